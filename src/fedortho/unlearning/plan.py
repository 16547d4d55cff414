"""From a request to a patch: observe, rank, prune; with a target instead of a ratio also try, repair and scrub."""

import copy
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from fedortho.data.request import EmptyGroup, ForgetRequest
from fedortho.devices import work_clock
from fedortho.errors import BadData, BadSetting, unknown
from fedortho.models.classifier import find_classifier
from fedortho.models.norms import norms_behind
from fedortho.models.patch import NOTHING, Patch, bind_patch
from fedortho.models.sites import EDITS, TAPS, Site, find_sites
from fedortho.statistics.engine import Engine, Tally, withheld_hint
from fedortho.statistics.observe import Observation, key_of
from fedortho.statistics.query import Query, Selection, Statistic
from fedortho.storage.settings import kebab
from fedortho.unlearning.calibrate import RATIOS, SHARES, Candidate, Trial, TrialRunner, calibrate
from fedortho.unlearning.directions import check_erasable, plan_erasure
from fedortho.unlearning.rank import Ranking, rank_correlation, rank_kernels, same_label_retain
from fedortho.unlearning.select import SCOPES, SPREADS, choose_kernels, merge_chosen, plan_edit, strengths

logger = logging.getLogger(__name__)
CONTRASTS = ("retain", "same-class")
WEIGHTINGS = ("pooled", "paper")
REPAIRS = ("batches", "layers")
OF_KERNELS = ("edit", "tap", "alpha", "rank_base", "scope", "contrast", "weighting", "min_difference", "repair")
SPREAD_IMAGES = 4500  # per group, to find directions on, unless statistics_images says another number


@dataclass(frozen=True)
class ForgetSettings:
    """How to forget; the defaults are the robust preset."""

    edit: Annotated[str, "channel (what leaves the layer) or conv (the kernel, as the paper prints)"] = "channel"
    tap: Annotated[str, "where responses are read: conv, bn, relu, or stream (residual groups as one)"] = "stream"
    layers: Annotated[str, "which convolutions: a depth, names, patterns"] = "deep"
    erase: Annotated[bool, "take the directions in which a class stands out of each layer; no: silence kernels"] = False
    ratio: Annotated[float, "share of kernels, or directions, in each layer; 0: found by target and budget"] = 0.0
    alpha: Annotated[float, "least strength; 1 silences the kernel"] = 1.0
    rank_base: Annotated[int, "first rank in S = max(alpha, 1 - rank/number): 1 as printed, or 0"] = 1
    scope: Annotated[str, "choose kernels per layer or global"] = "layer"
    spread: Annotated[str, "how the ratio is spread over layers: equal, or rising towards the last"] = "rising"
    contrast: Annotated[str, "rank against all retained images (retain) or those of the same labels (same-class)"] = (
        "retain"
    )
    weighting: Annotated[str, "in a federation: pooled sums, or the paper's weighted local differences"] = "pooled"
    min_difference: Annotated[float, "spare kernels whose difference is below this"] = -1e30
    repair: Annotated[bool, "re-estimate batch-norm statistics behind the edit on retained images"] = True
    repair_by: Annotated[str, "pooled moments of local batches (one exchange) or exact layers (one each)"] = "batches"
    scrub: Annotated[bool, "finish a class request in the classifier where pruning within the budget falls short"] = (
        True
    )
    target: Annotated[float, "forget accuracy to reach, class requests"] = 0.01
    max_retain_drop: Annotated[float, "retain accuracy that may be lost"] = 0.01
    statistics_images: Annotated[int, "at most so many images per group for the statistics; 0: all"] = 0
    repair_images: Annotated[int, "retained images for the repair"] = 1024
    trial_images: Annotated[int, "retained images to try edits on, and a quarter as many of what goes; 0: all"] = 4000
    seed: Annotated[int, "of all subsamples"] = 0

    def __post_init__(self) -> None:
        known: dict[str, Collection[str]] = {"edit": EDITS, "tap": TAPS, "scope": SCOPES, "spread": SPREADS}
        known |= {"contrast": CONTRASTS, "weighting": WEIGHTINGS, "repair_by": REPAIRS}
        for name, choices in known.items():
            if getattr(self, name) not in choices:
                raise unknown(kebab(name), getattr(self, name), choices)
        for name in ("ratio", "alpha", "target", "max_retain_drop"):
            if not 0 <= getattr(self, name) <= 1:
                raise BadSetting(f"{kebab(name)} must be between 0 and 1, not {getattr(self, name)}")
        for name in OF_KERNELS if self.erase else ():  # directions are chosen and removed in one way only
            only, given, word = getattr(ForgetSettings, name), getattr(self, name), kebab(name)
            if given != only:
                raise BadSetting(f"erase takes {word} {only}, not {given}; leave --{word} out or take another preset")
        if self.rank_base not in (0, 1):
            raise BadSetting(f"rank-base must be 0 or 1, not {self.rank_base}")
        for name in ("statistics_images", "repair_images", "trial_images", "seed"):
            if getattr(self, name) < 0:
                raise BadSetting(f"{kebab(name)} must not be negative, and is {getattr(self, name)}")


