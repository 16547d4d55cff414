"""Hyper-parameters by an equal budget for every method, chosen on validation images, never on test images."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from fedortho.data.images import Dataset
from fedortho.data.request import ForgetRequest
from fedortho.devices import using_threads
from fedortho.engines.query import Selection, draw
from fedortho.errors import BadRecord, BadSetting, FedOrthoError
from fedortho.methods import find_method, known_methods, unlearn
from fedortho.methods.method import serves
from fedortho.models.predictions import accuracy, evaluate
from fedortho.requests.comparing import Settings, chosen_methods, settings_by_method
from fedortho.requests.run_context import RunContext, method_for_run, open_context
from fedortho.runs.run import Run, open_run
from fedortho.storage.files import check_writable, locked, write_json
from fedortho.storage.provenance import Environment, environment
from fedortho.storage.records import read_record, write_record
from fedortho.storage.settings import as_mapping, field_types

FACTORS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0)  # of the published learning rate
GRIDS: Mapping[str, Mapping[str, tuple[Any, ...]]] = {  # values to try; other methods: the learning rate
    "paper": {"ratio": (0.01, 0.05, 0.2), "alpha": (0.5, 0.9)},
    "ssd": {"alpha": (1.0, 3.0, 10.0, 30.0, 50.0, 100.0)},
    "neggrad": {"lr": (0.003, 0.01, 0.03), "beta": (0.9, 0.95)},
    "class-pruning": {"ratio": (0.02, 0.05, 0.1), "lr": (0.005, 0.02)},
    "scrub": {"lr": (5e-4, 0.002, 0.01), "alpha": (0.001, 0.1)},
    "eu-k": {"k": (1, 3, 5), "lr": (0.03, 0.1)},
    "cf-k": {"k": (1, 3, 5), "lr": (0.03, 0.1)},
    "subspace": {"alpha_retain": (10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0)},  # the paper: up to 1000
}
# references, methods that search by themselves, a replay of updates, a control
FIXED = ("retrain", "retrain-plain", "hide", "directions", "federaser", "logit-mask")


@dataclass(frozen=True)
class Budget:
    """What every method may spend."""

    trials: int = 6
    images: int = 10_000  # training images of a trial; a federation uses all
    epochs: int = 2  # of a trial, upper bound
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.trials, self.images, self.epochs) < 1:
            raise BadSetting(f"trials, images and epochs must be at least 1, not {self}")


@dataclass(frozen=True)
class Attempt:
    """Settings and their outcome on validation images."""

    settings: Mapping[str, Any]
    forget: float
    retain: float
    score: float  # mean distance to the wanted forget accuracy and to the retain accuracy before; less is better
    error: str = ""  # why it failed; its numbers are then the worst possible ones


@dataclass(frozen=True)
class TuningTrials:
    """FILE.trials.json: all attempts by method, best first, and what they were made with."""

    schema: ClassVar[int] = 1
    model: str  # digest
    request: str
    budget: Budget
    base: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # settings to start from
    attempts: Mapping[str, tuple[Attempt, ...]] = field(default_factory=dict)
    environment: Environment | None = None

    def is_like(self, other: "TuningTrials") -> bool:
        """Whether both are about the same model, request, budget and starting settings."""
        same = (self.model, self.request, self.budget, self.base)
        return same == (other.model, other.request, other.budget, other.base)


def is_tunable(name: str) -> bool:
    """Whether a method has something to tune: a grid of its own, or a learning rate."""
    return name not in FIXED and (name in GRIDS or "lr" in field_types(find_method(name)))


def candidates(name: str, budget: Budget) -> list[dict[str, Any]]:
    """The settings to try, as many as the budget allows."""
    if not is_tunable(name):
        raise FedOrthoError(f"{name} has nothing to tune; choose from {', '.join(filter(is_tunable, known_methods()))}")
    grid = GRIDS.get(name)
    if grid is None:
        published: float = as_mapping(find_method(name)())["lr"]
        grid = {"lr": tuple(float(f"{published * factor:.6g}") for factor in FACTORS)}
    combined = [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]
    return combined[: budget.trials]


def tune(
    run: Run | Path | str,
    request: ForgetRequest | str,
    methods: str | Sequence[str] = "all",
    *,
    out: Path | str | None = None,
    settings: Settings = "published",
    budget: Budget | None = None,
    data: Dataset | None = None,
    watch: Callable[[str, int, Attempt], None] | None = None,
) -> dict[str, list[Attempt]]:
    """Search the hyper-parameters of methods on validation images, with the same budget for every method.

    Returns the attempts of each method, best first. `out` is a JSON file: it receives the best settings by method, as
    `compare(settings=out)` reads them, and OUT.trials.json all attempts; methods that it holds are not tuned again, and
    two processes may tune different methods into the same file. `settings` are those to start from. `all` are the
    methods that serve the request and have something to tune; others are refused if they are named. `watch` receives
    the method's name, the attempt's number and the attempt.
    """
    run, request = open_run(run), ForgetRequest.parse(request) if isinstance(request, str) else request
    budget, base = budget or Budget(), settings_by_method(run, settings)
    names = _tuned_methods(methods, request, budget)
    file = None if out is None else _TuningFile(Path(out), run, request, budget, base)
    data, tuned = data or run.load_data(), {} if file is None else file.attempts()
    for name in names:
        if name in tuned:
            continue
        on_attempt = None if watch is None else partial(watch, name)
        attempts = tune_method(run, data, request, name, budget, base=base.get(name), watch=on_attempt)
        tuned = tuned | {name: attempts} if file is None else file.add(name, attempts)
    if file is not None:
        file.write_best()  # a process may have been killed between the two files
    return tuned


def _tuned_methods(methods: str | Sequence[str], request: ForgetRequest, budget: Budget) -> list[str]:
    names = chosen_methods(methods)
    if methods == "all":
        return [name for name in names if is_tunable(name) and serves(find_method(name), request)]
    for name in names:
        candidates(name, budget)  # refuses a method that has nothing to tune
        if not serves(find_method(name), request):
            raise FedOrthoError(f"{name} does not serve {request}; leave it out")
    return names


def tune_method(
    run: Run,
    data: Dataset,
    request: ForgetRequest,
    name: str,
    budget: Budget | None = None,
    *,
    base: Mapping[str, Any] | None = None,
    watch: Callable[[int, Attempt], None] | None = None,
) -> list[Attempt]:
    """All attempts of one method, best first; each changes some settings of `base`.

    A class should never be predicted; samples and clients should be recognised no better than unseen images. An
    attempt that fails (its loss diverges) counts as the worst.
    """
    budget = budget or Budget()
    if not serves(find_method(name), request):
        raise FedOrthoError(f"{name} does not serve {request}; leave it out")
    context = open_context(run, data)
    context = replace(context, data=replace(data, train=draw(data.train, budget.images, budget.seed)))
    attempts = []
    with using_threads(run.settings.threads):
        before, wanted = _baseline(context, request)
        for number, settings in enumerate(candidates(name, budget)):
            attempt = _attempt(context, request, name, {**(base or {}), **settings}, budget, before, wanted)
            attempts.append(attempt)
            if watch is not None:
                watch(number, attempt)
    if all(attempt.error for attempt in attempts):
        raise FedOrthoError(f"no settings of {name} worked, so none is best: {attempts[0].error}")
    return sorted(attempts, key=lambda attempt: (bool(attempt.error), attempt.score))


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
    fields = field_types(find_method(name))
    method = method_for_run(context.run, name, settings, {"seed": budget.seed} if "seed" in fields else {})
    if "epochs" in fields:
        epochs = min(as_mapping(method)["epochs"], budget.epochs)
        method = replace(method, epochs=epochs)  # type: ignore[type-var]  # methods are dataclasses
    try:
        with context.engine() as engine:
            model = unlearn(context.run.load_model(), engine, request, method).model
        forget, retain = _measured(context, model, request)
    except FedOrthoError as error:
        return Attempt(dict(settings), 1.0, 0.0, 1.0, str(error))
    return Attempt(dict(settings), forget, retain, (abs(forget - wanted) + abs(retain - before)) / 2)


class _TuningFile:
    """The best settings by method, and beside them all attempts; several processes may add to it."""

    def __init__(
        self,
        path: Path,
        run: Run,
        request: ForgetRequest,
        budget: Budget,
        base: Mapping[str, Mapping[str, Any]],
    ) -> None:
        self.path, self.trials = path, path.with_suffix(".trials.json")
        self.mine = TuningTrials(run.record.model.digest, str(request), budget, dict(base))
        self._check()

    def _check(self) -> None:
        """Refuse a place that cannot be written, or a file without trials, which would be replaced."""
        path = self.path
        if path.is_dir():
            raise FedOrthoError(f"{path} is a directory; give the file to write, such as --out {path / 'tuned.json'}")
        if path.exists() and not self.trials.exists():
            raise FedOrthoError(f"{path} exists without {self.trials.name} beside it; choose another --out")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FedOrthoError(f"{path} cannot be written: {error.strerror}; choose another --out") from error
        check_writable(path.parent)

    def attempts(self) -> dict[str, list[Attempt]]:
        """The attempts of earlier calls; a file about another model, request, budget or settings is refused."""
        if not self.trials.exists():
            return {}
        try:
            found = read_record(TuningTrials, self.trials)
        except BadRecord as error:
            raise BadRecord(f"{error}; move it away or choose another --out") from error
        if not found.is_like(self.mine):
            raise FedOrthoError(
                f"{self.trials} is about another model, request, budget or settings; choose another --out"
            )
        return {name: list(attempts) for name, attempts in found.attempts.items()}

    def add(self, name: str, attempts: Sequence[Attempt]) -> dict[str, list[Attempt]]:
        with locked(self.path.with_suffix(".writing")):
            every = self.attempts() | {name: list(attempts)}
            tuples = {method: tuple(tried) for method, tried in every.items()}
            write_record(self.trials, replace(self.mine, attempts=tuples, environment=environment()))
        self.write_best()
        return every

    def write_best(self) -> None:
        with locked(self.path.with_suffix(".writing")):
            if best := {method: dict(attempts[0].settings) for method, attempts in self.attempts().items()}:
                write_json(self.path, best)
