"""From a target and a retain budget to the smallest edit that meets both, or a refusal with its frontier.

A trial is edit + repair + measurement, on images set aside for such choices and never on test images.
What the tail of the network receives is remembered, so a trial runs only what an edit can change.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from fedortho.errors import FedOrthoError
from fedortho.prune import Patch, edit_model
from fedortho.scrub import Classifier, scrubbed_rows
from fedortho.tail import Cut, cut_model, repair, run_tail, tail_inputs

RATIOS = (0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.125, 0.15, 0.175, 0.2, 0.25, 0.3, 0.4, 0.5, 0.65, 0.8)
STRENGTHS = tuple(step / 16 for step in range(1, 17))
SCRUBBED_RATIOS = 6  # how many ratios within the budget are tried with scrub before giving up


@dataclass(frozen=True)
class Sample:
    """Some images as a network reads them, with their labels."""

    inputs: Tensor
    labels: Tensor
    limit: float = 1.0  # of images that must go: the accuracy that may be left on them

    def __len__(self) -> int:
        return len(self.labels)


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


class Bench:
    """Remembered tail inputs of the images that trials are measured on."""

    def __init__(
        self,
        model: nn.Module,
        cut: Cut,
        norms: Sequence[str],
        *,
        forget: Sequence[Sample],
        retain: Sample,
        mending: Tensor,
        classifier: Classifier | None,
    ) -> None:
        self.model, self.cut, self.norms, self.classifier = model, cut, list(norms), classifier
        self.forget = [replace(part, inputs=tail_inputs(model, cut, part.inputs)) for part in forget]
        self.retain = replace(retain, inputs=tail_inputs(model, cut, retain.inputs))
        self.mending = tail_inputs(model, cut, mending)

    def measure(self, twin: nn.Module) -> tuple[float, float, float]:
        """Forget accuracy and its limit (of the part furthest above it) and retain accuracy of a cut model."""
        with torch.no_grad():
            parts = [(self._accuracy(twin, part), part.limit) for part in self.forget]
            forget, limit = max(parts, key=lambda pair: pair[0] - pair[1])
            return forget, limit, self._accuracy(twin, self.retain)

    def _accuracy(self, twin: nn.Module, part: Sample) -> float:
        answers = run_tail(twin, self.cut, part.inputs).argmax(1)
        return float((answers == part.labels).double().mean())

    def attempt(self, plan: Patch, *, ratio: float, mend: bool, scrub: float = 0.0) -> Trial:
        """Edit, repair if asked, scrub at the given strength, measure."""
        twin = edit_model(cut_model(self.model, self.cut), plan)  # every edit lies behind the cut
        replaced: dict[str, Tensor] = {}
        if mend and self.norms:
            replaced = repair(twin, self.cut, self.norms, self.mending)
            for name, (channels, values) in plan.put.items():
                if name in replaced:  # a silenced kernel keeps the statistics of nothing
                    replaced[name][channels] = values
            _fill(twin, replaced)
        if scrub and self.classifier is not None:
            kept = self.retain.inputs
            rows = scrubbed_rows(twin, self.cut, self.classifier, forget=self.forget, retain=kept, strength=scrub)
            _fill(twin, rows)
            replaced |= rows
        return Trial(ratio, scrub, *self.measure(twin), replace(plan, replaced=replaced))


def _fill(twin: nn.Module, values: Mapping[str, Tensor]) -> None:
    state = twin.state_dict()  # shares memory with the twin
    for name, value in values.items():
        state[name].copy_(value)


def smallest(values: Sequence[float], holds: Callable[[float], bool]) -> float | None:
    """The first of ascending values for which a monotone condition holds, by bisection; None if none does.

    >>> smallest([1, 2, 3, 4], lambda value: value * value > 8)
    3
    """
    low, high = 0, len(values)
    while low < high:
        middle = (low + high) // 2
        if holds(values[middle]):
            high = middle
        else:
            low = middle + 1
    return values[low] if low < len(values) else None


def calibrate(
    bench: Bench,
    plan: Callable[[float], Patch],
    least_retain: float,
    *,
    mend: bool,
    may_scrub: bool,
    ratios: Sequence[float] = RATIOS,
) -> tuple[Trial, list[Trial]]:
    """The chosen trial and all that were made; `Refused` if target and budget cannot both hold.

    First the smallest ratio that reaches the target. If that costs too much, the largest ratio within the
    budget, finished by the least scrub that reaches the target; then smaller ratios.
    """
    made: dict[tuple[float, float], Trial] = {}

    def trial(ratio: float, scrub: float = 0.0) -> Trial:
        if (ratio, scrub) not in made:
            made[ratio, scrub] = bench.attempt(plan(ratio), ratio=ratio, mend=mend, scrub=scrub)
        return made[ratio, scrub]

    enough = smallest(ratios, lambda ratio: trial(ratio).reaches)
    if enough is not None and trial(enough).retain >= least_retain:
        return trial(enough), list(made.values())
    too_much = smallest(ratios, lambda ratio: trial(ratio).retain < least_retain)
    affordable = [ratio for ratio in ratios if too_much is None or ratio < too_much]
    if may_scrub and bench.classifier is not None:
        for ratio in reversed(affordable[-SCRUBBED_RATIOS:]):
            strength = smallest(STRENGTHS, lambda t, ratio=ratio: trial(ratio, t).reaches)  # type: ignore[misc]  # bound early
            if strength is not None and trial(ratio, strength).retain >= least_retain:
                return trial(ratio, strength), list(made.values())
    frontier = sorted(made.values(), key=lambda t: (t.ratio, t.scrub))
    best = min((t.forget for t in frontier if t.retain >= least_retain), default=None)
    reached = (
        "no ratio keeps the budget" if best is None else f"the best forget accuracy within the budget is {best:.1%}"
    )
    raise Refused(
        f"forget accuracy at most {frontier[0].limit:.1%} and retain accuracy at least {least_retain:.1%} "
        f"cannot both be had: {reached}; nothing was changed",
        frontier,
    )
