"""From a target and a retain budget to an edit that meets both, or a refusal with its frontier."""

from collections.abc import Callable, Sequence

from fedortho.errors import FedOrthoError
from fedortho.models.patch import Patch
from fedortho.unlearning.plan import Effect, ForgetPlan
from fedortho.unlearning.settings import CalibrationSettings
from fedortho.unlearning.task import Task
from fedortho.unlearning.trials import Baseline, Candidate, Trial, TrialRunner, make_runner, measure_baseline

RATIOS = (0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.125, 0.15, 0.175, 0.2, 0.25, 0.3, 0.4, 0.5, 0.65, 0.8)
STRENGTHS = tuple(step / 16 for step in range(1, 17))
SCRUBS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25)  # of a class's own rows, which costs no retain accuracy; 0: none
UNPRUNED = Candidate(Patch("", "", note={"edit": "classifier", "sites": {}}), 0.0)
HOPELESS = 0.03  # retain accuracy beyond the budget, at which no larger edit is tried


class Refused(FedOrthoError):
    """No edit meets both target and budget; `frontier` has the trials."""

    event = "refused"  # in the journal

    def __init__(self, message: str, frontier: Sequence[Trial]) -> None:
        super().__init__(message)
        self.frontier = tuple(frontier)


class Unmeasured(Refused):
    """Forget accuracy of clients or samples is within the limit before any edit, so no effect of them is measurable."""

    event = "unmeasured"  # in the journal


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
    if settings.ratio:
        patch = edit(settings.ratio)
        if repair or task.forgotten is not None:
            given = [Candidate(patch, settings.ratio)]
            (patch,) = make_runner(task, settings, None, repair=repair).repaired(given)
        return ForgetPlan(patch, settings.ratio)
    baseline = baseline or measure_baseline(task, settings)
    if baseline.is_within and not task.request.classes and not settings.anyway:
        raise Unmeasured(_unmeasured(settings, baseline), ())
    runner = make_runner(task, settings, baseline, repair=repair, sequential=largest)
    runner.decide_all = largest
    ratios = ratios if task.sites else ()
    # start at half of a class's share of the kernels: that is usually within the budget
    share = (1 if largest else 1 / 2) / len(task.engine.info.class_names)
    start = sum(ratio < share for ratio in ratios) - 1 if task.request.classes else 0
    least = baseline.retain - settings.max_retain_drop
    chosen, trials = calibrate(runner, edit, least, ratios, max(start, 0), largest=largest, may_scrub=settings.scrub)
    pruned = next((trial.forget for trial in trials if trial.ratio == chosen.ratio and not trial.scrub), None)
    effect = Effect(baseline.forget, pruned, chosen.forget if chosen.scrub else None)
    return ForgetPlan(chosen.patch, chosen.ratio, tuple(trials), chosen, baseline.retain, effect)


def _unmeasured(settings: CalibrationSettings, baseline: Baseline) -> str:
    """What is known of a request that is within its limit before any edit."""
    limit = "models without it" if settings.limit else "unseen images with the same labels, a lenient estimate"
    return (
        f"nothing that only the forget set taught can be measured: forget accuracy is {baseline.forget:.1%} before any "
        f"edit, within the limit of {max(baseline.limits):.1%} ({limit}); nothing was changed, and nothing is said to "
        "be forgotten; --level exact removes it, --anyway edits all the same"
    )


def calibrate(
    runner: TrialRunner,
    edit: Callable[[float], Patch],
    least_retain: float,
    ratios: Sequence[float] = RATIOS,
    start: int = 5,
    *,
    largest: bool = False,
    may_scrub: bool,
) -> tuple[Trial, list[Trial]]:
    """The chosen trial and all that were made; `Refused` if target and budget cannot both hold.

    Where a scrub may finish what pruning leaves, the first edit that does is taken; see `_prune_and_scrub`. Otherwise
    it is the smallest ratio that reaches the target, or the `largest` within the budget; see `_prune`.
    """
    trials = _Trials(runner, edit)
    may_scrub = may_scrub and runner.classifier is not None
    if may_scrub and not largest:
        chosen = _prune_and_scrub(trials, ratios, start, least_retain)
    else:
        chosen = _prune(trials, ratios, start, least_retain, largest=largest, may_scrub=may_scrub)
    if chosen := chosen or trials.just(least_retain):
        return chosen, trials.all
    frontier = sorted(trials.all, key=lambda t: (t.ratio, t.scrub))
    kept = [trial.forget for trial in frontier if trial.retain >= least_retain]
    reached = f"the best forget accuracy within the budget is {min(kept):.1%}" if kept else "no ratio keeps the budget"
    wanted = f"forget accuracy at most {frontier[0].limit:.1%} and retain accuracy at least {least_retain:.1%}"
    raise Refused(f"{wanted} cannot both be had: {reached}; nothing was changed", frontier)


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

    def just(self, least_retain: float) -> Trial | None:
        """The best that meets both by its estimates, with nothing to spare."""
        just = [trial for trial in self.all if trial.forget <= trial.limit and trial.retain >= least_retain]
        return max(just, key=lambda trial: trial.retain, default=None)


