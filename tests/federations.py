"""What the tests of the federated engine share."""

from collections.abc import Sequence

import torch
from small import SETTINGS
from torch import nn

from fedortho.data.request import ForgetRequest
from fedortho.engines.query import Statistic
from fedortho.federated.engine import FederatedEngine
from fedortho.federated.local_grid import LocalGrid
from fedortho.models.zoo import build_model
from fedortho.runs.run import load_run_data
from fedortho.runs.settings import held_rows
from fedortho.training.recipe import Recipe

RECIPE = Recipe(epochs=2, batch_size=32, crop=0, flip=0.0)
PEAKS = Statistic("peaks", "all", "channel", "stream")
CLASS = ForgetRequest.parse("class:3")
OTHER = {"features.6": (torch.tensor([2]), torch.ones(1, dtype=torch.float64))}


def grid_of(engine: FederatedEngine) -> LocalGrid:
    assert isinstance(engine.transport.grid, LocalGrid)
    return engine.transport.grid


def greeted(engine: FederatedEngine, left: Sequence[int] = ()) -> FederatedEngine:
    """Another engine over the same clients, as a server that starts anew has it."""
    other = FederatedEngine(grid_of(engine), engine.federation, engine.task, left=left)
    other.hello()
    return other


def start() -> nn.Module:
    return build_model("small:TinyNet", num_classes=10, channels=1)


def held(engine: FederatedEngine) -> dict[int, torch.Tensor]:
    return held_rows(load_run_data(SETTINGS), engine.federation, 0)
