"""Membership attacks: guess from a model's predictions whether it was trained on an image.

Attacks are calibrated on images of known membership; each result states its accuracy and false positives on them.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedortho.data.images import check_labels, split_stratified
from fedortho.errors import BadData
from fedortho.models.predictions import refuse_broken

TINY = 1e-30  # lower bound of the arguments of logarithms
MIN_KNOWN = 10  # known members and non-members of a class that gets its own threshold
SPLITS = 10  # of the cross-validation


@dataclass(frozen=True)
class Predictions:
    """A model's probabilities for some images, and the images' labels."""

    probabilities: Tensor  # (n, classes), float64
    labels: Tensor  # (n,), int64

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def confidence(self) -> Tensor:
        """p_y, the probability of each image's own label, (n,)."""
        return self.probabilities.gather(1, self.labels.unsqueeze(1)).squeeze(1)

    def take(self, positions: Tensor) -> "Predictions":
        return Predictions(self.probabilities[positions], self.labels[positions])


def predictions_from(logits: Tensor, labels: Tensor, name: str) -> Predictions:
    """Probabilities in float64; NaN and infinity are refused, with the model's name.

    >>> predictions_from(torch.zeros(1, 4), torch.tensor([2]), "a model").confidence.tolist()
    [0.25]
    """
    if logits.dim() != 2 or labels.shape != logits.shape[:1]:
        raise BadData(f"{name}: {tuple(labels.shape)} labels for logits of shape {tuple(logits.shape)}")
    check_labels(labels, logits.shape[1])
    refuse_broken(logits, name)
    return Predictions(logits.double().softmax(1), labels)


def modified_entropy(predictions: Predictions) -> Tensor:
    """The negative of Song and Mittal's: (1 − p_y) log p_y + Σ_{i≠y} p_i log(1 − p_i); 0 if certain and correct."""
    p, own = predictions.probabilities, predictions.confidence
    others = (p * _log(1 - p)).scatter(1, predictions.labels.unsqueeze(1), 0.0).sum(1)
    return (1 - own) * _log(own) + others


def _log(values: Tensor) -> Tensor:
    return values.clamp_min(TINY).log()


def _loss(predictions: Predictions) -> Tensor:
    return -_log(predictions.confidence)


def correctness(predictions: Predictions) -> Tensor:
    """1 if the prediction is correct, else 0."""
    return (predictions.probabilities.argmax(1) == predictions.labels).double()


STATISTICS: Mapping[str, Callable[[Predictions], Tensor]] = {  # larger for members
    "correctness": correctness,
    "confidence": lambda answers: answers.confidence,  # Song et al. 2019
    "entropy": lambda answers: (answers.probabilities * _log(answers.probabilities)).sum(1),
    "modified-entropy": modified_entropy,
}


def best_threshold(members: Tensor, non_members: Tensor) -> float:
    """The smallest observed τ with the largest ½[P(member ≥ τ) + P(other < τ)], by one sort.

    >>> best_threshold(torch.tensor([3.0, 5.0, 5.0]), torch.tensor([1.0, 3.0, 4.0]))
    5.0
    """
    if not len(members) or not len(non_members):
        raise BadData(f"a threshold needs known members and non-members, not {len(members)} and {len(non_members)}")
    values, places = torch.cat([members, non_members]).unique(return_inverse=True)
    mine = torch.bincount(places[: len(members)], minlength=len(values))
    theirs = torch.bincount(places[len(members) :], minlength=len(values))
    called, left = len(members) - (mine.cumsum(0) - mine), theirs.cumsum(0) - theirs
    score = called * len(non_members) + left * len(members)  # whole numbers: ties are ties
    return float(values[(score == score.max()).nonzero()[0, 0]])


