"""The paper's edit as printed."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from torch import nn

from fedortho.data.request import KINDS, ForgetRequest
from fedortho.engines.engine import Engine
from fedortho.errors import BadSetting
from fedortho.methods.method import PlanningMethod
from fedortho.storage.settings import Share
from fedortho.unlearning.kernels import plan_kernels
from fedortho.unlearning.plan import ForgetPlan
from fedortho.unlearning.settings import WEIGHTINGS, KernelSettings


@dataclass(frozen=True)
class Paper(KernelSettings, PlanningMethod):
    """FedOrtho as printed: a fixed ratio of kernels, weakened by rank."""

    name: ClassVar[str] = "paper"
    kinds: ClassVar[tuple[str, ...]] = KINDS
    needs: ClassVar[str] = "all: one forward pass, none with a ledger"
    norms: ClassVar[str] = "untouched"
    edit = tap = "conv"

    ratio: Annotated[Share, "share of kernels weakened in each layer"] = 0.01
    alpha: Annotated[Share, "least strength; 1 silences the kernel"] = 0.5
    weighting: Annotated[str, WEIGHTINGS, "in a federation: pooled sums, or the paper's local differences"] = "paper"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.ratio:
            raise BadSetting("ratio must be above 0; the method hide finds one by target and budget")

    def plan(
        self, model: nn.Module, engine: Engine, request: ForgetRequest, forgotten: ForgetRequest | None = None
    ) -> ForgetPlan:
        return plan_kernels(self, model, engine, request, forgotten)
