"""Training as TensorBoard shows it, from what watchers are told anyway; local files only, and an extra."""

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
    """What watchers of a training or of a federation are told: among other things, all epochs or rounds so far."""

    @property
    def history(self) -> Sequence[Epoch]: ...


Seen = TypeVar("Seen", bound=HasHistory)


@contextmanager
def board(
    directory: Path | None, run: Path, settings: TrainSettings, watch: Callable[[Seen], None]
) -> Iterator[Callable[[Seen], None]]:
    """A watcher that tells `watch` and writes each epoch or round into DIRECTORY/RUN'S NAME; without one, `watch`.

    A run that goes on writes its whole history again and marks what earlier files told as superseded: every step is
    shown once, also one that was finished and not yet written when the run was killed.
    """
    if directory is None:
        yield watch
        return
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise FedOrthoError("--tensorboard needs a package; install it: pip install 'fedortho[tensorboard]'") from error
    place, recipe = _place(directory, run), settings.recipe
    if isinstance(settings, FederateSettings):
        recipe = replace(recipe, epochs=settings.rounds)
    writer: SummaryWriter | None = None
    written = 0

    def tell(now: Seen) -> None:
        nonlocal writer, written
        watch(now)
        if len(now.history) > written:
            writer = writer or SummaryWriter(str(place), purge_step=1)
            for entry in now.history[written:]:
                for name, value in scalars(entry, recipe).items():
                    writer.add_scalar(name, value, entry.epoch + 1)
            written = len(now.history)
            writer.flush()  # or a run that is killed would lose its last epochs

    try:
        yield tell
    finally:
        if writer is not None:
            writer.close()


def _place(directory: Path, run: Path) -> Path:
    place = directory / run.absolute().name
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FedOrthoError(f"{place} cannot be written: {error.strerror}; choose another --tensorboard") from error
    check_writable(place)
    return place


def scalars(entry: Epoch, recipe: Recipe) -> dict[str, float]:
    """An epoch or round as named numbers; what was not measured is left out.

    >>> entry = Epoch(0, 0.5, 0.9, None, 0.8, 2.0, images=100)
    >>> scalars(entry, Recipe(rate=0.1))["accuracy/validation"], scalars(entry, Recipe(rate=0.1))["rate"]
    (0.8, 0.1)
    """
    known: dict[str, Any] = {
        "loss": entry.loss,
        "accuracy/training": entry.accuracy,
        "accuracy/validation": entry.valid,
        "rate": learning_rate(recipe, entry.epoch),  # at its beginning
        "seconds": entry.seconds,
        "images per second": None if not entry.images or not entry.seconds else entry.images / entry.seconds,
        "orthogonality penalty": entry.ortho,
        "clients": entry.clients,
        "drift": entry.drift,
    }
    return {name: float(value) for name, value in known.items() if value is not None}
