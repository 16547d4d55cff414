"""What the tests of audits work on, importable by name."""

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from fedortho.audits.measurements import MeasurementCache
from fedortho.data.images import Dataset
from fedortho.data.request import ForgetRequest
from fedortho.evaluation.case import Case

COAT = ForgetRequest.parse("class:Coat")


@dataclass(frozen=True)
class World:
    """An original, networks retrained without coats, and the images of both."""

    data: Dataset
    original: nn.Module
    references: list[nn.Module]
    cache: MeasurementCache  # what was measured on them, for all tests

    def case(self, unlearned: nn.Module, *, reference: bool = True, second: bool = False) -> Case:
        references = self.references[: 2 if second else 1] if reference else []
        return Case(unlearned, self.original, tuple(references), self.data, COAT)

    def changed(self, change: Callable[[nn.Module], None]) -> nn.Module:
        """The original after an edit."""
        twin = copy.deepcopy(self.original)
        with torch.no_grad():
            change(twin)
        return twin
