"""Was an image trained on? Attacks that guess it from a model's answers, calibrated on images whose answer is known.

A number of guesses says little alone: each attack comes with its accuracy on known images and its false positives.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedortho.data.images import check_labels, split_stratified
from fedortho.errors import BadData
from fedortho.models.predictions import refuse_broken

TINY = 1e-30  # logs of less are logs of this
LEAST = 10  # known images of a class, on either side, for a threshold of its own
SPLITS = 10  # of the cross-validation


@dataclass(frozen=True)
class Answers:
    """What a model says of some images, as probabilities, beside their labels."""

    probabilities: Tensor  # (n, classes), float64
    labels: Tensor  # (n,), int64

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def classes(self) -> int:
        return self.probabilities.shape[1]

    @property
    def confidence(self) -> Tensor:
        """The probability of each image's own label, (n,)."""
        return self.probabilities.gather(1, self.labels.unsqueeze(1)).squeeze(1)

    def take(self, positions: Tensor) -> "Answers":
        return Answers(self.probabilities[positions], self.labels[positions])


def answers_from(logits: Tensor, labels: Tensor, what: str) -> Answers:
    """Probabilities in float64; answers that are no finite numbers are refused, naming whose they are.

    >>> answers_from(torch.zeros(1, 4), torch.tensor([2]), "a model").confidence.tolist()
    [0.25]
    """
    if logits.dim() != 2 or labels.shape != logits.shape[:1]:
        raise BadData(f"{what}: {tuple(labels.shape)} labels for answers of shape {tuple(logits.shape)}")
    check_labels(labels, logits.shape[1])
    refuse_broken(logits, what)
    return Answers(logits.double().softmax(1), labels)


def correctness(answers: Answers) -> Tensor:
    """1 where the largest probability is the label's, else 0."""
    return (answers.probabilities.argmax(1) == answers.labels).double()


def confidence(answers: Answers) -> Tensor:
    """p_y (Song et al. 2019)."""
    return answers.confidence


def negative_entropy(answers: Answers) -> Tensor:
    """Σ_i p_i log p_i."""
    p = answers.probabilities
    return (p * _log(p)).sum(1)


def modified_entropy(answers: Answers) -> Tensor:
    """The negative of Song and Mittal's: (1 − p_y) log p_y + Σ_{i≠y} p_i log(1 − p_i); 0 for a sure right answer."""
    p, own = answers.probabilities, answers.confidence
    others = (p * _log(1 - p)).scatter(1, answers.labels.unsqueeze(1), 0.0).sum(1)
    return (1 - own) * _log(own) + others


def _log(values: Tensor) -> Tensor:
    return values.clamp_min(TINY).log()


STATISTICS: Mapping[str, Callable[[Answers], Tensor]] = {  # larger: more like a member
    "correctness": correctness,
    "confidence": confidence,
    "entropy": negative_entropy,
    "modified-entropy": modified_entropy,
}


def best_threshold(members: Tensor, others: Tensor) -> float:
    """The smallest observed τ with the largest ½[P(member ≥ τ) + P(other < τ)], by one sort.

    >>> best_threshold(torch.tensor([3.0, 5.0, 5.0]), torch.tensor([1.0, 3.0, 4.0]))
    5.0
    """
    if not len(members) or not len(others):
        raise BadData(f"a threshold needs known members and non-members, not {len(members)} and {len(others)}")
    values, places = torch.cat([members, others]).unique(return_inverse=True)
    mine = torch.bincount(places[: len(members)], minlength=len(values))
    theirs = torch.bincount(places[len(members) :], minlength=len(values))
    called, left = len(members) - (mine.cumsum(0) - mine), theirs.cumsum(0) - theirs
    score = called * len(others) + left * len(members)  # whole numbers: ties are ties
    return float(values[(score == score.max()).nonzero()[0, 0]])


@dataclass(frozen=True)
class Thresholds:
    """From which value on an image of each class is called a member."""

    each: Tensor  # (classes,), float64
    fallback: tuple[int, ...]  # classes with too few known images, which have the threshold of all classes together

    def called(self, values: Tensor, labels: Tensor) -> Tensor:
        return values >= self.each[labels]


