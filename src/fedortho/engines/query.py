"""What may be asked of images: a statistic over selections of them."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from fedortho.data.images import Images
from fedortho.data.request import Clients, ForgetRequest
from fedortho.errors import unknown
from fedortho.models.patch import NOTHING, Patch
from fedortho.statistics.observe import steady_order
from fedortho.training.objectives import LOSSES


@dataclass(frozen=True)
class Selection:
    """Images of `split` that match `include` and not `exclude`, at most `limit` of them."""

    split: str = "train"
    include: ForgetRequest | None = None  # None: all
    exclude: ForgetRequest | None = None  # None: none
    limit: int = 0  # at most so many, drawn by the seed; 0: all
    seed: int = 0
    skip: int = 0  # steady: without the first so many
    steady: bool = False  # draw in the order of a hash of the row number, whatever else is selected

    def select(self, images: Images, clients: Clients | None = None) -> Images:
        """The selected images, among those of the split."""
        selected = images if self.include is None else images.subset(self.include.mask(images, clients))
        if self.exclude is not None:
            selected = selected.subset(~self.exclude.mask(selected, clients))
        if not self.steady:
            return draw(selected, self.limit, self.seed)
        return selected.subset(steady_order(selected.rows, self.seed)[self.skip : self.limit or None].sort().values)

    def without(self, forgotten: ForgetRequest | None) -> "Selection":
        """The same images less those that earlier requests have removed."""
        if forgotten is None:
            return self
        return replace(self, exclude=forgotten if self.exclude is None else self.exclude + forgotten)

    def on_client(self, client: int, share: int, least: int = 1) -> "Selection":
        """The same selection on one of `share` clients; a client sends nothing about fewer than `least` images."""
        include, exclude = (request and request.on_client(client) for request in (self.include, self.exclude))
        holders = (self.include and self.include.holders()) or share
        limit, skip = (max(-(-n // min(share, holders)), least) if n else 0 for n in (self.limit, self.skip))
        return replace(self, include=include, exclude=exclude, limit=limit, skip=skip)


def draw(images: Images, most: int, seed: int) -> Images:
    """At most `most` of the images, the same ones for the same seed; 0: all."""
    if not most or len(images) <= most:
        return images
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    return images.subset(order[:most].sort().values)


@dataclass(frozen=True)
class StatisticKind:
    """What whoever sends, pools, limits or pays for a statistic has to know of it."""

    compared: str  # pooling compares clients by all keys (`means`), by `squares` (a mean near 0 has no scale) or `none`
    bits: int | None = 16  # of a sum's fraction on the wire; None: float32, for gradients of very different magnitudes
    family: str = ""  # another statistic whose sums can be subtracted from these
    precomputable: str = ""  # since training, for whole `labels` or for `all` training images; empty: not at all


STATISTICS: Mapping[str, StatisticKind] = {
    "peaks": StatisticKind("means"),
    "difference": StatisticKind("none", family="peaks"),
    "right": StatisticKind("none", bits=0),
    "moments": StatisticKind("squares", bits=18),  # moments are subtracted from one another
    "layer": StatisticKind("squares", bits=18, family="moments"),
    "inputs": StatisticKind("squares", bits=18),
    "averages": StatisticKind("means", precomputable="labels"),
    "responses": StatisticKind("means"),
    "drift": StatisticKind("none", bits=None, precomputable="all"),
    "gram": StatisticKind("means", precomputable="labels"),
    "fisher": StatisticKind("none", bits=None, precomputable="all"),
    "fisher-abs": StatisticKind("none", bits=None, precomputable="all"),
    "gradient": StatisticKind("none", bits=None, precomputable="all"),
}


@dataclass(frozen=True)
class Statistic:
    """What to compute; `layers`, `edit` and `tap` select kernels, the other fields belong to single kinds."""

    kind: str  # one of STATISTICS
    layers: str = "deep"
    edit: str = "channel"
    tap: str = "stream"
    patches: tuple[Patch, ...] = (NOTHING,)  # candidates
    norms: tuple[str, ...] = ()  # moments: batch norms to estimate; layer: the one whose input is summed
    classifier: str = ""  # inputs: the layer; right: the layer in which candidates of one body differ
    sample: int = 0  # peaks: images of a selection that are read where no ledger has its sums; 0: all
    by_label: bool = False  # right, peaks, averages: a row for each label
    batch_size: int = 64  # fisher, gradient: images whose mean loss is derived; drift: images per step
    loss: str = "cross-entropy"  # fisher, gradient: one of LOSSES
    lr: float = 0.01  # drift: of the local epoch

    def __post_init__(self) -> None:
        if self.kind not in STATISTICS:
            raise unknown("statistic", self.kind, STATISTICS)
        if self.loss not in LOSSES:
            raise unknown("loss", self.loss, LOSSES)


@dataclass(frozen=True)
class Query:
    """A statistic of some selections; several queries travel together."""

    selections: tuple[Selection, ...]
    statistic: Statistic

    def without(self, forgotten: ForgetRequest | None) -> "Query":
        """The same query less the images that earlier requests have removed."""
        return replace(self, selections=tuple(selection.without(forgotten) for selection in self.selections))
