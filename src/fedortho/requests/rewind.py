"""Forget exactly: restore the last kept round, or continued run, before the data was used, and go on without it.

The result has the digest of `federate` or `train --without` all requests so far: it is that training, begun later.
"""

import logging
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import comb
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fedortho.data.images import Dataset
from fedortho.data.request import Clients, ForgetRequest
from fedortho.engines.query import Selection
from fedortho.errors import FedOrthoError
from fedortho.federated.server import train_federation
from fedortho.federated.strategies import is_repeatable
from fedortho.requests.references import find_original, original_of, purged_images
from fedortho.requests.transaction import journalled, relative_out, tell_once
from fedortho.runs.continuing import first_row, stages_of
from fedortho.runs.deleted import DeletedRecord, check_deleted
from fedortho.runs.record import RunRecord, TrainingRecord, read_run_record
from fedortho.runs.rounds import LOG_FILE, RoundLog, kept_rounds, read_log, read_start, round_file
from fedortho.runs.run import Run, open_run, served_requests, settings_of
from fedortho.runs.settings import FederateSettings, Federation, TrainSettings, held_rows, is_kept
from fedortho.runs.training import train_run
from fedortho.storage.provenance import environment

if TYPE_CHECKING:
    from flwr.serverapp import Grid

logger = logging.getLogger(__name__)
HERE = ("data", "data_dir", "device")  # where a training is repeated


class CannotRewind(FedOrthoError):
    """A run whose rounds or epochs do not lead to an exact result: only retraining does."""


@dataclass(frozen=True)
class RewindPlan:
    """What an exact request does and costs, known beforehand; rounds count from 1, and 0 is the untrained network.

    A run on one machine has epochs in place of rounds; those of the runs that it continued count before its own.
    """

    run: Run
    source: Run  # the run itself or one that it was derived from: it has the rounds
    settings: TrainSettings  # of the new run: those of the source, without all requests so far
    request: ForgetRequest  # of now
    contacts: Mapping[str, int | None]  # request → the first round with its data; None: nobody who has it was drawn
    first: int  # rounds before the first contact
    begin: int  # the last one of them that was kept
    planned: int  # all rounds
    expected: float | None  # rounds that such a request saves on average where all are kept; None: nothing is drawn
    remarks: tuple[str, ...]
    stages: tuple[Run, ...] = ()  # on one machine: the trainings to repeat, oldest first

    @property
    def is_untouched(self) -> bool:
        """Whether the model stays as it is, because nobody who has the data was ever drawn."""
        return self.begin == self.planned and getattr(self.settings, "norms", "fedavg") == "fedavg"

    @property
    def command(self) -> str:
        """The training that gives the same model."""
        return "train" if self.stages else "federate"

    def lines(self) -> list[str]:
        """The plan in sentences."""
        unit, verb = ("epoch", "used") if self.stages else ("round", "drawn")
        told = [
            f"{each}: {f'first {verb} in {unit} {n}' if n else f'never {verb}'}" for each, n in self.contacts.items()
        ]
        if self.is_untouched:
            log = self.source.path / LOG_FILE
            told.append(f"nothing to train: by {log} the model never met the data, and stays as it is")
        elif self.begin:
            kept = f", the model of {self.stages[0].settings.start}" if self.stages else ""
            left = f"{self.planned - self.begin} of {self.planned} {unit}s"
            told.append(f"back to the end of {unit} {self.begin}{kept}: {left} are trained again")
        else:
            told.append(f"back to the start: all {self.planned} {unit}s are trained again")
        is_drawn = self.expected is not None
        average = f"; on average {self.expected:.1f} for such a request, if all are kept" if is_drawn else ""
        told.append(f"{unit}s saved: {self.begin}{average}")
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
    if not isinstance(run.settings, FederateSettings):
        return _plan_epochs(run, run.request(request))
    source, settings, log = _source_of(run)
    asked, names, data = run.request(request), run.record.data.class_names, run.load_data()
    requests = [each.settled(names) for each in (*served_requests(run), asked)]
    without = sum(requests, settings.excluded).settled(names)
    for each in {run.path, source.path}:
        check_deleted(each, without, names)
    clients = None if log.own_images else held_rows(data, settings, settings.partition_seed)
    if clients is not None:  # a request that selects nothing new is refused
        asked.split(Selection(exclude=run.excluded).select(data.train, clients), clients, gone=data.gone)
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
        settings.rounds,
        expected_saved(settings, len(every), settings.rounds),
        (*_silent_rounds(log, first), *_remarks(source)),
    )


