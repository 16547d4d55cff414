"""Climb from the cheapest level to retraining, until the audits pass on validation images."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedortho.audits.judge import judge_case
from fedortho.audits.measurements import MeasurementCache
from fedortho.audits.retention import RETENTION
from fedortho.data.images import Dataset
from fedortho.data.request import ForgetRequest
from fedortho.devices import choose_device
from fedortho.errors import BadData, BadSetting, FedOrthoError
from fedortho.evaluation.case import Case
from fedortho.methods import LEVELS, make_method
from fedortho.methods.method import ForgetResult, Method
from fedortho.requests.counterfactuals import counterfactuals
from fedortho.requests.forgetting import ServedRequest, forget_run
from fedortho.requests.judging import JudgeOptions, OnStep, references_directory, references_for
from fedortho.requests.levels import erasing_methods, level_method, levels_for, training_cost_words
from fedortho.requests.references import case_of
from fedortho.requests.rewind import holds_rewind
from fedortho.requests.run_context import RunContext, open_context
from fedortho.requests.transaction import holds_result
from fedortho.runs.rows import hash_key
from fedortho.runs.run import Run, open_run
from fedortho.storage.settings import as_mapping
from fedortho.training.loop import Watch
from fedortho.unlearning.calibrate import Refused


class NotPassed(FedOrthoError):
    """A result that does not pass the audits on validation images."""

    def __init__(self, text: str, *, is_erased: bool = False) -> None:
        super().__init__(text)
        self.is_erased = is_erased  # too much of the rest was lost, and that is all


@dataclass(frozen=True)
class LevelAttempt:
    """A level that was tried, and why it was left."""

    level: str
    reason: str  # empty: it was taken
    stages: int = 0  # that were reset, where they are more than the level's own

    def __str__(self) -> str:
        method = f"{LEVELS[self.level]}{f' of {self.stages} stages' if self.stages else ''}"
        return f"{self.level}, by {method}: {f'left: {self.reason}' if self.reason else 'taken'}"


def forget_until_passed(
    run: Run | Path | str,
    request: ForgetRequest | str,
    options: JudgeOptions | None = None,
    *,
    out: Path | str,
    data: Dataset | None = None,
    on_attempt: Callable[[LevelAttempt], None] | None = None,
    on_training: Watch | None = None,
    on_step: OnStep = None,
    **how: Any,
) -> tuple[ServedRequest, tuple[LevelAttempt, ...]]:
    """Serve a request at the cheapest level whose result passes the audits, and return it with all that were tried.

    A class that is not erased by the level's own method, which keeps the first stage of a network with more than two,
    is erased once more with all stages reset, unless only retention failed. Every audit of the
    budget (`options.audit`) must pass on validation images against a reference model, which is found, given or trained
    as `options` say; an inconclusive one is not passed. Retraining, the last level, is taken without a decision.
    Nothing of an attempt that was left is written but its entry in the journal, and only the result that is taken is
    measured on test images. `how` are further arguments of `forget_run`.
    """
    options = options or JudgeOptions()
    run, out = open_run(run).at(options.data_dir, options.device, options.recipe), Path(out)
    asked = run.request(request, hashed=bool(how.get("hash_ids")))
    data = (data or run.load_data()).with_key(hash_key(run.path))  # which the request may have made
    how = {**how, "out": out, "data": data, "device": options.device, "hide_first": False}
    ways, ticket = [_Way(level) for level in levels_for(run, asked)], how.get("ticket") or None
    more = erasing_methods(run, data.train.shape)[1:] if asked.kind == "class" else []
    known = [*ways, *(deeper := [_Way("erase", method) for method in more])]
    done = [way for way in known if holds_result(run, asked, way.method_on(run), out, ticket=ticket)]
    if done or holds_rewind(run, asked, out):
        way = done[0] if done else _Way("exact")
        served = forget_run(run, request, way.method or "", level=way.level, **how)
        return served, (LevelAttempt(way.level, "", way.stages),)
    validation = _validation(run, asked, options, data, on_training, on_step)
    attempts: list[LevelAttempt] = []
    while not attempts or attempts[-1].reason:
        way, reason = ways.pop(0), ""
        try:
            accept = validation.check if way.level != "exact" else None
            served = forget_run(run, request, way.method or "", level=way.level, accept=accept, **how)
        except (NotPassed, Refused, BadSetting) as error:  # the latter: a network in which nothing can be edited
            reason = str(error)
            if way == _Way("erase") and deeper and isinstance(error, NotPassed) and not error.is_erased:
                ways.insert(0, deeper[-1])
            if not ways and isinstance(error, NotPassed):
                raise NotPassed(f"{error}; the last level is retraining, which needs --recipe FILE.toml") from error
            if not ways:
                raise
        attempts.append(LevelAttempt(way.level, reason, way.stages))
        if on_attempt is not None:
            on_attempt(attempts[-1])
    return served, tuple(attempts)


@dataclass(frozen=True)
class _Way:
    """A level, or the method of the level erase with more stages."""

    level: str
    method: Method | None = None  # None: the level's own

    def method_on(self, run: Run) -> Method:
        return self.method or level_method(run, self.level)

    @property
    def stages(self) -> int:
        return 0 if self.method is None else int(as_mapping(self.method)["stages"])


@dataclass(frozen=True)
class _Validation:
    """Decides by audits on validation images."""

    case: Case
    context: RunContext
    options: JudgeOptions
    references: Sequence[Run]
    on_step: OnStep
    cache: MeasurementCache = field(default_factory=MeasurementCache)

    def check(self, result: ForgetResult) -> None:
        """Refuse a result that does not pass."""
        method, options, run = make_method(result.method, result.settings), self.options, self.context.run
        directory, alike = references_directory(run, options), list[Run]()
        if not options.given:
            alike = counterfactuals(self.context, method, self.case.request, self.references, directory)
        treated = tuple(each.load_model() for each in alike)
        judged = replace(self.case, unlearned=copy.deepcopy(result.model).cpu(), counterfactuals=treated)
        verdict = judge_case(judged, options.audit, only=options.only, on_step=self.on_step, cache=self.cache)
        failed = {each.name: each.outcome for each in verdict.results if each.outcome not in ("PASS", "NOT RUN")}
        if failed or all(audit.outcome == "NOT RUN" for audit in verdict.audits):
            found = ", ".join(f"{name} {outcome}" for name, outcome in failed.items()) or "no audit was run"
            raise NotPassed(f"on validation images {found}", is_erased=list(failed) == [RETENTION.name])


def _validation(
    run: Run, request: ForgetRequest, options: JudgeOptions, data: Dataset, on_training: Watch | None, on_step: OnStep
) -> _Validation:
    """What decides on a run; refused where there are no validation images, no audits or no reference model."""
    if not len(data.valid):
        raise BadData(f"{run.path} has no validation images, on which --until passed decides; choose a --level")
    if options.audit == "none":
        raise FedOrthoError("--until passed decides by audits; give --audit quick or full")
    references = references_for(run, run, request, options, data, on_training)
    if not references:
        raise FedOrthoError(
            f"--until passed compares with a model that was retrained without {request}, and there is none; give "
            f"--reference RUN, or --retrain ({training_cost_words(run)})"
        )
    case = case_of(run, request, replace(data, test=data.valid), run, references, choose_device(options.device))
    return _Validation(case, open_context(run, data), options, references, on_step)
