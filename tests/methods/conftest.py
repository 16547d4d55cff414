"""A small trained network and an engine over digits, for what is peculiar to single methods."""

import pytest
from torch import nn

from fedortho.data.images import Dataset
from fedortho.engines.central import CentralEngine
from fedortho.models.zoo import build_model
from fedortho.training.loop import fit
from fedortho.training.recipe import Recipe


@pytest.fixture(scope="session")
def small_net(digits: Dataset) -> nn.Module:
    model = build_model("small:SmallNet", num_classes=10, channels=1)
    return fit(model, digits.train, Recipe(epochs=6, crop=0, flip=0.0, lr=0.1, batch_size=32))


@pytest.fixture
def engine(digits: Dataset) -> CentralEngine:
    return CentralEngine(
        digits, build=lambda seed: build_model("small:SmallNet", num_classes=10, channels=1, seed=seed)
    )
