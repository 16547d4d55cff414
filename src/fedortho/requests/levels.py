"""The levels of forgetting on a run: which method serves each, what it will cost, and the plan of a request."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedortho.audits.verdict import spoken_time
from fedortho.data.request import ForgetRequest, as_request
from fedortho.engines.query import Selection
from fedortho.errors import FedOrthoError
from fedortho.methods import LEVELS, MEANINGS, METHODS, find_method, level_of, level_of_method, make_method, meaning_of
from fedortho.methods.federaser import FedEraser
from fedortho.methods.hyperparameters import read_settings
from fedortho.methods.method import CannotServe, Method, serves
from fedortho.methods.r2d import R2D
from fedortho.methods.regrow import Regrow, stages_reset
from fedortho.methods.retrain import NO_RECIPE
from fedortho.models.graph import stage_entries
from fedortho.requests.judging import JudgeOptions, check_trainable
from fedortho.requests.references import find_references
from fedortho.requests.rewind import find_rewind
from fedortho.requests.run_context import method_for_run
from fedortho.runs.rows import hash_key
from fedortho.runs.run import Run
from fedortho.runs.settings import FederateSettings
from fedortho.storage.records import Scalar
from fedortho.storage.settings import as_mapping

# passes over the training images, in FLOPs of training steps, of methods that do not train; a forward pass is a third
PASSES = {"hide": 0.03, "paper": 1 / 3, "directions": 1 / 3}
DEEPER = "if it fails and has kept a stage, once more with all stages reset"
FLIPPED = ", {:.0%} of the images flipped left to right; --set flip=0 where a mirror image is another class"
SHOWN = 4  # ways that a refusal tells
NOT_EXACT = "approximate: what the data taught may still be found"


def level_for_run(run: Run, request: ForgetRequest, level: str = "", method: Method | str = "") -> str:
    """The level of a request; of clients and samples exact if a rewind saves rounds, else an error with all ways."""
    if level == "exact" and not method and not run.settings.epochs:
        raise CannotServe(f"level exact: {NO_RECIPE}")
    if level or method or request.kind == "class":
        return level_of(request, level, method, ("", f"; {training_cost_words(run)}"))
    if (rewind := find_rewind(run, request)) is not None and rewind.begin:
        return "exact"
    *told, exact = ways(run, request)
    more = [f"{len(told) - SHOWN} more that --dry-run lists"] if len(told) > SHOWN else []
    all_ways = "; ".join([*told[:SHOWN], *more, exact])
    raise CannotServe(f"{request} has no level by default; choose, in order of cost: {all_ways}")


def ways(run: Run, request: ForgetRequest) -> list[str]:
    """Ways to serve clients or samples without a rewind, by cost: those cheaper than retraining, then retraining."""
    check_selects(run, request)
    steps = [_planned(run, "hide", level_method(run, "hide"), run.path)] if serves(find_method("hide"), request) else []
    for name in METHODS:
        if serves(METHODS[name], request) and not level_of_method(name) and has_kept(run, name):
            steps.append(_planned(run, "", chosen_method(run, name), run.path))
    steps = [step for step in steps if step.share_of_training is None or step.share_of_training < 1]
    steps.sort(key=lambda step: step.effort)
    told = [
        f"{f'--level {step.level}' if step.level else f'--method {step.method}'} ({step.cost}; "
        f"{MEANINGS[step.level] if step.level else NOT_EXACT})"
        for step in steps
    ]
    return [*told, f"--level exact ({MEANINGS['exact']}; {training_cost_words(run)})"]


def check_selects(run: Run, request: ForgetRequest) -> None:
    """Refuse a request that names a client or images that the run does not have; of a federation, clients alone."""
    if isinstance(run.settings, FederateSettings):
        if unknown_clients := [client for client in request.clients if client >= run.settings.clients]:
            raise FedOrthoError(f"no client {unknown_clients[0]}; clients run 0 to {run.settings.clients - 1}")
        return
    data = run.load_data().with_key(hash_key(run.path))
    known = Selection(exclude=run.excluded).select(data.train)
    as_request(request, data).split(known, gone=data.gone)


def has_kept(run: Run, name: str) -> bool:
    """Whether a run kept what a method replays."""
    method = chosen_method(run, name)
    if isinstance(method, R2D):
        return _begin_of(method) is not None
    return not isinstance(method, FedEraser) or any(Path(method.updates).glob("round-*"))


def _begin_of(method: R2D) -> int | None:
    """The kept epoch or round that the method goes back to; None: none is kept that far back."""
    try:
        return method.begin()[0]
    except CannotServe:
        return None


def levels_for(run: Run, request: ForgetRequest) -> list[str]:
    """The levels that serve a request on a run, from the cheapest to retraining, which needs the run's recipe."""
    left_out = ["erase"] * (request.kind != "class") + ["exact"] * (not run.settings.epochs)
    return [level for level in LEVELS if level not in left_out]


