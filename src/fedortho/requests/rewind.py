"""Forget exactly in a federation: go back to a round before the data's first contact, and go on without it.

The result has the digest of `federate --without` all requests so far: it is the same training, begun later.
"""

import logging
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import comb
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fedortho.data.images import Dataset
from fedortho.data.request import Clients, ForgetRequest
from fedortho.errors import FedOrthoError
from fedortho.federated.engine import Watch
from fedortho.federated.server import train_federation
from fedortho.federated.strategies import is_repeatable
from fedortho.requests.references import find_original, purged_images
from fedortho.requests.transaction import tell_once
from fedortho.runs.rounds import LOG_FILE, RoundLog, kept_rounds, read_log, read_start, round_file
from fedortho.runs.run import Run, open_run, served_requests
from fedortho.runs.settings import FederateSettings, Federation, held_rows, is_kept
from fedortho.storage.journal import append_entry
from fedortho.storage.provenance import environment

if TYPE_CHECKING:
    from flwr.serverapp import Grid

logger = logging.getLogger(__name__)


class CannotRewind(FedOrthoError):
    """A run whose rounds do not lead to an exact result: exact means to retrain it."""


@dataclass(frozen=True)
class RewindPlan:
    """What an exact request comes to, known before the work; rounds count from 1, and 0 is the untrained network."""

    run: Run
    source: Run  # the run itself or one that it was derived from: it has the rounds
    settings: FederateSettings  # of the new run: those of the source, without all requests so far
    request: ForgetRequest  # of now
    contacts: Mapping[str, int | None]  # request → the first round with its data; None: nobody who has it was drawn
    first: int  # rounds before the first contact
    begin: int  # the last one of them that was kept
    expected: float  # rounds that such a request saves on average where all rounds are kept
    remarks: tuple[str, ...]

    @property
    def is_untouched(self) -> bool:
        """Whether the model stays as it is, because nobody who has the data was ever drawn."""
        return self.begin == self.settings.rounds and self.settings.norms == "fedavg"

    def lines(self) -> list[str]:
        """The plan in sentences."""
        told = [f"{each}: {f'first drawn in round {n}' if n else 'never drawn'}" for each, n in self.contacts.items()]
        rounds, log = self.settings.rounds, self.source.path / LOG_FILE
        if self.is_untouched:
            told.append(f"nothing to train: by {log} the model never met the data, and stays as it is")
        elif self.begin:
            left = f"{rounds - self.begin} of {rounds} rounds"
            told.append(f"back to the end of round {self.begin}: {left} are trained again")
        else:
            told.append(f"back to the start: all {rounds} rounds are trained again")
        told.append(f"rounds saved: {self.begin}; on average {self.expected:.1f} for such a request, if all are kept")
        return [*told, *self.remarks]


@dataclass(frozen=True)
class Rewound:
    """A request that was served exactly: the plan, the new run, and what was deleted of earlier runs."""

    plan: RewindPlan
    run: Run | None = None  # None: nothing was written
    deleted: tuple[Path, ...] = ()


def plan_rewind(run: Run | Path | str, request: ForgetRequest | str, *, data_dir: str = "") -> RewindPlan:
    """How far back an exact request goes and what it costs; `CannotRewind` where no round was kept that would serve."""
    run = open_run(run).at(data_dir)
    source, settings, log = _source_of(run)
    asked, names, data = run.request(request), run.record.data.class_names, run.load_data()
    requests = [each.settled(names) for each in (*served_requests(run), asked)]
    without = sum(requests, settings.excluded).settled(names)
    clients = None if log.own_images else held_rows(data, settings, settings.partition_seed)
    if clients is not None:  # a request that selects nothing new is refused
        known = data.train if run.excluded is None else data.train.subset(~run.excluded.mask(data.train, clients))
        asked.split(known, clients, gone=data.gone)
        if lost := purged_images(data, without, clients):
            raise FedOrthoError(f"{lost} images were purged for another request; name them in this one, too")
    holders = [_holders(settings, each, data, clients) for each in requests]
    every = set[int]().union(*holders)
    first = log.before_contact(every)
    return RewindPlan(
        run,
        source,
        replace(settings, without=str(without), keep_updates=False),
        requests[-1],
        {str(each): log.first_contact(who) for each, who in zip(requests, holders, strict=True)},
        first,
        _last_kept(source, settings, asked, first),
        expected_saved(settings, len(every), settings.rounds),
        _remarks(source, log, first),
    )


def find_rewind(run: Run, request: ForgetRequest) -> RewindPlan | None:
    """As `plan_rewind`; None, and the log says why, where an exact request means to retrain."""
    if not isinstance(run.settings, FederateSettings):
        return None
    try:
        plan = plan_rewind(run, request)
    except CannotRewind as error:
        logger.warning("no rewind: %s", error)
        return None
    return plan if plan.begin or plan.settings.keep_rounds else None


def holds_rewind(run: Run, request: ForgetRequest, out: Path) -> bool:
    """Whether `out` is the finished run of a rewind for this request."""
    plan = find_rewind(run, request) if (out / "run.json").exists() else None
    return plan is not None and open_run(out).settings == plan.settings


