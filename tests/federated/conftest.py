"""A small real federation: digits, a tiny network, clients in this process."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
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


@pytest.fixture
def make_engine(tmp_path: Path, own_cache: Path) -> Make:
    """An engine over clients in this process; changes go to the settings."""

    def make(**changes: object) -> FederatedEngine:
        settings = replace(SETTINGS, **changes)  # type: ignore[arg-type]
        with local_grid(settings, tmp_path / "clients") as grid:
            return federated_engine(grid, settings, load_run_data(settings))

    return make


@pytest.fixture(scope="session")
def tiny_digits(digits: Dataset) -> nn.Module:
    """The tiny network, trained a little, so that its kernels have something to say."""
    return fit(
        build_model("small:TinyNet", num_classes=10, channels=1), digits.train, Recipe(epochs=3, crop=0, flip=0.0)
    )
