"""The cost of every method is what torch's counter sees while it runs."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from small import SETTINGS
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from fedortho.data.images import Dataset
from fedortho.data.sources import load_images
from fedortho.engines.central import CentralEngine
from fedortho.engines.cost import Cost
from fedortho.engines.engine import Engine
from fedortho.engines.query import Selection
from fedortho.federated.server import federated_engine, local_grid
from fedortho.methods import METHODS, make_method, unlearn
from fedortho.methods.method import Method
from fedortho.models.zoo import build_model
from fedortho.runs.run import load_run_data
from fedortho.statistics.ledger import ledger_taps
from fedortho.statistics.observe import observe
from fedortho.storage.files import write_tensors
from fedortho.storage.settings import field_help
from fedortho.training.loop import fit
from fedortho.training.recipe import Recipe

CHEAP = {
    "epochs": 1,
    "batch_size": 32,
    "noise_images": 8,
    "noise_copies": 1,
    "noise_steps": 10,
    "max_retain_drop": 1.0,
    "ratio": 0.2,
}
CENTRAL = sorted(METHODS.keys() - {"federaser", "r2d"})  # these replay what a training kept


def cheap(name: str, **changes: object) -> Method:
    known = field_help(METHODS[name])
    return make_method(name, {key: value for key, value in CHEAP.items() if key in known}, changes)


@pytest.fixture(scope="module")
def few() -> Dataset:
    return load_images("digits", valid=0.85)


def central(few: Dataset) -> CentralEngine:
    return CentralEngine(few, build=lambda seed: build_model("small:SmallNet", num_classes=10, channels=1, seed=seed))


def counted(work: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as counter:
        work()
    return counter.get_total_flops()


def cost_and_count(model: nn.Module, engine: Engine, method: Method, request: str = "class:3") -> tuple[Cost, int]:
    costs: list[Cost] = []
    count = counted(lambda: costs.append(unlearn(model, engine, request, method).cost))
    return costs[0], count


@pytest.mark.parametrize("name", CENTRAL)
def test_the_cost_is_what_torch_counts_while_it_runs(few: Dataset, small_net: nn.Module, name: str) -> None:
    cost, count = cost_and_count(small_net, central(few), cheap(name))
    assert cost.flops == pytest.approx(count, rel=0.05)
    assert 0 <= cost.kept_flops <= cost.flops


@pytest.mark.parametrize("name", ["hide", "paper"])
def test_a_ledger_is_counted_as_what_made_it_and_saves_nothing_where_everybody_keeps(
    few: Dataset, small_net: nn.Module, name: str
) -> None:
    def make() -> None:
        engine.ledger = observe(small_net, few.train, ledger_taps(small_net, few.train.shape), classes=10)

    engine = central(few)
    before = counted(make)
    cost, count = cost_and_count(small_net, engine, cheap(name))
    without, _ = cost_and_count(small_net, central(few), cheap(name))
    assert cost.flops == pytest.approx(before + count, rel=0.05)
    assert cost.flops == pytest.approx(without.flops, rel=0.05)
    assert cost.kept_flops == pytest.approx(without.kept_flops, rel=0.05)
    assert without.kept_flops > 0


def test_importances_from_a_file_are_counted_as_what_made_them(
    few: Dataset, small_net: nn.Module, tmp_path: Path
) -> None:
    method = cheap("ssd", keep=str(tmp_path / "importances"))
    first, _ = cost_and_count(small_net, central(few), method)
    second, count = cost_and_count(small_net, central(few), method)
    assert (second.flops, second.kept_flops) == (first.flops, first.kept_flops)
    assert second.request_flops == pytest.approx(count, rel=0.05)
    assert second.images_trained < first.images_trained


IN_A_FEDERATION = ("hide", "ssd", "bad-teacher")  # `make test-slow` counts all of them there


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in IN_A_FEDERATION else pytest.mark.slow) for name in CENTRAL]
)
def test_clients_count_what_they_compute(few: Dataset, small_net: nn.Module, tmp_path: Path, name: str) -> None:
    settings = replace(SETTINGS, model="small:SmallNet", clients=2, split="iid", valid=0.85)
    with local_grid(settings, tmp_path) as grid:
        engine = federated_engine(grid, settings, load_run_data(settings))
        before = counted(lambda: engine.send_model(small_net, ledger=True))
        cost, count = cost_and_count(small_net, engine, cheap(name))
    assert cost.flops == pytest.approx(count + (before if name in ("hide", "paper") else 0), rel=0.05)
    assert cost.kept_flops > 0 or name not in ("hide", "ssd")


def test_what_replays_a_kept_training_is_counted_too(few: Dataset, small_net: nn.Module, tmp_path: Path) -> None:
    recipe = Recipe(epochs=2, batch_size=32, crop=0, flip=0.0)

    def keep(number: int, weights: Mapping[str, Tensor]) -> None:
        write_tensors(tmp_path / f"{number:05}.safetensors", weights)

    trained = fit(small_net, few.train, recipe, keep=keep)
    again = make_method("r2d", asdict(recipe), {"back": 1, "kept": str(tmp_path)})
    cost, count = cost_and_count(trained, central(few), again)
    assert cost.flops == pytest.approx(count, rel=0.05)
    settings = replace(SETTINGS, model="small:SmallNet", clients=3, split="iid", valid=0.85)
    with local_grid(settings, tmp_path / "clients") as grid:
        engine = federated_engine(grid, settings, load_run_data(settings))
        trained = engine.fit(small_net, Selection(), recipe, updates=tmp_path / "updates")
        eraser = make_method("federaser", {"batch_size": 32, "updates": str(tmp_path / "updates")})
        cost, count = cost_and_count(trained, engine, eraser, "client:2")
    assert cost.flops == pytest.approx(count, rel=0.05)
