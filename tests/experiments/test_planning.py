"""The plan of a table: how many networks and cells, and numbers that a small network can be checked by."""

import torch
from torch import nn
from typer.testing import CliRunner

from fedortho.cli.app import app
from fedortho.experiments import planning
from fedortho.experiments.experiment import load_experiment
from fedortho.experiments.planning import _kept_bytes, _Probe, plan_experiment


def test_the_plan_counts_networks_reference_models_and_cells(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(planning, "_probe", lambda *_: _Probe(0.001, 10**9, 10**6, 10**7))
    monkeypatch.setattr(planning, "ortho_flops", lambda *_: 0.0)
    monkeypatch.setattr(planning, "build_model", lambda *_, **__: nn.Identity())
    plans = plan_experiment(load_experiment("unlearning_res50", "paper"))
    assert [plan.key["data"] for plan in plans] == ["cifar10", "cifar100", "tiny-imagenet"]
    assert [(plan.networks, plan.references, plan.cells) for plan in plans] == [(3, 3, 3 * 8)] * 3
    assert plans[0].hours * 3600 == 150 * 45_000 * 0.001, "150 epochs, a tenth is held out"
    assert plans[2].hours * 3600 == 200 * 90_000 * 0.001
    assert plans[0].gigabytes == (3 * 10**6 + 128 * 10**7) / 1e9
    (parted, *_) = plan_experiment(load_experiment("unlearning_res50", "paper", accumulate=4))
    assert parted.gigabytes == (3 * 10**6 + 32 * 10**7) / 1e9
    assert parted.text.endswith("0.3 GB at batch 128 in 4 parts")
    (*_, federated) = plan_experiment(load_experiment("continuous_unlearning_comparison", "paper"))
    assert (federated.networks, federated.references) == (3, 0)
    assert federated.cells == 3 * (1 + 5 * 2), "the original, and two methods that serve five requests"
    assert federated.hours * 3600 == 1000 * 0.1 * 5 * 45_000 * 0.001, "a tenth of the clients, five local epochs"


def test_the_penalty_takes_its_share_of_the_time(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(planning, "_probe", lambda *_: _Probe(0.001, 10**9, 10**6, 10**7))
    monkeypatch.setattr(planning, "ortho_flops", lambda *_: 128e9)
    monkeypatch.setattr(planning, "build_model", lambda *_, **__: nn.Identity())
    with_ortho, without = plan_experiment(load_experiment("pruning", "paper"))
    assert with_ortho.hours == 2 * without.hours, "as much as a batch of 128 images"


def test_bytes_kept_for_the_backward_pass_are_those_of_activations() -> None:
    model = nn.Sequential(nn.Linear(10, 20), nn.Tanh(), nn.Linear(20, 5))
    assert _kept_bytes(model, torch.zeros(4, 10)) == 4 * (4 * 10 + 4 * 20), "inputs, and outputs of tanh, once"


def test_the_command_plans_on_this_machine_without_training() -> None:
    told = CliRunner().invoke(app, ["reproduce", "pruning", "--plan", "--device", "cpu"])
    assert told.exit_code == 0, told.output
    assert (
        "vgg-mini on fashion-mini, central, orthogonal layers: deep, lambda 0.1: 2 networks and 0 reference models"
        in told.stdout
    )
    assert "together 4 networks, 24 cells" in told.stdout
