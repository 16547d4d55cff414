"""Ours: observe, rank, prune; with a target instead of a ratio, repair and scrub in the robust preset."""

import copy
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import nn

from fedortho.calibrate import RATIOS, Bench, Sample, Trial, calibrate
from fedortho.data import Dataset, Images
from fedortho.errors import BadData, BadSetting, unknown
from fedortho.observe import Observation, key_of, observe
from fedortho.prune import SPREADS, Patch, bind_patch, choose_kernels, merge_chosen, plan_edit, strengths
from fedortho.rank import Ranking, rank_correlation, rank_kernels, same_label_retain
from fedortho.request import ForgetRequest
from fedortho.scrub import find_classifier
from fedortho.sites import EDITS, TAPS, Site, find_sites
from fedortho.tail import find_cut, norms_behind
from fedortho.train import evaluate

logger = logging.getLogger(__name__)
CONTRASTS = ("retain", "same-class")
SCOPES = ("layer", "global")


@dataclass(frozen=True)
class ForgetSettings:
    """How to forget; the defaults are the robust preset."""

    edit: Annotated[str, "channel (what leaves the layer) or conv (the kernel, as the paper prints)"] = "channel"
    tap: Annotated[str, "where responses are read: conv, bn, relu, or stream (residual groups as one)"] = "stream"
    layers: Annotated[str, "which convolutions: a depth, names, patterns"] = "deep"
    ratio: Annotated[float, "share of kernels weakened in each layer; 0: the smallest that reaches the target"] = 0.0
    alpha: Annotated[float, "least strength; 1 silences the kernel"] = 1.0
    rank_base: Annotated[int, "first rank in S = max(alpha, 1 - rank/number): 1 as printed, or 0"] = 1
    scope: Annotated[str, "choose kernels per layer or global"] = "layer"
    spread: Annotated[str, "how the ratio is spread over layers: equal, or rising towards the last"] = "rising"
    contrast: Annotated[str, "rank against all retained images (retain) or those of the same labels (same-class)"] = (
        "retain"
    )
    min_difference: Annotated[float, "spare kernels whose difference is below this"] = -1e30
    repair: Annotated[bool, "re-estimate batch-norm statistics behind the edit on retained images"] = True
    scrub: Annotated[bool, "finish a class request in the classifier where pruning within the budget falls short"] = (
        True
    )
    target: Annotated[float, "forget accuracy to reach, class requests"] = 0.01
    max_retain_drop: Annotated[float, "retain accuracy that may be lost"] = 0.01
    statistics_images: Annotated[int, "at most so many images per group for the statistics; 0: all"] = 0
    repair_images: Annotated[int, "retained images for the repair"] = 1024
    trial_images: Annotated[int, "at most so many images per group to measure trials on"] = 4000
    seed: Annotated[int, "of all subsamples"] = 0

    def __post_init__(self) -> None:
        for name, choices in (
            ("edit", EDITS),
            ("tap", TAPS),
            ("scope", SCOPES),
            ("spread", SPREADS),
            ("contrast", CONTRASTS),
        ):
            if getattr(self, name) not in choices:
                raise unknown(name, getattr(self, name), choices)
        for name in ("ratio", "alpha", "target", "max_retain_drop"):
            if not 0 <= getattr(self, name) <= 1:
                raise BadSetting(f"{name.replace('_', '-')} must be between 0 and 1, not {getattr(self, name)}")
        if self.rank_base not in (0, 1):
            raise BadSetting(f"rank-base must be 0 or 1, not {self.rank_base}")
        if min(self.statistics_images, self.repair_images, self.trial_images, self.seed) < 0:
            raise BadSetting("numbers of images and the seed must not be negative")


PRESETS: dict[str, dict[str, Any]] = {
    "robust": {},
    "paper": {
        "edit": "conv",
        "tap": "conv",
        "ratio": 0.01,
        "alpha": 0.5,
        "repair": False,
        "scrub": False,
        "spread": "equal",
    },
}


@dataclass(frozen=True)
class Outcome:
    """A patch and how it was come by."""

    patch: Patch
    trials: tuple[Trial, ...]  # empty for a fixed ratio without repair
    chosen: Trial | None
    retain_before: float | None  # on the images that trials were measured on
    seconds: Mapping[str, float]  # statistics, edit
    images_read: Mapping[str, int]
    sample_correlation: float | None  # of the subsample's ranking with the ledger's


