"""Ours: the robust edit (default), the one that erases directions, and the paper's as printed."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

from torch import nn

from fedortho.engine import Engine
from fedortho.plan import ForgetSettings, plan_forgetting
from fedortho.request import KINDS, ForgetRequest


@dataclass(frozen=True)
class Robust(ForgetSettings):
    """FedOrtho: the smallest edit that reaches the target within the budget, repaired, scrubbed if need be."""

    name: ClassVar[str] = "fedortho"
    kinds: ClassVar[tuple[str, ...]] = KINDS
    roles: ClassVar[str] = "all: one forward pass, none with a ledger; retain: a forward pass over some, to repair"
    norms: ClassVar[str] = "re-estimated behind the edit"

    def __call__(self, model: nn.Module, engine: Engine, request: ForgetRequest) -> nn.Module:
        return plan_forgetting(model, engine, request, self).patch.apply(model)


@dataclass(frozen=True)
class Erase(Robust):
    """FedOrtho beyond the paper: of the directions in which a class stands out, as many as the budget allows."""

    name: ClassVar[str] = "fedortho-erase"
    kinds: ClassVar[tuple[str, ...]] = ("class",)
    roles: ClassVar[str] = "all: one forward pass over some; retain: another, to repair"
    erase: Annotated[bool, "take the directions in which a class stands out of each layer; no: silence kernels"] = True


@dataclass(frozen=True)
class Paper(Robust):
    """FedOrtho as printed: a fixed ratio of kernels, weakened by rank."""

    name: ClassVar[str] = "fedortho-paper"
    roles: ClassVar[str] = "all: one forward pass, none with a ledger"
    norms: ClassVar[str] = "untouched"
    edit: Annotated[str, "channel (what leaves the layer) or conv (the kernel, as the paper prints)"] = "conv"
    tap: Annotated[str, "where responses are read: conv, bn, relu, or stream (residual groups as one)"] = "conv"
    ratio: Annotated[float, "share of kernels weakened in each layer; 0: the smallest that reaches the target"] = 0.01
    alpha: Annotated[float, "least strength; 1 silences the kernel"] = 0.5
    repair: Annotated[bool, "re-estimate batch-norm statistics behind the edit on retained images"] = False
    scrub: Annotated[bool, "finish a class request in the classifier where pruning falls short"] = False
    spread: Annotated[str, "how the ratio is spread over layers: equal, or rising towards the last"] = "equal"
    weighting: Annotated[str, "in a federation: pooled sums, or the paper's weighted local differences"] = "paper"


PRESETS: Mapping[str, type[ForgetSettings]] = {"robust": Robust, "erase": Erase, "paper": Paper}
