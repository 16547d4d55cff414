"""FedEraser: a replay without the client that leaves, from updates that the training kept."""

import copy
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small import SETTINGS
from torch import nn

from fedortho.data.images import Dataset
from fedortho.data.request import ForgetRequest
from fedortho.engines.central import CentralEngine
from fedortho.engines.query import Selection
from fedortho.errors import BadCheckpoint
from fedortho.federated.engine import FederatedEngine
from fedortho.federated.messages import TrainLocal
from fedortho.federated.server import federated_engine, local_grid
from fedortho.federated.wire import record_of
from fedortho.methods import make_method, unlearn
from fedortho.methods.federaser import FedEraser, read_round
from fedortho.methods.method import CannotServe
from fedortho.models.predictions import accuracy
from fedortho.models.zoo import build_model
from fedortho.runs.run import load_run_data
from fedortho.runs.settings import held_rows
from fedortho.storage.files import tensors_digest
from fedortho.storage.records import from_json
from fedortho.training.recipe import Recipe, learning_rate

LEAVING = ForgetRequest.parse("client:2")
FEDERATION = replace(SETTINGS, model="small:QuickNet", clients=3, split="dirichlet:0.3", least_images=100)
RECIPE = Recipe(epochs=4, lr=0.1, batch_size=32, schedule="constant", crop=0, flip=0.0, ortho=0.0, align=0.0)
ERASER = FedEraser(lr=0.05, batch_size=32, crop=0, flip=0.0)


def engine_in(place: Path) -> FederatedEngine:
    with local_grid(FEDERATION, place / "clients") as grid:
        return federated_engine(grid, FEDERATION, load_run_data(FEDERATION))


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, nn.Module]:
    """Four rounds: what clients and server stored, and the model."""
    place = tmp_path_factory.mktemp("training")
    engine = engine_in(place)
    net = build_model("small:QuickNet", num_classes=10, channels=1)
    model = engine.fit(net, Selection(), RECIPE, updates=place / "kept")
    engine.send_model(model, ledger=False)
    return place, model


@pytest.fixture
def engine(training: tuple[Path, nn.Module], tmp_path: Path) -> FederatedEngine:
    """The federation after its training, in a copy of what it stored."""
    shutil.copytree(training[0], tmp_path, dirs_exist_ok=True)
    return engine_in(tmp_path)


@pytest.fixture
def trained(training: tuple[Path, nn.Module]) -> nn.Module:
    return copy.deepcopy(training[1])


@pytest.fixture
def orders(trained: nn.Module, monkeypatch: pytest.MonkeyPatch) -> list[TrainLocal]:
    """The training messages to clients from now on, in order."""
    sent: list[TrainLocal] = []

    def record(arrays: Any, value: dict[str, Any]) -> Any:
        if "recipe" in value:
            sent.append(from_json(TrainLocal, value, "a message"))
        return record_of(arrays, value)

    monkeypatch.setattr("fedortho.federated.wire.record_of", record)
    return sent


