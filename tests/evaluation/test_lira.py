import math
from statistics import NormalDist, median

import pytest
import torch

from fedortho.errors import BadData
from fedortho.evaluation.lira import (
    bootstrap_interval,
    finite,
    margins,
    memorisation,
    offline_scores,
    roc_auc,
    true_positive_rate,
    unlearning_scores,
)


def test_margins_are_log_odds_of_the_label_even_where_probabilities_are_0_or_1() -> None:
    logits = 3 * torch.randn(50, 5, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(50) % 5
    for row, label, value in zip(logits.tolist(), labels.tolist(), margins(logits, labels, "a").tolist(), strict=True):
        odds = math.exp(row[label]) / sum(math.exp(x) for i, x in enumerate(row) if i != label)
        assert value == pytest.approx(math.log(odds))
    far = margins(torch.tensor([[2000.0, 0, 0], [0, 2000.0, 0]]), torch.tensor([0, 0]), "a")
    assert far.tolist() == pytest.approx([2000 - math.log(2), -2000])
    with pytest.raises(BadData, match=r"shadow 3.*not finite"):
        margins(torch.tensor([[math.nan, 0.0]]), torch.tensor([0]), "shadow 3")


def random_game(models: int, images: int, seed: int, shift: float) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    met = torch.rand(models, images, generator=generator) < 0.5
    met[0], met[1] = True, False
    hard = torch.randn(images, generator=generator, dtype=torch.float64)
    noise = torch.randn(models, images, generator=generator, dtype=torch.float64)
    return 2 * hard + noise + shift * met, met


def slow_normal(values: list[list[float]], among: list[list[bool]], image: int) -> NormalDist:
    """Median of the image's own values, spread of all images about their medians."""
    squares, centre = [], math.nan
    for column in range(len(values[0])):
        own = [row[column] for row, mask in zip(values, among, strict=True) if mask[column]]
        squares += [(value - median(own)) ** 2 for value in own]
        centre = median(own) if column == image else centre
    return NormalDist(centre, math.sqrt(sum(squares) / len(squares)))


def test_offline_lira_is_the_deviation_from_a_gaussian_with_pooled_spread() -> None:
    shadows, met = random_game(9, 12, seed=1, shift=1.5)
    target = torch.randn(12, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    offline = offline_scores(target, shadows, met).tolist()
    for image, value in enumerate(target.tolist()):
        outside = slow_normal(shadows.tolist(), (~met).tolist(), image)
        assert offline[image] == pytest.approx(outside.zscore(value))


def test_lira_finds_members_that_answers_alone_hide() -> None:
    shadows, met = random_game(64, 400, seed=3, shift=1.5)
    target, mine = shadows[2], met[2]
    rest = torch.arange(64) != 2
    scores = offline_scores(target, shadows[rest], met[rest])
    found = roc_auc(scores[mine], scores[~mine])
    assert 0.8 < found < 0.95
    assert found > roc_auc(target[mine], target[~mine]) + 0.05


def test_unlearning_scores_leave_the_scored_model_out() -> None:
    (unlearned, met), (never, _) = random_game(6, 5, seed=4, shift=1.0), random_game(6, 5, seed=5, shift=0.0)
    met = torch.tensor([[True, False, True, True, False]] * 3 + [[True, True, True, False, True]] * 3)
    mine, theirs = unlearning_scores(unlearned, never, met)
    assert torch.equal(mine.isfinite(), met)
    assert torch.equal(theirs.isfinite(), met)
    for model, image in met.nonzero().tolist():
        rest = [i for i in range(6) if i // 2 != model // 2]
        gone = slow_normal(unlearned[rest].tolist(), met[rest].tolist(), image)
        none = slow_normal(never[rest].tolist(), met[rest].tolist(), image)
        for scores, value in ((mine, float(unlearned[model, image])), (theirs, float(never[model, image]))):
            ratio = math.log(gone.pdf(value)) - math.log(none.pdf(value))
            assert float(scores[model, image]) == pytest.approx(ratio)


def test_unlearning_that_equals_retraining_is_not_told_apart_and_a_shift_is() -> None:
    met = random_game(16, 200, seed=6, shift=0.0)[1]
    for shift, low, high in ((0.0, 0.4, 0.6), (1.5, 0.75, 0.95), (-1.5, 0.75, 0.95)):
        unlearned, never = (random_game(16, 200, seed=s, shift=0.0)[0] for s in (7, 8))
        hard = unlearned.mean(0) - never.mean(0)
        mine, theirs = unlearning_scores(unlearned - hard + shift, never, met)
        assert low < roc_auc(finite(mine), finite(theirs)) < high


@pytest.mark.parametrize("seed", range(10))
def test_curves_are_what_comparing_every_pair_gives(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    positive = torch.randint(0, 9, (37,), generator=generator).double() + seed % 3
    negative = torch.randint(0, 9, (250,), generator=generator).double()
    pairs = [(a > b) + (a == b) / 2 for a in positive.tolist() for b in negative.tolist()]
    assert roc_auc(positive, negative) == pytest.approx(sum(pairs) / len(pairs))
    for false in (0.01, 0.1, 0.5):
        rates = [0.0]
        for limit in [*positive.tolist(), *negative.tolist()]:
            if sum(b >= limit for b in negative.tolist()) / 250 <= false:
                rates.append(sum(a >= limit for a in positive.tolist()) / 37)
        assert true_positive_rate(positive, negative, false) == pytest.approx(max(rates))


def test_an_interval_covers_the_value_and_is_wider_when_models_differ_more() -> None:
    widths = []
    for spread in (0.0, 2.0):
        generator = torch.Generator().manual_seed(1)
        shift = spread * torch.randn(10, 1, generator=generator)
        sides = [torch.randn(10, 50, generator=generator) + shift for _ in range(2)]
        low, high = bootstrap_interval(roc_auc, *sides)
        assert low <= roc_auc(sides[0].flatten(), sides[1].flatten()) <= high
        assert (low, high) == bootstrap_interval(roc_auc, *sides)
        sides[1] += shift.flip(0) - shift
        low, high = bootstrap_interval(roc_auc, *sides)
        widths.append(high - low)
    assert widths[1] > 2 * widths[0]


def test_too_few_shadows_are_refused() -> None:
    values, met = torch.zeros(2, 3, dtype=torch.float64), torch.tensor([[True] * 3, [False] * 3])
    with pytest.raises(BadData, match="train more"):
        unlearning_scores(values, values, met)
    with pytest.raises(BadData, match="both sides"):
        roc_auc(torch.zeros(0), torch.zeros(1))


def test_memorisation_is_the_difference_of_the_medians_with_and_without_an_image() -> None:
    shadows, met = random_game(7, 5, seed=9, shift=2.0)
    found = memorisation(shadows, met).tolist()
    for image in range(5):
        sides = [
            [row[image] for row, mask in zip(shadows.tolist(), met.tolist(), strict=True) if mask[image] is side]
            for side in (True, False)
        ]
        assert found[image] == pytest.approx(median(sides[0]) - median(sides[1]))


def test_noise_alone_favours_neither_side_though_few_models_are_fitted() -> None:
    """A model that is scored by all others has one model fewer on its own side, so its AUC is below 0.5."""
    found = []
    for seed in range(30):
        generator = torch.Generator().manual_seed(seed)
        first = torch.rand(4, 200, generator=generator) < 0.5
        met = torch.stack([first, ~first], 1).flatten(0, 1)
        values = torch.randn(8, 200, generator=generator, dtype=torch.float64)
        found.append(roc_auc(*map(finite, unlearning_scores(values, values, met, ~met))))
    assert sum(found) / 30 == pytest.approx(0.5, abs=0.005)


def test_images_that_some_models_unlearned_are_compared_with_models_that_never_had_them() -> None:
    values, _ = random_game(8, 6, seed=10, shift=0.0)
    first = torch.rand(4, 6, generator=torch.Generator().manual_seed(11)) < 0.5
    met = torch.stack([first, ~first], 1).flatten(0, 1)
    mine, theirs = unlearning_scores(values, values, met, ~met)
    assert torch.equal(mine.isfinite(), met)
    assert torch.equal(theirs.isfinite(), ~met)
    for model, image in ((0, 1), (3, 4), (7, 5)):
        rest = [i for i in range(8) if i // 2 != model // 2]
        gone = slow_normal(values[rest].tolist(), met[rest].tolist(), image)
        none = slow_normal(values[rest].tolist(), (~met[rest]).tolist(), image)
        ratio = math.log(gone.pdf(float(values[model, image]))) - math.log(none.pdf(float(values[model, image])))
        assert float((mine if met[model, image] else theirs)[model, image]) == pytest.approx(ratio)


@pytest.mark.slow
def test_an_interval_covers_the_truth_though_all_models_score_an_image_by_nearly_the_same_gaussians() -> None:
    """Intervals over models alone cover 0.5 in 13 of these 20 games of pure noise."""
    covered = 0
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        first = torch.rand(6, 60, generator=generator) < 0.5
        met = torch.stack([first, ~first], 1).flatten(0, 1)
        values = torch.randn(12, 60, generator=generator, dtype=torch.float64)
        low, high = bootstrap_interval(roc_auc, *unlearning_scores(values, values, met, ~met))
        covered += low <= 0.5 <= high
    assert covered >= 18
