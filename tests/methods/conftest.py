"""A small trained network and a central engine over digits."""

import pytest
from once import trained_once
from torch import nn

from fedortho.data.images import Dataset
from fedortho.engines.central import CentralEngine
from fedortho.models.zoo import build_model
from fedortho.training.loop import fit
from fedortho.training.recipe import Recipe


def trained(name: str, digits: Dataset, factory: pytest.TempPathFactory) -> nn.Module:
    recipe = Recipe(epochs=6, crop=0, flip=0.0, lr=0.1, batch_size=32)
    model = build_model(name, num_classes=10, channels=1)
    return trained_once(factory, name.replace(":", "-"), model, lambda model: fit(model, digits.train, recipe))


@pytest.fixture(scope="session")
def small_net(digits: Dataset, tmp_path_factory: pytest.TempPathFactory) -> nn.Module:
    return trained("small:SmallNet", digits, tmp_path_factory)


@pytest.fixture(scope="session")
def quick_net(digits: Dataset, tmp_path_factory: pytest.TempPathFactory) -> nn.Module:
    return trained("small:QuickNet", digits, tmp_path_factory)


@pytest.fixture
def engine(digits: Dataset) -> CentralEngine:
    return CentralEngine(
        digits, build=lambda seed: build_model("small:SmallNet", num_classes=10, channels=1, seed=seed)
    )