def plan_forgetting(
    model: nn.Module,
    data: Dataset,
    request: ForgetRequest,
    settings: ForgetSettings | None = None,
    *,
    ledger: Observation | None = None,
    forgotten: ForgetRequest | None = None,
    device: torch.device | str = "cpu",
) -> Outcome:
    """Find the patch for a request; the model is not changed.

    `forgotten` names what earlier requests have removed: it is no longer part of what is kept. Raises
    `Refused` with the frontier if target and budget cannot both hold.
    """
    settings = settings or ForgetSettings()
    started = time.perf_counter()
    task = _Task(model, data, request, settings, ledger=ledger, forgotten=forgotten, device=device)
    observed = time.perf_counter()
    trials: list[Trial] = []
    chosen, before = None, None
    if settings.ratio and not settings.repair:
        patch = task.plan(settings.ratio)
    else:
        bench = task.bench()
        if settings.ratio:
            chosen = bench.attempt(task.plan(settings.ratio), ratio=settings.ratio, mend=settings.repair)
            trials = [chosen]
        else:
            before = bench.attempt(Patch("", ""), ratio=0.0, mend=False).retain
            least = before - settings.max_retain_drop
            chosen, trials = calibrate(bench, task.plan, least, mend=settings.repair, may_scrub=settings.scrub)
        patch = chosen.patch
    patch = bind_patch(patch, task.model, request=str(request), method="fedortho")
    seconds = {"statistics": observed - started, "edit": time.perf_counter() - observed}
    _warn(task.sites, settings)
    return Outcome(patch, tuple(trials), chosen, before, seconds, task.images_read, task.sample_correlation)


def trace_frontier(
    model: nn.Module,
    data: Dataset,
    request: ForgetRequest,
    settings: ForgetSettings,
    *,
    ratios: Sequence[float] = RATIOS,
    ledger: Observation | None = None,
    device: torch.device | str = "cpu",
) -> list[Trial]:
    """What each ratio comes to on the images set aside, from no edit at all (ratio 0) on; for plots and comparisons."""
    task = _Task(model, data, request, settings, ledger=ledger, device=device)
    bench = task.bench()
    none = bench.attempt(Patch("", ""), ratio=0.0, mend=False)
    return [none, *(bench.attempt(task.plan(ratio), ratio=ratio, mend=settings.repair) for ratio in ratios)]


