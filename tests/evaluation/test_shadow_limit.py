import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from small import TinyNet
from torch import nn

from fedortho.data.images import Images
from fedortho.errors import BadData
from fedortho.evaluation.shadow_limit import ShadowLimit, shadow_limit
from fedortho.evaluation.shadows import Shadows, ShadowSettings
from fedortho.models.predictions import logits_of
from fedortho.training.recipe import Recipe

QUICK = Recipe(epochs=2, batch_size=32, ortho=0.0, crop=0, flip=0.0)


def build(seed: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return TinyNet()


@pytest.fixture
def estimated(toy: Images, tmp_path: Path) -> Callable[[torch.Tensor], tuple[ShadowLimit, Shadows, nn.Module]]:
    def estimate(forget: torch.Tensor) -> tuple[ShadowLimit, Shadows, nn.Module]:
        shadows = Shadows(tmp_path, toy.subset(range(160)), build, ShadowSettings(8, 0, recipe=QUICK))
        model = build(77)
        return shadow_limit(shadows, forget, model, toy.subset(range(160, 240))), shadows, model

    return estimate


def right(model: nn.Module, images: Images) -> list[bool]:
    return (logits_of(model, images).argmax(1) == images.labels).tolist()


def test_the_limit_is_the_accuracy_on_unseen_images_moved_by_how_much_harder_these_are(
    toy: Images, estimated: Callable[[torch.Tensor], tuple[ShadowLimit, Shadows, nn.Module]]
) -> None:
    """Image by image and label by label, against loops."""
    forget = torch.zeros(160, dtype=torch.bool)
    forget[[0, 1, 2, 4, 8, 13]] = True
    found, shadows, model = estimated(forget)
    valid, rows = toy.subset(range(160, 240)), torch.nonzero(forget).flatten().tolist()
    never = []
    for row in rows:
        answers = [
            right(shadows.original(n), shadows.proxy)[row] for n in range(8) if not bool(shadows.members[n][row])
        ]
        assert len(answers) == 4
        never.append(sum(answers) / 4)

    def labelled(network: nn.Module) -> float:
        answers, labels = right(network, valid), valid.labels.tolist()
        shares = []
        for row in rows:
            own = [a for a, label in zip(answers, labels, strict=True) if label == int(shadows.proxy.labels[row])]
            shares.append(sum(own) / len(own))
        return sum(shares) / len(shares)

    assert found.never == pytest.approx(sum(never) / 6)
    assert found.unseen == pytest.approx(sum(labelled(shadows.original(n)) for n in range(8)) / 8)
    assert found.own == pytest.approx(labelled(model))
    odds = 1.0
    for share, power in ((found.own, 1), (found.never, 1), (found.unseen, -1)):
        inside = min(max(share, 1 / 12), 11 / 12)
        odds *= (inside / (1 - inside)) ** power
    assert found.limit == pytest.approx(odds / (1 + odds))
    assert math.isfinite(found.limit)


def test_without_images_there_is_no_limit(
    estimated: Callable[[torch.Tensor], tuple[ShadowLimit, Shadows, nn.Module]],
) -> None:
    with pytest.raises(BadData, match="0 images and 80 validation images"):
        estimated(torch.zeros(160, dtype=torch.bool))
