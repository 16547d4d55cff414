"""The engine protocol: a method sees models and sums, never an image."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

from torch import nn

from fedortho.data.request import ForgetRequest
from fedortho.statistics.observe import Observation
from fedortho.statistics.query import Query, Selection
from fedortho.statistics.training_plan import TrainingPlan
from fedortho.training.loop import Mask
from fedortho.training.recipe import Recipe


@dataclass
class Tally:
    """What an engine has spent so far; bytes and exchanges stay 0 where nothing travels."""

    images_read: int = 0  # forward passes
    images_trained: int = 0  # forward and backward passes
    exchanges: int = 0
    bytes_up: int = 0  # from all clients together
    bytes_down: int = 0
    tail_flops: float = 0.0  # of candidates, which run only the tail of a network
    withheld: int = 0  # groups that clients did not tell of, because they are too small

    def since(self, before: "Tally") -> "Tally":
        return Tally(**{name: value - getattr(before, name) for name, value in asdict(self).items()})


class Engine(Protocol):
    """The two things that may be done with private data: train on it and add up what it says."""

    @property
    def names(self) -> tuple[str, ...]:
        """Of the classes."""
        ...

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of an image."""
        ...

    @property
    def parallel_trials(self) -> int:
        """How many candidates are best tried together."""
        ...

    @property
    def is_federated(self) -> bool: ...

    @property
    def has_ledger(self) -> bool: ...

    @property
    def tally(self) -> Tally: ...

    def fit(
        self, model: nn.Module, what: Selection | TrainingPlan, recipe: Recipe, *, trainable: Mask | None = None
    ) -> nn.Module:
        """Train a copy of the model on a group, or as a course says; only `trainable` coordinates move."""
        ...

    def fresh(self, seed: int) -> nn.Module:
        """A network of the kind that is served, with new weights."""
        ...

    def add_work(self, *, read: int = 0, trained: int = 0) -> None:
        """Count what a method computes by itself, without anybody's images."""
        ...

    def measure(self, model: nn.Module, queries: Sequence[Query]) -> list[list[Observation]]:
        """Per ask an observation of each of its groups, over all holders of images; one exchange."""
        ...

    def check(self, request: ForgetRequest, forgotten: ForgetRequest | None) -> None:
        """Refuse a request that names nothing, everything, or what is not there."""
        ...

    def identify(self, group: Selection) -> str:
        """A digest of which images a group is, for what is kept of them beyond the engine."""
        ...


def withheld_hint(engine: Engine) -> str:
    """What an error about missing images adds in a federation, whose clients may have withheld them."""
    return ", or no client has --least-group of them" if engine.is_federated else ""
