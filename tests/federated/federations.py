"""What the tests of the federated engine share."""

import torch
from small import SETTINGS
from torch import nn

from fedortho.federated.flower import FlowerEngine
from fedortho.federated.inprocess import InProcessGrid
from fedortho.federation import held_rows
from fedortho.models import build_model
from fedortho.probe import Probe
from fedortho.recipe import Recipe
from fedortho.request import ForgetRequest
from fedortho.runs import load_run_data

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
