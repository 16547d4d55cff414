"""Sums over images by label, and the forward pass that sums the peaks of kernels.

For a kernel and an image the peak is the largest value of its response map (paper, section 4.2). Observations
of disjoint images add up.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from fedortho.data.images import Images, check_labels
from fedortho.data.loaders import ImageSource
from fedortho.errors import BadData
from fedortho.models.capture import capture
from fedortho.models.layout import ordered_batches
from fedortho.models.predictions import evaluating
from fedortho.models.sites import Site, Structure
from fedortho.models.split import Split, run_tail, tail_model
from fedortho.storage.files import PRIVATE, prefixed, tensors_digest, write_tensors
from fedortho.storage.records import to_json

PEAK = partial(torch.amax, dim=(2, 3))


def steady_order(rows: Tensor, seed: int) -> Tensor:
    """Positions of the rows, ordered by a hash of each row's number: a subset keeps the order of the full set.

    >>> steady_order(torch.tensor([3, 5, 8]), 0).tolist(), steady_order(torch.tensor([3, 8]), 0).tolist()
    ([0, 2, 1], [0, 1])
    """
    mixed = (rows.numpy().astype(np.uint64) + np.uint64(seed)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    return torch.from_numpy(np.argsort(mixed ^ (mixed >> np.uint64(32)), kind="stable"))


@dataclass(frozen=True)
class Kept:
    """What a ledger keeps beside sums: the structure of the network, and activations before its deep layers."""

    structure: Structure
    split: Split  # before the deep layers
    flops: float  # of making the ledger
    rows: Tensor  # (n,), int64
    labels: Tensor  # (n,), int64
    training: Tensor  # (n,), bool: a training image, otherwise one for validation
    inputs: Tensor  # (n, …), float16: activations at the split
    right: Tensor  # (n,), bool: whether the model's answer is right

    def tensors(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in ("rows", "labels", "training", "inputs", "right")}

    def where(self, stay: Tensor) -> "Kept":
        parts: dict[str, Any] = {name: value[stay] for name, value in self.tensors().items()}
        return replace(self, **parts)

    def places(self, rows: Tensor) -> Tensor:
        """Where each row is kept; −1: it is not."""
        if not len(self.rows):
            return torch.full_like(rows, -1)
        ascending, order = self.rows.sort()
        at = order[torch.searchsorted(ascending, rows).clamp_max(len(order) - 1)]
        return torch.where(self.rows[at] == rows, at, -1)


@dataclass(frozen=True)
class Observation:
    """Sums by label and the counts that they are divided by; with a model's digest it is that model's ledger.

    Counts are numbers of images, except for gradients (batches) and batch-norm inputs (values).
    """

    sums: Mapping[str, Tensor]  # such as "tap:site" → (labels, kernels), float64
    counts: Tensor  # (labels,), int64
    model: str = ""  # digest of the model that was observed
    stale: tuple[str, ...] = ()  # entries that an edit has made untrue
    kept: Kept | None = None  # of a ledger

    def __add__(self, other: "Observation") -> "Observation":
        if self.sums.keys() != other.sums.keys():
            raise BadData("observations of different layers or taps do not add up")
        if self.model and other.model and self.model != other.model:
            raise BadData(f"observations of two models do not add up ({self.model[:12]} and {other.model[:12]})")
        sums = {key: value + other.sums[key] for key, value in self.sums.items()}
        return replace(self, sums=sums, counts=self.counts + other.counts)

    def __sub__(self, other: "Observation") -> "Observation":
        return self + replace(other, sums={key: -value for key, value in other.sums.items()}, counts=-other.counts)

    def only(self, labels: Sequence[int]) -> "Observation":
        """The part that comes from images of these labels."""
        kept = torch.zeros(len(self.counts), dtype=torch.bool)
        kept[list(labels)] = True
        sums = {key: value * kept.unsqueeze(1) for key, value in self.sums.items()}
        return replace(self, sums=sums, counts=self.counts * kept)

    def collapsed(self) -> "Observation":
        """The same over all labels together, in one row: what a client sends of a group."""
        sums = {key: value.sum(0, keepdim=True) for key, value in self.sums.items()}
        return replace(self, sums=sums, counts=self.counts.sum().view(1))

    @property
    def images(self) -> int:
        return int(self.counts.sum())

    def among(self, keys: Sequence[str]) -> "Observation":
        return replace(self, sums={key: self.sums[key] for key in keys})

    def mean(self, key: str) -> Tensor:
        """The sum over all labels, divided by the count, (kernels,)."""
        if self.images <= 0:
            raise BadData("no image was observed; a mean needs at least one")
        return self.sums[key].sum(0) / self.images

    @property
    def digest(self) -> str:
        """Of the sums and counts alone."""
        return tensors_digest(self._tensors())

    def _tensors(self) -> dict[str, Tensor]:
        return {**prefixed("sums.", self.sums), "counts": self.counts}

    def save(self, path: Path) -> None:
        tensors, note = self._tensors(), dict[str, Any](model=self.model, stale=list(self.stale))
        if (kept := self.kept) is not None:
            tensors |= prefixed("kept.", kept.tensors())
            note["kept"] = to_json(KeptRecord(kept.structure, kept.split, kept.flops))
        write_tensors(path, tensors, note, mode=PRIVATE)


@dataclass(frozen=True)
class KeptRecord:
    """The part of `Kept` that is written beside its tensors."""

    schema: ClassVar[int] = 1

    structure: Structure
    split: Split
    flops: float


def weighted_difference(forget: Observation, retain: Observation) -> Observation:
    """One client's term in the paper: number of images times (forget mean − retain mean); 0 if it lacks either set."""
    number = forget.images + retain.images if forget.images and retain.images else 0
    sums = {key: value.new_zeros(1, value.shape[1]) for key, value in forget.sums.items()}
    if number:
        sums = {key: number * (forget.mean(key) - retain.mean(key)).unsqueeze(0) for key in sums}
    return Observation(sums, torch.tensor([number]), forget.model)