def fit_thresholds(
    members: Tensor, member_labels: Tensor, others: Tensor, other_labels: Tensor, classes: int, min_known: int
) -> tuple[Tensor, list[int]]:
    """The value from which on an image of each class is called a member, (classes,), and the classes that fell back.

    Classes with fewer than `min_known` images on either side have the threshold of all classes together.
    """
    per_class = torch.full((classes,), best_threshold(members, others), dtype=torch.float64)
    fallback = []
    for label in range(classes):
        mine, theirs = members[member_labels == label], others[other_labels == label]
        if min(len(mine), len(theirs)) >= max(min_known, 1):
            per_class[label] = best_threshold(mine, theirs)
        else:
            fallback.append(label)
    return per_class, fallback


@dataclass(frozen=True)
class AttackResult:
    """An attack's guesses on the forget set, and its accuracy on images of known membership; rates are shares."""

    member_rate: float  # share of the forget images called members
    accuracy: float  # ½ (true positives + true negatives), on known images not used for fitting
    false_positive_rate: float  # share of the known non-members called members
    fallback_classes: tuple[int, ...] = ()  # classes with the global threshold
    forgotten: int = 0  # images
    members: int = 0  # known members in the accuracy; under cross-validation all of them, in turn
    non_members: int = 0


@dataclass(frozen=True)
class KnownImages:
    """The attacked model's predictions for known members (trained on) and known non-members."""

    members: Predictions
    non_members: Predictions

    def halves(self, seed: int = 0) -> tuple["KnownImages", "KnownImages"]:
        """One half to fit an attack on, one to measure it on; stratified by class."""
        sizes = len(self.members), len(self.non_members)
        if min(sizes) < 2:
            raise BadData(f"an attack needs 2 known members and 2 non-members or more, not {sizes[0]} and {sizes[1]}")
        fit, check = [], []
        for side in (self.members, self.non_members):
            first, second = split_stratified(side.labels, 0.5, seed)
            if not len(second):  # no class has two images
                first, second = first[::2], first[1::2]
            fit.append(side.take(first))
            check.append(side.take(second))
        return KnownImages(*fit), KnownImages(*check)


