"""Where the data lives: a method sees models and sums, never an image; central or federated is which engine it gets."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Protocol

import torch
from torch import nn

from fedortho.adapters import Adapters
from fedortho.data import Dataset, Images
from fedortho.errors import FedOrthoError
from fedortho.files import tensors_digest
from fedortho.lessons import Aim, Lesson, Manner, count_images
from fedortho.observe import Observation
from fedortho.probe import Memory, Probe, answer
from fedortho.recipe import Recipe
from fedortho.request import Clients, ForgetRequest
from fedortho.train import Mask, fit


@dataclass(frozen=True)
class Group:
    """Some of the images, by description: of one split, those that a request names, less those of another."""

    split: str = "train"
    only: ForgetRequest | None = None  # None: all
    but: ForgetRequest | None = None  # None: without exception
    most: int = 0  # a seeded draw of at most so many; 0: all
    seed: int = 0

    def select(self, images: Images, clients: Clients | None = None) -> Images:
        """The images of this group among those of its split."""
        chosen = torch.ones(len(images), dtype=torch.bool) if self.only is None else self.only.mask(images, clients)
        if self.but is not None:
            chosen &= ~self.but.mask(images, clients)
        return draw(images.subset(chosen), self.most, self.seed)

    def on_client(self, client: int, share: int, least: int = 1) -> "Group":
        """The same group as one of `share` clients sees it; of fewer than `least` images it would tell nothing."""
        only, but = (None if request is None else request.on_client(client) for request in (self.only, self.but))
        holders = (self.only and self.only.holders()) or share
        most = max(-(-self.most // min(share, holders)), least) if self.most else 0
        return replace(self, only=only, but=but, most=most)


def draw(images: Images, most: int, seed: int) -> Images:
    """At most so many of the images, the same ones for the same seed; 0: all."""
    if not most or len(images) <= most:
        return images
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    return images.subset(order[:most].sort().values)


@dataclass(frozen=True)
class Part:
    """Some images and what is to be learnt from them."""

    group: Group = field(default_factory=Group)
    aim: Aim = field(default_factory=Aim)
    fraction: float = 1.0  # of the group, drawn by its seed
    given: Images | None = None  # in place of the group: images that were made, not taken

    def lesson(self, images: Images) -> Lesson:
        """The same with the images of its group, as their holder has them."""
        if self.given is not None:
            return Lesson(self.given, self.aim, given=True)
        most = 0 if self.fraction >= 1 else max(round(self.fraction * len(images)), 1)
        return Lesson(draw(images, most, self.group.seed), self.aim)


@dataclass(frozen=True)
class Course:
    """What a model is taught: parts of the images, how they are taken, and what else that needs."""

    parts: tuple[Part, ...]
    manner: Manner = field(default_factory=Manner)
    teachers: Mapping[str, nn.Module] = field(default_factory=dict)  # by the names that aims give
    adapters: Adapters | None = None  # those that the model has


def as_course(what: Group | Course) -> Course:
    return what if isinstance(what, Course) else Course((Part(what),))


@dataclass(frozen=True)
class Ask:
    """A probe of some groups; several asks travel together."""

    groups: tuple[Group, ...]
    probe: Probe


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
    def at_once(self) -> int:
        """How many candidates are best tried together."""
        ...

    @property
    def is_federated(self) -> bool: ...

    @property
    def has_ledger(self) -> bool: ...

    @property
    def tally(self) -> Tally: ...

    def fit(
        self, model: nn.Module, what: Group | Course, recipe: Recipe, *, trainable: Mask | None = None
    ) -> nn.Module:
        """Train a copy of the model on a group, or as a course says; only `trainable` coordinates move."""
        ...

    def fresh(self, seed: int) -> nn.Module:
        """A network of the kind that is served, with new weights."""
        ...

    def add_work(self, *, read: int = 0, trained: int = 0) -> None:
        """Count what a method computes by itself, without anybody's images."""
        ...

    def measure(self, model: nn.Module, asks: Sequence[Ask]) -> list[list[Observation]]:
        """Per ask an observation of each of its groups, over all holders of images; one exchange."""
        ...

    def check(self, request: ForgetRequest, forgotten: ForgetRequest | None) -> None:
        """Refuse a request that names nothing, everything, or what is not there."""
        ...

    def identify(self, group: Group) -> str:
        """A digest of which images a group is, for what is kept of them beyond the engine."""
        ...


