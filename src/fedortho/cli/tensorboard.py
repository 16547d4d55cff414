"""Curves of a training or a federation for TensorBoard, an optional extra; files on this machine only."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from fedortho.errors import FedOrthoError
from fedortho.runs.settings import FederateSettings, TrainSettings
from fedortho.storage.files import check_writable
from fedortho.training.loop import Epoch
from fedortho.training.recipe import Recipe, learning_rate


class HasHistory(Protocol):
    """The progress of a training or of a federation, which includes all epochs or rounds so far."""

    @property
    def history(self) -> Sequence[Epoch]: ...


Reported = TypeVar("Reported", bound=HasHistory)


@contextmanager
def tensorboard_watch(
    directory: Path | None, run: Path, settings: TrainSettings, watch: Callable[[Reported], None]
) -> Iterator[Callable[[Reported], None]]:
    """A watcher that calls `watch` and writes each epoch or round into DIRECTORY/NAME OF THE RUN.

    Without a directory it is `watch` itself. A training that continues writes its whole history again and marks the
    steps of earlier files as superseded, so every step is shown once, also one that finished just before a kill.
    """
    if directory is None:
        yield watch
        return
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise FedOrthoError(
            "--tensorboard needs the package tensorboard; run: pip install 'fedortho[tensorboard]'"
        ) from error
    files, recipe = directory / run.absolute().name, settings.recipe
    try:
        files.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FedOrthoError(f"{files} cannot be written: {error.strerror}; choose another --tensorboard") from error
    check_writable(files)
    if isinstance(settings, FederateSettings):
        recipe = replace(recipe, epochs=settings.rounds)
    writer: SummaryWriter | None = None
    written = 0

    def report(now: Reported) -> None:
        nonlocal writer, written
        watch(now)
        if len(now.history) > written:
            writer = writer or SummaryWriter(str(files), purge_step=1)
            for entry in now.history[written:]:
                for name, value in scalars(entry, recipe).items():
                    writer.add_scalar(name, value, entry.epoch + 1)
            written = len(now.history)
            writer.flush()  # or a killed training would lose its last epochs

    try:
        yield report
    finally:
        if writer is not None:
            writer.close()


def scalars(entry: Epoch, recipe: Recipe) -> dict[str, float]:
    """The measured numbers of an epoch or round, by the names of their curves.

    >>> entry = Epoch(0, 0.5, 0.9, None, 0.8, 2.0, images=100)
    >>> scalars(entry, Recipe(lr=0.1))["accuracy/validation"], scalars(entry, Recipe(lr=0.1))["lr"]
    (0.8, 0.1)
    """
    known: dict[str, Any] = {
        "loss": entry.loss,
        "accuracy/training": entry.accuracy,
        "accuracy/validation": entry.valid,
        "lr": learning_rate(recipe, entry.epoch),  # at the beginning of the epoch
        "seconds": entry.seconds,
        "images per second": None if not entry.images or not entry.seconds else entry.images / entry.seconds,
        "orthogonality penalty": entry.ortho,
        "clients": entry.clients,
        "drift": entry.drift,
    }
    return {name: float(value) for name, value in known.items() if value is not None}
