"""Removes the directions in which a class stands out."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from fedortho.methods.hide import Hide


@dataclass(frozen=True)
class Directions(Hide):
    """FedOrtho beyond the paper: of the directions in which a class stands out, as many as the budget allows."""

    name: ClassVar[str] = "directions"
    kinds: ClassVar[tuple[str, ...]] = ("class",)
    roles: ClassVar[str] = "all: one forward pass over some; retain: another, to repair"
    erase: Annotated[bool, "take the directions in which a class stands out of each layer; no: silence kernels"] = True
