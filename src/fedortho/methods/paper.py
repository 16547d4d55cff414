"""The paper's edit as printed."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from torch import nn

from fedortho.data.request import KINDS, ForgetRequest
from fedortho.engines.engine import Engine
from fedortho.errors import BadSetting
from fedortho.models.patch import bind_patch
from fedortho.unlearning.kernels import (
    KernelEdit,
    choose_weighting,
    peak_queries,
    rank_parts,
    sample_correlation,
    warn_of,
)
from fedortho.unlearning.plan import ForgetPlan, Phases
from fedortho.unlearning.settings import KernelSettings
from fedortho.unlearning.task import start_task


@dataclass(frozen=True)
class Paper(KernelSettings):
    """FedOrtho as printed: a fixed ratio of kernels, weakened by rank."""

    name: ClassVar[str] = "paper"
    kinds: ClassVar[tuple[str, ...]] = KINDS
    roles: ClassVar[str] = "all: one forward pass, none with a ledger"
    norms: ClassVar[str] = "untouched"

    ratio: Annotated[float, "share of kernels weakened in each layer"] = 0.01
    alpha: Annotated[float, "least strength; 1 silences the kernel"] = 0.5
    weighting: Annotated[str, "in a federation: pooled sums, or the paper's weighted local differences"] = "paper"

    @property
    def edit(self) -> str:
        return "conv"

    @property
    def tap(self) -> str:
        return "conv"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.ratio:
            raise BadSetting("ratio must be above 0; the method hide finds one by target and budget")

    def __call__(self, model: nn.Module, engine: Engine, request: ForgetRequest) -> nn.Module:
        return self.plan(model, engine, request).patch.apply(model)

    def plan(
        self, model: nn.Module, engine: Engine, request: ForgetRequest, forgotten: ForgetRequest | None = None
    ) -> ForgetPlan:
        """Measure statistics, rank kernels, weaken the first of them, bind the patch."""
        phases = Phases(engine)
        task = start_task(model, engine, request, self, forgotten)
        weighting, limit = choose_weighting(task, self.weighting, "retain"), self.statistics_images
        rankings = rank_parts(task, engine.measure(task.model, peak_queries(task, weighting, limit)), weighting)
        correlation = sample_correlation(task, rankings, weighting, "retain", limit)
        phases.end("statistics")
        how = KernelEdit(self.edit, self.alpha, self.rank_base, self.scope, "equal", self.min_difference)
        patch = how.patch(task, rankings, self.ratio)
        patch = bind_patch(patch, task.model, request=str(request), method=self.name, statistics=weighting)
        phases.end("edit")
        opposed = how.opposed(rankings, self.ratio)
        warn_of(task, how, opposed)
        return ForgetPlan(patch, (), None, None, phases.seconds, phases.spent, correlation, opposed)
