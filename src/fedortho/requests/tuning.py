"""Hyper-parameters by an equal budget for every method, chosen on validation images, never on test images.

First every candidate of a method's grid is tried on some of the training images. Then the two best are tried at the
size that a comparison reports (all training images, as many passes), and after them the neighbours of the best one, in
the grid or a step beyond its edge, until it has been compared with all of them or the budget is spent. The chosen
values were therefore measured at the reported size. A search takes place on another request than the one that it is
for: another class, another client, other samples.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from fedortho.data.images import Dataset
from fedortho.data.request import ForgetRequest
from fedortho.devices import using_threads
from fedortho.engines.query import Selection, draw
from fedortho.errors import BadRecord, BadSetting, Busy, FedOrthoError
from fedortho.methods import find_method, known_methods, make_method, unlearn
from fedortho.methods.method import Schedule, serves
from fedortho.models.predictions import accuracy, evaluate
from fedortho.requests.comparing import Settings, chosen_methods, settings_by_method
from fedortho.requests.run_context import RunContext, method_for_run, open_context
from fedortho.runs.run import Run, open_run
from fedortho.storage.files import check_writable, locked, write_json
from fedortho.storage.provenance import Environment, environment
from fedortho.storage.records import Scalar, read_record, write_record
from fedortho.storage.settings import as_mapping, field_types

Grid = Mapping[str, tuple[Any, ...]]  # values to try of each setting, in ascending order
GRIDS: Mapping[str, Grid] = {
    "paper": {"ratio": (0.01, 0.03, 0.1, 0.2, 0.4)},  # α stays at the 0.5 of the paper
    "finetune": {"lr": (0.001, 0.003, 0.01, 0.03, 0.1)},
    "not": {"lr": (0.001, 0.003, 0.01, 0.03, 0.1)},
    "fused": {"lr": (0.005, 0.05, 0.15, 0.5, 1.5)},
    "ssd": {"alpha": (10.0, 30.0, 50.0, 100.0), "lam": (0.3, 1.0, 3.0)},
    "salun": {"lr": (0.0039, 0.013, 0.039, 0.13), "ratio": (0.3, 0.5, 0.8)},
    "unsir": {"lr": (0.0006, 0.002, 0.006, 0.02), "repair_lr": (0.0003, 0.001, 0.003)},
    "bad-teacher": {"lr": (0.00003, 0.0001, 0.0003, 0.001, 0.003)},
    "class-pruning": {"ratio": (0.02, 0.05, 0.1), "lr": (0.0015, 0.005, 0.015)},
    "neggrad": {"lr": (0.0003, 0.001, 0.003, 0.01), "beta": (0.9, 0.95, 0.98)},
    "scrub": {"lr": (0.0005, 0.0015, 0.005, 0.015), "alpha": (0.001, 0.03, 1.0)},
    "eu-k": {"lr": (0.01, 0.03, 0.1), "k": (1, 2, 3, 5)},
    "cf-k": {"lr": (0.003, 0.01, 0.03, 0.1), "k": (1, 3, 5)},
    "subspace": {"alpha_retain": (10.0, 100.0, 1000.0), "alpha_forget": (1.0, 3.0, 10.0, 30.0)},
}
FACTORS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0)  # methods without a grid: of their own learning rate
# references, methods that search by themselves, a replay of updates, a control
FIXED = ("retrain", "retrain-plain", "hide", "directions", "federaser", "logit-mask")
STARTS = 2  # candidates that are tried at the reported size before any neighbour
PATIENCE = 60.0  # seconds to wait while another process writes


@dataclass(frozen=True)
class Budget:
    """What every method may spend."""

    candidates: int = 12  # of the first stage, at most
    images: int = 10_000  # training images of a candidate in the first stage; a federation uses all
    trials: int = 6  # at the reported size, at most
    epochs: int = 1  # passes of a trial, at most
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.candidates, self.images, self.trials, self.epochs) < 1:
            raise BadSetting(f"candidates, images, trials and epochs must be at least 1, not {self}")


@dataclass(frozen=True)
class Attempt:
    """Settings and their outcome on validation images."""

    settings: Mapping[str, Any]
    images: int  # of the training set
    forget: float
    retain: float
    score: float  # mean of |forget − wanted| and max(0, retain before − retain); less is better
    error: str = ""  # why it failed; its numbers are then the worst possible ones


@dataclass(frozen=True)
class Choice:
    """A chosen value and the range in which it was searched."""

    value: Scalar
    lowest: Scalar  # of the values that were tried
    highest: Scalar
    inside: bool  # a lower and a higher value were tried, or are out of the setting's range


@dataclass(frozen=True)
class Search:
    """The attempts of one method in their order; the best is chosen among those at the reported size."""

    attempts: tuple[Attempt, ...]
    best: Attempt | None = None  # None: it goes on
    settled: bool = False  # the best was compared with all its neighbours at the reported size
    choices: Mapping[str, Choice] = field(default_factory=dict)


@dataclass(frozen=True)
class TuningTrials:
    """FILE.trials.json: the searches by method, and what they were made with."""

    schema: ClassVar[int] = 2
    model: str  # digest
    request: str  # that the settings are for
    tuned_on: str  # the request that the trials served
    budget: Budget
    base: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # settings to start from
    searches: Mapping[str, Search] = field(default_factory=dict)
    environment: Environment | None = None


def is_tunable(name: str) -> bool:
    """Whether a method has something to tune: a grid of its own, or a learning rate."""
    return name not in FIXED and (name in GRIDS or "lr" in field_types(find_method(name)))


def grid_of(name: str) -> Grid:
    """The values to try of each setting of a method."""
    if not is_tunable(name):
        raise FedOrthoError(f"{name} has nothing to tune; choose from {', '.join(filter(is_tunable, known_methods()))}")
    if name in GRIDS:
        return GRIDS[name]
    published: float = as_mapping(find_method(name)())["lr"]
    return {"lr": tuple(_rounded(published * factor) for factor in FACTORS)}


def tune(
    run: Run | Path | str,
    request: ForgetRequest | str,
    methods: str | Sequence[str] = "all",
    *,
    on: ForgetRequest | str | None = None,
    out: Path | str | None = None,
    settings: Settings = "published",
    budget: Budget | None = None,
    data: Dataset | None = None,
    watch: Callable[[str, int, Attempt], None] | None = None,
) -> dict[str, Search]:
    """Search the hyper-parameters of methods on validation images, with the same budget for every method.

    The trials serve the request `on`, by default another one of the same kind and size that the budget's seed draws, so
    that nothing is chosen on what is reported. `out` is a JSON file: it receives the best settings by method, as
    `compare(settings=out)` reads them, and OUT.trials.json all attempts. A search that was interrupted goes on after
    its last attempt, and several processes may tune different methods into the same file. `settings` are those to start
    from. `all` are the methods that serve the request and have something to tune; others are refused if they are named.
    `watch` receives the method's name, the attempt's number and the attempt.
    """
    run, budget = open_run(run), budget or Budget()
    request = ForgetRequest.parse(request) if isinstance(request, str) else request
    names, base = _tuned_methods(methods, request), settings_by_method(run, settings)
    data = data or run.load_data()
    context = open_context(run, data)
    on = ForgetRequest.parse(on) if isinstance(on, str) else on or stand_in(request, context, budget.seed)
    about = TuningTrials(run.record.model.digest, str(request), str(on), budget, dict(base))
    file = None if out is None else _TuningFile(Path(out), about)
    found, busy = {} if file is None else file.searches(), []
    for name in names:
        if name in found and found[name].best is not None:
            continue
        if file is None:
            found[name] = tune_method(context, on, name, budget, base=base.get(name), watch=watch)
            continue
        try:
            with locked(file.path.with_suffix(f".{name}")):
                known = file.searches().get(name, Search(()))
                save = lambda search, name=name: file.write(name, search)  # noqa: E731
                found[name] = tune_method(
                    context, on, name, budget, base=base.get(name), known=known.attempts, save=save, watch=watch
                )
        except Busy:
            busy.append(name)
    if file is not None:
        found = file.write_best()
    if busy:
        raise Busy(f"another process is tuning {', '.join(busy)} into {out}; run this again when it has finished")
    return found


def _tuned_methods(methods: str | Sequence[str], request: ForgetRequest) -> list[str]:
    names = chosen_methods(methods)
    if methods == "all":
        return [name for name in names if is_tunable(name) and serves(find_method(name), request)]
    for name in names:
        grid_of(name)  # refuses a method that has nothing to tune
        if not serves(find_method(name), request):
            raise FedOrthoError(f"{name} does not serve {request}; leave it out")
    return names


def stand_in(request: ForgetRequest, context: RunContext, seed: int) -> ForgetRequest:
    """Another request of the same kinds, drawn by a seed: as many other classes and clients, other samples of the
    same labels; nothing that the run has forgotten before."""
    drawn, data = random.Random(seed), context.data
    taken = request if context.forgotten is None else context.forgotten + request
    labels, forgotten = set(taken.labels(data.train.names)), Selection(exclude=taken)
    classes = [str(label) for label in range(data.train.classes) if label not in labels]
    clients = [client for client in context.clients or () if client not in taken.clients]
    asked = (
        ForgetRequest(samples=request.samples).split(data.train, context.clients)[0].labels if request.samples else ()
    )
    left = forgotten.select(data.train, context.clients)
    samples: list[str] = []
    try:
        for label in sorted({int(label) for label in asked}):
            rows = left.rows[left.labels == label].tolist()
            samples += map(str, drawn.sample(rows, int((torch.as_tensor(asked) == label).sum())))
        return ForgetRequest(
            tuple(drawn.sample(classes, len(request.classes))),
            tuple(drawn.sample(clients, len(request.clients))),
            tuple(samples),
        )
    except ValueError as error:
        raise FedOrthoError(f"there is no other request like {request} to tune on; name one with --on") from error


def tune_method(
    context: RunContext,
    request: ForgetRequest,
    name: str,
    budget: Budget | None = None,
    *,
    base: Mapping[str, Any] | None = None,
    known: Sequence[Attempt] = (),
    save: Callable[[Search], None] | None = None,
    watch: Callable[[str, int, Attempt], None] | None = None,
) -> Search:
    """The search of one method on this very request; each attempt changes some settings of `base`.

    A class should never be predicted; samples and clients should be recognised as often as unseen images of their
    labels are by the original model: an estimate of what retraining gives, which ignores that a client's images differ
    from others. An attempt that fails (its loss diverges) counts as the worst. `known` attempts are not made again.
    """
    budget, grid, made = budget or Budget(), grid_of(name), list[Attempt]()
    if not serves(find_method(name), request):
        raise FedOrthoError(f"{name} does not serve {request}; leave it out")
    reported = len(context.data.train)
    with using_threads(context.run.settings.threads):
        before, wanted = _baseline(context, request)

        def attempt(settings: Mapping[str, Any], images: int) -> Attempt:
            for earlier in known:
                if earlier.images == images and _place(grid, earlier.settings) == _place(grid, settings):
                    return earlier
            smaller = context if images == reported else _on_fewer_images(context, request, images, budget.seed)
            return _attempt(smaller, request, name, {**(base or {}), **settings}, budget, before, wanted)

        for number, tried in enumerate(_attempts(name, grid, budget, reported, context.clients is not None, attempt)):
            made.append(tried)
            if number >= len(known):
                if save is not None:
                    save(Search(tuple(made)))
                if watch is not None:
                    watch(name, number, tried)
    if all(tried.error for tried in made):
        raise FedOrthoError(f"no settings of {name} worked, so none is best: {made[0].error}")
    search = _finished(name, grid, made, reported)
    if save is not None:
        save(search)
    return search


def _attempts(
    name: str,
    grid: Grid,
    budget: Budget,
    reported: int,
    is_federation: bool,
    attempt: Callable[[Mapping[str, Any], int], Attempt],
) -> Iterator[Attempt]:
    """The grid on fewer images, then, at the reported size, the best of it and its neighbours."""
    images = reported if is_federation else min(budget.images, reported)
    combined = [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]
    made: list[Attempt] = []
    for settings in combined[: budget.candidates]:
        made.append(attempt(settings, images))
        yield made[-1]
    for _ in range(budget.trials):
        following = _following(name, grid, made, reported)
        if following is None:
            return
        made.append(attempt(following, reported))
        yield made[-1]


def _following(name: str, grid: Grid, made: Sequence[Attempt], reported: int) -> Mapping[str, Any] | None:
    """The settings to try next at the reported size; None: the best has been compared with all its neighbours.

    Those beyond the edge of what was tried come first, the others by their score on fewer images.
    """
    measured = [attempt for attempt in made if attempt.images == reported]
    done = {_place(grid, attempt.settings) for attempt in measured}
    screened = {_place(grid, attempt.settings): _rank(attempt) for attempt in made if attempt.images != reported}
    places = [place for place in screened if place not in done]
    if len(measured) >= STARTS or not places:
        best = min(measured, key=_rank)
        places = [place for place in _neighbours(name, grid, made, best.settings) if place not in done]
    places.sort(key=lambda place: screened.get(place, (False, 0.0, 0.0)))
    return dict(zip(grid, places[0], strict=True)) if places else None


def _rank(attempt: Attempt) -> tuple[bool, float, float]:
    """Of two attempts with the same score the one that retains more is better."""
    return bool(attempt.error), attempt.score, -attempt.retain


def _place(grid: Grid, settings: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(settings[name] for name in grid)


def _tried(grid: Grid, made: Sequence[Attempt], name: str) -> list[Any]:
    return sorted({*(attempt.settings[name] for attempt in made), *grid[name]})


def _neighbours(name: str, grid: Grid, made: Sequence[Attempt], settings: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    """The next lower and the next higher value of each setting, as far as the method allows them."""
    found = []
    for key in grid:
        for values in (_tried(grid, made, key), _tried(grid, made, key)[::-1]):
            at = values.index(settings[key])
            value = values[at + 1] if at + 1 < len(values) else _beyond(key, values)
            place = _place(grid, {**settings, key: value})
            if value is not None and _is_allowed(name, dict(zip(grid, place, strict=True))):
                found.append(place)
    return found


def _beyond(key: str, values: Sequence[Any]) -> Any:
    """The value after the last, at the distance of the last two: a factor, for whole numbers a difference."""
    if len(values) < 2:
        return None
    last, before = values[-1], values[-2]
    if isinstance(last, int):
        return 2 * last - before
    if key in ("beta",):  # a weight near 1: what counts is its distance to 1
        return _rounded(1 - (1 - last) ** 2 / (1 - before))
    return _rounded(last**2 / before)


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")


def _is_allowed(name: str, settings: Mapping[str, Any]) -> bool:
    try:
        make_method(name, settings)
    except BadSetting:
        return False
    return True


def _finished(name: str, grid: Grid, made: Sequence[Attempt], reported: int) -> Search:
    best = min((attempt for attempt in made if attempt.images == reported), key=_rank)
    choices = {}
    for key in grid:
        values, value = _tried(grid, made, key), best.settings[key]
        open_ends = [
            ends[-1] == value
            and (further := _beyond(key, ends)) is not None
            and _is_allowed(name, {**best.settings, key: further})
            for ends in (values, values[::-1])
        ]
        choices[key] = Choice(value, values[0], values[-1], not any(open_ends))
    return Search(tuple(made), best, _following(name, grid, made, reported) is None, choices)


def _on_fewer_images(context: RunContext, request: ForgetRequest, images: int, seed: int) -> RunContext:
    """The context with some of its training images; clients and samples that are forgotten stay complete."""
    train = context.data.train
    if request.kind == "class":
        return replace(context, data=replace(context.data, train=draw(train, images, seed)))
    chosen = request.mask(train, context.clients)
    others = torch.nonzero(~chosen).flatten()
    order = torch.randperm(len(others), generator=torch.Generator().manual_seed(seed))
    chosen[others[order[: max(images - int(chosen.sum()), 1)]]] = True
    return replace(context, data=replace(context.data, train=train.subset(torch.nonzero(chosen).flatten())))


def _baseline(context: RunContext, request: ForgetRequest) -> tuple[float, float]:
    """Retain accuracy before, and the wanted forget accuracy: 0 for a class, else that of unseen images."""
    model = context.run.load_model().to(context.device)
    _, retain = _measured(context, model, request)
    if request.kind == "class":
        return retain, 0.0
    forget = Selection(include=request).select(context.data.train, context.clients)
    unseen = Selection(exclude=context.forgotten).select(context.data.valid, context.clients)
    shares = evaluate(model, unseen, device=context.device).per_class
    right = torch.tensor([retain if share is None else share for share in shares])
    return retain, float(right[forget.labels].mean())


def _measured(context: RunContext, model: nn.Module, request: ForgetRequest) -> tuple[float, float]:
    """Forget and retain accuracy on validation images; clients and samples are training images themselves."""
    model = model.to(context.device)
    part = context.data.valid if request.kind == "class" else context.data.train
    forget = Selection(include=request).select(part, context.clients)
    everything = request if context.forgotten is None else context.forgotten + request
    retain = Selection("valid", None, everything).select(context.data.valid, context.clients)
    return accuracy(model, forget, device=context.device), accuracy(model, retain, device=context.device)


def _attempt(
    context: RunContext,
    request: ForgetRequest,
    name: str,
    settings: Mapping[str, Any],
    budget: Budget,
    before: float,
    wanted: float,
) -> Attempt:
    kind, images = find_method(name), len(context.data.train)
    if issubclass(kind, Schedule):
        published = as_mapping(make_method(name, settings))["epochs"]
        settings = {**settings, "epochs": min(published, budget.epochs)}
    seed = {"seed": budget.seed} if "seed" in field_types(kind) else {}
    try:
        with context.engine() as engine:
            method = method_for_run(context.run, name, settings, seed)
            model = unlearn(context.run.load_model(), engine, request, method).model
        forget, retain = _measured(context, model, request)
    except FedOrthoError as error:
        return Attempt(dict(settings), images, 1.0, 0.0, 1.0, str(error))
    score = (abs(forget - wanted) + max(0.0, before - retain)) / 2
    return Attempt(dict(settings), images, forget, retain, score)


class _TuningFile:
    """The best settings by method, and beside them all searches; several processes may add to it."""

    def __init__(self, path: Path, about: TuningTrials) -> None:
        self.path, self.trials, self.about = path, path.with_suffix(".trials.json"), about
        if path.is_dir():
            raise FedOrthoError(f"{path} is a directory; give the file to write, such as --out {path / 'tuned.json'}")
        if path.exists() and not self.trials.exists():
            raise FedOrthoError(f"{path} exists without {self.trials.name} beside it; choose another --out")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FedOrthoError(f"{path} cannot be written: {error.strerror}; choose another --out") from error
        check_writable(path.parent)

    def searches(self) -> dict[str, Search]:
        """The searches of earlier calls; a file about another model, request, budget or settings is refused."""
        if not self.trials.exists():
            return {}
        try:
            found = read_record(TuningTrials, self.trials)
        except BadRecord as error:
            raise BadRecord(f"{error}; move it away or choose another --out") from error
        if replace(found, searches={}, environment=None) != self.about:
            raise FedOrthoError(
                f"{self.trials} is about another model, request, budget or settings; choose another --out"
            )
        return dict(found.searches)

    def write(self, name: str, search: Search) -> None:
        with locked(self.path.with_suffix(".writing"), PATIENCE):
            every = self.searches() | {name: search}
            write_record(self.trials, replace(self.about, searches=every, environment=environment()))
        if search.best is not None:
            self.write_best()

    def write_best(self) -> dict[str, Search]:
        with locked(self.path.with_suffix(".writing"), PATIENCE):
            every = self.searches()
            if best := {name: dict(found.best.settings) for name, found in every.items() if found.best is not None}:
                write_json(self.path, best)
        return every
