"""From a target and a retain budget to the smallest edit that meets both, or a refusal with its frontier.

A trial is edit + repair + measurement, on images set aside for such choices and never on test images. A
central engine tries one candidate after the other; a federation tries many in one exchange.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor, nn

from fedortho.errors import FedOrthoError
from fedortho.models.patch import NOTHING, Patch, edit_model
from fedortho.statistics.engine import Engine
from fedortho.statistics.query import Query, Selection, Statistic
from fedortho.unlearning.repair import norm_buffers
from fedortho.unlearning.scrub import scrubbed_rows

RATIOS = (0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.125, 0.15, 0.175, 0.2, 0.25, 0.3, 0.4, 0.5, 0.65, 0.8)
SHARES = (0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.125, 0.15, 0.2, 0.25, 0.3)  # of directions
STRENGTHS = tuple(step / 16 for step in range(1, 17))
SCRUBBED_RATIOS = 6  # how many ratios within the budget are tried with scrub before giving up


@dataclass(frozen=True)
class Candidate:
    """An edit to be tried."""

    patch: Patch
    ratio: float
    scrub: float = 0.0


@dataclass(frozen=True)
class Trial:
    """What an edit came to on the images set aside."""

    ratio: float
    scrub: float  # strength, 0: none
    forget: float  # accuracy on what must go; of several parts the one furthest above its limit
    limit: float  # what it may be
    retain: float
    patch: Patch

    @property
    def reaches(self) -> bool:
        return self.forget <= self.limit


class Refused(FedOrthoError):
    """Target and budget cannot both hold; the frontier shows what was reached."""

    def __init__(self, message: str, frontier: Sequence[Trial]) -> None:
        super().__init__(message)
        self.frontier = tuple(frontier)


@dataclass
class TrialRunner:
    """The groups that trials are measured on, and what else a trial needs."""

    engine: Engine
    model: nn.Module
    base: Statistic  # which kernels candidates edit
    forget: Sequence[tuple[Selection, float]]  # what must go, and the accuracy that may be left on it
    retain: Selection
    mending: Selection  # for the repair; no norms, no repair
    norms: Sequence[str] = ()
    layerwise: bool = False
    classifier: str | None = None
    _mended: dict[float, Patch] = field(default_factory=dict)  # by ratio

    @property
    def parallel_trials(self) -> int:
        return self.engine.parallel_trials

    def attempt(self, candidates: Sequence[Candidate]) -> list[Trial]:
        """Repair where there are norms, scrub where a strength is asked for, measure."""
        patches = self._mend(candidates)
        patches = self._scrub(candidates, patches)
        statistic = replace(self.base, kind="right", patches=tuple(patches))
        groups = (*(group for group, _ in self.forget), self.retain)
        ((*gone, kept),) = self.engine.measure(self.model, [Query(groups, statistic)])
        trials = []
        for number, (candidate, patch) in enumerate(zip(candidates, patches, strict=True)):
            parts = [(float(o.mean(f"{number}")), limit) for o, (_, limit) in zip(gone, self.forget, strict=True)]
            worst = max(parts, key=lambda pair: pair[0] - pair[1])
            trials.append(Trial(candidate.ratio, candidate.scrub, *worst, float(kept.mean(f"{number}")), patch))
        return trials

    def _mend(self, candidates: Sequence[Candidate]) -> list[Patch]:
        """The candidates with re-estimated batch norms; a ratio is repaired once, whatever scrub follows."""
        new = {c.ratio: c.patch for c in candidates if c.patch is not NOTHING and c.ratio not in self._mended}
        if new and self.norms:
            turns = [(norm,) for norm in self.norms] if self.layerwise else [tuple(self.norms)]
            self._mended |= dict(zip(new, self._repaired(list(new.values()), turns), strict=True))
        return [self._mended.get(c.ratio, c.patch) for c in candidates]

    def _repaired(self, patches: list[Patch], turns: Sequence[tuple[str, ...]]) -> list[Patch]:
        kind = "layer" if self.layerwise else "moments"
        for norms in turns:  # layerwise: each norm sees those before it repaired
            statistic = replace(self.base, kind=kind, patches=tuple(patches), norms=norms)
            ((pooled,),) = self.engine.measure(self.model, [Query((self.mending,), statistic)])
            for number, patch in enumerate(patches):
                buffers = {**patch.replaced, **norm_buffers(pooled, number, norms)}
                for name, (channels, values) in patch.put.items():
                    if name in buffers:  # a silenced kernel keeps the statistics of nothing
                        buffers[name][channels] = values
                patches[number] = replace(patch, replaced=buffers)
        return patches

    def _scrub(self, candidates: Sequence[Candidate], patches: list[Patch]) -> list[Patch]:
        wanted = [number for number, candidate in enumerate(candidates) if candidate.scrub]
        if not wanted or self.classifier is None:
            return patches
        ratios = list(dict.fromkeys(candidates[number].ratio for number in wanted))
        mended = [next(p for c, p in zip(candidates, patches, strict=True) if c.ratio == ratio) for ratio in ratios]
        statistic = replace(self.base, kind="inputs", classifier=self.classifier, patches=tuple(mended))
        groups = (*(group for group, _ in self.forget), self.retain)
        ((*gone, kept),) = self.engine.measure(self.model, [Query(groups, statistic)])
        for number in wanted:
            place = ratios.index(candidates[number].ratio)
            mean, square = kept.mean(f"{place}:sum"), kept.mean(f"{place}:square")
            rows = scrubbed_rows(
                edit_model(self.model, patches[number]),
                self.classifier,
                forget_means=[o.mean(f"{place}:sum") for o in gone],
                retain_mean=mean,
                retain_variance=_variance(mean, square, kept.images),
                strength=candidates[number].scrub,
            )
            patches[number] = replace(patches[number], replaced={**patches[number].replaced, **rows})
        return patches


def _variance(mean: Tensor, square: Tensor, count: int) -> Tensor:
    return (square - mean.square()).clamp_min(0) * count / max(count - 1, 1)


def smallest(
    values: Sequence[float], holds: Callable[[Sequence[float]], Sequence[bool]], parallel_trials: int = 1
) -> float | None:
    """The first of ascending values for which a monotone condition holds; None if none does.

    It is asked of `parallel_trials` values at a time: 1 is bisection, as many as there are is one question.

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


