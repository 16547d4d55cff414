"""U-LiRA on single images: shadow models that unlearned an image against shadow models that never trained on it.

Every shadow model has half of the proxy, so each image of a request is unlearned by half of the models and unknown to
the others, which unlearned other images of the same request. Both sides carry the side effects of the method, and no
model is retrained for a request. The self-test shows that the attack finds what is there, and nothing else.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fedortho.data.images import Images
from fedortho.evaluation import lira
from fedortho.evaluation.shadows import Shadows
from fedortho.models.predictions import logits_of

MEMORISED = 100  # images of the self-test, at most a quarter of the proxy
AUC, FOUND = "AUC", "true positives at 1 % false"


def margins_under(model: nn.Module, images: Images, name: str, device: torch.device | str = "cpu") -> Tensor:
    """φ of the images' own labels, (n,)."""
    logits = logits_of(copy.deepcopy(model).to(device), images, device=device)
    return lira.margins(logits, images.labels, name)


def attack_summary(positive: Tensor, negative: Tensor, seed: int = 0) -> dict[str, Any]:
    """How well scores, (models, n), separate: AUC and true positives at 1 % false, with intervals over models."""
    sides = lira.finite(positive), lira.finite(negative)
    return {
        AUC: lira.roc_auc(*sides),
        f"{AUC}, 95 %": lira.bootstrap_interval(lira.roc_auc, positive, negative, seed=seed),
        FOUND: lira.true_positive_rate(*sides),
        f"{FOUND}, 95 %": lira.bootstrap_interval(lira.true_positive_rate, positive, negative, seed=seed),
        "scores": [len(side) for side in sides],
    }


def attack_samples(table: Tensor, members: Tensor, seed: int = 0) -> dict[str, Any]:
    """The attack on φ after unlearning, (models, n); `members` says which model was trained on which image."""
    return attack_summary(*lira.unlearning_scores(table, table, members, ~members), seed)


def most_memorised(shadows: Shadows, numbers: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
    """A mask over the proxy: images whose φ differs most between those of these models that have them and others."""
    rows = [margins_under(shadows.original(n), shadows.proxy, f"shadow model {n}", device) for n in numbers]
    by_image = lira.memorisation(torch.stack(rows), shadows.members[list(numbers)]).nan_to_num(nan=-torch.inf)
    mask = torch.zeros(len(shadows.proxy), dtype=torch.bool)
    mask[by_image.topk(max(min(MEMORISED, len(mask) // 4), 1)).indices] = True
    return mask


def self_test(shadows: Shadows, limit: float, device: torch.device | str = "cpu") -> dict[str, Any]:
    """The attack on the most memorised images: it must find them in untouched models, and not in retrained ones.

    Some models choose the images and others are measured, so that chance does not choose what it is measured by.
    """
    choosing, number = shadows.settings.choosing, shadows.settings.models
    chosen = most_memorised(shadows, range(choosing), device)
    targets, measured = shadows.proxy.subset(chosen), range(choosing, number)
    members = shadows.members[choosing:][:, chosen]
    found = {}
    for name, make in (("untouched", shadows.original), ("retrained", lambda n: shadows.without(n, chosen))):
        rows = [margins_under(make(n), targets, f"shadow model {n}, {name}", device) for n in measured]
        found[name] = attack_samples(torch.stack(rows), members, shadows.settings.seed)
    passes = {name: abs(attack[AUC] - 0.5) <= limit for name, attack in found.items()}
    holds = passes["retrained"] and not passes["untouched"]
    return {"holds": holds, "images": len(targets), "models": number - choosing, **found}
