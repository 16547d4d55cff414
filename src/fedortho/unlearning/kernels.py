"""The paper's edit on a task: query the peaks of kernels, rank kernels, choose and weaken them."""

import logging
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor, nn

from fedortho.data.request import EmptyGroup, ForgetRequest
from fedortho.engines.engine import Engine
from fedortho.engines.query import Query
from fedortho.errors import BadSetting
from fedortho.models.patch import Patch
from fedortho.statistics.observe import Observation, key_of
from fedortho.unlearning.calibrate import find_edit
from fedortho.unlearning.plan import ForgetPlan, Phases
from fedortho.unlearning.rank import Ranking, rank_correlation, rank_kernels, same_label_retain
from fedortho.unlearning.select import choose_kernels, kernel_patch, merge_chosen, strengths
from fedortho.unlearning.settings import CalibrationSettings, KernelSettings
from fedortho.unlearning.task import Task, start_task
from fedortho.unlearning.trials import measure_statistics

logger = logging.getLogger(__name__)
SAMPLE = 384  # images of each group that a calibrated edit is ranked on where no sums are kept


def plan_kernels(
    method: KernelSettings, model: nn.Module, engine: Engine, request: ForgetRequest, forgotten: ForgetRequest | None
) -> ForgetPlan:
    """Measure statistics, rank kernels, weaken a given ratio of them or one that trials find, bind the patch."""
    phases = Phases(engine)
    task = start_task(model, engine, request, method, forgotten)
    calibration = method if isinstance(method, CalibrationSettings) else None
    _check(task, method, calibration)
    weighting = choose_weighting(task, method)
    if calibration is not None and not (method.ratio or method.statistics_images):  # trials tell whether they suffice
        task = replace(task, statistic=replace(task.statistic, sample=SAMPLE))
    queries = peak_queries(task, weighting, method.statistics_images)
    peaks, baseline = measure_statistics(task, queries, calibration)
    rankings = rank_parts(task, peaks, weighting, method.contrast)
    correlation = sample_correlation(task, rankings, weighting, method)
    phases.end("statistics")

    def edit(ratio: float) -> Patch:
        return weakened(task, rankings, method, ratio)

    if calibration is None:
        found = ForgetPlan(edit(method.ratio), method.ratio)
    else:
        found = find_edit(task, edit, calibration, baseline, repair=method.repair)
    opposed = count_opposed(rankings, method, found.ratio)
    found = replace(found, sample_correlation=correlation, opposed=opposed, left_out=task.left_out)
    _warn(task, method, opposed)
    return phases.finish(found, task.model, request=str(request), method=method.name, statistics=weighting)


def chosen_kernels(ranking: Ranking, method: KernelSettings, ratio: float) -> dict[str, Tensor]:
    settings = {"scope": method.scope, "spread": method.spread}
    return choose_kernels(ranking, ratio, min_difference=method.min_difference, **settings)


def weakened(task: Task, rankings: Sequence[Ranking], method: KernelSettings, ratio: float) -> Patch:
    """The kernels of each part's ranking, weakened; a kernel of several parts by its larger strength."""
    selections = []
    for ranking in rankings:
        chosen = chosen_kernels(ranking, method, ratio)
        selections.append({s: (k, strengths(len(k), method.alpha, method.rank_base)) for s, k in chosen.items()})
    return kernel_patch(task.model, task.sites, merge_chosen(selections), method.edit)


def count_opposed(rankings: Sequence[Ranking], method: KernelSettings, ratio: float) -> int:
    """How many of the edited kernels respond at least as strongly to the retain set."""
    number = 0
    for ranking in rankings if ratio else ():  # 0: nothing was edited
        chosen = chosen_kernels(ranking, method, ratio)
        number += sum(int((ranking.scores[site][kernels] <= 0).sum()) for site, kernels in chosen.items())
    return number


def choose_weighting(task: Task, method: KernelSettings) -> str:
    """Pooled or the paper's; the latter is undefined for a client, whose images are all in the forget set."""
    if not task.engine.info.is_federated:
        return "pooled"
    if method.contrast == "same-class":
        raise BadSetting("contrast same-class needs sums by label, which never leave a client; use retain")
    if method.weighting == "paper" and task.request.clients:
        logger.warning("the paper's weighting is undefined for client requests: pooled statistics are used")
        return "pooled"
    return method.weighting


def peak_queries(task: Task, weighting: str, limit: int) -> list[Query]:
    """The peaks of all kernels on the forget sets and the retain set; with the paper's weighting their differences."""
    forget, retain = task.forget_sets(limit), task.retain_set(limit)
    if weighting == "paper":
        return [Query((part, retain), replace(task.statistic, kind="difference")) for part in forget]
    return [Query((*forget, retain), task.statistic)]


def rank_parts(
    task: Task, measured: Sequence[Sequence[Observation]], weighting: str, contrast: str = "retain"
) -> list[Ranking]:
    """One ranking for each part of the request, from the answers to `peak_queries`."""
    keys = {site.name: key_of(site, task.statistic.tap) for site in task.sites}
    if weighting == "paper":
        if not all(difference.images for (difference,) in measured):
            raise EmptyGroup("no client holds both images to forget and images to keep; use --weighting pooled")
        return [Ranking({site: o.mean(key) for site, key in keys.items()}) for (o,) in measured]
    *forget, retain = measured[0]
    task.check_measured(forget, retain)
    same = contrast == "same-class"
    return [rank_kernels(part, same_label_retain(part, retain) if same else retain, keys) for part in forget]


def sample_correlation(task: Task, rankings: Sequence[Ranking], weighting: str, method: KernelSettings) -> float | None:
    """Rank correlation of a subsample's rankings with those of all images; only where the engine has a ledger."""
    if not method.statistics_images or not task.engine.info.has_ledger:
        return None
    measured = task.engine.measure(task.model, peak_queries(task, weighting, 0))
    known = rank_parts(task, measured, weighting, method.contrast)
    values = [rank_correlation(a, b) for a, b in zip(rankings, known, strict=True)]
    return sum(values) / len(values)


def _normed_layers(task: Task) -> list[str]:
    """Edited layers that a batch norm follows: re-estimating its statistics undoes a scaled kernel."""
    return [layer.name for site in task.sites for layer in site.layers if layer.norm_kind == "BatchNorm2d"]


def _check(task: Task, method: KernelSettings, calibration: CalibrationSettings | None) -> None:
    """Refuse a target that the request has no use for, and a repair that would undo the edit."""
    if calibration and not (task.request.classes or method.ratio) and calibration.target != CalibrationSettings.target:
        aim = f"{task.request.kind} requests aim at what unseen images of the same labels get: leave --target out"
        raise BadSetting(f"target {calibration.target:g} is for classes; {aim}")
    normed = _normed_layers(task)
    if method.edit == "conv" and method.repair and method.alpha < 1 and normed:  # the norm divides the scale out again
        raise BadSetting(f"repair undoes a conv edit before batch norm ({normed[0]}); give --no-repair or --alpha 1")


def _warn(task: Task, method: KernelSettings, opposed: int) -> None:
    """Say where the edit is weaker than it looks."""
    if opposed:
        what = "of the edited kernels respond at least as strongly to the retain set; min-difference 0 spares them"
        logger.warning("%d %s", opposed, what)
    normed = _normed_layers(task)
    if method.edit == "conv" and normed and method.alpha < 1:
        where = normed[0] if len(normed) == 1 else f"{len(normed)} of the edited layers"
        advice = "re-estimating its statistics undoes a conv edit; take the method hide"
        logger.warning("batch norm follows %s: %s", where, advice)
