"""The levels of forgetting on a run: which method serves each, what it will cost, and the plan of a request."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedortho.audits.verdict import spoken_time
from fedortho.data.request import ForgetRequest
from fedortho.errors import BadSetting
from fedortho.methods import LEVELS, MEANINGS, find_method, level_of, make_method
from fedortho.methods.hyperparameters import read_settings
from fedortho.methods.method import Method
from fedortho.requests.judging import JudgeOptions
from fedortho.requests.references import find_references
from fedortho.requests.run_context import method_for_run
from fedortho.runs.run import Run
from fedortho.runs.settings import FederateSettings
from fedortho.storage.settings import as_mapping

# passes over the training images, in FLOPs of training steps, of methods that do not train; a forward pass is a third
PASSES = {"hide": 0.03, "paper": 1 / 3, "directions": 1 / 3}


def level_for_run(run: Run, request: ForgetRequest, level: str = "", method: Method | str = "") -> str:
    """As `level_of`; a refusal says what hiding and retraining cost on this run."""
    hiding = _planned(run, "hide", method_of_level(run, "hide"), run.path).seconds
    costs = ["" if hiding is None else f"; about {spoken_time(hiding)}", f"; {training_cost_words(run)}"]
    return level_of(request, level, method, costs)


def levels_for(request: ForgetRequest) -> list[str]:
    """The levels that serve a request, from the cheapest to retraining."""
    return [level for level in LEVELS if level != "erase" or request.kind == "class"]


def method_of_level(
    run: Run, level: str, settings: str = "published", changes: Mapping[str, Any] | None = None
) -> Method:
    """The method that serves a level on this run.

    `exact` is retraining by the run's recipe; where a federation kept rounds, `forget_run` rewinds to the same bytes.
    """
    return chosen_method(run, LEVELS[level], settings, changes)


def chosen_method(run: Run, name: str, settings: str = "published", changes: Mapping[str, Any] | None = None) -> Method:
    """A method with its hyper-parameters for a run: those of `settings`, overridden by `changes`.

    `settings` is `published`, `short`, `tuned` or a JSON file. Methods that train use the run's augmentation and seed,
    and retraining its recipe.
    """
    known = read_settings(run.settings.data, run.settings.model, settings).get(name, {})
    is_planning = hasattr(find_method(name), "plan")  # a method of ours, whose seed is not the run's
    base = make_method(name, known) if is_planning else method_for_run(run, name, known)
    return make_method(name, as_mapping(base), changes or {})


def hidden_path(out: Path) -> Path:
    """Where the hidden model is written before a class is erased into `out`."""
    return out.with_name(f"{out.name}-hidden")


def training_seconds(run: Run) -> float:
    """How long the training of a run took; 0: that is not known."""
    return sum(entry.seconds for entry in run.history())


def training_cost_words(run: Run) -> str:
    seconds = training_seconds(run)
    return f"training took {spoken_time(seconds)}" if seconds else "its cost is unknown"


@dataclass(frozen=True)
class PlannedStep:
    """A method that will run, and about what it will cost."""

    level: str  # empty: the method was named
    method: Method
    out: Path
    share: float | None  # of the FLOPs of the run's training; None: not known
    seconds: float | None

    def __str__(self) -> str:
        name = self.method.name
        what = f"{self.level}, by {name} ({MEANINGS[self.level]})" if self.level else f"by {name}"
        cost = (
            "cost not known"
            if self.share is None
            else f"about {self.share:.{0 if self.share > 0.05 else 1}%} of the training's computation"
        )
        time = "" if self.seconds is None else f" ({spoken_time(self.seconds)})"
        return f"{what}: {cost}{time}; writes {self.out}"


@dataclass(frozen=True)
class ForgettingPlan:
    """What will be done for a request, before anything is done."""

    run: Path
    request: str
    steps: tuple[PlannedStep, ...]
    undo: Path | None
    audit: str  # the budget; none: the result is not judged
    references: tuple[Path, ...]  # that were found
    retrain_seconds: float | None = None  # a reference will be trained, about so long; 0: that is not known
    until_passed: bool = False  # the first step that passes the audits on validation images ends it

    def lines(self) -> list[str]:
        """The plan in words."""
        until = ", until one passes the audits on validation images" if self.until_passed else ""
        title = f"plan: {self.request} on {self.run}{until}"
        steps = [f"{number}. {step}" for number, step in enumerate(self.steps, start=1)]
        steps[-1] += f" and {self.undo}" if self.undo else ""
        return [title, *steps, f"then {self._judging()}"]

    def _judging(self) -> str:
        if self.audit == "none":
            return "nothing is audited (--audit none)"
        budget = f"{self.audit} audits on test images"
        if self.references:
            return f"{budget} against {', '.join(map(str, self.references))}"
        if self.retrain_seconds is None:
            return f"{budget} without a reference model, so they cannot pass; --retrain trains one"
        time = f", about {spoken_time(self.retrain_seconds)}" if self.retrain_seconds else ""
        return f"{budget} against a reference model that is trained for it{time}"

    def to_json(self) -> dict[str, Any]:
        """The plan for JSON."""
        steps = [
            {"level": s.level, "method": s.method.name, "settings": as_mapping(s.method), "out": str(s.out)}
            | {"share-of-training": s.share, "seconds": s.seconds}
            for s in self.steps
        ]
        return {"run": str(self.run), "request": self.request, "steps": steps, "until-passed": self.until_passed} | {
            "undo": None if self.undo is None else str(self.undo),
            "audit": self.audit,
            "references": [str(path) for path in self.references],
            "trains-reference": self.retrain_seconds is not None and not self.references,
        }


def plan_request(
    run: Run,
    request: ForgetRequest,
    level: str,
    method: Method,
    out: Path,
    undo: Path | None,
    options: JudgeOptions,
    *,
    hide_first: bool = True,
) -> ForgettingPlan:
    """The plan of a request: the hidden run first where a class is erased, then the method."""
    steps = [("hide", method_of_level(run, "hide"), hidden_path(out))] if level == "erase" and hide_first else []
    return _plan(run, request, [*steps, (level, method, out)], undo, options)


def plan_climb(
    run: Run, request: ForgetRequest, out: Path, until: str, undo: Path | None, options: JudgeOptions
) -> ForgettingPlan:
    """The plan of a request that is served at the first level whose result passes."""
    if until != "passed":
        raise BadSetting(f"--until is {until!r}; expected passed")
    steps = [(level, method_of_level(run, level), out) for level in levels_for(request)]
    return replace(_plan(run, request, steps, undo, options), until_passed=True)


def _plan(
    run: Run,
    request: ForgetRequest,
    steps: Sequence[tuple[str, Method, Path]],
    undo: Path | None,
    options: JudgeOptions,
) -> ForgettingPlan:
    found = options.given or find_references(run, request, options.references, options.data_dir)
    return ForgettingPlan(
        run.path,
        str(request),
        tuple(_planned(run, *step) for step in steps),
        undo,
        options.audit,
        tuple(each.path for each in found),
        training_seconds(run) if options.retrain else None,
    )


def _planned(run: Run, level: str, method: Method, out: Path) -> PlannedStep:
    """A step with its estimated cost: passes over the training images relative to those of the run's training."""
    settings = run.settings
    passes = settings.rounds if isinstance(settings, FederateSettings) else settings.epochs
    epochs = PASSES.get(method.name, getattr(method, "epochs", None))
    share = epochs / passes if passes and epochs is not None else None
    seconds = training_seconds(run)
    return PlannedStep(level, method, out, share, share * seconds if share is not None and seconds else None)
