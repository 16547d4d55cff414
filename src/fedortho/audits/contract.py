"""What every audit takes and gives: a model that is said to have forgotten, read against one that never knew."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn

from fedortho.data import Dataset, Images
from fedortho.request import Clients, ForgetRequest

OUTCOMES = ("PASS", "FAIL", "NOT RUN", "NO REFERENCE", "ERROR")


@dataclass(frozen=True)
class Case:
    """The models and images of an audit; none of them is modified."""

    forgot: nn.Module
    original: nn.Module
    reference: nn.Module | None  # retrained without what had to go
    second: nn.Module | None  # retrained likewise by another seed: what a difference between two of them is worth
    data: Dataset
    request: ForgetRequest
    forgotten: ForgetRequest | None = None  # by earlier requests: not retained either
    clients: Clients | None = None  # rows of each client, for requests about clients
    device: torch.device | str = "cpu"
    seed: int = 0

    @property
    def everything(self) -> ForgetRequest:
        """This request and all before it."""
        return self.request if self.forgotten is None else self.forgotten + self.request

    @cached_property
    def gone_train(self) -> Images:
        """The training images that had to be forgotten."""
        return self.data.train.subset(self.request.mask(self.data.train, self.clients))

    @cached_property
    def kept_train(self) -> Images:
        """The training images that stay."""
        return self.data.train.subset(~self.everything.mask(self.data.train, self.clients))

    @cached_property
    def judged(self) -> Images:
        """What forget accuracy is measured on: of a class its test images, of clients and samples their images."""
        if self.request.kind != "class":
            return self.gone_train
        return self.data.test.subset(self.request.mask(self.data.test))

    @cached_property
    def kept_test(self) -> Images:
        """Test images of the classes that stay."""
        gone = ForgetRequest(self.everything.classes)
        return self.data.test.subset(~gone.mask(self.data.test)) if gone.classes else self.data.test


@dataclass(frozen=True)
class Audit:
    """What one attempt to undo forgetting, or to tell it from never having known, came to."""

    name: str
    outcome: str  # one of OUTCOMES
    says: str  # one sentence for a person, with the numbers
    value: float | None = None  # what is held against the limit
    limit: float | None = None  # PASS up to here
    forgot: float | None = None  # the same measurement on each model, as a share or in its own unit
    original: float | None = None
    reference: float | None = None
    seconds: float = 0.0
    details: Mapping[str, Any] = field(default_factory=dict)  # plain JSON values: per layer, per step, settings

    def __post_init__(self) -> None:
        assert self.outcome in OUTCOMES, self.outcome
