"""A small real federation: digits, a tiny network, clients in this process."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from once import trained_once
from small import SETTINGS
from torch import nn

from fedortho.data.images import Dataset
from fedortho.federated.engine import FederatedEngine
from fedortho.federated.server import federated_engine, local_grid
from fedortho.models.zoo import build_model
from fedortho.runs.run import load_run_data
from fedortho.training.loop import fit
from fedortho.training.recipe import Recipe

Make = Callable[..., FederatedEngine]
FEW = replace(SETTINGS, valid=0.75)  # a quarter of the training images: few steps


@pytest.fixture
def make_engine(tmp_path: Path, own_cache: Path) -> Make:
    """A function that builds an engine over clients in this process, with changed settings."""

    def make(**changes: object) -> FederatedEngine:
        settings = replace(FEW, **changes)  # type: ignore[arg-type]
        with local_grid(settings, tmp_path / "clients") as grid:
            return federated_engine(grid, settings, load_run_data(settings))

    return make


@pytest.fixture(scope="session")
def few_digits(own_cache: Path) -> Dataset:
    """The images of all clients of `make_engine` in one place."""
    return load_run_data(FEW)


@pytest.fixture(scope="session")
def tiny_digits(digits: Dataset, tmp_path_factory: pytest.TempPathFactory) -> nn.Module:
    """The tiny network after three epochs on digits."""
    recipe = Recipe(epochs=3, crop=0, flip=0.0)
    model = build_model("small:TinyNet", num_classes=10, channels=1)
    return trained_once(tmp_path_factory, "digits-tiny", model, lambda model: fit(model, digits.train, recipe))
