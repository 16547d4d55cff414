"""The ledger of a trained model: sums of its kernels' peaks by label, and cached activations of some images.

The activations are those before the first deep layer. So requests need no forward pass over all images, and trials none
through the first layers. An edit of the deep layers leaves the activations as they are; the sums are then corrected by
the mean change of the peaks on these images.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from fedortho.data.images import Images
from fedortho.devices import FlopCounter
from fedortho.errors import BadCheckpoint, FedOrthoError
from fedortho.models.sites import Site, Structure, trace_structure
from fedortho.models.split import find_split, image_activations
from fedortho.statistics.observe import Kept, KeptRecord, Observation, key_of, observe, steady_order, tail_peaks
from fedortho.storage.files import below, damage_named, read_tensors, tensors_digest, write_tensors
from fedortho.storage.records import from_json

logger = logging.getLogger(__name__)
KEPT_TRAINING, KEPT_VALIDATION = 512, 1200  # images whose activations are kept
LEAST_KEPT = 8  # kept images of a label by which its sums are moved; with fewer it is all kept images


def write_ledger(
    path: Path,
    model: nn.Module,
    images: Images,
    *,
    valid: Images | None = None,
    device: torch.device | str = "cpu",
    progress: Callable[[int, int], None] | None = None,
) -> bool:
    """Observe the deep layers at every tap, for requests to come; False if the network has none that can be edited."""
    try:
        taps = ledger_taps(model, images.shape)
    except FedOrthoError as error:
        logger.info("no ledger was written: %s", error)
        return False
    with FlopCounter() as counter:
        seen = observe(model, images, taps, classes=images.classes, device=device, progress=progress)
        kept = keep_activations(model, images, images.subset([]) if valid is None else valid, device)
    replace(seen, kept=replace(kept, flops=float(counter.flops))).save(path)
    return True


def ledger_taps(
    model: nn.Module, shape: tuple[int, int, int], structure: Structure | None = None
) -> list[tuple[Site, str]]:
    """Every tap that a method reads in the deep layers."""
    structure = structure or trace_structure(model, shape)
    single = structure.sites("deep", "conv", "conv")
    streams = [site for site in structure.sites("deep", "channel", "stream") if site.is_stream]
    return [(site, tap) for site in single for tap in ("conv", "bn", "relu")] + [(site, "stream") for site in streams]


def keep_activations(model: nn.Module, train: Images, valid: Images, device: torch.device | str = "cpu") -> Kept:
    """The network's structure, and activations of the images that are drawn first; none if it cannot be split."""
    structure = trace_structure(model, train.shape)
    example = train.normalise(train.pixels[train.rows[:2]].to(device))
    split = find_split(model.eval(), structure.sites("deep", "channel", "stream"), example)
    numbers = (KEPT_TRAINING, KEPT_VALIDATION) if split.entry is not None else (0, 0)
    several = zip((train, valid), numbers, strict=True)
    parts = [images.subset(steady_order(images.rows, 0)[:number]) for images, number in several]
    inputs = [image_activations(model, split, part, device).half().cpu() for part in parts if len(part)]
    rows, labels = (torch.cat([getattr(part, name) for part in parts]) for name in ("rows", "labels"))
    training = torch.arange(len(rows)) < len(parts[0])
    activations = torch.cat(inputs) if inputs else torch.zeros(0, dtype=torch.float16)
    if not bool(torch.isfinite(activations).all()):  # beyond the range of half precision
        return Kept(structure, split, 0.0, rows[:0], labels[:0], training[:0], activations[:0], training[:0])
    kept = Kept(structure, split, 0.0, rows, labels, training, activations, torch.zeros(len(rows), dtype=torch.bool))
    return replace(kept, right=_answers(model, kept, [])[1]) if len(rows) else kept


def _answers(model: nn.Module, kept: Kept, taps: list[tuple[Site, str]]) -> tuple[dict[str, Tensor], Tensor]:
    """Peaks of the kept images and whether each is answered right."""
    device = next(model.parameters()).device
    peaks, outputs = tail_peaks(model, kept.split, kept.inputs.to(device).float(), taps)
    return {key: peak.cpu().double() for key, peak in peaks.items()}, outputs.argmax(1).cpu() == kept.labels


