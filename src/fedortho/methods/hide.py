"""The smallest edit of kernels that reaches the target within the retain budget (default)."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar

from torch import nn

from fedortho.data.request import KINDS, ForgetRequest
from fedortho.engines.engine import Engine
from fedortho.errors import BadSetting
from fedortho.models.patch import Patch, bind_patch
from fedortho.unlearning.calibrate import RATIOS, check_target, find_edit
from fedortho.unlearning.kernels import (
    KernelEdit,
    choose_weighting,
    normed_layers,
    peak_queries,
    rank_parts,
    sample_correlation,
    warn_of,
)
from fedortho.unlearning.plan import ForgetPlan, Phases
from fedortho.unlearning.settings import CalibrationSettings, KernelSettings
from fedortho.unlearning.task import Task, start_task
from fedortho.unlearning.trials import Trial, measure_statistics, trace_frontier


@dataclass(frozen=True)
class Hide(CalibrationSettings, KernelSettings):
    """FedOrtho: the smallest edit that reaches the target within the budget, repaired, scrubbed if need be."""

    name: ClassVar[str] = "hide"
    kinds: ClassVar[tuple[str, ...]] = KINDS
    roles: ClassVar[str] = "all: one forward pass, none with a ledger; retain: a forward pass over some, to repair"
    norms: ClassVar[str] = "re-estimated behind the edit"

    edit: Annotated[str, "channel (what leaves the layer) or conv (the kernel, as the paper prints)"] = "channel"
    tap: Annotated[str, "where responses are read: conv, bn, relu, or stream (residual groups as one)"] = "stream"
    contrast: Annotated[str, "rank against all retained images (retain) or those of the same labels (same-class)"] = (
        "retain"
    )
    repair: Annotated[bool, "re-estimate batch-norm statistics behind the edit on retained images"] = True

    def __call__(self, model: nn.Module, engine: Engine, request: ForgetRequest) -> nn.Module:
        return self.plan(model, engine, request).patch.apply(model)

    def plan(
        self, model: nn.Module, engine: Engine, request: ForgetRequest, forgotten: ForgetRequest | None = None
    ) -> ForgetPlan:
        """Measure statistics, rank kernels, calibrate (each trial is repaired and scrubbed), bind the patch."""
        phases = Phases(engine)
        task = self._task(model, engine, request, forgotten)
        weighting, limit = choose_weighting(task, self.weighting, self.contrast), self.statistics_images
        peaks, baseline = measure_statistics(task, peak_queries(task, weighting, limit), self)
        rankings = rank_parts(task, peaks, weighting, self.contrast)
        correlation = sample_correlation(task, rankings, weighting, self.contrast, limit)
        phases.end("statistics")
        found = find_edit(task, partial(self._how.patch, task, rankings), self, baseline, repair=self.repair)
        patch = bind_patch(found.patch, task.model, request=str(request), method=self.name, statistics=weighting)
        phases.end("edit")
        opposed = self._how.opposed(rankings, found.ratio)
        warn_of(task, self._how, opposed)
        trials = (found.trials, found.chosen, found.retain_before)
        return ForgetPlan(patch, *trials, phases.seconds, phases.spent, correlation, opposed)

    def frontier(
        self, model: nn.Module, engine: Engine, request: ForgetRequest, ratios: Sequence[float] = RATIOS
    ) -> list[Trial]:
        """The trial of each ratio, after one without any edit (ratio 0); for plots and comparisons."""
        task = self._task(model, engine, request, None)
        weighting = choose_weighting(task, self.weighting, self.contrast)
        peaks = engine.measure(task.model, peak_queries(task, weighting, self.statistics_images))
        rankings = rank_parts(task, peaks, weighting, self.contrast)

        def edit(ratio: float) -> Patch:
            return self._how.patch(task, rankings, ratio)

        return trace_frontier(task, edit, ratios, self, repair=self.repair)

    @property
    def _how(self) -> KernelEdit:
        return KernelEdit(self.edit, self.alpha, self.rank_base, self.scope, self.spread, self.min_difference)

    def _task(self, model: nn.Module, engine: Engine, request: ForgetRequest, forgotten: ForgetRequest | None) -> Task:
        task = start_task(model, engine, request, self, forgotten)
        check_target(task, self)
        normed = normed_layers(task.sites)
        if self.edit == "conv" and self.repair and self.alpha < 1 and normed:  # batch norm divides the scale out again
            raise BadSetting(
                f"repair undoes a conv edit before batch norm ({normed[0]}); give --no-repair or --alpha 1"
            )
        return task