def match_members(members: Tensor, non_members: Tensor, limit: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Positions of known members and non-members, equally many of each in every class, at most `limit` in all.

    >>> mine, theirs = match_members(torch.tensor([0, 0, 0, 1, 2]), torch.tensor([0, 1, 1, 0]), limit=100)
    >>> len(mine), sorted(theirs.tolist())[::2]  # two of class 0, one of class 1, none of class 2
    (3, [0, 3])
    """
    generator = torch.Generator().manual_seed(seed)
    shared = sorted(set(members.tolist()) & set(non_members.tolist()))
    if not shared:
        raise BadData("no class has both retained training images and test images; attacks cannot be calibrated")
    share = max(limit // len(shared), 1)
    drawn: tuple[list[Tensor], list[Tensor]] = ([], [])
    for label in shared:
        mine, theirs = (members == label).nonzero().flatten(), (non_members == label).nonzero().flatten()
        number = min(len(mine), len(theirs), share)
        for positions, chosen in zip((mine, theirs), drawn, strict=True):
            chosen.append(positions[torch.randperm(len(positions), generator=generator)[:number]])
    return torch.cat(drawn[0]), torch.cat(drawn[1])


def _rate(called: Tensor) -> float:
    return float(called.double().mean())


def _result(
    guess: Callable[[Predictions], Tensor], forgotten: Predictions, check: KnownImages, fallback: tuple[int, ...] = ()
) -> AttackResult:
    """The result of an attack, from its guesses, (n,) bool, on images that it was not fitted on."""
    _require(forgotten)
    true, false = _rate(guess(check.members)), _rate(guess(check.non_members))
    sizes = len(forgotten), len(check.members), len(check.non_members)
    return AttackResult(_rate(guess(forgotten)), (true + 1 - false) / 2, false, fallback, *sizes)


def statistic_attack(
    name: str, forgotten: Predictions, known: KnownImages, *, min_known: int = MIN_KNOWN, seed: int = 0
) -> AttackResult:
    """One of Song and Mittal's attacks: members are predicted correctly, or their statistic reaches a threshold."""
    statistic = STATISTICS[name]
    fit, check = known.halves(seed)
    if name == "correctness":
        return _result(lambda answers: statistic(answers) == 1, forgotten, check)
    mine, theirs = ((statistic(side), side.labels) for side in (fit.members, fit.non_members))
    thresholds, fallback = fit_thresholds(*mine, *theirs, forgotten.probabilities.shape[1], min_known)
    used = torch.cat([forgotten.labels, check.members.labels, check.non_members.labels]).unique().tolist()
    shared = tuple(label for label in fallback if label in used)
    return _result(lambda part: statistic(part) >= thresholds[part.labels], forgotten, check, shared)


def svc_attack(forgotten: Predictions, known: KnownImages, *, seed: int = 0) -> AttackResult:
    """A support vector machine (RBF, C = 3, γ = 1 / features) on the confidence, as SalUn's code has it."""
    from sklearn.svm import SVC

    fit, check = known.halves(seed)
    machine = SVC(C=3.0, kernel="rbf", gamma="auto").fit(*_points(STATISTICS["confidence"], fit))
    return _result(lambda answers: _predict(machine, answers.confidence.numpy()), forgotten, check)


def loss_attack(forgotten: Predictions, known: KnownImages, *, seed: int = 0) -> AttackResult:
    """Logistic regression on the loss; all rates are means over stratified shuffle splits of the known images."""
    _require(forgotten)
    losses = _loss(forgotten).numpy()
    rates = [(_rate(_predict(model, losses)), right, false) for model, right, false in _splits(known, seed)]
    sizes = len(forgotten), len(known.members), len(known.non_members)
    rate, accuracy, false = (sum(each) / SPLITS for each in zip(*rates, strict=True))
    return AttackResult(rate, accuracy, false, (), *sizes)


def loss_separation(forgotten: Predictions, unseen: Predictions, *, seed: int = 0) -> float:
    """How well the loss separates forgotten images from unseen images with the same labels; 0.5: not at all.

    The cross-validated accuracy of the NeurIPS 2023 unlearning challenge's starting kit.
    """
    return sum(accuracy for _, accuracy, _ in _splits(KnownImages(forgotten, unseen), seed)) / SPLITS


def _points(feature: Callable[[Predictions], Tensor], known: KnownImages) -> tuple[Any, Any]:
    """One feature of each image, (n, 1), and its membership, (n,), as NumPy arrays for scikit-learn."""
    values = torch.cat([feature(known.members), feature(known.non_members)]).unsqueeze(1)
    truth = torch.cat([torch.ones(len(known.members)), torch.zeros(len(known.non_members))])
    return values.numpy(), truth.numpy()


def _require(forgotten: Predictions) -> None:
    if not len(forgotten):
        raise BadData("the forget set has no image to attack")


def _predict(model: Any, values: Any) -> Tensor:
    return torch.from_numpy(model.predict(values.reshape(-1, 1))) == 1


def _splits(known: KnownImages, seed: int) -> Iterator[tuple[Any, float, float]]:
    """Class-balanced logistic regressions on the loss, with accuracy and false positives on the images set aside."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import StratifiedShuffleSplit

    values, truth = _points(_loss, known)
    fewest = int(min(truth.sum(), len(truth) - truth.sum()))
    if fewest < SPLITS:
        raise BadData(f"cross-validation needs at least {SPLITS} members and {SPLITS} non-members, not {fewest}")
    for fit, aside in StratifiedShuffleSplit(SPLITS, test_size=0.1, random_state=seed).split(values, truth):
        model = LogisticRegression(class_weight="balanced").fit(values[fit], truth[fit])
        called, was = _predict(model, values[aside]), torch.from_numpy(truth[aside]) == 1
        false = _rate(called[~was])
        yield model, (_rate(called[was]) + 1 - false) / 2, false


ATTACKS: Mapping[str, Callable[..., AttackResult]] = {  # (forgotten, known, seed=) → AttackResult
    **{name: partial(statistic_attack, name) for name in STATISTICS},
    "svc-confidence": svc_attack,
    "loss": loss_attack,
}