def _plan_epochs(run: Run, asked: ForgetRequest) -> RewindPlan:
    """The plan on one machine: the first of the trainings that had the data, and those that continued it."""
    source = run
    while source.record.is_edited:
        source = original_of(source)
    here = {name: getattr(run.settings, name) for name in HERE}
    stages = [replace(stage, settings=replace(stage.settings, **here)) for stage in stages_of(source)]
    data, names = run.load_data(), run.record.data.class_names
    asked.split(Selection(exclude=run.excluded).select(data.train), gone=data.gone)
    requests = [each.settled(names) for each in (*served_requests(run), asked)]
    without = sum(requests, source.settings.excluded).settled(names)
    for each in {run.path, *(stage.path for stage in stages)}:
        check_deleted(each, without, names)
    if lost := purged_images(data, without, None):
        raise FedOrthoError(f"{lost} images were purged for another request; name them in this one, too")
    joined = [stage.record.data.first_new or 0 for stage in stages]
    at = [max(n for n, first in enumerate(joined) if first <= first_row(each, data)) for each in requests]
    ends = [0, *accumulate(stage.settings.epochs for stage in stages)]
    begin = ends[min(at)]
    if len(stages) == 1:
        raise CannotRewind(
            f"{run.path} had {asked} in its first epoch, so that no earlier model is without it; only retraining is "
            "exact: train --without (images that come in later by train --continue can be taken back)"
        )
    settings = replace(stages[-1].settings, without=str(without))
    contacts = {str(each): ends[stage] + 1 for each, stage in zip(requests, at, strict=True)}
    remarks = _remarks(source, is_normalised=min(at) == 0)  # by constants of the first data
    plan = (run, source, settings, requests[-1], contacts, begin, begin, ends[-1], None, remarks)
    return RewindPlan(*plan, tuple(stages[min(at) :]))


def find_rewind(run: Run, request: ForgetRequest) -> RewindPlan | None:
    """As `plan_rewind`; None, and the log says why, where an exact request means to retrain."""
    if not isinstance(run.settings, FederateSettings) and not run.settings.start:
        return None  # all data was there from the first epoch on
    try:
        plan = plan_rewind(run, request)
    except CannotRewind as error:
        logger.warning("no rewind: %s", error)
        return None
    return plan if plan.begin or plan.stages or plan.settings.passes.keep else None


def holds_rewind(run: Run, request: ForgetRequest, out: Path) -> bool:
    """Whether `out` is the run of a rewind for this request, finished or not."""
    plan = find_rewind(run, request) if (out / "run.json").exists() else None
    return plan is not None and _begun(plan, out) is not None


def _begun(plan: RewindPlan, out: Path) -> TrainingRecord | None:
    """The record at `out` if the plan's training wrote it."""
    record = read_run_record(out)
    start = plan.settings.start  # of the run that was continued; one that is repeated has a new path
    is_same = record is not None and replace(settings_of(record, out), start=start) == plan.settings
    return record if is_same else None


def rewind_run(
    run: Run | Path | str,
    request: ForgetRequest | str,
    out: Path | str | None = None,
    *,
    purge: bool = False,
    workers: int = 1,
    grid: "Grid | None" = None,
    watch: Callable[[Any], None] | None = None,
    data_dir: str = "",
) -> Rewound:
    """Serve a request exactly: the new run is what `federate` or `train --without` all requests so far gives.

    It begins at the last kept round before the first contact of any request that the run has served, these included,
    and goes on without them to the planned end. On one machine it begins with the model that was continued by the
    training which first had the data; that training and later ones are repeated, all but the last into OUT-start-N.
    Neither its model nor anything that it keeps has met their data. Killed, it goes on when it is called again. Without
    `out` nothing is done, and the result shows the plan. With `purge` weights, ledgers and kept rounds of earlier runs
    that have met the data are deleted; their records stay.
    """
    plan = plan_rewind(run, request, data_dir=data_dir)
    if out is None:
        return Rewound(plan)
    out, run, asked = Path(out), plan.run, str(plan.request)
    told = {"out": relative_out(run, out)}
    with nullcontext() if isinstance(_begun(plan, out), RunRecord) else journalled(run, plan.request, told):
        if isinstance(plan.settings, FederateSettings):
            begin = read_start(plan.source, plan.begin) if plan.begin else None
            how: dict[str, Any] = {"watch": watch, "workers": workers, "data": run.load_data(), "begin": begin}
            new = train_federation(out, plan.settings, grid, **how)
        else:
            new = _train_stages(plan, out, watch)
    saved = f"{plan.settings.passes.unit}-saved"
    details = {**told, "method": "rewind", "without": plan.settings.without, saved: plan.begin}
    tell_once(run, "executed", out.name, asked, new.record.model.digest, details)
    return Rewound(plan, new, tuple(_delete_traces(plan, out)) if purge else ())


