"""The paper's edit as printed."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from fedortho.methods.hide import Hide


@dataclass(frozen=True)
class Paper(Hide):
    """FedOrtho as printed: a fixed ratio of kernels, weakened by rank."""

    name: ClassVar[str] = "paper"
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
