"""What may be asked of images: a statistic over selections of them."""

from dataclasses import dataclass, replace

import torch

from fedortho.data.images import Images
from fedortho.data.request import Clients, ForgetRequest
from fedortho.errors import unknown
from fedortho.models.patch import NOTHING, Patch
from fedortho.training.objectives import LOSSES


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


KINDS = (
    *("peaks", "difference", "right", "moments", "layer", "inputs", "averages", "spread", "drift"),
    *("fisher", "fisher-abs", "gradient"),
)


@dataclass(frozen=True)
class Probe:
    """A question; `layers`, `edit` and `tap` say which kernels are meant, the rest belongs to single kinds."""

    kind: str  # one of KINDS
    layers: str = "deep"
    edit: str = "channel"
    tap: str = "stream"
    patches: tuple[Patch, ...] = (NOTHING,)  # candidates
    norms: tuple[str, ...] = ()  # moments: batch norms to estimate; layer: the one whose input is summed
    classifier: str = ""  # inputs: the layer
    by_label: bool = False  # right, peaks, averages: a row for each label
    batch: int = 64  # fisher, gradient: images whose mean loss is derived; drift: images per step
    loss: str = "cross-entropy"  # fisher, gradient: one of LOSSES
    rate: float = 0.01  # drift: of the local epoch

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise unknown("probe", self.kind, KINDS)
        if self.loss not in LOSSES:
            raise unknown("loss", self.loss, LOSSES)


@dataclass(frozen=True)
class Ask:
    """A probe of some groups; several asks travel together."""

    groups: tuple[Group, ...]
    probe: Probe
