"""An edit of few kernels that reaches the target within the retain budget (default)."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from torch import nn

from fedortho.data.request import KINDS, ForgetRequest
from fedortho.engines.engine import Engine
from fedortho.methods.method import PlanningMethod
from fedortho.models.sites import EDITS, TAPS
from fedortho.storage.settings import Count
from fedortho.unlearning.kernels import plan_kernels
from fedortho.unlearning.plan import ForgetPlan
from fedortho.unlearning.settings import CalibrationSettings, KernelSettings

CONTRASTS = ("retain", "same-class")


@dataclass(frozen=True)
class Hide(CalibrationSettings, KernelSettings, PlanningMethod):
    """FedOrtho: an edit of few kernels that reaches the target within the budget, repaired, scrubbed if need be."""

    name: ClassVar[str] = "hide"
    kinds: ClassVar[tuple[str, ...]] = KINDS
    needs: ClassVar[str] = "all: one forward pass, none with a ledger; retain: a forward pass over some, to repair"
    norms: ClassVar[str] = "re-estimated behind the edit"

    repair_images: Annotated[Count, "retained images for the repair"] = 256
    trial_images: Annotated[
        Count, "retained images for trials, at most, and half as many of the forget set; 0: all"
    ] = 512
    edit: Annotated[str, EDITS, "channel (what leaves the layer) or conv (the kernel, as the paper prints)"] = "channel"
    tap: Annotated[str, TAPS, "where responses are read: conv, bn, relu, or stream (residual groups as one)"] = "stream"
    contrast: Annotated[str, CONTRASTS, "rank against all retained images or those of the same labels"] = "retain"
    repair: Annotated[bool, "re-estimate batch-norm statistics behind the edit on retained images"] = True

    def plan(
        self, model: nn.Module, engine: Engine, request: ForgetRequest, forgotten: ForgetRequest | None = None
    ) -> ForgetPlan:
        return plan_kernels(self, model, engine, request, forgotten)
