"""R2D: a kept model, and the rest of the schedule on the retain set; if that model never met the data, a rewind."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from small import SETTINGS, write_images
from torch import Tensor, nn

from fedortho.data.images import Dataset
from fedortho.data.request import ForgetRequest
from fedortho.federated.server import train_federation
from fedortho.methods.method import CannotServe
from fedortho.methods.r2d import R2D
from fedortho.models.zoo import build_model
from fedortho.requests.comparing import compare
from fedortho.requests.forgetting import forget_run
from fedortho.requests.judging import JudgeOptions
from fedortho.requests.levels import chosen_method, plan_request, ways
from fedortho.requests.rewind import rewind_run
from fedortho.requests.run_context import method_for_run
from fedortho.runs.rounds import read_log
from fedortho.runs.run import Run
from fedortho.runs.settings import TrainSettings
from fedortho.runs.training import train_run
from fedortho.storage.files import read_tensors, tensors_digest
from fedortho.training.loop import fit
from fedortho.training.recipe import Recipe

CENTRAL = TrainSettings(
    data="digits",
    model="small:TinyNet",
    epochs=4,
    valid=0.8,
    crop=0,
    flip=0.0,
    threads=1,
    device="cpu",
    keep_epochs="2",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train_run(tmp_path_factory.mktemp("runs") / "run", CENTRAL)


def model_from(state: Mapping[str, Tensor]) -> nn.Module:
    model = build_model("small:TinyNet", num_classes=10, channels=1)
    model.load_state_dict(dict(state))
    return model


def test_the_rest_of_a_schedule_is_the_same_training_where_there_is_no_momentum(digits: Dataset) -> None:
    few, states = digits.train.subset(range(100)), dict[int, dict[str, Tensor]]()
    recipe = Recipe(epochs=4, momentum=0.0, batch_size=16, flip=0.5, warmup=1.0)
    net = build_model("small:TinyNet", num_classes=10, channels=1)
    whole = fit(net, few, recipe, keep=lambda n, w: states.update({n: {k: v.clone() for k, v in w.items()}}))
    rest = fit(model_from(states[2]), few, recipe, after=2)
    assert sorted(states) == [1, 2, 3, 4]
    assert tensors_digest(rest.state_dict()) == tensors_digest(whole.state_dict())
    assert tensors_digest(states[2]) != tensors_digest(states[4])


def test_it_replays_the_last_epochs_on_the_retain_set_and_says_so(
    run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    served = forget_run(run, "class:3", "r2d", out=tmp_path / "out")
    assert "back to the end of epoch 2 of 4, which has met the data" in caplog.text
    data, method = run.load_data(), method_for_run(run, "r2d")
    assert isinstance(method, R2D)
    number, path = method.begin()
    assert (number, path) == (2, run.path / "epochs" / "00002.safetensors")
    weights = run.new_model()
    weights.load_state_dict(read_tensors(path)[0])
    retain = data.train.subset(data.train.labels != 3)
    wanted = fit(weights, retain, run.settings.recipe, after=2)
    assert served.record.model_after == tensors_digest(wanted.state_dict())
    assert served.record.method == "r2d"
    assert served.record.cost is not None
    assert served.record.cost.images_trained == 2 * len(retain)
    assert served.rewind is None, "it is never called exact"


def test_a_run_that_kept_nothing_so_far_back_is_refused_by_name(run: Run, tmp_path: Path) -> None:
    told = (
        r"a kept epoch or round up to 1, and .*epochs has 2; choose a smaller back \(forget: --set back=N; compare: --s"
    )
    with pytest.raises(CannotServe, match=told):
        forget_run(run, "class:3", chosen_method(run, "r2d", changes={"back": 3}), out=tmp_path / "out")
    plain = train_run(tmp_path / "plain", replace(CENTRAL, keep_epochs="", epochs=1))
    (row,) = compare(plain, "class:3", "r2d", out=tmp_path / "compared")
    assert "has none; train with --keep-epochs" in row.refused
    (row,) = compare(run, "class:3", "r2d", out=tmp_path / "kept")
    assert not row.refused
    assert row.accuracies is not None


def test_where_the_kept_round_never_met_the_client_it_is_the_rewind(tmp_path: Path) -> None:
    images = write_images(tmp_path / "images", {"ant": 30, "bee": 30})
    settings = replace(SETTINGS, data=str(images), clients=6, rounds=4, fraction=0.2, split="iid", least_images=3)
    settings = replace(settings, batch_size=8, seed=1, keep_rounds="all", align=0.0, evaluate_every=0, timeout=60.0)
    run = train_federation(tmp_path / "run", settings)
    log = read_log(run.path)
    assert log is not None
    client = log.rounds[-1].drawn[0]
    first = log.first_contact([client])
    assert first is not None
    assert first > 1, "the seed draws a client that was not drawn before"
    back = settings.rounds - (first - 1)
    method = chosen_method(run, "r2d", changes={"back": back})
    served = forget_run(run, f"client:{client}", method, out=tmp_path / "out")
    assert served.record.model_after == rewind_run(run, f"client:{client}", tmp_path / "left").run.record.model.digest


def test_the_order_of_service_has_it_with_its_cost_where_epochs_were_kept(run: Run) -> None:
    told = ways(run, ForgetRequest.parse("samples:0"))
    mine = next(way for way in told if way.startswith("--method r2d"))
    assert "about 50% of the training's computation" in mine
    assert "approximate" in mine
    assert told[-1].startswith("--level exact (retraining")


def test_a_run_that_kept_late_epochs_only_lists_the_other_ways_and_may_go_back_less(tmp_path: Path) -> None:
    run = train_run(tmp_path / "run", replace(CENTRAL, epochs=5, keep_epochs="4"))
    asked = ForgetRequest(samples=(str(int(run.load_data().train.rows[0])),))
    with pytest.raises(CannotServe, match=r"up to 2, and .* has 4"):
        forget_run(run, asked, "r2d")
    assert not any("r2d" in way for way in ways(run, asked)), "it would be refused"
    step = ("", chosen_method(run, "r2d"), tmp_path / "out")
    plan = plan_request(run, asked, [step], None, JudgeOptions())
    assert plan.steps[0].cost == "cost not known", "shadow models, or --set back, may still choose epoch 4"
    back = ("", chosen_method(run, "r2d", changes={"back": 1}), tmp_path / "out")
    plan = plan_request(run, asked, [back], None, JudgeOptions())
    assert (plan.steps[0].passes, plan.steps[0].share_of_training) == (1, 0.2)
