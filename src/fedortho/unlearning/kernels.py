"""The paper's edit on a task: query the peaks of kernels, rank kernels, choose and weaken them."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from fedortho.data.request import EmptyGroup
from fedortho.engines.query import Query
from fedortho.errors import BadSetting
from fedortho.models.patch import Patch
from fedortho.models.sites import Site
from fedortho.statistics.observe import Observation, key_of
from fedortho.unlearning.rank import Ranking, rank_correlation, rank_kernels, same_label_retain
from fedortho.unlearning.select import choose_kernels, merge_chosen, plan_edit, strengths
from fedortho.unlearning.task import Task

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class KernelEdit:
    """How kernels are chosen and weakened, whatever the ratio."""

    edit: str
    alpha: float
    rank_base: int
    scope: str
    spread: str
    min_difference: float

    def choose(self, ranking: Ranking, ratio: float) -> dict[str, Tensor]:
        """Site → kernels."""
        return choose_kernels(ranking, ratio, scope=self.scope, spread=self.spread, min_difference=self.min_difference)

    def patch(self, task: Task, rankings: Sequence[Ranking], ratio: float) -> Patch:
        """The kernels of each part's ranking, weakened; a kernel of several parts by its larger strength."""
        selections = []
        for ranking in rankings:
            chosen = self.choose(ranking, ratio)
            strong = {site: strengths(len(kernels), self.alpha, self.rank_base) for site, kernels in chosen.items()}
            selections.append({site: (kernels, strong[site]) for site, kernels in chosen.items()})
        return plan_edit(task.model, task.sites, merge_chosen(selections), self.edit)

    def opposed(self, rankings: Sequence[Ranking], ratio: float) -> int:
        """How many of the edited kernels respond at least as strongly to the retain set."""
        if not ratio:
            return 0  # nothing was edited
        return sum(
            int((ranking.scores[site][kernels] <= 0).sum())
            for ranking in rankings
            for site, kernels in self.choose(ranking, ratio).items()
        )


def choose_weighting(task: Task, weighting: str, contrast: str) -> str:
    """Pooled or the paper's; the latter is undefined for a client, whose images are all in the forget set."""
    if not task.engine.info.is_federated:
        return "pooled"
    if contrast == "same-class":
        raise BadSetting("contrast same-class needs sums by label, which never leave a client; use retain")
    if weighting == "paper" and task.request.clients:
        logger.warning("the paper's weighting is undefined for client requests: pooled statistics are used")
        return "pooled"
    return weighting


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


def sample_correlation(
    task: Task, rankings: Sequence[Ranking], weighting: str, contrast: str, limit: int
) -> float | None:
    """Rank correlation of a subsample's rankings with those of all images; only where the engine has a ledger."""
    if not limit or not task.engine.info.has_ledger:
        return None
    measured = task.engine.measure(task.model, peak_queries(task, weighting, 0))
    known = rank_parts(task, measured, weighting, contrast)
    values = [rank_correlation(a, b) for a, b in zip(rankings, known, strict=True)]
    return sum(values) / len(values)


def normed_layers(sites: Sequence[Site]) -> list[str]:
    """Edited layers that a batch norm follows: re-estimating its statistics undoes a scaled kernel."""
    return [layer.name for site in sites for layer in site.layers if layer.norm_kind == "BatchNorm2d"]


def warn_of(task: Task, how: KernelEdit, opposed: int) -> None:
    """Say where the edit is weaker than it looks."""
    if opposed:
        logger.warning(
            "%d of the edited kernels respond at least as strongly to the retain set; --min-difference 0 spares them",
            opposed,
        )
    normed = normed_layers(task.sites)
    if how.edit == "conv" and normed and how.alpha < 1:
        logger.warning(
            "batch norm follows %s: re-estimating its statistics undoes a conv edit; take the method hide",
            normed[0] if len(normed) == 1 else f"{len(normed)} of the edited layers",
        )
