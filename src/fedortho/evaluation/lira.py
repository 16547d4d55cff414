"""Per-image likelihood-ratio attacks: is an answer more like that of models that met the image, or that did not?

LiRA (Carlini et al. 2022) and U-LiRA (Hayes et al. 2024, arXiv:2403.01218) on answers of shadow models. There are few
of them, so each image has a centre of its own (the median) and all images share one variance.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedortho.errors import BadData
from fedortho.evaluation.membership_attacks import answers_from

LEAST_SPREAD = 1e-9  # of answers that are all equal
DRAWS = 200  # of the bootstrap


def margins(logits: Tensor, labels: Tensor, what: str) -> Tensor:
    """φ = log p_y − log Σ_{i≠y} p_i of each image, (n,), float64, from the logits, so that no p is too small.

    >>> margins(torch.tensor([[0.0, 0.0], [900.0, 0.0]]), torch.tensor([0, 0]), "a model").tolist()
    [0.0, 900.0]
    """
    answers_from(logits, labels, what)  # refuses what is not finite
    own = labels.unsqueeze(1)
    others = logits.double().scatter(1, own, -math.inf).logsumexp(1)
    return logits.double().gather(1, own).squeeze(1) - others


def _centre(values: Tensor, among: Tensor) -> tuple[Tensor, Tensor]:
    """Median of each image over some models, (n,), NaN where there is none, and the deviation of all, pooled."""
    chosen = torch.where(among, values, torch.nan)
    centre = chosen.nanquantile(0.5, dim=0)
    rest = (chosen - centre)[among]
    if not len(rest):
        raise BadData("no shadow model is left to compare with; train more of them")
    return centre, rest.square().mean().sqrt().clamp_min(LEAST_SPREAD)


def _log_density(value: Tensor, centre: Tensor, spread: Tensor) -> Tensor:
    return -((value - centre) / spread).square() / 2 - spread.log()


def lira_scores(target: Tensor, shadows: Tensor, met: Tensor) -> Tensor:
    """Online LiRA: log N_in(φ) − log N_out(φ) of each image, (n,); NaN without shadows on either side.

    `target` is φ under the attacked model, (n,); `shadows` under each shadow model, (models, n), with `met` telling
    which of them were trained on which image.
    """
    inside, outside = _centre(shadows, met), _centre(shadows, ~met)
    return _log_density(target, *inside) - _log_density(target, *outside)


def offline_scores(target: Tensor, shadows: Tensor, met: Tensor) -> Tensor:
    """Offline LiRA: how far φ lies above that of models which never met the image, in deviations, (n,)."""
    centre, spread = _centre(shadows, ~met)
    return (target - centre) / spread


@dataclass(frozen=True)
class Scores:
    """Scores of one side of a game, image by image, and the shadow model that each comes from."""

    values: Tensor  # (k,)
    models: Tensor  # (k,)


def unlearning_scores(
    unlearned: Tensor, is_unlearned: Tensor, unmet: Tensor, is_unmet: Tensor
) -> tuple[Scores, Scores]:
    """U-LiRA: log N_u(φ) − log N_o(φ) of models that unlearned an image, and of models that never met it.

    φ is (models, n); the masks say which model and image count. A model is never scored by what it took part in:
    each time the Gaussians come from the other models.
    """
    parts: tuple[list[Tensor], list[Tensor]] = ([], [])
    for number in range(len(unlearned)):
        others = (torch.arange(len(unlearned)) != number).unsqueeze(1)
        gone, never = _centre(unlearned, is_unlearned & others), _centre(unmet, is_unmet & others)
        for values, mask, found in ((unlearned, is_unlearned, parts[0]), (unmet, is_unmet, parts[1])):
            ratio = _log_density(values[number], *gone) - _log_density(values[number], *never)
            found.append(torch.where(mask[number], ratio, torch.nan))
    mine, theirs = (_scores(torch.stack(found)) for found in parts)
    return mine, theirs


def _scores(table: Tensor) -> Scores:
    """Of a table (models, n) what is a number."""
    there = table.isfinite()
    if not bool(there.any()):
        raise BadData("no image was met by two shadow models or more; train more of them")
    return Scores(table[there], there.nonzero()[:, 0])


def area_under_curve(positive: Tensor, negative: Tensor) -> float:
    """The chance that a positive scores above a negative, ties counting half; by one sort.

    >>> area_under_curve(torch.tensor([2.0, 1.0]), torch.tensor([1.0, 0.0]))
    0.875
    """
    if not len(positive) or not len(negative):
        raise BadData(f"a ROC curve needs both sides, not {len(positive)} and {len(negative)} scores")
    values, places = torch.cat([positive, negative]).unique(return_inverse=True)
    above = torch.bincount(places[: len(positive)], minlength=len(values)).double()
    below = torch.bincount(places[len(positive) :], minlength=len(values)).double()
    wins = above @ (below.cumsum(0) - below / 2)
    return float(wins / (len(positive) * len(negative)))


def true_positives(positive: Tensor, negative: Tensor, false: float = 0.01) -> float:
    """The share of positives above the lowest threshold that lets at most `false` of the negatives through."""
    allowed = int(false * len(negative) + 1e-9)
    if allowed >= len(negative):
        return 1.0
    limit = negative.sort(descending=True).values[allowed]
    return float((positive > limit).double().mean())


def interval(
    measure: Callable[[Tensor, Tensor], float], positive: Scores, negative: Scores, *, seed: int = 0
) -> tuple[float, float]:
    """95 % of what redrawn shadow models give; whole models are drawn, as answers of one model vary together."""
    models = torch.cat([positive.models, negative.models]).unique()
    random = torch.Generator().manual_seed(seed)
    sides = [(side.values, [(side.models == m).nonzero().flatten() for m in models]) for side in (positive, negative)]
    found = []
    for _ in range(DRAWS):
        drawn = torch.randint(len(models), (len(models),), generator=random).tolist()
        one, other = (values[torch.cat([places[number] for number in drawn])] for values, places in sides)
        if len(one) and len(other):
            found.append(measure(one, other))
    low, high = torch.tensor(found, dtype=torch.float64).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64))
    return float(low), float(high)
