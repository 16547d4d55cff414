"""The engine protocol: a method sees models and sums, never an image; and the plans by which an engine trains."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Protocol

import torch
from torch import nn

from fedortho.data.images import Images
from fedortho.data.request import ForgetRequest
from fedortho.engines.query import Query, Selection, draw
from fedortho.errors import FedOrthoError
from fedortho.models.sites import Structure
from fedortho.models.zoo import BUILD
from fedortho.statistics.observe import Observation
from fedortho.training.adapters import Adapters
from fedortho.training.loop import Mask
from fedortho.training.objectives import FitOptions, Target, TrainingSet
from fedortho.training.recipe import Recipe


@dataclass(frozen=True)
class PlanPart:
    """A selection of images and the target they are trained on."""

    group: Selection = field(default_factory=Selection)
    target: Target = field(default_factory=Target)
    fraction: float = 1.0  # of the group, drawn by its seed
    given: Images | None = None  # in place of the group: images that were made, not taken

    def training_set(self, images: Images) -> TrainingSet:
        """The same with the images of its group, as their holder has them."""
        if self.given is not None:
            return TrainingSet(self.given, self.target, given=True)
        most = 0 if self.fraction >= 1 else max(round(self.fraction * len(images)), 1)
        return TrainingSet(draw(images, most, self.group.seed), self.target)

    def given_share(self, start: float, end: float, seed: int) -> "PlanPart":
        """The same with the generated images between two shares of their order, which the seed draws.

        Copies of an image stand side by side: shares that do not overlap have other images.
        """
        if self.given is None:
            return self
        _, image = self.given.rows.unique(return_inverse=True)
        rank = torch.randperm(int(image.max()) + 1, generator=torch.Generator().manual_seed(seed))
        ordered = torch.argsort(rank[image], stable=True)
        first, last = (round(share * len(ordered)) for share in (start, end))
        return replace(self, given=self.given.subset(ordered[first:last].sort().values))


@dataclass(frozen=True)
class TrainingPlan:
    """Parts of the images with their targets, fit options, and the teachers or adapters that they need."""

    parts: tuple[PlanPart, ...]
    options: FitOptions = field(default_factory=FitOptions)
    teachers: Mapping[str, nn.Module] = field(default_factory=dict)  # by the names in targets
    adapters: Adapters | None = None  # those that the model has
    # the model whose frozen weights the trained one has: clients that hold it are not sent these
    original: nn.Module | None = field(default=None, repr=False)

    def without(self, forgotten: ForgetRequest | None) -> "TrainingPlan":
        """The same plan less the images that earlier requests have removed."""
        return replace(self, parts=tuple(replace(part, group=part.group.without(forgotten)) for part in self.parts))


def as_training_plan(what: Selection | TrainingPlan) -> TrainingPlan:
    return what if isinstance(what, TrainingPlan) else TrainingPlan((PlanPart(what),))


@dataclass
class Tally:
    """What an engine has spent so far; exchanges and bytes stay 0 on one machine."""

    images_read: int = 0  # forward passes; those of kept activations through deep layers are not among them
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
    grows, so it is no part of `info`. `check` refuses a request that names no images, which only their holder knows; it
    needs no model and costs nothing.
    """

    @property
    def info(self) -> EngineInfo: ...

    @property
    def tally(self) -> Tally:
        """What was spent so far; a method that uses statistics stored by itself adds what they cost to it."""
        ...

    def fit(
        self,
        model: nn.Module,
        what: Selection | TrainingPlan,
        recipe: Recipe,
        *,
        trainable: Mask | None = None,
        after: int = 0,
    ) -> nn.Module:
        """Train a copy of the model on a selection or by a plan; only `trainable` coordinates move.

        `after` epochs or rounds of the recipe are over: its schedule goes on with those that are left.
        """
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
        raise FedOrthoError(f"this method needs networks with new weights; give the engine {BUILD}")
    return engine.info.build(seed)


def withheld_hint(engine: Engine) -> str:
    """What an error about missing images adds in a federation, whose clients may have withheld them."""
    return ", or no client has --least-group of them" if engine.info.is_federated else ""
