"""Removes the directions in which a class stands out."""

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import nn

from fedortho.data.request import ForgetRequest
from fedortho.engines.engine import Engine
from fedortho.engines.query import Query
from fedortho.errors import BadSetting
from fedortho.methods.method import PlanningMethod
from fedortho.models.patch import Patch
from fedortho.models.sites import DIRECTIONS
from fedortho.unlearning.calibrate import find_edit
from fedortho.unlearning.directions import SHARES, erasure_patch
from fedortho.unlearning.plan import ForgetPlan, Phases
from fedortho.unlearning.settings import CalibrationSettings
from fedortho.unlearning.task import start_task
from fedortho.unlearning.trials import measure_statistics

IMAGES = 4500  # per group, to find directions on, unless statistics_images gives another number


@dataclass(frozen=True)
class Directions(CalibrationSettings, PlanningMethod):
    """FedOrtho beyond the paper: of the directions in which a class stands out, as many as the budget allows."""

    name: ClassVar[str] = "directions"
    kinds: ClassVar[tuple[str, ...]] = ("class",)
    needs: ClassVar[str] = "all: one forward pass over some; retain: another, to repair"
    norms: ClassVar[str] = "re-estimated behind the edit"
    edit = DIRECTIONS

    def plan(
        self, model: nn.Module, engine: Engine, request: ForgetRequest, forgotten: ForgetRequest | None = None
    ) -> ForgetPlan:
        """Measure how responses lie, remove directions (each trial is repaired and scrubbed), bind the patch."""
        phases = Phases(engine)
        task = start_task(model, engine, request, self, forgotten)
        if request.kind != "class":
            raise BadSetting(f"directions are those of a class; forget {request} by the method hide")
        if not task.sites:
            name, reason = next(iter(task.left_out.items()))
            raise BadSetting(f"no direction can be removed from {name}: {reason}; choose others, or --method hide")
        limit = self.statistics_images or IMAGES
        sets = (*task.forget_sets(limit), task.retain_set(limit))
        query = Query(sets, replace(task.statistic, kind="responses"))
        ((*forget, retain),), baseline = measure_statistics(task, [query], self)
        task.check_measured(forget, retain)
        phases.end("statistics")
        names = engine.info.class_names
        removed = task.removed.labels(names)
        labels = [label for label in range(len(names)) if label not in removed]

        def edit(share: float) -> Patch:
            return erasure_patch(task.model, task.sites, forget, retain, labels=labels, share=share, spread=self.spread)

        found = find_edit(task, edit, self, baseline, ratios=SHARES, largest=True)
        found = replace(found, left_out=task.left_out)
        return phases.finish(found, task.model, request=str(request), method=self.name, statistics="pooled")