def _prune(
    trials: _Trials, ratios: Sequence[float], start: int, least_retain: float, *, largest: bool, may_scrub: bool
) -> Trial | None:
    """The smallest ratio that reaches the target, or the `largest` within the budget, searched from `start` outwards.

    If the largest misses the target, smaller ratios in growing steps are scrubbed, then the unpruned network.
    """

    def serves(trial: Trial) -> bool:
        return trial.reaches and trial.keeps(least_retain)

    def is_beyond(place: int) -> bool:
        trial = trials[ratios[place], 0.0]
        return not trial.keeps(least_retain) if largest else trial.reaches or trial.retain < least_retain - HOPELESS

    is_parallel = trials.runner.is_parallel  # in a federation the first edit that does is taken
    if is_parallel and ratios and not largest and serves(trial := trials[ratios[start], 0.0]):
        return trial
    place = first_place(len(ratios), start, is_beyond)
    place = place - 1 if largest else min(place, len(ratios) - 1)
    if place >= 0 and serves(trial := trials[ratios[place], 0.0]):
        return trial
    places = [place - step for step in (0, 1, 2, 4, 8, 16) if place >= step]
    rest = [each for each in range(place - 1, -1, -1) if each not in places]  # before the request is refused
    strengths = STRENGTHS[3::4] if is_parallel else STRENGTHS
    tried = [*(ratios[each] for each in places), UNPRUNED.ratio, *(ratios[each] for each in rest)]
    for ratio in tried if may_scrub else ():
        bare = [(ratio, 0.0)] if ratio else []  # for the record: what pruning does alone
        made = trials.several([*bare, *((ratio, strength) for strength in strengths)])
        weakest = next((trial for trial in made if trial.scrub and trial.reaches), None)
        if weakest is not None and weakest.keeps(least_retain):
            return weakest
    return None


def _prune_and_scrub(trials: _Trials, ratios: Sequence[float], start: int, least_retain: float) -> Trial | None:
    """The first ratio whose weakest scrub that reaches the target is within the budget; all strengths at once.

    From `start` the ratio is halved where that costs too much, down to the unpruned network, and the next larger one
    is taken where no strength reaches the target. Before giving up: what just meets both, then ratios left out.
    """
    tried: list[int] = []

    def attempt(place: int) -> Trial | None:
        tried.append(place)
        ratio = ratios[place] if place >= 0 else UNPRUNED.ratio
        made = trials.several([(ratio, scrub) for scrub in SCRUBS if ratio or scrub])
        return next((trial for trial in made if trial.reaches), None)

    place = start if ratios else -1
    while place < len(ratios) and place not in tried:
        found = attempt(place)
        if found is not None and found.keeps(least_retain):
            return found
        place = place + 1 if found is None else sum(ratio <= ratios[max(place, 0)] / 2 for ratio in ratios) - 1
    for place in (each for each in range(start - 1, -1, -1) if each not in tried):
        if (just := trials.just(least_retain)) is not None:
            return just
        attempt(place)
    return None


def first_place(number: int, start: int, holds: Callable[[int], bool]) -> int:
    """The first place where a monotone condition holds, else `number`; doubling steps from `start`, then bisection."""
    low, high, at, step = 0, number, min(start, number - 1), 1
    while low < high:
        if holds(at):
            high = at
        else:
            low = at + 1
        if high == number:
            at = min(low - 1 + step, number - 1)
        else:
            at = max(high - step, 0) if low == 0 else (low + high) // 2
        step *= 2
    return low