def _train_stages(plan: RewindPlan, out: Path, watch: Callable[[Any], None] | None) -> Run:
    """Repeat the trainings of a plan without its requests; each continues the one before it, the last is `out`."""
    start, without = plan.stages[0].settings.start, ForgetRequest.parse(plan.settings.without)
    for number, stage in enumerate(plan.stages, start=1):
        is_last = number == len(plan.stages)
        place = out if is_last else out.with_name(f"{out.name}-start-{number}")
        settings = replace(stage.settings, start=start, without=plan.settings.without)
        data = replace(stage, settings=settings).load_data()  # images of `without` may have been deleted
        settings = replace(settings, without=str(_known_to(without, data)))
        new = train_run(place, settings, watch=watch, data=data)
        start = os.path.abspath(new.path)
    return new


def _known_to(request: ForgetRequest, data: Dataset) -> ForgetRequest:
    """The request without samples that this data does not have yet."""
    assert data.train.ids is not None, "data of a run has digests"
    rows = [data.train.ids.by_hash[each] if each.startswith("hmac:") else int(each) for each in request.samples]
    known = [word for word, row in zip(request.samples, rows, strict=True) if row < len(data.train.store_labels)]
    return replace(request, samples=tuple(known))


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
        raise CannotRewind(
            f"{run.path} has no {LOG_FILE}, nor has a run that it was derived from; only retraining is exact"
        )
    settings = replace(source.settings, **{name: getattr(run.settings, name) for name in HERE})
    if settings.draw == 1:
        raise CannotRewind(f"{source.path} has draw 1: an absent client changes all draws; only retraining is exact")
    if not is_repeatable(settings.strategy):
        what = f"{settings.strategy}, which may keep state between rounds"
        raise CannotRewind(f"{source.path} was trained by {what}; only retraining is exact")
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
        f"or powers to go on after round {powers}; only retraining is exact"
    )


def _silent_rounds(log: RoundLog, first: int) -> list[str]:
    silent = [n for n, each in enumerate(log.rounds[:first], 1) if each.answered != each.drawn]
    return [
        f"in round {n} a client did not answer: the digest is that of a training in which it does not answer either"
        for n in silent
    ]


def _remarks(source: Run, *, is_normalised: bool = True) -> tuple[str, ...]:
    """What whoever compares digests must know; `is_normalised`: the data has its part in the constants."""
    told = []
    if source.record.environment.may_differ_from(environment()):
        told.append("earlier models have other versions or another processor: a whole training here may differ")
    if is_normalised and not source.settings.preprocessing.is_given:
        told.append("images are normalised by mean and deviation of the whole training split, with the data or without")
    return tuple(told)


def _delete_traces(plan: RewindPlan, out: Path) -> list[Path]:
    """Delete what has met the data, from the run up to the one that has the rounds; returns what was deleted.

    Each of these runs has a record of it first, so that no later request on it uses the data again.
    """
    deleted: list[Path] = []
    run: Run | None = plan.run
    while run is not None:
        DeletedRecord(plan.settings.without, relative_out(run, out)).write(run.path)
        places = [run.path / "clients"]
        if not plan.is_untouched:
            places += [run.path / name for name in ("model.safetensors", "patches", "updates", "ledger.safetensors")]
            places += [round_file(run.path, number) for number in kept_rounds(run.path) if number > plan.first]
            places += [run.path / "epochs"]
        for place in filter(Path.exists, places):
            shutil.rmtree(place) if place.is_dir() else place.unlink()
            deleted.append(place)
        earlier = {each.path: before for before, each in pairwise(plan.stages)}
        run = earlier.get(run.path) if run.path in {plan.source.path, *earlier} else find_original(run)
    return deleted
