"""What the tests of the federated engine share."""

import torch
from small import SETTINGS
from torch import nn

from fedortho.data.request import ForgetRequest
from fedortho.federated.engine import FlowerEngine
from fedortho.federated.local_grid import InProcessGrid
from fedortho.models.zoo import build_model
from fedortho.runs.federation import held_rows
from fedortho.runs.run import load_run_data
from fedortho.statistics.query import Probe
from fedortho.training.recipe import Recipe

RECIPE = Recipe(epochs=2, batch=32, crop=0, flip=0.0)
PEAKS = Probe("peaks", "all", "channel", "stream")
CLASS = ForgetRequest.parse("class:3")
OTHER = {"features.6": (torch.tensor([2]), torch.ones(1, dtype=torch.float64))}


def grid_of(engine: FlowerEngine) -> InProcessGrid:
    assert isinstance(engine.line.grid, InProcessGrid)
    return engine.line.grid


def start() -> nn.Module:
    return build_model("small:TinyNet", classes=10, channels=1)


def held(engine: FlowerEngine) -> dict[int, torch.Tensor]:
    return held_rows(load_run_data(SETTINGS), engine.federation, 0)
