"""Trials: an edit is repaired, scrubbed and measured; test images are not used.

Forget accuracy is measured on training images, retain accuracy on validation images.

A central engine tries one candidate after the other; a federation tries many in one exchange.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from fedortho.engines.engine import withheld_hint
from fedortho.engines.query import Query, Selection
from fedortho.errors import BadData
from fedortho.models.classifier import find_classifier
from fedortho.models.norms import norms_behind
from fedortho.models.patch import Patch
from fedortho.statistics.observe import Observation
from fedortho.unlearning.repair import repaired
from fedortho.unlearning.scrub import scrubbed
from fedortho.unlearning.settings import CalibrationSettings
from fedortho.unlearning.task import Task


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
    retain: float
    patch: Patch

    @property
    def reaches(self) -> bool:
        return self.forget <= self.limit


@dataclass(frozen=True)
class Baseline:
    """Accuracies before any edit."""

    retain: float
    limits: tuple[float, ...]  # of each part: its forget accuracy may be at most this
    forget: float  # of several parts the one furthest above its limit


def trial_sets(task: Task, images: int) -> tuple[list[Selection], Selection]:
    """Training images of each part, and validation images of the retain set, four times as many."""
    return task.forget_sets(max(images // 4, 1) if images else 0), task.retain_set(images, "valid")


def baseline_queries(task: Task, settings: CalibrationSettings) -> list[Query]:
    """How many predictions are right before any edit; by label too where the limit is that of unseen images."""
    forget, retain = trial_sets(task, settings.trial_images)
    sets, statistic = (*forget, retain), replace(task.statistic, kind="right")
    by_label = any(part.clients or part.samples for part in task.parts)
    return [Query(sets, statistic), *([Query(sets, replace(statistic, by_label=True))] if by_label else [])]


def read_baseline(task: Task, settings: CalibrationSettings, measured: Sequence[Sequence[Observation]]) -> Baseline:
    """The accuracies from the answers to `baseline_queries`."""
    (*forget, retain), by_label = measured[0], measured[1] if len(measured) > 1 else ()
    if not retain.images:
        hint = withheld_hint(task.engine)
        raise BadData(
            f"no validation image is left to measure trials on{hint}; train with --valid above 0, or give --ratio"
        )
    overall = float(retain.mean("0"))
    limits = [
        settings.target if part.classes else _unseen_accuracy(by_label[place], by_label[-1], overall)
        for place, part in enumerate(task.parts)
    ]
    seen = [(part, limit) for part, limit in zip(forget, limits, strict=True) if part.images]
    return Baseline(overall, tuple(limits), _worst(seen, "0")[0] if seen else 0.0)


def _unseen_accuracy(part: Observation, retain: Observation, overall: float) -> float:
    """Accuracy on unseen images of the same labels, weighted as those labels occur in the part.

    For a label that no client counts (clients withhold counts of few images) it is the accuracy on all unseen images.
    """
    shares = torch.where(retain.counts > 0, retain.sums["0"].flatten() / retain.counts.clamp_min(1), overall)
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


def _worst(parts: Sequence[tuple[Observation, float]], key: str) -> tuple[float, float]:
    """Accuracy and limit of the part that is furthest above its limit."""
    return max(((float(part.mean(key)), limit) for part, limit in parts), key=lambda pair: pair[0] - pair[1])


@dataclass
class TrialRunner:
    """Repairs, scrubs and measures candidates."""

    task: Task
    forget: Sequence[tuple[Selection, float]]  # each part, and the accuracy that counts as forgotten
    retain: Selection
    repair: Selection  # images for the repair
    norms: Sequence[str] = ()  # batch norms to repair; none: no repair
    layerwise: bool = False
    classifier: str | None = None
    _repaired: dict[float, Patch] = field(default_factory=dict)  # by ratio

    @property
    def parallel_trials(self) -> int:
        return self.task.engine.info.parallel_trials

    def attempt(self, candidates: Sequence[Candidate]) -> list[Trial]:
        """Repair where there are norms, scrub where a strength is given, measure."""
        patches = self._scrub(candidates, self._repair(candidates))
        (*forget, retain) = self._measured("right", patches)
        parts = [(part, limit) for part, (_, limit) in zip(forget, self.forget, strict=True)]
        trials = []
        for number, (candidate, patch) in enumerate(zip(candidates, patches, strict=True)):
            worst = _worst(parts, f"{number}")
            trials.append(Trial(candidate.ratio, candidate.scrub, *worst, float(retain.mean(f"{number}")), patch))
        return trials

    def _measured(self, kind: str, patches: Sequence[Patch], classifier: str = "") -> list[Observation]:
        sets = (*(part for part, _ in self.forget), self.retain)
        statistic = replace(self.task.statistic, kind=kind, patches=tuple(patches), classifier=classifier)
        (found,) = self.task.engine.measure(self.task.model, [Query(sets, statistic)])
        return found

    def _repair(self, candidates: Sequence[Candidate]) -> list[Patch]:
        """The candidates with re-estimated batch norms; a ratio is repaired once, whatever scrub follows."""
        new = {c.ratio: c.patch for c in candidates if c.ratio and c.ratio not in self._repaired}
        if new and self.norms:
            turns = [(norm,) for norm in self.norms] if self.layerwise else [tuple(self.norms)]
            patches = list(new.values())
            for norms in turns:  # layerwise: each norm sees those before it repaired
                patches = self._repair_norms(patches, norms)
            self._repaired |= dict(zip(new, patches, strict=True))
        return [self._repaired.get(c.ratio, c.patch) for c in candidates]

    def _repair_norms(self, patches: Sequence[Patch], norms: tuple[str, ...]) -> list[Patch]:
        kind = "layer" if self.layerwise else "moments"
        statistic = replace(self.task.statistic, kind=kind, patches=tuple(patches), norms=norms)
        ((pooled,),) = self.task.engine.measure(self.task.model, [Query((self.repair,), statistic)])
        return [repaired(patch, pooled, number, norms) for number, patch in enumerate(patches)]

    def _scrub(self, candidates: Sequence[Candidate], patches: list[Patch]) -> list[Patch]:
        """The candidates with a scrubbed classifier; its inputs are measured once for each ratio."""
        wanted = [number for number, candidate in enumerate(candidates) if candidate.scrub]
        if not wanted or self.classifier is None:
            return patches
        ratios = list(dict.fromkeys(candidates[number].ratio for number in wanted))
        bare = [next(p for c, p in zip(candidates, patches, strict=True) if c.ratio == ratio) for ratio in ratios]
        *forget, retain = self._measured("inputs", bare, self.classifier)
        linear = self.task.model.get_submodule(self.classifier)
        assert isinstance(linear, nn.Linear)
        for number in wanted:
            place = ratios.index(candidates[number].ratio)
            rows = scrubbed(linear.weight, linear.bias, forget, retain, place, candidates[number].scrub)
            named = {f"{self.classifier}.{name}": value for name, value in rows.items()}
            patches[number] = replace(patches[number], replaced={**patches[number].replaced, **named})
        return patches


def make_runner(
    task: Task, settings: CalibrationSettings, baseline: Baseline | None, *, repair: bool = True
) -> TrialRunner:
    """A runner for this task; without a baseline (a fixed ratio) any accuracy counts as forgotten."""
    forget, retain = trial_sets(task, settings.trial_images)
    limits = (1.0,) * len(forget) if baseline is None else baseline.limits
    classes, example = len(task.engine.info.class_names), task.example
    return TrialRunner(
        task,
        forget=list(zip(forget, limits, strict=True)),
        retain=retain,
        repair=task.retain_set(settings.repair_images),
        norms=norms_behind(task.model, task.sites, example) if repair else [],
        layerwise=settings.repair_by == "layers",
        classifier=find_classifier(task.model, classes, example) if task.request.kind == "class" else None,
    )
