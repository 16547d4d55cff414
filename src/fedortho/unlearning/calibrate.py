"""From a target and a retain budget to the smallest edit that meets both, or a refusal with its frontier."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from fedortho.errors import FedOrthoError
from fedortho.models.patch import Patch
from fedortho.unlearning.plan import Effect, ForgetPlan
from fedortho.unlearning.settings import CalibrationSettings
from fedortho.unlearning.task import Task
from fedortho.unlearning.trials import (
    Baseline,
    Candidate,
    Trial,
    TrialRunner,
    baseline_queries,
    make_runner,
    read_baseline,
)

T = TypeVar("T")
RATIOS = (0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.125, 0.15, 0.175, 0.2, 0.25, 0.3, 0.4, 0.5, 0.65, 0.8)
STRENGTHS = tuple(step / 16 for step in range(1, 17))
UNPRUNED = Candidate(Patch("", "", note={"edit": "classifier", "sites": {}}), 0.0)
SCRUBBED_RATIOS = 6  # how many ratios within the budget are tried with scrub before giving up


class Refused(FedOrthoError):
    """No edit meets both target and budget; `frontier` has the trials."""

    def __init__(self, message: str, frontier: Sequence[Trial]) -> None:
        super().__init__(message)
        self.frontier = tuple(frontier)


def find_edit(
    task: Task,
    edit: Callable[[float], Patch],
    settings: CalibrationSettings,
    baseline: Baseline | None,
    *,
    ratios: Sequence[float] = RATIOS,
    largest: bool = False,
    repair: bool = True,
) -> ForgetPlan:
    """The edit at the given ratio, or at the one that meets target and budget; repaired, and scrubbed where needed."""
    if settings.ratio and not repair:
        return ForgetPlan(edit(settings.ratio), settings.ratio)
    if settings.ratio:
        before, trial = make_runner(task, settings, None, repair=repair).attempt(
            [UNPRUNED, Candidate(edit(settings.ratio), settings.ratio)]
        )
        return ForgetPlan(trial.patch, trial.ratio, (trial,), trial, effect=Effect(before.forget, trial.forget, None))
    if baseline is None:
        measured = task.engine.measure(task.model, baseline_queries(task, settings))
        baseline = read_baseline(task, settings, measured)
    runner = make_runner(task, settings, baseline, repair=repair)
    least = baseline.retain - settings.max_retain_drop
    ratios = ratios if task.sites else ()
    chosen, trials = calibrate(runner, edit, least, ratios, largest, may_scrub=settings.scrub)
    pruned = next((trial.forget for trial in trials if trial.ratio == chosen.ratio and not trial.scrub), None)
    effect = Effect(baseline.forget, pruned, chosen.forget if chosen.scrub else None)
    return ForgetPlan(chosen.patch, chosen.ratio, tuple(trials), chosen, baseline.retain, effect)


def calibrate(
    runner: TrialRunner,
    edit: Callable[[float], Patch],
    least_retain: float,
    ratios: Sequence[float] = RATIOS,
    largest: bool = False,
    *,
    may_scrub: bool,
) -> tuple[Trial, list[Trial]]:
    """The chosen trial and all that were made; `Refused` if target and budget cannot both hold.

    First the smallest ratio that reaches the target, or the `largest` that reaches it within the budget. If that
    costs too much, the largest ratio within the budget, finished by the least scrub that reaches the target; then
    smaller ratios; then a scrub of the unpruned network, which edits the classifier alone.
    """
    trials = _Trials(runner, edit)
    ratios = thinned(ratios, runner.parallel_trials)
    unscrubbed = [(ratio, 0.0) for ratio in ratios]
    enough = trials.first(unscrubbed, lambda trial: trial.reaches)
    if enough is not None and not largest and enough.retain >= least_retain:
        return enough, trials.all
    too_much = trials.first(unscrubbed, lambda trial: trial.retain < least_retain)
    affordable = [ratio for ratio in ratios if too_much is None or ratio < too_much.ratio]
    if largest and affordable and trials[affordable[-1], 0.0].reaches:
        return trials[affordable[-1], 0.0], trials.all
    if may_scrub and runner.classifier is not None:
        chosen = _scrubbed(trials, affordable[::-1][:SCRUBBED_RATIOS], least_retain)
        if chosen is not None:
            _ = trials[chosen.ratio, 0.0]  # for the record: what pruning does alone
            return chosen, trials.all
        chosen = _scrubbed(trials, [UNPRUNED.ratio], least_retain)
        if chosen is not None:
            return chosen, trials.all
    raise _refusal(trials.all, least_retain)


class _Trials:
    """Trials by ratio and strength of the scrub, each made once."""

    def __init__(self, runner: TrialRunner, edit: Callable[[float], Patch]) -> None:
        self.runner, self.edit = runner, edit
        self.made: dict[tuple[float, float], Trial] = {}

    @property
    def all(self) -> list[Trial]:
        return list(self.made.values())

    def __getitem__(self, key: tuple[float, float]) -> Trial:
        return self.several([key])[0]

    def several(self, keys: Sequence[tuple[float, float]]) -> list[Trial]:
        new = [key for key in dict.fromkeys(keys) if key not in self.made]
        if new:
            patches = {ratio: self.edit(ratio) if ratio else UNPRUNED.patch for ratio, _ in new}
            found = self.runner.attempt([Candidate(patches[ratio], ratio, scrub) for ratio, scrub in new])
            self.made.update(zip(new, found, strict=True))
        return [self.made[key] for key in keys]

    def first(self, keys: Sequence[tuple[float, float]], holds: Callable[[Trial], bool]) -> Trial | None:
        """The first trial for which a monotone condition holds."""
        key = smallest(keys, lambda tried: list(map(holds, self.several(tried))), self.runner.parallel_trials)
        return None if key is None else self[key]


def _scrubbed(trials: _Trials, largest_first: Sequence[float], least_retain: float) -> Trial | None:
    """For each ratio in turn, the weakest scrub that reaches the target; the first such trial within the budget."""
    parallel_trials = trials.runner.parallel_trials
    strengths = STRENGTHS if parallel_trials == 1 else STRENGTHS[3::4]
    together = max(parallel_trials // len(strengths), 1)
    for place, ratio in enumerate(largest_first):
        if parallel_trials > 1 and place % together == 0:  # in a federation: several ratios in one exchange
            batch = largest_first[place : place + together]
            trials.several([(each, strength) for each in batch for strength in strengths])
        enough = trials.first([(ratio, strength) for strength in strengths], lambda trial: trial.reaches)
        if enough is not None and enough.retain >= least_retain:
            return enough
    return None


def _refusal(made: Sequence[Trial], least_retain: float) -> Refused:
    frontier = sorted(made, key=lambda t: (t.ratio, t.scrub))
    best = min((t.forget for t in frontier if t.retain >= least_retain), default=None)
    reached = (
        "no ratio keeps the budget" if best is None else f"the best forget accuracy within the budget is {best:.1%}"
    )
    return Refused(
        f"forget accuracy at most {frontier[0].limit:.1%} and retain accuracy at least {least_retain:.1%} "
        f"cannot both be had: {reached}; nothing was changed",
        frontier,
    )


def smallest(values: Sequence[T], holds: Callable[[Sequence[T]], Sequence[bool]], parallel_trials: int = 1) -> T | None:
    """The first of ascending values for which a monotone condition holds; None if none does.

    `holds` gets `parallel_trials` values per call: 1 is bisection, all values at once is a single call.

    >>> smallest([1, 2, 3, 4], lambda tried: [value * value > 8 for value in tried])
    3
    """
    low, high = 0, len(values)
    while low < high:
        number = min(parallel_trials, high - low)
        places = [low + (high - low) * (place + 1) // (number + 1) for place in range(number)]
        for place, yes in zip(places, holds([values[place] for place in places]), strict=True):
            if yes:
                high = place
                break
            low = place + 1
    return values[low] if low < len(values) else None


def thinned(values: Sequence[float], limit: int) -> list[float]:
    """At most `limit` values, evenly spaced, with the first and the last; a limit of 1 (no parallel trials) keeps all.

    >>> thinned([1, 2, 3, 4, 5], 3)
    [1, 3, 5]
    """
    if limit == 1 or len(values) <= limit:
        return list(values)
    return [values[round(place * (len(values) - 1) / (limit - 1))] for place in range(limit)]