def key_of(site: Site, tap: str) -> str:
    """Where an observation keeps a site: `conv:features.3`; the tap `stream` of a single layer is its relu."""
    kind = "stream" if site.is_stream else "relu" if tap == "stream" else tap
    return f"{kind}:{site.name}"


def observe(
    model: nn.Module,
    images: Images | ImageSource,
    taps: Sequence[tuple[Site, str]],
    *,
    classes: int,
    device: torch.device | str = "cpu",
    progress: Callable[[int, int], None] | None = None,
) -> Observation:
    """Peaks of all kernels at each (site, tap), in one pass that ends behind the last tapped layer."""
    wanted = _modules(taps)
    sums = {key: torch.zeros(classes, kernels, dtype=torch.float64) for key, (_, _, kernels) in wanted.items()}
    counts = torch.zeros(classes, dtype=torch.int64)
    with evaluating(model):
        for inputs, labels in ordered_batches(model, images, device):
            check_labels(labels, classes)
            with capture(model, _names(wanted), PEAK, stop=True) as seen:
                model(inputs)
            peaks = _peaks({module: outputs[-1] for module, outputs in seen.items()}, wanted)
            for key, peak in peaks.items():
                sums[key].index_add_(0, labels.cpu(), peak.cpu().double())
            counts += torch.bincount(labels.cpu(), minlength=classes)
            if progress is not None and isinstance(images, Images):
                progress(int(counts.sum()), len(images))
    return Observation(sums, counts, tensors_digest(model.state_dict()))


def tail_peaks(
    model: nn.Module, split: Split, inputs: Tensor, taps: Sequence[tuple[Site, str]]
) -> tuple[dict[str, Tensor], Tensor]:
    """Peaks at each tap, (images, kernels), and the outputs, of a network's tail for activations at the split."""
    wanted, tail = _modules(taps), tail_model(model, split)
    with torch.no_grad(), capture(tail, _names(wanted), PEAK) as seen:
        outputs = run_tail(tail, split, inputs)
    return _peaks({module: torch.cat(parts) for module, parts in seen.items()}, wanted), outputs


def _modules(taps: Sequence[tuple[Site, str]]) -> dict[str, tuple[str, str, int]]:
    """Of each key the module whose output is read, the kind of tap, and the number of kernels."""
    wanted = {}
    for site, tap in taps:
        key = key_of(site, tap)
        kind, layer = key.partition(":")[0], site.layers[0]
        single = layer.norm if kind in ("bn", "relu") and layer.norm else layer.name
        wanted[key] = (site.name if site.is_stream else single, kind, site.kernels)
    return wanted


def _names(wanted: Mapping[str, tuple[str, str, int]]) -> list[str]:
    return list(dict.fromkeys(module for module, _, _ in wanted.values()))


def _peaks(seen: Mapping[str, Tensor], wanted: Mapping[str, tuple[str, str, int]]) -> dict[str, Tensor]:
    return {key: seen[at].clamp_min(0) if kind == "relu" else seen[at] for key, (at, kind, _) in wanted.items()}
