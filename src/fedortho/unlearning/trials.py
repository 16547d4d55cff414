"""Trials: an edit is repaired, scrubbed and measured until it is decided; test images are not used.

Forget accuracy is measured on training images, retain accuracy on validation images, where the original answers the
same images. A candidate is tested in two stages: on few images first, and on the others unless the first already reject
it, each with an error of at most 5 % (an exact binomial tail for the target, a normal one for the difference of two
answers to the same images). The target may be accepted in the first stage. The budget may only between strengths of one
edit, which lose the same answers; between different edits that would favour a lucky one.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import add

import torch
from torch import Tensor, nn

from fedortho.engines.engine import withheld_hint
from fedortho.engines.query import Query, Selection
from fedortho.errors import BadData
from fedortho.models.norms import norms_behind
from fedortho.models.patch import NOTHING, Patch
from fedortho.models.split import find_classifier
from fedortho.statistics.observe import Observation
from fedortho.unlearning.repair import repaired
from fedortho.unlearning.scrub import scrubbed
from fedortho.unlearning.settings import CalibrationSettings
from fedortho.unlearning.task import Task

SCRUB_FORGET, SCRUB_RETAIN = 64, 128  # images that show the direction of a scrub
ERROR, DEVIATIONS = 0.05, 1.645  # of an early decision: the probability of a wrong one, and its normal quantile


@dataclass(frozen=True)
class Candidate:
    """An edit to be tried."""

    patch: Patch
    ratio: float  # 0: nothing is pruned
    scrub: float = 0.0


@dataclass(frozen=True)
class Trial:
    """The accuracies of one edit on the images of the trials."""

    ratio: float
    scrub: float  # strength, 0: none
    forget: float  # accuracy on the forget set; of several parts the one furthest above its limit
    limit: float  # the highest accuracy that counts as forgotten
    retain: float  # that of the original, less what was lost on the images that were looked at
    patch: Patch
    spare: float = 0.0  # by which the forget accuracy must be below the limit, because few images were counted
    doubt: float = 0.0  # and by which the retain accuracy must be above its limit

    @property
    def reaches(self) -> bool:
        return self.forget + self.spare <= self.limit

    def keeps(self, least_retain: float) -> bool:
        return self.retain - self.doubt >= least_retain


@dataclass(frozen=True)
class Baseline:
    """Accuracies before any edit."""

    retain: float
    limits: tuple[float, ...]  # of each part: its forget accuracy may be at most this
    forget: float  # of several parts the one furthest above its limit
    is_within: bool = False  # every part is at or below its limit


Look = tuple[Selection, ...]  # what candidates are measured on: training images of each part, then validation images


def look_at(task: Task, images: int, skip: int = 0, part: int = 4) -> Look:
    """`images` validation images after the first `skip`, and 1/`part` as many of each part of the request."""
    forget = task.forget_sets(images // part, skip // part, steady=True)
    return *forget, task.retain_set(images, "valid", skip, steady=True)


def looks(task: Task, images: int) -> list[Look]:
    """An eighth of the images, then the others."""
    if images < 32:
        return [look_at(task, images)]
    return [look_at(task, images // 8), look_at(task, images, images // 8)]


def strength_looks(task: Task, images: int) -> list[Look]:
    """First `images`/4 validation images and `images`/2 of each part of the request, then the rest of the first."""
    if images < 32:
        return [look_at(task, images, part=2)]
    first = (*task.forget_sets(images // 2, steady=True), task.retain_set(images // 4, "valid", steady=True))
    return [first, (task.retain_set(images, "valid", images // 4, steady=True),)]


@dataclass
class Score:
    """Right answers of one candidate that were counted so far."""

    limits: Sequence[float]  # of each part
    budget: float
    parts: list[tuple[int, int]] = field(default_factory=list)  # right answers and images of each part
    images: int = 0  # of the retain set
    lost: int = 0  # right answers of the original less those of the candidate
    changed: int = 0  # answers that only one of the two has right

    @property
    def worst(self) -> tuple[float, float]:
        """Accuracy and limit of the part that is furthest above its limit."""
        if not all(images for _, images in self.parts):
            raise BadData("no image of the forget set is left to measure trials on; give --ratio")
        shares = [right / images for right, images in self.parts]
        return max(zip(shares, self.limits, strict=True), key=lambda pair: pair[0] - pair[1])

    @property
    def spare(self) -> float:
        """What one more right answer would add, at most half the limit: the target is reached with it to spare."""
        return min(1 / min(images for _, images in self.parts), self.worst[1] / 2)

    @property
    def loss(self) -> float:
        return self.lost / max(self.images, 1)

    @property
    def doubt(self) -> float:
        """Half a standard deviation of the loss, at most half the budget."""
        return min(math.sqrt(self.changed) / max(self.images, 1), self.budget) / 2

    def reaches(self) -> bool | None:
        """Whether every part is forgotten; None: it is not decided."""
        verdicts = [is_at_most(limit, *part) for part, limit in zip(self.parts, self.limits, strict=True)]
        return None if None in verdicts and False not in verdicts else all(verdicts)

    def is_within(self) -> bool | None:
        return is_within(self.budget, self.lost, self.changed, max(self.images, 1))


def is_at_most(limit: float, right: int, images: int) -> bool | None:
    """Whether the accuracy that these counts come from is at most `limit`; None: it could be either.

    >>> is_at_most(0.01, 0, 300), is_at_most(0.01, 3, 50), is_at_most(0.01, 0, 50)
    (True, False, None)
    """
    from scipy.special import bdtr, bdtrc  # the two tails of the binomial distribution

    if limit >= 1 or bdtr(right, images, limit) <= ERROR:
        return True
    return False if bdtrc(right - 1, images, limit) <= ERROR else None


def is_within(budget: float, lost: int, changed: int, images: int) -> bool | None:
    """Whether a loss of right answers, of answers that `changed`, is within the budget; None: it could be either.

    >>> is_within(0.01, -20, 40, 1000), is_within(0.01, 30, 40, 1000), is_within(0.01, 8, 40, 1000)
    (True, False, None)
    """
    loss, deviation = lost / images, math.sqrt(max(changed, 1)) / images
    if loss + DEVIATIONS * deviation <= budget:
        return True
    return False if loss - DEVIATIONS * deviation > budget else None


def baseline_queries(task: Task, settings: CalibrationSettings) -> list[Query]:
    """How many answers are right before any edit; by label too where the limit is that of unseen images."""
    statistic = replace(task.statistic, kind="right")
    if all(part.classes for part in task.parts):
        return [Query(looks(task, settings.trial_images)[0], statistic)]
    sets = (*task.forget_sets(settings.trial_images, steady=True), task.retain_set(settings.trial_images, "valid"))
    return [Query(sets, statistic), *([] if settings.limit else [Query(sets, replace(statistic, by_label=True))])]


def read_baseline(task: Task, settings: CalibrationSettings, measured: Sequence[Sequence[Observation]]) -> Baseline:
    """The accuracies from the answers to `baseline_queries`."""
    (*forget, retain), by_label = measured[0], measured[1] if len(measured) > 1 else ()
    if not retain.images:
        hint = f"{withheld_hint(task.engine)}; train with --valid above 0, or give --ratio"
        raise BadData(f"no validation image is left to measure trials on{hint}")
    overall = float(retain.mean("right"))
    limits = [settings.target] * len(forget)
    for place, part in enumerate(task.parts):
        if not part.classes:
            limits[place] = settings.limit or _unseen_accuracy(by_label[place], by_label[-1], overall)
    seen = [(float(part.mean("right")), limit) for part, limit in zip(forget, limits, strict=True) if part.images]
    forget_, limit = max(seen, key=lambda pair: pair[0] - pair[1]) if seen else (0.0, 0.0)
    return Baseline(overall, tuple(limits), forget_, is_within=bool(seen) and forget_ <= limit)


def measure_baseline(task: Task, settings: CalibrationSettings) -> Baseline:
    """The accuracies before any edit, by an exchange of their own."""
    return read_baseline(task, settings, task.engine.measure(task.model, baseline_queries(task, settings)))


def _unseen_accuracy(part: Observation, retain: Observation, overall: float) -> float:
    """Accuracy on unseen images of the same labels, weighted as those labels occur in the part.

    For a label that no client counts (clients withhold counts of few images) it is the accuracy on all unseen images.
    """
    shares = torch.where(retain.counts > 0, retain.sums["right"].flatten() / retain.counts.clamp_min(1), overall)
    return float((part.counts * shares).sum() / part.images) if part.images else overall


def measure_statistics(
    task: Task, queries: Sequence[Query], settings: CalibrationSettings | None
) -> tuple[list[list[Observation]], Baseline | None]:
    """Answers to the queries; a federation that calibrates counts correct predictions in the same exchange."""
    if settings is None or settings.ratio or not task.engine.info.is_federated:
        return task.engine.measure(task.model, queries), None
    measured = task.engine.measure(task.model, [*queries, *baseline_queries(task, settings)])
    number = len(queries)
    return measured[:number], read_baseline(task, settings, measured[number:])


@dataclass
class TrialRunner:
    """Repairs, scrubs and measures candidates."""

    task: Task
    looks: Sequence[Look]
    inputs: Sequence[Look]  # images that the classifier's inputs are measured on, for the scrub
    baseline: Baseline
    budget: float  # retain accuracy that may be lost
    repair: Selection  # images for the repair
    norms: Sequence[str] = ()  # batch norms to repair; none: no repair
    layerwise: bool = False
    classifier: str | None = None
    own_rows: bool = True  # a scrub changes the classifier's rows of the forgotten classes alone; see above
    decide_all: bool = False  # also whether candidates that miss the target are within the budget
    _repaired: dict[float, Patch] = field(default_factory=dict)  # by ratio

    @property
    def is_parallel(self) -> bool:
        """Whether several candidates are best tried in one query."""
        return self.task.engine.info.parallel_trials > 1

    def attempt(self, candidates: Sequence[Candidate]) -> list[Trial]:
        """Repair where there are norms, scrub where a strength is given, measure until each is decided."""
        patches = self._scrub(candidates, self.repaired(candidates))
        scores = [Score(self.baseline.limits, self.budget) for _ in candidates]
        first, *later = self.looks
        everyone = list(range(len(candidates)))
        self._count(first, scores, patches, everyone, everyone)
        for look in later:
            waiting = [n for n in everyone if scores[n].is_within() is not False and scores[n].reaches() is not False]
            if look[:-1]:
                self._count(look, scores, patches, [n for n in waiting if scores[n].reaches() is None], [])
            waiting = everyone if self.decide_all else [n for n in waiting if scores[n].worst[0] <= scores[n].worst[1]]
            waiting = [n for n in waiting if scores[n].is_within() is not False]
            if not self.own_rows or any(scores[n].is_within() is None for n in waiting):
                self._count(look, scores, patches, [], waiting)
        return [
            Trial(c.ratio, c.scrub, *score.worst, self.baseline.retain - score.loss, patch, score.spare, score.doubt)
            for c, patch, score in zip(candidates, patches, scores, strict=True)
        ]

    def _count(
        self, look: Look, scores: "list[Score]", patches: Sequence[Patch], forget: Sequence[int], retain: Sequence[int]
    ) -> None:
        """Add the right answers of some candidates on the forget set, and of some on the retain set; one exchange."""
        statistic = replace(self.task.statistic, kind="right", classifier=self.classifier or "")
        queries = []
        if forget:
            queries.append(Query(look[:-1], replace(statistic, patches=tuple(patches[n] for n in forget))))
        if retain:
            beside = (NOTHING, *(patches[n] for n in retain))  # the original, for the same images
            queries.append(Query(look[-1:], replace(statistic, patches=beside)))
        found = self.task.engine.measure(self.task.model, queries) if queries else []
        for place, number in enumerate(forget):
            before = scores[number].parts or [(0, 0)] * len(found[0])
            new = [(int(part.sums["right"][:, place].sum()), part.images) for part in found[0]]
            scores[number].parts = [(a + c, b + d) for (a, b), (c, d) in zip(before, new, strict=True)]
        for place, number in enumerate(retain, 1):
            right, changed = (found[-1][0].sums[name].sum(0) for name in ("right", "changed"))
            scores[number].images += found[-1][0].images
            scores[number].lost += int(right[0] - right[place])
            scores[number].changed += int(changed[place])

    def repaired(self, candidates: Sequence[Candidate]) -> list[Patch]:
        """The candidates with re-estimated batch norms; a ratio is repaired once, whatever scrub follows."""
        new = {c.ratio: c.patch for c in candidates if c.ratio and c.ratio not in self._repaired}
        if new and self.norms:
            kind = "layer" if self.layerwise else "moments"
            for norms in [(norm,) for norm in self.norms] if self.layerwise else [tuple(self.norms)]:
                patches = tuple(new.values())  # layerwise: each norm sees those before it repaired
                statistic = replace(self.task.statistic, kind=kind, patches=patches, norms=norms)
                ((pooled,),) = self.task.engine.measure(self.task.model, [Query((self.repair,), statistic)])
                new = {ratio: repaired(new[ratio], pooled, number, norms) for number, ratio in enumerate(new)}
            self._repaired |= new
        held = self._held()
        found = [self._repaired.get(c.ratio, c.patch) for c in candidates]
        return [replace(patch, replaced={**patch.replaced, **held}) for patch in found] if held else found

    def _held(self) -> dict[str, Tensor]:
        """The classifier with the rows of classes that earlier requests removed set to the mean of the other rows.

        Such a logit is never the largest, its row tells nothing of the class, and no later edit brings the class back.
        """
        task, names = self.task, self.task.engine.info.class_names
        gone = [] if task.forgotten is None else task.forgotten.labels(names)
        if not gone or self.classifier is None:
            return {}
        linear = task.model.get_submodule(self.classifier)
        stays = [label for label in range(len(names)) if label not in task.removed.labels(names)]
        held = {f"{self.classifier}.{name}": t.detach().clone() for name, t in linear.named_parameters()}
        for rows in held.values():
            rows[list(gone)] = rows[stays].mean(0)
        return held

    def _scrub(self, candidates: Sequence[Candidate], patches: list[Patch]) -> list[Patch]:
        """The candidates with a scrubbed classifier; its inputs are measured once for each ratio."""
        wanted = [number for number, candidate in enumerate(candidates) if candidate.scrub]
        if not wanted or self.classifier is None:
            return patches
        ratios = list(dict.fromkeys(candidates[number].ratio for number in wanted))
        bare = [next(p for c, p in zip(candidates, patches, strict=True) if c.ratio == ratio) for ratio in ratios]
        *forget, retain = self._classifier_inputs(bare)
        linear = self.task.model.get_submodule(self.classifier)
        assert isinstance(linear, nn.Linear)
        weight, bias = f"{self.classifier}.weight", f"{self.classifier}.bias"
        names, patches = self.task.engine.info.class_names, list(patches)
        own = [part.labels(names) for part in self.task.parts] if self.own_rows else None
        for number in wanted:
            place, replaced = ratios.index(candidates[number].ratio), patches[number].replaced
            tensors = replaced.get(weight, linear.weight), replaced.get(bias, linear.bias)
            rows = scrubbed(*tensors, forget, retain, place, candidates[number].scrub, own)
            named = {f"{self.classifier}.{name}": value for name, value in rows.items()}
            patches[number] = replace(patches[number], replaced={**replaced, **named})
        return patches

    def _classifier_inputs(self, patches: Sequence[Patch]) -> list[Observation]:
        statistic = replace(self.task.statistic, kind="inputs", classifier=self.classifier or "")
        own = f"{self.classifier}."
        kept = [{n: t for n, t in patch.replaced.items() if not n.startswith(own)} for patch in patches]
        bodies = tuple(replace(patch, replaced=each) for patch, each in zip(patches, kept, strict=True))
        sets = [Query(look, replace(statistic, patches=bodies)) for look in self.inputs]
        return [reduce(add, several) for several in zip(*self.task.engine.measure(self.task.model, sets), strict=True)]


def make_runner(
    task: Task,
    settings: CalibrationSettings,
    baseline: Baseline | None,
    *,
    repair: bool = True,
    sequential: bool = False,
) -> TrialRunner:
    """A runner for this task; without a baseline (a fixed ratio) any accuracy counts as forgotten.

    Trials are `sequential` where many ratios are tried; one or two looks are cheaper where one or two are.
    """
    any_accuracy = Baseline(1.0, (1.0,) * len(task.parts), 1.0)
    classes, example = len(task.engine.info.class_names), task.example
    retained = replace(task.retain_set(settings.repair_images), steady=True)
    few = (*task.forget_sets(SCRUB_FORGET, steady=True), replace(retained, limit=SCRUB_RETAIN))
    classifier = find_classifier(task.model, classes, example) if task.request.kind == "class" else None
    images, may_scrub = settings.trial_images, settings.scrub and classifier is not None
    several = looks(task, images)
    once = strength_looks(task, images) if may_scrub else [look_at(task, images, part=2)]
    return TrialRunner(
        task,
        looks=several if sequential else once,
        inputs=several if sequential else [few],
        own_rows=not sequential,
        baseline=baseline or any_accuracy,
        budget=settings.max_retain_drop if baseline else 1.0,
        repair=retained,
        norms=norms_behind(task.model, task.sites, example) if repair else [],
        layerwise=settings.repair_by == "layers",
        classifier=classifier,
    )