def level_method(run: Run, level: str) -> Method:
    """The method of a level, with its hyper-parameters for this run; at `exact`, `forget_run` may rewind instead."""
    return chosen_method(run, LEVELS[level])


def erasing_methods(run: Run, shape: tuple[int, int, int]) -> list[Method]:
    """The method of the level erase, then the same with one stage more each, up to all; all cost about the same."""
    method, entries = level_method(run, "erase"), stage_entries(run.load_model(), shape)
    own = stages_reset(int(as_mapping(method)["stages"]), len(entries))
    more = range(own + 1, len(entries) + 2)
    return [method, *(make_method(method.name, as_mapping(method), {"stages": stages}) for stages in more)]


def chosen_method(run: Run, name: str, settings: str = "published", changes: Mapping[str, Any] | None = None) -> Method:
    """A method with its hyper-parameters for a run: those of `settings`, overridden by `changes`.

    `settings` is `published`, `short`, `tuned` or a JSON file; augmentation, seed and recipe to retrain are the run's.
    """
    known = read_settings(run.settings.data, run.settings.model, settings).get(name, {})
    is_planning = hasattr(find_method(name), "plan")  # a method of ours, whose seed is not the run's
    base = make_method(name, known) if is_planning else method_for_run(run, name, known)
    return make_method(name, as_mapping(base), changes or {})


def hidden_path(out: Path) -> Path:
    """Where the hidden model is written before a class is erased into `out`."""
    return out.with_name(f"{out.name}-hidden")


def training_cost_words(run: Run) -> str:
    """How long the training of a run took, which is what retraining will take."""
    seconds = _training_seconds(run)
    return f"training took {spoken_time(seconds)}" if seconds else "its cost is unknown"


def _training_seconds(run: Run) -> float:
    return sum(entry.seconds for entry in run.history())


@dataclass(frozen=True)
class PlannedStep:
    """A method that will run, and about what it will cost."""

    level: str  # empty: the method was named
    method: str
    settings: Mapping[str, Scalar]
    out: str
    share_of_training: float | None  # of the FLOPs of the run's training; None: not known
    seconds: float | None
    note: str = ""  # what must be known of it
    passes: float | None = None  # over the training images

    @property
    def effort(self) -> float:
        """What orders the steps of a run: the share of its training or, where that is not known, passes."""
        known = self.passes if self.share_of_training is None else self.share_of_training
        return math.inf if known is None else known

    def __str__(self) -> str:
        what = (
            f"{self.level}, by {self.method} ({meaning_of(self.level, self.settings)})"
            if self.level
            else f"by {self.method}"
        )
        return f"{what}{f' ({self.note})' if self.note else ''}: {self.cost}; writes {self.out}"

    @property
    def cost(self) -> str:
        """Its share of the training's computation, and time."""
        share, time = self.share_of_training, "" if self.seconds is None else f" ({spoken_time(self.seconds)})"
        if share is not None:
            return f"about {share:.{0 if share > 0.05 else 1}%} of the training's computation{time}"
        if self.passes is None:
            return f"cost not known{time}"
        number = f"{self.passes:.2g}" if self.passes < 1 else f"{self.passes:g}"
        return f"{number} {'pass' if number == '1' else 'passes'} over the training images"