def fit_thresholds(
    members: Tensor, member_labels: Tensor, others: Tensor, other_labels: Tensor, classes: int, least: int = LEAST
) -> Thresholds:
    """A threshold for each class; classes with fewer than `least` known images on either side share the global one."""
    each = torch.full((classes,), best_threshold(members, others), dtype=torch.float64)
    enough = torch.minimum(
        torch.bincount(member_labels, minlength=classes), torch.bincount(other_labels, minlength=classes)
    ) >= max(least, 1)
    for label in enough.nonzero().flatten().tolist():
        each[label] = best_threshold(members[member_labels == label], others[other_labels == label])
    return Thresholds(each, tuple((~enough).nonzero().flatten().tolist()))


@dataclass(frozen=True)
class Attack:
    """What an attack says of the images that had to go, and how far it can be trusted; all rates are shares."""

    name: str
    member_rate: float  # of the forgotten images: called members
    accuracy: float  # ½ (true positives + true negatives), on known images that it was not fitted on
    false_positive_rate: float  # of known non-members: called members
    fallback_classes: tuple[int, ...] = ()  # judged by the global threshold
    forgotten: int = 0  # images
    members: int = 0  # that accuracy was measured on; by cross-validation all of them, in turn
    others: int = 0


@dataclass(frozen=True)
class KnownMembership:
    """Images that were trained on and images that were not, as the attacked model answers to them."""

    members: Answers
    others: Answers

    def halves(self, seed: int = 0) -> tuple["KnownMembership", "KnownMembership"]:
        """One to fit an attack on, one to measure it on; each class is halved."""
        if min(len(self.members), len(self.others)) < 2:
            raise BadData(
                f"an attack needs at least 2 known members and 2 known non-members, "
                f"not {len(self.members)} and {len(self.others)}"
            )
        fit, check = zip(*(_halved(answers, seed) for answers in (self.members, self.others)), strict=True)
        return KnownMembership(*fit), KnownMembership(*check)


def _halved(answers: Answers, seed: int) -> tuple[Answers, Answers]:
    kept, aside = split_stratified(answers.labels, 0.5, seed)
    if not len(aside):  # no class has two
        kept, aside = kept[::2], kept[1::2]
    return answers.take(kept), answers.take(aside)


