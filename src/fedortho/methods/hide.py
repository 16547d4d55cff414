"""The smallest edit that reaches the target within the retain budget (default)."""

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from fedortho.data.request import KINDS, ForgetRequest
from fedortho.statistics.engine import Engine
from fedortho.unlearning.plan import ForgetSettings, plan_forgetting


@dataclass(frozen=True)
class Hide(ForgetSettings):
    """FedOrtho: the smallest edit that reaches the target within the budget, repaired, scrubbed if need be."""

    name: ClassVar[str] = "hide"
    kinds: ClassVar[tuple[str, ...]] = KINDS
    roles: ClassVar[str] = "all: one forward pass, none with a ledger; retain: a forward pass over some, to repair"
    norms: ClassVar[str] = "re-estimated behind the edit"

    def __call__(self, model: nn.Module, engine: Engine, request: ForgetRequest) -> nn.Module:
        return plan_forgetting(model, engine, request, self).patch.apply(model)