@dataclass(frozen=True)
class ForgettingPlan:
    """What will be done for a request, before anything is done."""

    run: str
    request: str
    steps: tuple[PlannedStep, ...]
    until_passed: bool  # the first step that passes the audits on validation images ends it
    undo: str | None
    audit: str  # the budget; none: the result is not judged
    references: tuple[str, ...]  # that were found
    trains_references: int  # so many more
    treats_references: bool  # the method is applied to them, too
    training_seconds: float  # of one; 0: not known
    has_recipe: bool = True  # False: the run was trained elsewhere, nobody knows how

    def lines(self) -> list[str]:
        """The plan in words."""
        until = ", until one passes the audits on validation images" if self.until_passed else ""
        steps = [f"{number}. {step}" for number, step in enumerate(self.steps, start=1)]
        steps[-1] += f" and {self.undo}" if self.undo else ""
        judging = f"{self.audit} audits on test images {self._against}"
        judging = "nothing is audited (--audit none)" if self.audit == "none" else judging
        return [f"plan: {self.request} on {self.run}{until}", *steps, f"then {judging}"]

    @property
    def _against(self) -> str:
        seconds, models = self.trains_references * self.training_seconds, list(self.references)
        if self.trains_references:
            number = {1: "a reference model that is", 2: "two reference models that are"}
            trained = number.get(self.trains_references, "three reference models that are")
            models.append(f"{trained} trained for it{f', about {spoken_time(seconds)}' if seconds else ''}")
        if not models:
            how = "" if self.has_recipe else " by the training that --recipe FILE names"
            return f"without a reference model, so they cannot pass; --retrain trains one{how}"
        alike = ", and what the method makes of them" if self.treats_references else ""
        return f"against {', '.join(models)}{alike}"


def plan_request(
    run: Run,
    request: ForgetRequest,
    steps: Sequence[tuple[str, Method, Path]],
    undo: Path | None,
    options: JudgeOptions,
    *,
    until_passed: bool = False,
) -> ForgettingPlan:
    """The plan of a request that is served by these steps, each a level, a method and the run that it writes."""
    check_trainable(run, request, options)
    found = options.given or find_references(run, request, options.references)
    planned = [_planned(run, *step) for step in steps]
    is_alike = not options.given and (options.retrain or until_passed)
    if until_passed:
        planned = [replace(step, note=f"{step.note}; {DEEPER}") if step.level == "erase" else step for step in planned]
    return ForgettingPlan(
        str(run.path),
        str(request),
        tuple(planned),
        until_passed,
        None if undo is None else str(undo),
        options.audit,
        tuple(str(each.path) for each in found),
        max(options.trained_references - len(found), 0),
        is_alike and any(getattr(method, "has_counterfactual", False) for _, method, _ in steps),
        _training_seconds(run),
        bool(run.settings.epochs),
    )


def _planned(run: Run, level: str, method: Method, out: Path) -> PlannedStep:
    """A step with its estimated cost, relative to the run's training: in epochs or rounds, or in passes over images."""
    seconds, (unit, passes, _) = _training_seconds(run), run.settings.passes
    epochs, note = PASSES.get(method.name, getattr(method, "epochs", None) or None), ""
    if isinstance(method, R2D):
        epochs = None  # not known before shadow models have chosen how far back
        if not (method.kept and any(Path(method.kept).glob("*.safetensors"))):
            method.begin()  # refuses, and says how a run keeps some
        if (begin := _begin_of(method)) is not None:
            epochs = passes - begin
            note = f"back to {unit[:-1]} {begin} of {passes}, which has met the data; {NOT_EXACT}"
    whole = run.settings.image_passes if method.name in PASSES else passes
    share = epochs / whole if whole and epochs is not None else None
    if isinstance(method, Regrow):
        note = f"{method.epochs} {unit if whole else 'passes'}"
        note += FLIPPED.format(method.flip) if method.flip and not whole else ""
        note += "; the level exact costs no more" if share is not None and share >= 1 else ""
    time = share * seconds if share is not None and seconds else None
    return PlannedStep(level, method.name, as_mapping(method), str(out), share, time, note, epochs)
