"""Curves of a training or a federation for TensorBoard, an optional extra; files on this machine only."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedortho.errors import FedOrthoError
from fedortho.runs.settings import FederateSettings, TrainSettings
from fedortho.storage.files import check_writable
from fedortho.training.loop import Epoch
from fedortho.training.recipe import Recipe, learning_rate

Watch = Callable[[Any], None]  # of a training or a federation; what it receives has the history so far


@contextmanager
def tensorboard_watch(directory: Path | None, run: Path, settings: TrainSettings, watch: Watch) -> Iterator[Watch]:
    """A watcher that calls `watch` and writes each epoch or round into DIRECTORY/NAME OF THE RUN.

    Without a directory it is `watch` itself. A training that continues writes its whole history again and marks the
    steps of earlier files as superseded, so every step is shown once, also one that finished just before a kill.
    """
    if directory is None:
        yield watch
        return
    try:
        from torch.utils.tensorboard import SummaryWriter

        files = directory / run.absolute().name
        files.mkdir(parents=True, exist_ok=True)
    except ImportError as error:
        raise FedOrthoError("--tensorboard needs its package; run: pip install 'fedortho[tensorboard]'") from error
    except OSError as error:
        raise FedOrthoError(f"{files} cannot be written: {error.strerror}; choose another --tensorboard") from error
    check_writable(files)
    recipe, writers, written = settings.recipe, list[SummaryWriter](), 0
    if isinstance(settings, FederateSettings):
        recipe = replace(recipe, epochs=settings.rounds)

    def report(now: Any) -> None:
        nonlocal written
        watch(now)
        if len(now.history) > written:
            if not writers:  # a training that was finished before writes nothing
                writers.append(closed.enter_context(SummaryWriter(str(files), purge_step=1)))
            for entry in now.history[written:]:
                for name, value in scalars(entry, recipe).items():
                    writers[0].add_scalar(name, value, entry.epoch + 1)
            written = len(now.history)
            writers[0].flush()  # or a killed training would lose its last epochs

    with ExitStack() as closed:
        yield report


def scalars(entry: Epoch, recipe: Recipe) -> dict[str, float]:
    """The measured numbers of an epoch or round, by the names of their curves."""
    known = {
        "loss": entry.loss,
        "accuracy/training": entry.accuracy,
        "accuracy/validation": entry.valid,
        "lr": learning_rate(recipe, entry.epoch),  # at the beginning of the epoch
        "seconds": entry.seconds,
        "images per second": entry.images / entry.seconds if entry.images and entry.seconds else None,
        "orthogonality penalty": entry.ortho,
        "clients": entry.clients,
        "drift": entry.drift,
    }
    return {name: float(value) for name, value in known.items() if value is not None}
