"""The ledger of a trained model: sums of its kernels' peaks by label, so that requests need no forward pass."""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from fedortho.data.images import Images
from fedortho.errors import BadCheckpoint, FedOrthoError
from fedortho.models.sites import Site, trace_structure
from fedortho.statistics.observe import Observation, key_of, observe
from fedortho.storage.files import read_tensors, tensors_digest

logger = logging.getLogger(__name__)


def write_ledger(
    path: Path,
    model: nn.Module,
    images: Images,
    *,
    device: torch.device | str = "cpu",
    progress: Callable[[int, int], None] | None = None,
) -> bool:
    """Observe the deep layers at every tap, for requests to come; False if the network has none that can be edited."""
    try:
        taps = ledger_taps(model, images.shape)
    except FedOrthoError as error:
        logger.info("no ledger was written: %s", error)
        return False
    observe(model, images, taps, classes=images.classes, device=device, progress=progress).save(path)
    return True


def ledger_taps(model: nn.Module, shape: tuple[int, int, int]) -> list[tuple[Site, str]]:
    """Every tap that a method reads in the deep layers."""
    structure = trace_structure(model, shape)
    single = structure.sites("deep", "conv", "conv")
    streams = [site for site in structure.sites("deep", "channel", "stream") if site.is_stream]
    return [(site, tap) for site in single for tap in ("conv", "bn", "relu")] + [(site, "stream") for site in streams]


def rebind_ledger(ledger: Observation, before: nn.Module, after: nn.Module, images: Images) -> Observation:
    """The ledger bound to an edited model, its entries behind the edit marked stale (found by trying 64 images)."""
    few = images.subset(range(min(64, len(images))))
    taps = [pair for pair in ledger_taps(before, images.shape) if key_of(*pair) in ledger.sums]
    old, new = (observe(model, few, taps, classes=images.classes) for model in (before.cpu(), after.cpu()))
    changed = [key for key in ledger.sums if key not in old.sums or not torch.equal(old.sums[key], new.sums[key])]
    stale = tuple(sorted({*ledger.stale, *changed}))
    return replace(ledger, model=tensors_digest(after.state_dict()), stale=stale)


def forget_lines(ledger: Observation, stays: Images) -> Observation:
    """The ledger without the labels of forgotten images: their sums include those images."""
    whole = torch.bincount(stays.labels, minlength=len(ledger.counts)) == ledger.counts
    return ledger.only(whole.nonzero().flatten().tolist())


def load_ledger(path: Path, model: nn.Module) -> Observation | None:
    """A saved ledger, None where there is none; one that belongs to another model is refused."""
    if not path.exists():
        return None
    tensors, note = read_tensors(path)
    digest = tensors_digest(model.state_dict())
    if note.get("model") != digest:
        raise BadCheckpoint(f"{path} is the ledger of another model ({str(note.get('model'))[:12]}, not {digest[:12]})")
    sums = {name.removeprefix("sums."): t for name, t in tensors.items() if name.startswith("sums.")}
    return Observation(sums, tensors["counts"], digest, tuple(note["stale"]))