def rewind_run(
    run: Run | Path | str,
    request: ForgetRequest | str,
    out: Path | str | None = None,
    *,
    purge: bool = False,
    workers: int = 1,
    grid: "Grid | None" = None,
    watch: Watch | None = None,
    data_dir: str = "",
) -> Rewound:
    """Serve a request exactly: the new run is what `federate --without` all requests so far gives.

    It begins at the last kept round before the first contact of any request that the run has served, these included,
    and goes on without them to the planned end. Neither its model nor anything that it keeps has met their data.
    Killed, it goes on when it is called again. Without `out` nothing is done, and the result shows the plan. With
    `purge` weights, ledgers and kept rounds of earlier runs that have met the data are deleted; their records stay.
    """
    plan = plan_rewind(run, request, data_dir=data_dir)
    if out is None:
        return Rewound(plan)
    out, run, asked = Path(out), plan.run, str(plan.request)
    append_entry(run.path.absolute().parent, "received", run.path.name, asked, before=run.record.model.digest)
    begin = read_start(plan.source, plan.begin) if plan.begin else None
    how: dict[str, Any] = {"watch": watch, "workers": workers, "data": run.load_data(), "begin": begin}
    new = train_federation(out, plan.settings, grid, **how)
    details = {"method": "rewind", "without": plan.settings.without, "rounds-saved": plan.begin}
    tell_once(run, "executed", out.name, asked, new.record.model.digest, details)
    return Rewound(plan, new, tuple(_delete_traces(plan)) if purge else ())


def expected_saved(federation: Federation, holders: int, rounds: int) -> float:
    """Rounds before the first contact with one of `holders` clients, on average: ((1 − q)/q)(1 − (1 − q)ᵀ).

    q is the probability that a round draws at least one of them.

    >>> round(expected_saved(Federation(clients=100, fraction=0.1), 1, 60), 1)
    9.0
    """
    drawn = max(round(federation.fraction * federation.clients), 1)
    miss = comb(federation.clients - holders, drawn) / comb(federation.clients, drawn)
    return float(rounds) if miss == 1 else miss / (1 - miss) * (1 - miss**rounds)


def _source_of(run: Run) -> tuple[Run, FederateSettings, RoundLog]:
    """The run whose rounds trained this run's model, its settings and its log; refused where that cannot be exact."""
    source: Run | None = run
    while source is not None and (log := read_log(source.path)) is None:
        source = find_original(source)
    if source is None or log is None or not isinstance(source.settings, FederateSettings):
        raise CannotRewind(f"{run.path} has no {LOG_FILE}, nor has a run that it was derived from; exact is to retrain")
    settings = replace(source.settings, data=run.settings.data, data_dir=run.settings.data_dir)
    if settings.draw == 1:
        raise CannotRewind(f"{source.path} has draw 1: an absent client changes all draws; exact is to retrain")
    if not is_repeatable(settings.strategy):
        what = f"{settings.strategy}, which may keep state between rounds"
        raise CannotRewind(f"{source.path} was trained by {what}; exact is to retrain")
    if settings.start:
        raise CannotRewind(f"{source.path} began with {settings.start}, which may know the data; retrain that")
    return source, settings, log


def _holders(settings: FederateSettings, request: ForgetRequest, data: Dataset, clients: Clients | None) -> set[int]:
    """The clients whose training a request changes: those it names, and those that train with images of it.

    Which classes clients with images of their own have, nobody else knows: all of them may be meant.
    """
    if clients is None:
        return set(range(settings.clients)) if request.classes else request.named_clients()
    train = replace(data.train, rows=torch.cat([data.train.rows, data.gone]))  # images that were deleted since, too
    rows = train.rows[request.mask(train, clients) & ~settings.excluded.mask(train, clients)]
    return {client for client, own in clients.items() if bool(torch.isin(own, rows).any())} | set(request.clients)


def _last_kept(source: Run, settings: FederateSettings, asked: ForgetRequest, first: int) -> int:
    """The last kept round of the first ones; a model that is as its last round left it is a kept round."""
    if first == settings.rounds and settings.norms == "fedavg":
        return first
    if not first or settings.keep_rounds:
        return max((number for number in kept_rounds(source.path) if number <= first), default=0)
    powers = max(number for number in range(1, first + 1) if is_kept("powers", number))
    raise CannotRewind(
        f"{source.path} kept no rounds, and {asked} needs the end of round {first}; expected --keep-rounds all, "
        f"or powers to go on after round {powers}; exact is to retrain"
    )


def _remarks(source: Run, log: RoundLog, first: int) -> tuple[str, ...]:
    """What whoever compares digests must know."""
    silent = [n for n, each in enumerate(log.rounds[:first], 1) if each.answered != each.drawn]
    told = [f"in round {n} a client did not answer: equal is a training in which it is silent again" for n in silent]
    began, here = source.record.environment, environment()
    if (began.versions, began.processor) != (here.versions, here.processor):
        told.append("earlier rounds have other versions or another processor: a whole training here may differ")
    if not source.settings.preprocessing.is_given:
        told.append("images are normalised by mean and deviation of the whole training split, with the data or without")
    return tuple(told)


def _delete_traces(plan: RewindPlan) -> list[Path]:
    """Delete what has met the data, from the run up to the one that has the rounds; returns what was deleted."""
    deleted: list[Path] = []
    run: Run | None = plan.run
    while run is not None:
        places = [run.path / "clients"]
        if not plan.is_untouched:
            places += [run.path / name for name in ("model.safetensors", "patches", "updates")]
            places += [round_file(run.path, number) for number in kept_rounds(run.path) if number > plan.first]
        for place in filter(Path.exists, places):
            shutil.rmtree(place) if place.is_dir() else place.unlink()
            deleted.append(place)
        run = None if run.path == plan.source.path else find_original(run)
    return deleted