def match_known(members: Tensor, others: Tensor, most: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Positions of known members and non-members, drawn so that every class has as many of each, at most `most` in all.

    >>> mine, theirs = match_known(torch.tensor([0, 0, 0, 1, 2]), torch.tensor([0, 1, 1, 0]), most=100)
    >>> len(mine), sorted(theirs.tolist())[::2]  # two of class 0 and one of class 1; of class 2 nothing is known
    (3, [0, 3])
    """
    random = torch.Generator().manual_seed(seed)
    shared = sorted(set(members.tolist()) & set(others.tolist()))
    if not shared:
        raise BadData("no class has both retained training images and test images; there is nothing to calibrate on")
    share = max(most // len(shared), 1)
    drawn: tuple[list[Tensor], list[Tensor]] = ([], [])
    for label in shared:
        mine, theirs = (members == label).nonzero().flatten(), (others == label).nonzero().flatten()
        number = min(len(mine), len(theirs), share)
        for positions, chosen in zip((mine, theirs), drawn, strict=True):
            chosen.append(positions[torch.randperm(len(positions), generator=random)[:number]])
    return torch.cat(drawn[0]), torch.cat(drawn[1])


def _rate(called: Tensor) -> float:
    return float(called.double().mean())


def _judged(
    name: str,
    guess: Callable[[Answers], Tensor],
    forgotten: Answers,
    check: KnownMembership,
    fallback: tuple[int, ...] = (),
) -> Attack:
    """What guesses, (n,) bool, come to on images that the attack was not fitted on."""
    true, false = _rate(guess(check.members)), _rate(guess(check.others))
    sizes = len(forgotten), len(check.members), len(check.others)
    return Attack(name, _rate(guess(forgotten)), (true + 1 - false) / 2, false, fallback, *sizes)


def statistic_attack(
    name: str, forgotten: Answers, known: KnownMembership, *, least: int = LEAST, seed: int = 0
) -> Attack:
    """One of Song and Mittal's four: a right answer, or a statistic at or above its class's threshold, is a member."""
    _require(forgotten)
    statistic = STATISTICS[name]
    fit, check = known.halves(seed)
    if name == "correctness":
        return _judged(name, lambda answers: statistic(answers) == 1, forgotten, check)
    thresholds = fit_thresholds(
        statistic(fit.members), fit.members.labels, statistic(fit.others), fit.others.labels, forgotten.classes, least
    )
    used = torch.cat([forgotten.labels, check.members.labels, check.others.labels]).unique().tolist()
    fallback = tuple(label for label in thresholds.fallback if label in used)
    return _judged(name, lambda part: thresholds.called(statistic(part), part.labels), forgotten, check, fallback)


def svc_attack(forgotten: Answers, known: KnownMembership, *, seed: int = 0) -> Attack:
    """A support vector machine (RBF, C = 3, γ = 1 / features) on the confidence, as SalUn's code has it."""
    from sklearn.svm import SVC

    _require(forgotten)
    fit, check = known.halves(seed)
    machine = SVC(C=3.0, kernel="rbf", gamma="auto")
    machine.fit(*_points(confidence, fit))
    return _judged("svc-confidence", lambda answers: _predict(machine, confidence(answers)), forgotten, check)


def loss_attack(forgotten: Answers, known: KnownMembership, *, seed: int = 0) -> Attack:
    """Logistic regression on the loss; all rates are means over stratified shuffle splits of the known images."""
    _require(forgotten)
    values, truth = _points(_loss, known)
    mine, accuracies, false = [], [], []
    for model, aside in _regressions(values, truth, seed):
        called = torch.from_numpy(model.predict(values[aside])) == 1
        was = torch.from_numpy(truth[aside]) == 1
        mine.append(_rate(_predict(model, _loss(forgotten))))
        false.append(_rate(called[~was]))
        accuracies.append((_rate(called[was]) + 1 - false[-1]) / 2)
    rate, accuracy, wrong = (sum(rates) / SPLITS for rates in (mine, accuracies, false))
    return Attack("loss", rate, accuracy, wrong, (), len(forgotten), len(known.members), len(known.others))


def loss_separation(forgotten: Answers, unseen: Answers, *, seed: int = 0) -> float:
    """How well forgotten images can be told from unseen ones of their kind by the loss; 0.5: not at all.

    The cross-validated accuracy of the NeurIPS 2023 unlearning challenge's starting kit.
    """
    values, truth = _points(_loss, KnownMembership(forgotten, unseen))
    accuracies = []
    for model, aside in _regressions(values, truth, seed):
        called, was = model.predict(values[aside]) == 1, truth[aside] == 1
        accuracies.append((called[was].mean() + (~called[~was]).mean()) / 2)
    return float(sum(accuracies) / SPLITS)


def _loss(answers: Answers) -> Tensor:
    return -_log(answers.confidence)


def _require(forgotten: Answers) -> None:
    if not len(forgotten):
        raise BadData("there is no forgotten image to attack")


def _points(feature: Callable[[Answers], Tensor], known: KnownMembership) -> tuple[Any, Any]:
    """One feature of each image, (n, 1), and whether it was trained on, (n,), as scikit-learn wants them."""
    values = torch.cat([feature(known.members), feature(known.others)]).unsqueeze(1)
    truth = torch.cat([torch.ones(len(known.members)), torch.zeros(len(known.others))])
    return values.numpy(), truth.numpy()


def _predict(model: Any, values: Tensor) -> Tensor:
    return torch.from_numpy(model.predict(values.unsqueeze(1).numpy())) == 1


def _regressions(values: Any, truth: Any, seed: int) -> Any:
    """Logistic regressions, both sides weighing the same, each with the positions that it was not fitted on."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import StratifiedShuffleSplit

    least = int(min(truth.sum(), len(truth) - truth.sum()))
    if least < SPLITS:
        raise BadData(f"cross-validation needs at least {SPLITS} images that were trained on and not, not {least}")
    for fit, aside in StratifiedShuffleSplit(SPLITS, test_size=0.1, random_state=seed).split(values, truth):
        yield LogisticRegression(class_weight="balanced").fit(values[fit], truth[fit]), aside


ATTACKS: Mapping[str, Callable[..., Attack]] = {  # (forgotten, known, seed=) → Attack
    **{name: partial(statistic_attack, name) for name in STATISTICS},
    "svc-confidence": svc_attack,
    "loss": loss_attack,
}