def thinned(values: Sequence[float], most: int) -> list[float]:
    """At most so many of the values, evenly by place, the first and the last among them.

    >>> thinned([1, 2, 3, 4, 5], 3)
    [1, 3, 5]
    """
    if most == 1 or len(values) <= most:
        return list(values)
    return [values[round(place * (len(values) - 1) / (most - 1))] for place in range(most)]


def calibrate(
    runner: TrialRunner,
    plan: Callable[[float], Patch],
    least_retain: float,
    ratios: Sequence[float] = RATIOS,
    largest: bool = False,
    *,
    may_scrub: bool,
) -> tuple[Trial, list[Trial]]:
    """The chosen trial and all that were made; `Refused` if target and budget cannot both hold.

    First the smallest ratio that reaches the target, or the `largest` that reaches it within the budget. If that
    costs too much, the largest ratio within the budget, finished by the least scrub that reaches the target; then
    smaller ratios.
    """
    trials = _Trials(runner, plan)
    ratios = thinned(ratios, runner.parallel_trials)
    enough = smallest(
        ratios, lambda tried: [trial.reaches for trial in trials.unscrubbed(tried)], runner.parallel_trials
    )
    if enough is not None and not largest and trials[enough, 0.0].retain >= least_retain:
        return trials[enough, 0.0], trials.all
    too_much = smallest(
        ratios,
        lambda tried: [trial.retain < least_retain for trial in trials.unscrubbed(tried)],
        runner.parallel_trials,
    )
    affordable = [ratio for ratio in ratios if too_much is None or ratio < too_much]
    if largest and affordable and trials[affordable[-1], 0.0].reaches:
        return trials[affordable[-1], 0.0], trials.all
    if may_scrub and runner.classifier is not None:
        chosen = _scrubbed(trials, affordable[::-1][:SCRUBBED_RATIOS], least_retain)
        if chosen is not None:
            return chosen, trials.all
    raise _refusal(trials.all, least_retain)


class _Trials:
    """Trials by ratio and strength of the scrub, each made once."""

    def __init__(self, runner: TrialRunner, plan: Callable[[float], Patch]) -> None:
        self.runner, self.plan = runner, plan
        self.made: dict[tuple[float, float], Trial] = {}

    @property
    def all(self) -> list[Trial]:
        return list(self.made.values())

    def __getitem__(self, key: tuple[float, float]) -> Trial:
        return self.several([key])[0]

    def several(self, keys: Sequence[tuple[float, float]]) -> list[Trial]:
        new = [key for key in dict.fromkeys(keys) if key not in self.made]
        if new:
            found = self.runner.attempt([Candidate(self.plan(ratio), ratio, scrub) for ratio, scrub in new])
            self.made.update(zip(new, found, strict=True))
        return [self.made[key] for key in keys]

    def unscrubbed(self, ratios: Sequence[float]) -> list[Trial]:
        return self.several([(ratio, 0.0) for ratio in ratios])


def _scrubbed(trials: _Trials, dearest_first: Sequence[float], least_retain: float) -> Trial | None:
    """The first of these ratios that the least scrub which reaches the target leaves within the budget."""
    parallel_trials = trials.runner.parallel_trials
    strengths = STRENGTHS if parallel_trials == 1 else STRENGTHS[3::4]
    together = max(parallel_trials // len(strengths), 1)
    for place, ratio in enumerate(dearest_first):
        if parallel_trials > 1 and place % together == 0:  # where exchanges cost, as many in one as it takes
            batch = dearest_first[place : place + together]
            trials.several([(each, strength) for each in batch for strength in strengths])

        def reach(tried: Sequence[float], ratio: float = ratio) -> list[bool]:
            return [trial.reaches for trial in trials.several([(ratio, strength) for strength in tried])]

        strength = smallest(strengths, reach, parallel_trials)
        if strength is not None and trials[ratio, strength].retain >= least_retain:
            return trials[ratio, strength]
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
