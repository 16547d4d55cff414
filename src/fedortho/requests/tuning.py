"""Hyper-parameters by an equal budget for every method, chosen on validation images and never on test images."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedortho.data.images import Dataset
from fedortho.data.request import ForgetRequest
from fedortho.devices import using_threads
from fedortho.errors import BadSetting, FedOrthoError
from fedortho.methods import find_method, known_methods, unlearn
from fedortho.methods.hyperparameters import read_settings
from fedortho.methods.method import serves
from fedortho.models.predictions import accuracy, evaluate
from fedortho.requests.comparing import RunContext, chosen_methods, context_of, settings_for
from fedortho.runs.run import Run, open_run
from fedortho.statistics.query import Selection, draw
from fedortho.storage.files import check_writable, locked, read_json, write_json
from fedortho.storage.provenance import SCHEMA, environment
from fedortho.storage.records import to_json
from fedortho.storage.settings import as_mapping, field_types

FACTORS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0)  # of the published rate
GRIDS: Mapping[str, Mapping[str, tuple[Any, ...]]] = {  # what is tried; all others: the rate
    "paper": {"ratio": (0.01, 0.05, 0.2), "alpha": (0.5, 0.9)},
    "ssd": {"alpha": (1.0, 3.0, 10.0, 30.0, 50.0, 100.0)},
    "neggrad": {"lr": (0.003, 0.01, 0.03), "beta": (0.9, 0.95)},
    "class-pruning": {"ratio": (0.02, 0.05, 0.1), "lr": (0.005, 0.02)},
}
# standards, targets, a replay, a control: nothing to tune
FIXED = ("retrain", "retrain-plain", "hide", "directions", "federaser", "logit-mask")


@dataclass(frozen=True)
class Budget:
    """What every method may spend on finding its settings."""

    trials: int = 6
    images: int = 10_000  # training images that a trial may see; in a federation all
    epochs: int = 2  # at most, in a trial
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.trials, self.images, self.epochs) < 1:
            raise BadSetting(f"trials, images and epochs must be at least 1, not {self}")


@dataclass(frozen=True)
class Attempt:
    """Settings and what they came to on validation images."""

    settings: Mapping[str, Any]
    forget: float
    retain: float
    score: float  # mean distance from the wanted forget accuracy and from the retain accuracy before; less is better
    error: str = ""  # why it failed; its numbers are then those of the worst there is, and not measured


def is_tunable(name: str) -> bool:
    """Whether a method has something to tune: a grid of its own, or a learning rate."""
    return name not in FIXED and (name in GRIDS or "lr" in field_types(find_method(name)))


def candidates(name: str, budget: Budget) -> list[dict[str, Any]]:
    """The settings to try, as many as the budget allows."""
    if not is_tunable(name):
        raise FedOrthoError(f"{name} has nothing to tune; choose from {', '.join(filter(is_tunable, known_methods()))}")
    grid = GRIDS.get(name)
    if grid is None:
        published: float = getattr(find_method(name)(), "lr")  # noqa: B009  # the protocol knows no lr
        grid = {"lr": tuple(float(f"{published * factor:.6g}") for factor in FACTORS)}
    combined = [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]
    return combined[: budget.trials]


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
    """All attempts, best first; what is tried goes over the settings of `base`.

    A class is to be answered never, samples and clients no better than images that were not trained on. What was
    given up by an attempt that failed (a loss that diverged) counts as the worst.
    """
    budget = budget or Budget()
    if not serves(find_method(name), request):
        raise FedOrthoError(f"{name} does not serve {request}; leave it out")
    place = context_of(run, data)
    place = replace(place, data=replace(data, train=draw(data.train, budget.images, budget.seed)))
    attempts = []
    with using_threads(run.settings.threads):
        before, wanted = _baseline(place, request)
        for number, settings in enumerate(candidates(name, budget)):
            attempt = _attempt(place, request, name, {**(base or {}), **settings}, budget, before, wanted)
            attempts.append(attempt)
            if watch is not None:
                watch(number, attempt)
    if all(attempt.error for attempt in attempts):
        raise FedOrthoError(f"no settings of {name} worked, so none is best: {attempts[0].error}")
    return sorted(attempts, key=lambda attempt: (bool(attempt.error), attempt.score))


def _baseline(place: RunContext, request: ForgetRequest) -> tuple[float, float]:
    """Retain accuracy before, and the forget accuracy wanted: none, or that of unseen images of these labels."""
    model = place.run.load_model().to(place.device)
    _, kept = _measured(place, model, request)
    if request.kind == "class":
        return kept, 0.0
    gone = Selection(include=request).select(place.data.train, place.clients)
    unseen = Selection(exclude=place.forgotten).select(place.data.valid, place.clients)
    shares = evaluate(model, unseen, device=place.device).per_class
    right = torch.tensor([kept if share is None else share for share in shares])
    return kept, float(right[gone.labels].mean())


def _measured(place: RunContext, model: nn.Module, request: ForgetRequest) -> tuple[float, float]:
    """Forget and retain accuracy; validation images only, but for clients and samples, which are training images."""
    model = model.to(place.device)
    part = place.data.valid if request.kind == "class" else place.data.train
    gone = Selection(include=request).select(part, place.clients)
    everything = request if place.forgotten is None else place.forgotten + request
    kept = Selection("valid", None, everything).select(place.data.valid, place.clients)
    return accuracy(model, gone, device=place.device), accuracy(model, kept, device=place.device)


def _attempt(
    place: RunContext,
    request: ForgetRequest,
    name: str,
    settings: Mapping[str, Any],
    budget: Budget,
    before: float,
    wanted: float,
) -> Attempt:
    method = settings_for(
        place.run, name, settings, {"seed": budget.seed} if "seed" in field_types(find_method(name)) else {}
    )
    if "epochs" in field_types(find_method(name)):
        most = min(as_mapping(method)["epochs"], budget.epochs)
        method = replace(method, epochs=most)  # type: ignore[type-var]  # methods are dataclasses
    try:
        with place.engine() as engine:
            forgot = unlearn(place.run.load_model(), engine, request, method).model
        gone, kept = _measured(place, forgot, request)
    except FedOrthoError as error:
        return Attempt(dict(settings), 1.0, 0.0, 1.0, str(error))
    return Attempt(dict(settings), gone, kept, (abs(gone - wanted) + abs(kept - before)) / 2)


def tune(
    run: Run | Path | str,
    request: ForgetRequest | str,
    methods: str | Sequence[str] = "all",
    *,
    out: Path | str,
    settings: str | Mapping[str, Mapping[str, Any]] = "published",
    budget: Budget | None = None,
    data: Dataset | None = None,
    watch: Callable[[str, int, Attempt], None] | None = None,
) -> dict[str, list[Attempt]]:
    """Search the hyper-parameters of methods on validation images, with the same budget for every method.

    Returns the attempts of each method, best first. The JSON file `out` receives the best settings by method, as
    `compare(settings=out)` reads them, and OUT.trials.json all attempts; methods that are in the file are not tuned
    again, and two processes may tune different methods into the same file. `settings` are those to begin with. `all`
    are those that serve the request and have something to tune; others are refused if they are named.
    """
    run, request = open_run(run), ForgetRequest.parse(request) if isinstance(request, str) else request
    out, budget = Path(out), budget or Budget()
    base = read_settings(run.settings.data, run.settings.model, settings) if isinstance(settings, str) else settings
    names = _tuned_methods(methods, request, budget)
    data = data or run.load_data()
    trials = out.with_suffix(".trials.json")
    _check_place(out, trials)
    about: dict[str, Any] = {"budget": asdict(budget), "request": str(request), "model": run.record.model.digest}
    about["base"] = dict(base)
    for name in names:
        if name in _attempts(trials, about):
            continue
        on_attempt = None if watch is None else partial(watch, name)
        attempts = tune_method(run, data, request, name, budget, base=base.get(name), watch=on_attempt)
        with locked(out.with_suffix(".writing")):
            done = _attempts(trials, about) | {name: attempts}
            origin = {"schema": SCHEMA, "environment": to_json(environment())}
            tried = {method: [asdict(attempt) for attempt in attempts] for method, attempts in done.items()}
            write_json(trials, origin | about | {"attempts": tried})
            _write_best(out, done)
    with locked(out.with_suffix(".writing")):
        done = _attempts(trials, about)
        _write_best(out, done)  # in case a process was killed between the two files
    return done


def _tuned_methods(methods: str | Sequence[str], request: ForgetRequest, budget: Budget) -> list[str]:
    names = chosen_methods(methods)
    if methods == "all":
        return [name for name in names if is_tunable(name) and serves(find_method(name), request)]
    for name in names:
        candidates(name, budget)  # refuses a method that has nothing to tune
        if not serves(find_method(name), request):
            raise FedOrthoError(f"{name} does not serve {request}; leave it out")
    return names


def _write_best(out: Path, done: Mapping[str, list[Attempt]]) -> None:
    if done:
        write_json(out, {method: dict(attempts[0].settings) for method, attempts in done.items()})


def _check_place(out: Path, trials: Path) -> None:
    """Refuse a place that cannot be written, or a file of which no trials are known: it would be replaced."""
    if out.is_dir():
        raise FedOrthoError(f"{out} is a directory; give the file to write, such as --out {out / 'tuned.json'}")
    if out.exists() and not trials.exists():
        raise FedOrthoError(f"{out} is there already, and without {trials.name} beside it; choose another --out")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FedOrthoError(f"{out} cannot be written: {error.strerror}; choose another --out") from error
    check_writable(out.parent)


def _attempts(trials: Path, about: Mapping[str, Any]) -> dict[str, list[Attempt]]:
    """What was found before; a file about another model, request or budget is refused."""
    if not trials.exists():
        return {}
    found = read_json(trials)
    if not isinstance(found, dict) or {key: found.get(key, {}) for key in about} != about:
        raise FedOrthoError(f"{trials} is about another model, request, budget or preset; choose another --out")
    return {name: [Attempt(**attempt) for attempt in attempts] for name, attempts in found["attempts"].items()}
