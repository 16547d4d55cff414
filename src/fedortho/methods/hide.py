"""The smallest edit that reaches the target within the retain budget (default)."""

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from fedortho.data.request import KINDS, ForgetRequest
from fedortho.statistics.engine import Engine
from fedortho.unlearning.plan import ForgetPlan, ForgetSettings, plan_forgetting


@dataclass(frozen=True)
class Hide(ForgetSettings):
    """FedOrtho: the smallest edit that reaches the target within the budget, repaired, scrubbed if need be."""

    name: ClassVar[str] = "hide"
    kinds: ClassVar[tuple[str, ...]] = KINDS
    roles: ClassVar[str] = "all: one forward pass, none with a ledger; retain: a forward pass over some, to repair"
    norms: ClassVar[str] = "re-estimated behind the edit"

    def __call__(self, model: nn.Module, engine: Engine, request: ForgetRequest) -> nn.Module:
        return self.plan(model, engine, request).patch.apply(model)

    def plan(
        self, model: nn.Module, engine: Engine, request: ForgetRequest, forgotten: ForgetRequest | None = None
    ) -> ForgetPlan:
        return plan_forgetting(model, engine, request, self, forgotten=forgotten)