class _Task:
    """A request on its way: what was observed and ranked, and from that the edit for any ratio."""

    def __init__(
        self,
        model: nn.Module,
        data: Dataset,
        request: ForgetRequest,
        settings: ForgetSettings,
        *,
        ledger: Observation | None = None,
        forgotten: ForgetRequest | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.model, self.request, self.settings = copy.deepcopy(model).to(device).eval(), request, settings
        self.device = device
        train, self.valid = (_without(part, forgotten) for part in (data.train, data.valid))
        forget, self.retain = request.split(train)
        self.parts = _parts(request, forget)
        self.sites = find_sites(self.model, train.shape, settings.layers, settings.edit, settings.tap)
        keys = {site.name: key_of(site, settings.tap) for site in self.sites}
        ranked = _rank(self.look, self.parts, self.retain, keys=keys, settings=settings, ledger=ledger)
        self.rankings, read, self.sample_correlation = ranked
        self.images_read = {"statistics": read, "edit": 0}

    def look(self, images: Images) -> Observation:
        taps = [(site, self.settings.tap) for site in self.sites]
        return observe(self.model, images, taps, classes=images.classes, device=self.device)

    def plan(self, ratio: float) -> Patch:
        """The edit at this ratio: the kernels of each part's ranking, the larger strength for one in several."""
        settings, selections = self.settings, []
        for ranking in self.rankings:
            chosen = choose_kernels(
                ranking, ratio, scope=settings.scope, spread=settings.spread, min_difference=settings.min_difference
            )
            strong = {site: strengths(len(k), settings.alpha, settings.rank_base) for site, k in chosen.items()}
            selections.append({site: (kernels, strong[site]) for site, kernels in chosen.items()})
        return plan_edit(self.model, self.sites, merge_chosen(selections), settings.edit)

    def bench(self) -> Bench:
        """Images to measure trials on: validation images of what stays, training images of what goes."""
        settings = self.settings
        kept = self.valid.subset((~self.request.mask(self.valid)).nonzero().flatten())
        if not len(kept):
            raise BadData(
                "no validation image is left to measure trials on; train with --valid above 0, or give --ratio"
            )
        retain = self._sample(_draw(kept, settings.trial_images, settings.seed))
        mending = self._sample(_draw(self.retain, settings.repair_images, settings.seed))
        forget = []
        for number, part in enumerate(self.parts):
            is_class = number < len(self.request.classes)
            limit = settings.target if is_class else _held_out(self.model, part, kept, self.device)
            forget.append(self._sample(_draw(part, settings.trial_images // 4, settings.seed), limit))
        self.images_read["edit"] = sum(map(len, [*forget, retain, mending]))
        example = retain.inputs[:2]
        finish = self.request.kind == "class"
        return Bench(
            self.model,
            find_cut(self.model, self.sites, example),
            norms_behind(self.model, self.sites, example) if settings.repair else [],
            forget=forget,
            retain=retain,
            mending=mending.inputs,
            classifier=find_classifier(self.model, self.valid.classes, example) if finish else None,
        )

    def _sample(self, images: Images, limit: float = 1.0) -> Sample:
        inputs = images.normalise(images.pixels[images.rows].to(self.device))
        return Sample(inputs, images.labels.to(self.device), limit)


def _without(images: Images, forgotten: ForgetRequest | None) -> Images:
    if forgotten is None:
        return images
    return images.subset((~forgotten.mask(images)).nonzero().flatten())


def _parts(request: ForgetRequest, forget: Images) -> list[Images]:
    """What is ranked on its own: each class, and all clients and samples together."""
    labels = request.labels(forget.names)
    parts = [forget.subset((forget.labels == label).nonzero().flatten()) for label in labels]
    single = ForgetRequest(clients=request.clients, samples=request.samples)
    if request.clients or request.samples:
        parts.append(forget.subset(single.mask(forget).nonzero().flatten()))
    empty = [word for word, part in zip(request.classes, parts, strict=False) if not len(part)]
    if empty:
        raise BadData(f"class:{empty[0]} has no training image (left); there is nothing to forget")
    return parts


def _rank(
    look: Callable[[Images], Observation],
    parts: Sequence[Images],
    retain: Images,
    *,
    keys: Mapping[str, str],
    settings: ForgetSettings,
    ledger: Observation | None,
) -> tuple[list[Ranking], int, float | None]:
    """A ranking per part, the number of images read, and a subsample's agreement with the ledger."""

    def rankings(gone: Sequence[Observation], kept: Observation) -> list[Ranking]:
        against = [same_label_retain(o, kept) if settings.contrast == "same-class" else kept for o in gone]
        return [rank_kernels(o, k, keys) for o, k in zip(gone, against, strict=True)]

    known = _from_ledger(ledger, look, parts, retain, list(keys.values()))
    if known is not None and not settings.statistics_images:
        return rankings(*known[:2]), known[2], None
    drawn = [_draw(part, settings.statistics_images, settings.seed) for part in [*parts, retain]]
    seen = [look(part) for part in drawn]
    found = rankings(seen[:-1], seen[-1])
    correlation = None
    if known is not None:
        values = [rank_correlation(a, b) for a, b in zip(found, rankings(*known[:2]), strict=True)]
        correlation = sum(values) / len(values)
    return found, sum(map(len, drawn)), correlation


def _from_ledger(
    ledger: Observation | None,
    look: Callable[[Images], Observation],
    parts: Sequence[Images],
    retain: Images,
    keys: Sequence[str],
) -> tuple[list[Observation], Observation, int] | None:
    """What the ledger knows of parts and rest, and how many images had to be read; None if it does not serve.

    A whole class is a line of the ledger; single samples are looked at and taken off the lines of their labels.
    """
    if ledger is None or any(key not in ledger.sums or key in ledger.stale for key in keys):
        return None
    ledger = ledger.among(keys)
    gone, read, taken = [], 0, []
    for part in parts:
        label = int(part.labels[0])
        if len(part) == int(ledger.counts[label]) and bool((part.labels == label).all()):
            gone.append(ledger.only([label]))
        else:
            gone.append(look(part))
            taken.append(gone[-1])
            read += len(part)
    left = retain.labels.unique().tolist()
    kept = ledger.only(left)
    for observation in taken:
        kept = kept - observation.only(left)
    return (gone, kept, read) if int(kept.counts.sum()) == len(retain) else None


def _draw(images: Images, most: int, seed: int) -> Images:
    if not most or len(images) <= most:
        return images
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    return images.subset(order[:most].sort().values)


def _held_out(model: nn.Module, part: Images, kept: Images, device: torch.device | str) -> float:
    """Accuracy on unseen images of the same labels, weighted as those labels occur in the part."""
    shares = evaluate(model, kept, device=device).per_class
    known = [shares[int(label)] for label in part.labels]
    values = [share for share in known if share is not None]
    if not values:
        raise BadData("no validation image has the labels of the samples to forget; give --ratio instead of a target")
    return sum(values) / len(values)


def _warn(sites: Sequence[Site], settings: ForgetSettings) -> None:
    followed = [layer.name for site in sites for layer in site.layers if layer.norm_kind == "BatchNorm2d"]
    if settings.edit == "conv" and followed and settings.alpha < 1:
        logger.warning(
            "batch norm follows %s: re-estimating its statistics undoes a conv edit; use the robust preset to erase",
            followed[0] if len(followed) == 1 else f"{len(followed)} of the edited layers",
        )