@dataclass(frozen=True)
class ForgetPlan:
    """A patch and how it was come by."""

    patch: Patch
    trials: tuple[Trial, ...]  # empty for a fixed ratio without repair
    chosen: Trial | None
    retain_before: float | None  # on the images that trials were measured on
    seconds: Mapping[str, float]  # statistics, edit
    spent: Mapping[str, Tally]  # by the engine, for the same two
    sample_correlation: float | None  # of the subsample's ranking with the ledger's
    opposed: int = 0  # edited kernels that respond no more to what goes than to what stays

    @property
    def images_read(self) -> dict[str, int]:
        return {phase: tally.images_read for phase, tally in self.spent.items()}


def plan_forgetting(
    model: nn.Module,
    engine: Engine,
    request: ForgetRequest,
    settings: ForgetSettings | None = None,
    *,
    forgotten: ForgetRequest | None = None,
) -> ForgetPlan:
    """Find the patch for a request; the model is not changed.

    `forgotten` names what earlier requests have removed:
    it is no longer part of what is kept. Raises `Refused` with the frontier if target and budget cannot both hold.
    """
    settings = settings or ForgetSettings()
    clock, spent = [work_clock()], [replace(engine.tally)]
    task = _Task(model, engine, request, settings, forgotten)
    clock.append(work_clock())
    spent.append(replace(engine.tally))
    trials: list[Trial] = []
    chosen, before = None, None
    if settings.ratio and not settings.repair:
        patch = task.plan(settings.ratio)
    else:
        runner, plan = task.runner(), task.erase if settings.erase else task.plan
        if settings.ratio:
            trials = runner.attempt([Candidate(plan(settings.ratio), settings.ratio)])
            chosen = trials[0]
        else:
            before = task.retain_before
            assert before is not None, "the bench measured it"
            least, how = before - settings.max_retain_drop, (SHARES, True) if settings.erase else (RATIOS, False)
            chosen, trials = calibrate(runner, plan, least, *how, may_scrub=settings.scrub)
        patch = chosen.patch
    patch = bind_patch(patch, task.model, request=str(request), method="hide", statistics=task.weighting)
    clock.append(work_clock())
    spent.append(replace(engine.tally))
    phases = ("statistics", "edit")
    seconds = {phase: clock[i + 1] - clock[i] for i, phase in enumerate(phases)}
    tallies = {phase: spent[i + 1].since(spent[i]) for i, phase in enumerate(phases)}
    opposed = task.opposed(chosen.ratio if chosen is not None else settings.ratio)
    _warn(task.sites, settings, opposed)
    return ForgetPlan(patch, tuple(trials), chosen, before, seconds, tallies, task.sample_correlation, opposed)


def trace_frontier(
    model: nn.Module,
    engine: Engine,
    request: ForgetRequest,
    settings: ForgetSettings,
    *,
    ratios: Sequence[float] = RATIOS,
) -> list[Trial]:
    """What each ratio comes to on the images set aside, from no edit at all (ratio 0) on; for plots and comparisons."""
    task = _Task(model, engine, request, settings)
    plan = task.erase if settings.erase else task.plan
    candidates = [Candidate(NOTHING, 0.0), *(Candidate(plan(ratio), ratio) for ratio in ratios)]
    return task.runner().attempt(candidates)