@pytest.mark.parametrize("average_first", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_it_replays_the_training_without_the_client_and_keeps_what_the_others_know(
    digits: Dataset, engine: FederatedEngine, trained: nn.Module, tmp_path: Path, average_first: bool
) -> None:
    before, asked = tensors_digest(trained.state_dict()), engine.transport.log[-1]
    method = replace(ERASER, updates=str(tmp_path / "kept"), average_first=average_first)
    first, again = (unlearn(trained, engine, LEAVING, method).model for _ in range(2))
    assert tensors_digest(first.state_dict()) == tensors_digest(again.state_dict())
    assert tensors_digest(trained.state_dict()) == before
    new = engine.transport.log[engine.transport.log.index(asked) + 1 :]
    assert all(2 not in exchange.bytes_down for exchange in new), "the client that leaves receives nothing"
    assert len(new) == 2 * 3 * (1 if average_first else 2), "three calibrated rounds, twice"
    rows = held_rows(digits, FEDERATION, 0)
    there = torch.isin(digits.test.labels, digits.train.subset(torch.isin(digits.train.rows, rows[0])).labels.unique())
    assert accuracy(first, digits.test.subset(there)) > 0.5


@pytest.mark.parametrize("rounds", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_statistics_that_no_client_sent_are_pooled_in_the_end(digits: Dataset, tmp_path: Path, rounds: int) -> None:
    local = replace(FEDERATION, norms="local")
    with local_grid(local, tmp_path / "clients") as grid:
        engine = federated_engine(grid, local, digits)
    net = build_model("small:QuickNet", num_classes=10, channels=1)
    recipe = replace(RECIPE, epochs=rounds)
    trained = engine.fit(net, Selection(), recipe, updates=tmp_path / "kept")
    forgot = unlearn(trained, engine, LEAVING, replace(ERASER, updates=str(tmp_path / "kept"))).model
    assert 2 not in engine.transport.log[-1].bytes_down, "the client that leaves receives nothing"
    images = digits.train.subset(~torch.isin(digits.train.rows, held_rows(digits, local, 0)[2]))
    with torch.no_grad():
        answers = forgot.get_submodule("features.0")(images.normalise(images.pixels[images.rows]))
    assert torch.allclose(forgot.get_buffer("features.1.running_mean"), answers.mean((0, 2, 3)), atol=0.02)
    assert torch.allclose(forgot.get_buffer("features.1.running_var"), answers.var((0, 2, 3)), rtol=0.1)


def test_clients_shuffle_otherwise_in_every_replayed_round(
    engine: FederatedEngine, trained: nn.Module, tmp_path: Path, orders: list[TrainLocal]
) -> None:
    method = replace(ERASER, updates=str(tmp_path / "kept"))
    method(trained, engine, LEAVING)
    replace(method, interval=3)(trained, engine, LEAVING)
    seeds = [order.recipe.seed for order in orders]
    assert len(set(seeds[:6])) == 3 * 2, "three calibrated rounds of two clients"
    assert seeds[6:] == seeds[4:6], "a stored round has the seeds that are its own"


def test_a_replayed_round_has_the_rate_and_the_penalty_of_the_training(
    engine: FederatedEngine, trained: nn.Module, tmp_path: Path, orders: list[TrainLocal]
) -> None:
    method = replace(ERASER, updates=str(tmp_path / "kept"), lr=0.1, epochs=4, schedule="cosine", ortho=0.02)
    method(trained, engine, LEAVING)
    wanted = [learning_rate(replace(RECIPE, schedule="cosine"), turn) for turn in (1, 1, 2, 2, 3, 3)]
    assert [order.recipe.lr for order in orders] == pytest.approx(wanted)
    assert {order.recipe.ortho for order in orders} == {0.02}
    assert not any(order.align for order in orders)


def test_steps_have_the_stored_length_and_the_first_round_is_a_mean(
    engine: FederatedEngine, trained: nn.Module, tmp_path: Path
) -> None:
    one, two = (
        replace(ERASER, updates=str(tmp_path / "kept"), average_first=True, most=rounds)(trained, engine, LEAVING)
        for rounds in (1, 2)
    )
    stored = [read_round(tmp_path / "kept" / f"round-0000{turn}", trained, LEAVING) for turn in (0, 1)]
    assert set(stored[0].clients) == {0, 1}
    weight = {client: images / sum(stored[0].images.values()) for client, images in stored[0].images.items()}
    for name, _ in trained.named_parameters():
        mean = [sum(weight[c] * s.clients[c][name] for c in (0, 1)) for s in stored]
        assert torch.allclose(one.get_parameter(name), mean[0], atol=1e-6)
        length = (mean[1] - stored[1].begin[name]).norm()
        step = (two.get_parameter(name) - one.get_parameter(name)).detach().norm()
        assert float(step) == pytest.approx(float(length), rel=1e-3)


def test_without_kept_updates_or_a_federation_it_is_refused(
    digits: Dataset, engine: FederatedEngine, small_net: nn.Module, tmp_path: Path
) -> None:
    with pytest.raises(CannotServe, match="federaser serves client requests only, not class:3; retrain, "):
        unlearn(small_net, engine, "class:3", "federaser")
    with pytest.raises(CannotServe, match=r"no directory holds none.*--keep-updates"):
        unlearn(small_net, engine, LEAVING, "federaser")
    rows = held_rows(digits, FEDERATION, 0)
    with pytest.raises(CannotServe, match="stored updates"):
        unlearn(small_net, CentralEngine(digits, clients=rows), LEAVING, "federaser")


def test_updates_of_another_network_are_refused(engine: FederatedEngine, trained: nn.Module, tmp_path: Path) -> None:
    other = build_model("small:TinyNet", num_classes=10, channels=1)
    with pytest.raises(BadCheckpoint, match="another network"):
        make_method("federaser", {"updates": str(tmp_path / "kept")})(other, engine, LEAVING)
