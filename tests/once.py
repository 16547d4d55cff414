"""Trained models and runs are made once per test session; other worker processes wait for the files and read them."""

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock
from safetensors.torch import load_model, save_model
from torch import nn

from fedortho.runs.run import Run, open_run
from fedortho.runs.settings import TrainSettings
from fedortho.runs.training import train_run


def session_directory(factory: pytest.TempPathFactory) -> Path:
    """The temporary directory that all processes of this session share; the next session has another one."""
    base = factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """The session's directory `name`, which the first process to ask for it fills with `make`."""
    place = session_directory(factory) / "once" / name
    place.parent.mkdir(parents=True, exist_ok=True)
    finished = place.with_name(f"{name}.finished")
    with FileLock(place.with_name(f"{name}.lock")):
        if not finished.exists():
            shutil.rmtree(place, ignore_errors=True)  # left by a process that failed
            place.mkdir()
            make(place)
            finished.touch()
    return place


def run_once(factory: pytest.TempPathFactory, path: Path, settings: TrainSettings) -> Run:
    """A copy at `path` of the run with these settings, which is trained once per session."""
    name = f"run-{hashlib.sha256(repr(settings).encode()).hexdigest()[:12]}"
    made = made_once(factory, name, lambda place: train_run(place / "run", settings))
    shutil.copytree(made / "run", path)
    return open_run(path)


def trained_once(
    factory: pytest.TempPathFactory, name: str, model: nn.Module, train: Callable[[nn.Module], nn.Module]
) -> nn.Module:
    """The model with the weights that `train` gives it, in evaluation mode."""
    place = made_once(factory, name, lambda place: save_model(train(model), str(place / "model.safetensors")))
    load_model(model, place / "model.safetensors")
    return model.eval()
