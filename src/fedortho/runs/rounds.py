"""Rounds and epochs: who was drawn in a round, which models are kept, and the round that a training goes on from."""

import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from torch import Tensor

from fedortho.errors import BadCheckpoint
from fedortho.runs.run import Run
from fedortho.runs.settings import TrainSettings, is_kept
from fedortho.storage.files import read_tensors, tensors_digest, write_tensors
from fedortho.storage.records import read_record
from fedortho.training.loop import Epoch

LOG_FILE = "rounds.json"


@dataclass(frozen=True)
class RoundRecord:
    """One round: the clients that were drawn, those that answered, and the model that it ended with."""

    drawn: tuple[int, ...]
    answered: tuple[int, ...]
    averaged: tuple[int, ...]  # of those that answered: they had images, and their model is in the mean
    model: str  # digest


@dataclass(frozen=True)
class RoundLog:
    """rounds.json: all rounds of a training; a client that none of them names has taught the model nothing."""

    schema: ClassVar[int] = 1

    rounds: tuple[RoundRecord, ...]
    own_images: bool  # clients have images that nobody else knows

    def before_contact(self, clients: Collection[int]) -> int:
        """How many rounds ended before one of these clients was drawn; all of them if that never happened."""
        places = (place for place, each in enumerate(self.rounds) if not set(clients).isdisjoint(each.drawn))
        return next(places, len(self.rounds))

    def first_contact(self, clients: Collection[int]) -> int | None:
        """The first round, counted from 1, that drew one of these clients; None: there is none."""
        before = self.before_contact(clients)
        return before + 1 if before < len(self.rounds) else None


def keep_round(run: Path, settings: TrainSettings, number: int, state: Mapping[str, Tensor]) -> None:
    """Keep the model after `number` rounds or epochs if settings say so; the last only if norms are pooled later."""
    unit, planned, keep = settings.passes
    is_pooled = getattr(settings, "norms", "fedavg") != "fedavg"
    if keep and (is_pooled if number == planned else is_kept(keep, number)):
        write_tensors(round_file(run, number, unit), state)


def kept_rounds(run: Path, unit: str = "rounds") -> dict[int, int]:
    """The bytes on disk of each kept round or epoch, by its number."""
    return {int(file.stem): file.stat().st_size for file in sorted((run / unit).glob("*.safetensors"))}


def copy_rounds(run: Path, to: Path, most: int) -> None:
    """Copy the kept rounds up to the one that ends `most` rounds."""
    for number in [number for number in kept_rounds(run) if number <= most]:
        round_file(to, number).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(round_file(run, number), round_file(to, number))


def round_file(run: Path, number: int, unit: str = "rounds") -> Path:
    """Where the model after `number` rounds or epochs is kept."""
    return run / unit / f"{number:05}.safetensors"


@dataclass(frozen=True)
class StartRound:
    """The state after some rounds of a finished run, from which another training goes on."""

    run: Path
    weights: Mapping[str, Tensor]
    history: tuple[Epoch, ...]
    log: tuple[RoundRecord, ...]


def read_log(run: Path) -> RoundLog | None:
    """The log of a run's rounds; None: it has none, as runs of earlier versions and edited ones."""
    return read_record(RoundLog, run / LOG_FILE) if (run / LOG_FILE).exists() else None


def read_start(run: Run, number: int) -> StartRound:
    """The state of a run after `number` of its rounds; a file that its log does not describe is refused."""
    log, path = read_record(RoundLog, run.path / LOG_FILE).rounds, round_file(run.path, number)
    if number == len(log) and not path.exists():
        path = run.path / "model.safetensors"
    weights, _ = read_tensors(path)
    if tensors_digest(weights) != log[number - 1].model:
        raise BadCheckpoint(
            f"{path} is not the model that {LOG_FILE} describes; remove it to go on from an earlier one"
        )
    return StartRound(run.path, weights, tuple(run.history()[:number]), log[:number])
