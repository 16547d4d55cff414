"""What planning returns: the patch, the trials that led to it, and what they took."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch import nn

from fedortho.engines.engine import Engine, Tally
from fedortho.models.patch import Patch, bind_patch
from fedortho.unlearning.trials import Trial


@dataclass(frozen=True)
class Effect:
    """What each half of an edit did to the forget accuracy, on the training images that trials are measured on."""

    before: float
    pruned: float | None  # with weakened kernels or without directions; None: nothing was pruned
    scrubbed: float | None  # with the classifier edit as well; None: the classifier was not edited

    def __str__(self) -> str:
        """A line of accuracies.

        >>> print(Effect(0.998, None, 0.004))
        forget accuracy on training images: 99.8% before, nothing was pruned, 0.4% after the classifier edit
        """
        pruned = "nothing was pruned" if self.pruned is None else f"{self.pruned:.1%} after pruning"
        missing = "the classifier was not edited"
        scrubbed = missing if self.scrubbed is None else f"{self.scrubbed:.1%} after the classifier edit"
        return f"forget accuracy on training images: {self.before:.1%} before, {pruned}, {scrubbed}"


@dataclass(frozen=True)
class ForgetPlan:
    """A patch and how it was found."""

    patch: Patch
    ratio: float  # 0: a classifier edit, no kernel was weakened
    trials: tuple[Trial, ...] = ()  # empty for a fixed ratio without repair
    chosen: Trial | None = None
    retain_before: float | None = None  # accuracy on the images of the trials before the edit
    effect: Effect | None = None  # of pruning and of the classifier edit; None: not measured
    left_out: Mapping[str, str] = field(default_factory=dict)  # layers that could not be edited, with the reason
    seconds: Mapping[str, float] = field(default_factory=dict)  # statistics, edit
    spent: Mapping[str, Tally] = field(default_factory=dict)  # by the engine, for the same two
    sample_correlation: float | None = None  # of the subsample's ranking with the ledger's
    opposed: int = 0  # edited kernels that respond at least as strongly to the retain set

    @property
    def images_read(self) -> dict[str, int]:
        return {phase: tally.images_read for phase, tally in self.spent.items()}


class Phases:
    """Seconds and the engine's tally of each phase, one after the other."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.seconds: dict[str, float] = {}
        self.spent: dict[str, Tally] = {}
        self._since, self._before = time.perf_counter(), replace(engine.tally)

    def end(self, phase: str) -> None:
        now, tally = time.perf_counter(), replace(self.engine.tally)
        self.seconds[phase], self.spent[phase] = now - self._since, tally.since(self._before)
        self._since, self._before = now, tally

    def finish(self, plan: ForgetPlan, model: nn.Module, **about: str) -> ForgetPlan:
        """The plan with its patch bound to the model, and with what its phases took."""
        patch = bind_patch(plan.patch, model, **about)
        self.end("edit")
        return replace(plan, patch=patch, seconds=self.seconds, spent=self.spent)