def or_withheld(engine: Engine) -> str:
    """What an error about missing images adds in a federation, whose clients may have withheld them."""
    return ", or no client has --least-group of them" if engine.is_federated else ""


@dataclass
class CentralEngine:
    """All images in one place."""

    data: Dataset
    ledger: Observation | None = None
    clients: Clients | None = None  # rows of each client, where the images came from a federation
    device: torch.device | str = "cpu"
    tally: Tally = field(default_factory=Tally)
    build: Callable[[int], nn.Module] | None = None  # from a seed to a network with new weights
    at_once = 1
    is_federated = False

    def __post_init__(self) -> None:
        self._digest, self._memory = "", Memory()
        self._model: nn.Module | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return self.data.train.names

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.data.train.shape

    @property
    def has_ledger(self) -> bool:
        return self.ledger is not None

    def fit(
        self, model: nn.Module, what: Group | Course, recipe: Recipe, *, trainable: Mask | None = None
    ) -> nn.Module:
        course = as_course(what)
        lessons = [part.lesson(self._images(part.group)) for part in course.parts]
        trained = fit(
            model,
            lessons,
            recipe,
            device=self.device,
            trainable=trainable,
            manner=course.manner,
            teachers=course.teachers,
        )
        seen, taught = count_images(lessons, recipe.batch, recipe.epochs, course.manner)
        self.add_work(read=taught, trained=seen)
        return trained

    def fresh(self, seed: int) -> nn.Module:
        return fresh_model(self.build, seed)

    def add_work(self, *, read: int = 0, trained: int = 0) -> None:
        self.tally.images_read += read
        self.tally.images_trained += trained

    def measure(self, model: nn.Module, asks: Sequence[Ask]) -> list[list[Observation]]:
        model, memory = self._remembered(model)
        read, trained, tried = memory.images_read, memory.images_trained, memory.tail_flops
        found = []
        for ask in asks:
            groups = [self._images(group) for group in ask.groups]
            probe = replace(ask.probe, by_label=ask.probe.by_label or ask.probe.kind == "peaks")  # nobody to protect
            found.append(answer(model, self.data.train, groups, probe, memory=memory, device=self.device))
        self.add_work(read=memory.images_read - read, trained=memory.images_trained - trained)
        self.tally.tail_flops += memory.tail_flops - tried
        return found

    def check(self, request: ForgetRequest, forgotten: ForgetRequest | None) -> None:
        request.split(Group(but=forgotten).select(self.data.train, self.clients), self.clients)

    def identify(self, group: Group) -> str:
        images = self._images(group)
        return f"{self.data.digest}:{tensors_digest({'rows': images.rows, 'labels': images.labels})}"

    def _images(self, group: Group) -> Images:
        images: Images = getattr(self.data, group.split)
        return group.select(images, self.clients)

    def _remembered(self, model: nn.Module) -> tuple[nn.Module, Memory]:
        """A copy of the model on the engine's device, and what is known of it from earlier asks."""
        digest = tensors_digest(model.state_dict())
        if digest != self._digest or self._model is None:
            ledger = self.ledger if self.ledger is not None and self.ledger.model == digest else None
            self._digest, self._memory = digest, Memory(ledger, {}, {})
            self._model = copy.deepcopy(model).to(self.device).eval()
        return self._model, self._memory


def fresh_model(build: Callable[[int], nn.Module] | None, seed: int) -> nn.Module:
    """A new network, where the engine knows how to make one."""
    if build is None:
        raise FedOrthoError(
            "this method needs networks with new weights; give the engine build=, a function from a seed to a network"
        )
    return build(seed)