def rebind_ledger(ledger: Observation, before: nn.Module, after: nn.Module, images: Images) -> Observation:
    """The ledger of an edited model: sums by label move by their images times the mean change of the kept ones.

    They stay within the range of what kept images give: a mean beyond it no image could explain, and servers refuse it.
    If no activations are kept, or the edit changes them, entries that differ for 64 images are marked stale instead.
    """
    digest, kept = tensors_digest(after.state_dict()), ledger.kept
    prefix = kept.split.before if kept is not None else ()
    states = [(before.get_submodule(name).state_dict(), after.get_submodule(name).state_dict()) for name in prefix]
    is_same = all(tensors_digest(old) == tensors_digest(new) for old, new in states)
    if kept is not None and len(kept.rows) and is_same:
        return replace(_moved(ledger, kept, before.eval(), after.eval()), model=digest)
    few = images.subset(range(min(64, len(images))))
    taps = [pair for pair in ledger_taps(before, images.shape) if key_of(*pair) in ledger.sums]
    old, new = (observe(model, few, taps, classes=images.classes) for model in (before.cpu(), after.cpu()))
    changed = [key for key in ledger.sums if key not in old.sums or not torch.equal(old.sums[key], new.sums[key])]
    kept = None if kept is None else kept.where(torch.zeros(len(kept.rows), dtype=torch.bool))
    return replace(ledger, model=digest, stale=tuple(sorted({*ledger.stale, *changed})), kept=kept)


def _moved(ledger: Observation, kept: Kept, before: nn.Module, after: nn.Module) -> Observation:
    taps = [pair for pair in ledger_taps(before, (0, 0, 0), kept.structure) if key_of(*pair) in ledger.sums]
    of_training = kept.where(kept.training)
    old, _ = _answers(before, of_training, taps)
    new, right = _answers(after, kept, taps)
    sums = dict(ledger.sums)
    for key, peaks in old.items():
        change = new[key][kept.training] - peaks  # (kept training images, kernels)
        moves = change.mean(0).expand(len(ledger.counts), -1).clone()
        for label in of_training.labels.unique().tolist():
            mine = of_training.labels == label
            if int(mine.sum()) >= LEAST_KEPT:
                moves[label] = change[mine].mean(0)
        means = sums[key] / ledger.counts.clamp_min(1).unsqueeze(1) + moves
        lowest, highest = new[key][kept.training].aminmax(dim=0)  # a silenced kernel has no response: exactly 0
        sums[key] = ledger.counts.unsqueeze(1) * means.clamp(lowest, highest)
    return replace(ledger, sums=sums, kept=replace(kept, right=right))


def forget_lines(ledger: Observation, stays: Images) -> Observation:
    """The ledger without the labels of forgotten images, whose sums include those images, and without them."""
    whole = torch.bincount(stays.labels, minlength=len(ledger.counts)) == ledger.counts
    left = ledger.only(whole.nonzero().flatten().tolist())
    if (kept := ledger.kept) is None:
        return left
    named = torch.isin(kept.labels, stays.labels)  # validation images of a forgotten class go as well
    return replace(left, kept=kept.where(named & (~kept.training | torch.isin(kept.rows, stays.rows))))


def drop_activations(path: Path, rows: Tensor, labels: Sequence[int]) -> int:
    """Remove the kept activations of these rows and labels from a ledger's file; how many there were."""
    tensors, note = read_tensors(path)
    kept = {name: tensor for name, tensor in tensors.items() if name.startswith("kept.")}
    if not kept:
        return 0
    gone = torch.isin(kept["kept.rows"], rows) | torch.isin(kept["kept.labels"], torch.tensor(labels).long())
    if bool(gone.any()):
        write_tensors(path, tensors | {name: tensor[~gone] for name, tensor in kept.items()}, note)
    return int(gone.sum())


def load_ledger(path: Path, model: nn.Module) -> Observation | None:
    """A saved ledger, None where there is none; one that belongs to another model is refused."""
    if not path.exists():
        return None
    tensors, note = read_tensors(path)
    digest = tensors_digest(model.state_dict())
    if note.get("model") != digest:
        raise BadCheckpoint(f"{path} is the ledger of another model ({str(note.get('model'))[:12]}, not {digest[:12]})")
    kept = None
    with damage_named(path):
        if "kept" in note:
            about = from_json(KeptRecord, note["kept"], path)
            kept = Kept(about.structure, about.split, about.flops, **below("kept.", tensors))
        sums, stale = below("sums.", tensors), tuple(map(str, note["stale"]))
        return Observation(sums, tensors["counts"], digest, stale, kept)
