"""Per-image likelihood-ratio attacks: is a prediction more like that of models trained on the image, or of others?

LiRA (Carlini et al. 2022) and U-LiRA (Hayes et al. 2024, arXiv:2403.01218) on margins of shadow models. There are few
shadow models, so each image has its own centre (the median) and all images share one variance.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from fedortho.errors import BadData
from fedortho.evaluation.membership_attacks import predictions_from

MIN_SPREAD = 1e-9  # for margins that are all equal
DRAWS = 200  # of the bootstrap


def margins(logits: Tensor, labels: Tensor, name: str) -> Tensor:
    """φ = log p_y − log Σ_{i≠y} p_i of each image, (n,), float64; from the logits, so that no p underflows.

    >>> margins(torch.tensor([[0.0, 0.0], [900.0, 0.0]]), torch.tensor([0, 0]), "a model").tolist()
    [0.0, 900.0]
    """
    predictions_from(logits, labels, name)  # refuses NaN and infinity
    own = labels.unsqueeze(1)
    others = logits.double().scatter(1, own, -math.inf).logsumexp(1)
    return logits.double().gather(1, own).squeeze(1) - others


def _centre(values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Median of each image over the models of a mask, (n,), NaN without any; and the deviation pooled over images."""
    chosen = torch.where(mask, values, torch.nan)
    centre = chosen.nanquantile(0.5, dim=0)
    deviations = (chosen - centre)[mask]
    if not len(deviations):
        raise BadData("there are no shadow models to compare with; train more of them")
    return centre, deviations.square().mean().sqrt().clamp_min(MIN_SPREAD)


def _log_density(value: Tensor, centre: Tensor, spread: Tensor) -> Tensor:
    return -((value - centre) / spread).square() / 2 - spread.log()


def offline_scores(target: Tensor, shadows: Tensor, members: Tensor) -> Tensor:
    """Offline LiRA: how far φ lies above that of models not trained on the image, in deviations, (n,).

    `target` is φ under the attacked model, (n,); `shadows` under each shadow model, (models, n); `members` says which
    model was trained on which image.
    """
    centre, spread = _centre(shadows, ~members)
    return (target - centre) / spread


def unlearning_scores(
    unlearned: Tensor, never: Tensor, members: Tensor, others: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """U-LiRA: log N_u(φ) − log N_n(φ) of models that unlearned an image, and of models never trained on it.

    φ and both results are (models, n). `members` are the pairs of model and image that count for the first, `others`
    those for the second (None: the same); results are NaN elsewhere. A model is scored by Gaussians that are fitted
    without it and without the other model of its pair, which has the other half of the images: so both sides are
    fitted to equally many models, and noise alone favours neither.
    """
    others, pairs = members if others is None else others, torch.arange(len(unlearned)) // 2
    rows: tuple[list[Tensor], list[Tensor]] = ([], [])
    for number in range(len(unlearned)):
        is_fitted = (pairs != number // 2).unsqueeze(1)
        inside, outside = _centre(unlearned, members & is_fitted), _centre(never, others & is_fitted)
        for values, mask, ratios in zip((unlearned, never), (members, others), rows, strict=True):
            ratio = _log_density(values[number], *inside) - _log_density(values[number], *outside)
            ratios.append(torch.where(mask[number], ratio, torch.nan))
    positive, negative = (torch.stack(ratios) for ratios in rows)
    if not bool(positive.isfinite().any() & negative.isfinite().any()):
        raise BadData("no image is in the training data of two shadow models; train more of them")
    return positive, negative


def memorisation(shadows: Tensor, members: Tensor) -> Tensor:
    """How much higher φ is where an image was trained on: difference of the two medians, (n,); NaN without one."""
    inside, outside = (torch.where(mask, shadows, torch.nan).nanquantile(0.5, dim=0) for mask in (members, ~members))
    return inside - outside


def finite(scores: Tensor) -> Tensor:
    """The scores that count, (k,)."""
    return scores[scores.isfinite()]


def roc_auc(positive: Tensor, negative: Tensor) -> float:
    """Area under the ROC curve: the probability that a positive scores above a negative, ties counting half.

    From the sum of the positives' ranks, which is faster than a curve: the bootstrap calls it 200 times.

    >>> roc_auc(torch.tensor([2.0, 1.0]), torch.tensor([1.0, 0.0]))
    0.875
    """
    from scipy.stats import rankdata

    if not len(positive) or not len(negative):
        raise BadData(f"a ROC curve needs scores on both sides, not {len(positive)} and {len(negative)}")
    ranks = rankdata(torch.cat([positive, negative]).numpy())[: len(positive)]
    return float(ranks.mean() - (len(positive) + 1) / 2) / len(negative)


def true_positive_rate(positive: Tensor, negative: Tensor, false: float = 0.01) -> float:
    """The share of positives above the lowest threshold that at most a share `false` of the negatives exceeds."""
    allowed = int(false * len(negative) + 1e-9)
    if allowed >= len(negative):
        return 1.0
    limit = negative.sort(descending=True).values[allowed]
    return float((positive > limit).double().mean())


def bootstrap_interval(
    measure: Callable[[Tensor, Tensor], float], positive: Tensor, negative: Tensor, *, seed: int = 0
) -> tuple[float, float]:
    """95 % interval over redrawn shadow models and redrawn images, (models, n).

    Both are drawn whole, because scores of one model are correlated, and so are those of one image, which all models
    score by nearly the same Gaussians. It errs on the wide side; over models alone it covers the truth in 70 %.
    """
    is_scored = (positive.isfinite() | negative.isfinite()).any(1)
    generator, number, measured = torch.Generator().manual_seed(seed), int(is_scored.sum()), []
    for _ in range(DRAWS):
        drawn = torch.randint(number, (number, 1), generator=generator)
        images = torch.randint(positive.shape[1], (positive.shape[1],), generator=generator)
        one, other = (finite(scores[is_scored][drawn, images]) for scores in (positive, negative))
        if len(one) and len(other):
            measured.append(measure(one, other))
    low, high = torch.tensor(measured, dtype=torch.float64).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64))
    return float(low), float(high)
