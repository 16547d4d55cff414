import math
from fractions import Fraction

import pytest
import torch
from small import TinyNet
from torch import Tensor

from fedortho.data.images import Images
from fedortho.errors import BadData
from fedortho.evaluation.membership_attacks import (
    ATTACKS,
    STATISTICS,
    KnownImages,
    Predictions,
    best_threshold,
    fit_thresholds,
    loss_separation,
    match_members,
    predictions_from,
    statistic_attack,
)
from fedortho.models.predictions import evaluate, logits_of


def random_answers(
    number: int, seed: int, *, classes: int = 4, sharp: float = 2.0, empty: int | None = None
) -> Predictions:
    """Rounded, so that many are equal; no image has the label `empty`."""
    generator = torch.Generator().manual_seed(seed)
    logits = (sharp * torch.randn(number, classes, generator=generator)).round()
    labels = torch.randint(0, classes, (number,), generator=generator)
    if empty is not None:
        labels[labels == empty] = (empty + 1) % classes
    return predictions_from(logits, labels, "random")


def log(value: float) -> float:
    return math.log(max(value, 1e-30))


def slow_statistic(name: str, p: list[float], y: int) -> float:
    if name == "correctness":
        return float(max(range(len(p)), key=lambda i: (p[i], -i)) == y)
    if name == "confidence":
        return p[y]
    if name == "entropy":
        return sum(x * log(x) for x in p)
    return (1 - p[y]) * log(p[y]) + sum(p[i] * log(1 - p[i]) for i in range(len(p)) if i != y)


def slow_threshold(members: list[float], others: list[float]) -> float:
    def score(t: float) -> Fraction:
        true = Fraction(sum(v >= t for v in members), len(members))
        return true + Fraction(sum(v < t for v in others), len(others))

    candidates = sorted({*members, *others})
    best = max(score(t) for t in candidates)
    return next(t for t in candidates if score(t) == best)


@pytest.mark.parametrize("name", STATISTICS)
def test_statistics_are_their_formulas_even_for_probabilities_of_0_and_1(name: str) -> None:
    hard = Predictions(torch.eye(4, dtype=torch.float64)[[0, 1, 2, 3]], torch.tensor([0, 1, 3, 2]))
    for answers in (random_answers(200, seed=1), hard):
        expected = [
            slow_statistic(name, p, y)
            for p, y in zip(answers.probabilities.tolist(), answers.labels.tolist(), strict=True)
        ]
        values = STATISTICS[name](answers)
        assert torch.isfinite(values).all()
        assert values.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_modified_entropy_knows_the_label_and_entropy_does_not() -> None:
    sure = torch.tensor([[0.97, 0.01, 0.02]] * 2, dtype=torch.float64)
    answers = Predictions(sure, torch.tensor([0, 1]))
    right, wrong = STATISTICS["modified-entropy"](answers).tolist()
    assert right > -0.1 > -4 > wrong
    same = STATISTICS["entropy"](answers)
    assert same[0] == same[1]


@pytest.mark.parametrize("seed", range(30))
def test_the_threshold_is_the_first_best_of_an_exhaustive_search(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, 40, (2,), generator=generator).tolist()
    members, others = (torch.randint(0, 8, (n,), generator=generator).double() for n in sizes)
    members += seed % 3
    assert best_threshold(members, others) == slow_threshold(members.tolist(), others.tolist())