class _Task:
    """A request on its way: what was observed and ranked, and from that the edit for any ratio."""

    def __init__(
        self,
        model: nn.Module,
        engine: Engine,
        request: ForgetRequest,
        settings: ForgetSettings,
        forgotten: ForgetRequest | None = None,
    ) -> None:
        self.model, self.engine = copy.deepcopy(model).cpu().eval(), engine
        self.request, self.settings = request, settings
        engine.check(request, forgotten)
        if not request.classes and not settings.ratio and settings.target != ForgetSettings.target:
            raise BadSetting(
                f"target {settings.target:g} is for classes; {request.kind} requests aim at what unseen images of the "
                "same labels get: leave --target out"
            )
        if settings.erase and request.kind != "class":
            raise BadSetting(f"directions are those of a class; forget {request} by the robust preset")
        self.parts = request.parts()
        self.everything = request if forgotten is None else forgotten + request
        self.sites = find_sites(self.model, engine.shape, settings.layers, settings.edit, settings.tap)
        _check_repair(self.sites, settings)
        self.base = Statistic("peaks", settings.layers, settings.edit, settings.tap)
        most, seed = settings.trial_images, settings.seed
        few = max(most // 4, 1) if most else 0
        self.tried = [Selection("train", part, forgotten, few, seed) for part in self.parts]
        self.kept = Selection("valid", None, self.everything, most, seed)
        self.weighting = _weighting(request, settings, engine)
        self.retain_before: float | None = None  # until a target asks for it
        self.limits = [1.0] * len(self.parts)
        self.rankings = self._look(forgotten)
        self.sample_correlation = self._correlation(forgotten)

    def _groups(self, forgotten: ForgetRequest | None, most: int) -> list[Selection]:
        seed = self.settings.seed
        parts = [Selection("train", part, forgotten, most, seed) for part in self.parts]
        return [*parts, Selection("train", None, self.everything, most, seed)]

    def _look(self, forgotten: ForgetRequest | None) -> list[Ranking]:
        """The statistics; where exchanges cost, what the model gets right before any edit is asked along with them."""
        if self.settings.erase:
            check_erasable(self.model, self.sites, self._example())
            groups = self._groups(forgotten, self.settings.statistics_images or SPREAD_IMAGES)
            queries = [Query(tuple(groups), replace(self.base, kind="spread"))]
        else:
            queries = self._peak_queries(self._groups(forgotten, self.settings.statistics_images))
        number = len(queries)
        if self.engine.is_federated and not self.settings.ratio:
            queries += self._baseline_queries()
        found = self.engine.measure(self.model, queries)
        if len(found) > number:
            self._set_baseline(*found[number:])
        if self.settings.erase:
            self.spreads = found[0]
            self._check_there(*self.spreads)
            return []
        return self._rank(found[:number])

    def _baseline_queries(self) -> list[Query]:
        """What is right before any edit: in all, and by label where the limit is that of unseen images alike."""
        groups, statistic = (*self.tried, self.kept), replace(self.base, kind="right")
        by_label = any(part.clients or part.samples for part in self.parts)
        return [Query(groups, statistic), *([Query(groups, replace(statistic, by_label=True))] if by_label else [])]

    def _set_baseline(self, found: Sequence[Observation], by_label: Sequence[Observation] = ()) -> None:
        kept = found[-1]
        if not kept.images:
            few = withheld_hint(self.engine)
            raise BadData(
                f"no validation image is left to measure trials on{few}; train with --valid above 0, or give --ratio"
            )
        self.retain_before = float(kept.mean("0"))
        self.limits = [
            self.settings.target if part.classes else _held_out(by_label[place], by_label[-1], self.retain_before)
            for place, part in enumerate(self.parts)
        ]

    def _peak_queries(self, groups: Sequence[Selection]) -> list[Query]:
        *parts, rest = groups
        if self.weighting == "paper":
            return [Query((part, rest), replace(self.base, kind="difference")) for part in parts]
        return [Query(tuple(groups), self.base)]

    def _rank(self, found: Sequence[Sequence[Observation]]) -> list[Ranking]:
        keys = {site.name: key_of(site, self.settings.tap) for site in self.sites}
        if self.weighting == "paper":
            if not all(o.images for (o,) in found):
                raise EmptyGroup("no client holds both images to forget and images to keep; use --weighting pooled")
            return [Ranking({site: o.mean(key) for site, key in keys.items()}) for (o,) in found]
        *gone, kept = found[0]
        self._check_there(*gone, kept)
        same = self.settings.contrast == "same-class"
        return [rank_kernels(o, same_label_retain(o, kept) if same else kept, keys) for o in gone]

    def _check_there(self, *groups: Observation) -> None:
        *gone, kept = groups
        for part, o in zip(self.parts, gone, strict=True):
            if not o.images:
                few = withheld_hint(self.engine)
                raise EmptyGroup(f"{part} has no training image (left){few}; there is nothing to forget")
        if not kept.images:
            raise EmptyGroup(f"{self.request} selects all images; nothing would be left to keep: retrain")

    def _correlation(self, forgotten: ForgetRequest | None) -> float | None:
        """How well a subsample's ranking agrees with that of all images, where a ledger knows it for nothing."""
        if not self.settings.statistics_images or not self.engine.has_ledger or self.settings.erase:
            return None
        known = self._rank(self.engine.measure(self.model, self._peak_queries(self._groups(forgotten, 0))))
        values = [rank_correlation(a, b) for a, b in zip(self.rankings, known, strict=True)]
        return sum(values) / len(values)

    def plan(self, ratio: float) -> Patch:
        """The edit at this ratio: the kernels of each part's ranking, the larger strength for one in several."""
        settings, selections = self.settings, []
        for chosen in self._choices(ratio):
            strong = {site: strengths(len(k), settings.alpha, settings.rank_base) for site, k in chosen.items()}
            selections.append({site: (kernels, strong[site]) for site, kernels in chosen.items()})
        return plan_edit(self.model, self.sites, merge_chosen(selections), settings.edit)

    def _choices(self, ratio: float) -> list[dict[str, Tensor]]:
        how: dict[str, Any] = {name: getattr(self.settings, name) for name in ("scope", "spread", "min_difference")}
        return [choose_kernels(ranking, ratio, **how) for ranking in self.rankings]

    def opposed(self, ratio: float) -> int:
        """How many kernels of the edit at this ratio respond no more to what goes than to what stays."""
        if not ratio:
            return 0  # nothing was edited
        pairs = zip(self.rankings, self._choices(ratio), strict=True)
        return sum(int((r.scores[site][kernels] <= 0).sum()) for r, c in pairs for site, kernels in c.items())

    def erase(self, share: float) -> Patch:
        """The edit that takes this share of directions out of each layer, on average."""
        *gone, kept = self.spreads
        lost = self.everything.labels(self.engine.names)
        labels = [label for label in range(len(self.engine.names)) if label not in lost]
        return plan_erasure(self.model, self.sites, gone, kept, labels=labels, share=share, spread=self.settings.spread)

    def _example(self) -> Tensor:
        return torch.rand(2, *self.engine.shape, generator=torch.Generator().manual_seed(0))

    def runner(self) -> TrialRunner:
        """Where trials are measured: validation images of what stays, training images of what goes."""
        settings = self.settings
        if self.retain_before is None and not settings.ratio:
            self._set_baseline(*self.engine.measure(self.model, self._baseline_queries()))
        example = self._example()
        classes = len(self.engine.names)
        return TrialRunner(
            self.engine,
            self.model,
            self.base,
            forget=list(zip(self.tried, self.limits, strict=True)),
            retain=self.kept,
            mending=Selection("train", None, self.everything, settings.repair_images, settings.seed),
            norms=norms_behind(self.model, self.sites, example) if settings.repair else [],
            layerwise=settings.repair_by == "layers",
            classifier=find_classifier(self.model, classes, example) if self.request.kind == "class" else None,
        )


def _weighting(request: ForgetRequest, settings: ForgetSettings, engine: Engine) -> str:
    """Pooled or the paper's; the latter is undefined for a client, whose images are all on one side."""
    if not engine.is_federated:
        return "pooled"
    if settings.contrast == "same-class":
        raise BadSetting("contrast same-class needs sums by label, which never leave a client; use retain")
    if settings.weighting == "paper" and request.clients:
        logger.warning("the paper's weighting is undefined for client requests: pooled statistics are used")
        return "pooled"
    return settings.weighting


def _held_out(part: Observation, kept: Observation, overall: float) -> float:
    """Accuracy on unseen images of the same labels, weighted as those labels occur in the part.

    Where nobody tells of a label (clients withhold counts of few images), it is the accuracy on all unseen images.
    """
    shares = torch.where(kept.counts > 0, kept.sums["0"].flatten() / kept.counts.clamp_min(1), overall)
    return float((part.counts * shares).sum() / part.images) if part.images else overall


def _followed(sites: Sequence[Site]) -> list[str]:
    return [layer.name for site in sites for layer in site.layers if layer.norm_kind == "BatchNorm2d"]


def _check_repair(sites: Sequence[Site], settings: ForgetSettings) -> None:
    """Refuse to re-estimate what would undo the edit: batch norm divides a weakened kernel's scale out again."""
    if settings.edit == "conv" and settings.repair and settings.alpha < 1 and (followed := _followed(sites)):
        raise BadSetting(f"repair undoes a conv edit before batch norm ({followed[0]}); give --no-repair or --alpha 1")


def _warn(sites: Sequence[Site], settings: ForgetSettings, opposed: int) -> None:
    if opposed:
        logger.warning(
            "%d of the edited kernels respond no more to what goes than to what stays; --min-difference 0 spares them",
            opposed,
        )
    followed = _followed(sites)
    if settings.edit == "conv" and followed and settings.alpha < 1:
        logger.warning(
            "batch norm follows %s: re-estimating its statistics undoes a conv edit; take another preset",
            followed[0] if len(followed) == 1 else f"{len(followed)} of the edited layers",
        )
