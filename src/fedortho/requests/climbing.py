"""Climb from the cheapest level to retraining, until the audits pass on validation images."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedortho.audits.judge import judge_case
from fedortho.audits.measurements import MeasurementCache
from fedortho.data.images import Dataset
from fedortho.data.request import ForgetRequest
from fedortho.devices import choose_device
from fedortho.errors import BadData, FedOrthoError
from fedortho.methods import LEVELS, make_method
from fedortho.methods.method import ForgetResult
from fedortho.requests.counterfactuals import counterfactuals
from fedortho.requests.forgetting import ServedRequest, forget_run
from fedortho.requests.judging import JudgeOptions, OnStep, references_directory, references_for
from fedortho.requests.levels import level_method, levels_for, training_cost_words
from fedortho.requests.references import case_of
from fedortho.requests.rewind import holds_rewind
from fedortho.requests.run_context import open_context
from fedortho.requests.transaction import holds_result
from fedortho.runs.run import Run, open_run
from fedortho.training.loop import Watch
from fedortho.unlearning.calibrate import Refused


class NotPassed(FedOrthoError):
    """A result that does not pass the audits on validation images."""


@dataclass(frozen=True)
class LevelAttempt:
    """A level that was tried, and why it was left."""

    level: str
    reason: str  # empty: it was taken

    def __str__(self) -> str:
        return f"{self.level}, by {LEVELS[self.level]}: {f'left: {self.reason}' if self.reason else 'taken'}"


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

    Every audit of the budget (`options.audit`) must pass on validation images against a reference model, which is
    found, given or trained as `options` say; an inconclusive one is not passed. Retraining, the last level, is taken
    without a decision. Nothing of an attempt that was left is written but its entry in the journal, and only the
    result that is taken is measured on test images. `how` are further arguments of `forget_run`.
    """
    options = options or JudgeOptions()
    run, out = open_run(run).at(options.data_dir, recipe=options.recipe), Path(out)
    data = data or run.load_data(options.data_dir)
    asked = run.request(request, hashed=bool(how.get("hash_ids")))
    how = {**how, "out": out, "data": data, "device": options.device, "hide_first": False}
    levels, ticket = levels_for(asked), how.get("ticket") or None
    done = [each for each in levels if holds_result(run, asked, level_method(run, each), out, ticket=ticket)]
    if done or holds_rewind(run, asked, out):
        level = done[0] if done else "exact"
        return forget_run(run, request, level=level, **how), (LevelAttempt(level, ""),)
    check = _validation(run, asked, options, data, on_training, on_step)
    attempts: list[LevelAttempt] = []
    for level in levels:
        try:
            served = forget_run(run, request, level=level, accept=None if level == levels[-1] else check, **how)
            attempts.append(LevelAttempt(level, ""))
        except (NotPassed, Refused) as error:
            if level == levels[-1]:
                raise
            attempts.append(LevelAttempt(level, str(error)))
        if on_attempt is not None:
            on_attempt(attempts[-1])
        if not attempts[-1].reason:
            break
    return served, tuple(attempts)


def _validation(
    run: Run, request: ForgetRequest, options: JudgeOptions, data: Dataset, on_training: Watch | None, on_step: OnStep
) -> Callable[[ForgetResult], None]:
    """A function that refuses a result which does not pass the audits on validation images."""
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
    cache, context = MeasurementCache(), open_context(run.at(options.data_dir, options.device), data)
    directory = references_directory(run, options)

    def check(result: ForgetResult) -> None:
        method = make_method(result.method, result.settings)
        alike = [] if options.given else counterfactuals(context, method, request, references, directory)
        treated = tuple(each.load_model() for each in alike)
        judged = replace(case, unlearned=copy.deepcopy(result.model).cpu(), counterfactuals=treated)
        verdict = judge_case(judged, options.audit, only=options.only, on_step=on_step, cache=cache)
        failed = [f"{each.name} {each.outcome}" for each in verdict.results if each.outcome not in ("PASS", "NOT RUN")]
        if failed or all(audit.outcome == "NOT RUN" for audit in verdict.audits):
            raise NotPassed(f"on validation images {', '.join(failed) or 'no audit was run'}")

    return check