def test_a_threshold_for_many_values_is_found_quickly() -> None:
    values = torch.rand(2, 400_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    best = 0.25 ** (1 / 3)  # where 1 − t⁴ + t is largest
    assert best_threshold(values[0] ** 0.25, values[1]) == pytest.approx(best, abs=0.02)


def slow_attack(name: str, forgotten: Predictions, known: KnownImages, least: int, seed: int) -> tuple[float, ...]:
    """Image by image, with thresholds by exhaustive search."""
    fit, check = known.halves(seed)

    def values(answers: Predictions, label: int | None = None) -> list[float]:
        pairs = zip(answers.probabilities.tolist(), answers.labels.tolist(), strict=True)
        return [slow_statistic(name, p, y) for p, y in pairs if label in (None, y)]

    def called(answers: Predictions) -> Fraction:
        count = 0
        for p, y in zip(answers.probabilities.tolist(), answers.labels.tolist(), strict=True):
            mine, theirs = values(fit.members, y), values(fit.non_members, y)
            if min(len(mine), len(theirs)) < least:
                mine, theirs = values(fit.members), values(fit.non_members)
            threshold = 1.0 if name == "correctness" else slow_threshold(mine, theirs)
            count += slow_statistic(name, p, y) >= threshold - 1e-12
        return Fraction(count, len(answers))

    lr, true, false = called(forgotten), called(check.members), called(check.non_members)
    return float(lr), float((true + 1 - false) / 2), float(false)


@pytest.mark.parametrize("name", STATISTICS)
@pytest.mark.parametrize("empty", [None, 2])
def test_statistic_attacks_agree_with_a_loop_also_when_a_class_has_no_known_image(name: str, empty: int | None) -> None:
    known = KnownImages(random_answers(90, 2, sharp=4, empty=empty), random_answers(70, 3, empty=empty))
    forgotten = random_answers(50, 4, sharp=3)
    attack = statistic_attack(name, forgotten, known, min_known=5, seed=1)
    slow = slow_attack(name, forgotten, known, 5, 1)
    assert (attack.member_rate, attack.accuracy, attack.false_positive_rate) == pytest.approx(slow, abs=1e-12)
    assert attack.fallback_classes == ((empty,) if empty is not None and name != "correctness" else ())


def test_classes_with_few_known_images_on_either_side_share_the_global_threshold() -> None:
    members, others = torch.tensor([5.0, 6, 7, 8, 100, 100]), torch.tensor([1.0, 2, 3, 4, 4, 100])
    member_labels, other_labels = torch.tensor([0, 0, 0, 0, 1, 1]), torch.tensor([0, 0, 0, 0, 0, 1])
    thresholds, fallback = fit_thresholds(members, member_labels, others, other_labels, classes=3, min_known=2)
    assert fallback == [1, 2]
    assert thresholds.tolist() == [5.0, 5.0, 5.0]
    alone, fallback = fit_thresholds(members, member_labels, others, other_labels, classes=3, min_known=1)
    assert fallback == [2]
    assert alone.tolist() == [5.0, 100.0, 5.0]


def confident(share: float, number: int, seed: int) -> Predictions:
    """Two classes; the label's probability is near `share`."""
    generator = torch.Generator().manual_seed(seed)
    own = (share + 0.02 * torch.randn(number, generator=generator, dtype=torch.float64)).clamp(0.01, 0.99)
    labels = torch.randint(0, 2, (number,), generator=generator)
    p = torch.stack([own, 1 - own], 1)
    return Predictions(torch.where(labels.unsqueeze(1) == 0, p, p.flip(1)), labels)


@pytest.mark.parametrize("name", [name for name in ATTACKS if name != "correctness"])
def test_every_attack_tells_sure_from_unsure_answers(name: str) -> None:
    known = KnownImages(confident(0.95, 200, 1), confident(0.6, 200, 2))
    seen, unseen = (ATTACKS[name](confident(share, 100, 3), known, seed=0) for share in (0.95, 0.6))
    assert seen.member_rate > 0.9
    assert unseen.member_rate < 0.1
    assert 0.9 < seen.accuracy <= 1
    assert seen.false_positive_rate < 0.1
    assert seen.forgotten == 100


@pytest.mark.parametrize("name", ATTACKS)
def test_no_attack_has_power_where_members_answer_like_the_others(name: str) -> None:
    known = KnownImages(random_answers(1000, 5), random_answers(1000, 6))
    attack = ATTACKS[name](random_answers(400, 7), known, seed=0)
    assert attack.accuracy == pytest.approx(0.5, abs=0.06)
    assert attack.member_rate == pytest.approx(attack.false_positive_rate, abs=0.15)


def test_accuracy_is_measured_on_images_that_the_attack_was_not_fitted_on() -> None:
    known = KnownImages(random_answers(60, 8, classes=2, sharp=5), random_answers(60, 9, classes=2, sharp=5))
    for half in range(2):
        part, other = known.halves(3)[half], known.halves(3)[1 - half]
        assert len(part.members) + len(other.members) == 60
        assert abs(len(part.non_members) - len(other.non_members)) <= 2
    marked = Predictions(known.members.probabilities, torch.arange(60) % 2)
    fit, check = KnownImages(marked, marked).halves(3)
    assert fit.members.labels.bincount().tolist() == check.members.labels.bincount().tolist() == [15, 15]


def test_separation_by_loss_is_half_for_alike_images_and_one_for_others() -> None:
    assert loss_separation(random_answers(500, 10), random_answers(400, 11)) == pytest.approx(0.5, abs=0.06)
    assert loss_separation(confident(0.95, 200, 1), confident(0.5, 100, 2)) > 0.97


def test_known_images_are_drawn_equally_from_every_class_and_differ_by_seed() -> None:
    members, others = torch.arange(400) % 4, torch.cat([torch.arange(90) % 3, torch.tensor([3] * 5)])
    mine, theirs = match_members(members, others, limit=80, seed=1)
    assert members[mine].bincount().tolist() == others[theirs].bincount().tolist() == [20, 20, 20, 5]
    assert len(set(mine.tolist())) == len(mine)
    again, _ = match_members(members, others, limit=80, seed=1)
    assert again.equal(mine)
    assert not match_members(members, others, limit=80, seed=2)[0].equal(mine)


def test_answers_that_are_not_finite_are_refused_by_name() -> None:
    logits, labels = torch.zeros(5, 3), torch.zeros(5, dtype=torch.int64)
    for bad in (float("nan"), float("inf"), -float("inf")):
        logits[3, 1] = bad
        with pytest.raises(BadData, match=rf"the forgotten model.*1 of 5.*image 3: {bad}"):
            predictions_from(logits, labels, "the forgotten model")
    with pytest.raises(BadData, match="label 3"):
        predictions_from(torch.zeros(1, 3), torch.tensor([3]), "a model")
    with pytest.raises(BadData, match="shape"):
        predictions_from(torch.zeros(2, 3), torch.tensor([1]), "a model")


def test_huge_finite_answers_are_probabilities_of_exactly_0_and_1() -> None:
    answers = predictions_from(torch.tensor([[1e30, -1e30], [3e38, 0.0]]), torch.tensor([0, 1]), "a model")
    assert answers.confidence.tolist() == [1.0, 0.0]
    assert all(torch.isfinite(statistic(answers)).all() for statistic in STATISTICS.values())


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_without_images_is_refused(name: str) -> None:
    none, some = random_answers(0, 1), random_answers(40, 1)
    for forgotten, known in (
        (none, KnownImages(some, some)),
        (some, KnownImages(none, some)),
        (some, KnownImages(some, none)),
    ):
        with pytest.raises(BadData):
            ATTACKS[name](forgotten, known, seed=0)
    with pytest.raises(BadData, match="calibrate"):
        match_members(torch.tensor([0, 0]), torch.tensor([1]), limit=10)


def test_logits_are_those_of_single_images_and_the_mode_stays(tiny: TinyNet, toy: Images) -> None:
    tiny.train()
    logits = logits_of(tiny, toy)
    assert tiny.training
    assert logits.dtype == torch.float64
    tiny.eval()
    with torch.no_grad():
        alone: Tensor = torch.cat([tiny(toy.normalise(toy.pixels[i : i + 1])) for i in range(5)])
    assert torch.allclose(logits[:5].float(), alone, atol=1e-5)
    right = float((logits.argmax(1) == toy.labels).double().mean())
    assert right == pytest.approx(evaluate(tiny, toy).accuracy)
    with pytest.raises(BadData, match="no images"):
        logits_of(tiny, toy.subset([]))
