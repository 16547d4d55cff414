"""The engine protocol: a method sees models and sums, never an image."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

from torch import nn

from fedortho.data.request import ForgetRequest
from fedortho.engines.query import Query, Selection
from fedortho.engines.training_plan import TrainingPlan
from fedortho.errors import FedOrthoError
from fedortho.models.sites import Structure
from fedortho.statistics.observe import Observation
from fedortho.training.loop import Mask
from fedortho.training.recipe import Recipe


@dataclass
class Tally:
    """What an engine has spent so far; exchanges and bytes stay 0 on one machine."""

    images_read: int = 0  # forward passes
    images_trained: int = 0  # forward and backward passes
    flops: float = 0.0  # computed elsewhere: by clients, or before the request (a ledger, stored importances)
    kept_flops: float = 0.0  # of all FLOPs those that do not depend on the request
    exchanges: int = 0
    bytes_up: int = 0  # from all clients together
    bytes_down: int = 0
    withheld: int = 0  # selections that clients did not answer, because they are too small

    def since(self, before: "Tally") -> "Tally":
        return Tally(**{name: value - getattr(before, name) for name, value in asdict(self).items()})


@dataclass(frozen=True)
class EngineInfo:
    """What a method may know of the images before it queries them, and how to query them best."""

    class_names: tuple[str, ...]
    image_shape: tuple[int, int, int]  # channels, height, width
    data_digest: str = ""  # of the training images: the key of anything stored outside the engine, such as Fisher sums
    is_federated: bool = False
    has_ledger: bool = False  # sums over all training images are stored for the layers that it covers
    parallel_trials: int = 1  # how many candidates are best tried in one query
    build: Callable[[int], nn.Module] | None = None  # from a seed to a network with new weights
    structure: Structure | None = None  # of the network, where it was kept with the ledger


class Engine(Protocol):
    """Access to images that a method never sees.

    The two things that may be done with private data are `fit` and `measure`; `info` says what else is known. `tally`
    is apart from `info` because it grows. `check` is a method because only who holds the images, or knows the clients,
    can say whether a request names any; it needs no model and costs nothing.
    """

    @property
    def info(self) -> EngineInfo: ...

    @property
    def tally(self) -> Tally:
        """What was spent so far; a method that uses statistics stored by itself adds what they cost to it."""
        ...

    def fit(
        self, model: nn.Module, what: Selection | TrainingPlan, recipe: Recipe, *, trainable: Mask | None = None
    ) -> nn.Module:
        """Train a copy of the model on a selection or by a plan; only `trainable` coordinates move."""
        ...

    def measure(self, model: nn.Module, queries: Sequence[Query]) -> list[list[Observation]]:
        """For each query an observation of each of its selections, over all who hold images; one exchange."""
        ...

    def check(self, request: ForgetRequest, forgotten: ForgetRequest | None) -> None:
        """Refuse a request that names no image, all images, or images that do not exist."""
        ...


def fresh_model(engine: Engine, seed: int) -> nn.Module:
    """A network of the same architecture with new weights, where the engine can build one."""
    if engine.info.build is None:
        raise FedOrthoError(
            "this method needs networks with new weights; give the engine build=, a function from a seed to a network"
        )
    return engine.info.build(seed)


def withheld_hint(engine: Engine) -> str:
    """What an error about missing images adds in a federation, whose clients may have withheld them."""
    return ", or no client has --least-group of them" if engine.info.is_federated else ""
