"""All metrics of one case: a model that is said to have forgotten, beside a retrained one; each pass is made once."""

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, cached_property, partial

import torch
from torch import Tensor, nn

from fedortho.data.images import Images
from fedortho.data.request import ForgetRequest
from fedortho.errors import BadData, BadSetting
from fedortho.evaluation.case import Case
from fedortho.evaluation.membership_attacks import (
    ATTACKS,
    Answers,
    Attack,
    KnownMembership,
    answers_from,
    loss_separation,
    match_known,
)
from fedortho.evaluation.metrics import Metric, Reading, measured
from fedortho.models.capture import capture
from fedortho.models.classifier import find_classifier
from fedortho.models.predictions import evaluating, logits_of
from fedortho.statistics.query import draw

MOST = 2500  # images of a group that is only sampled
LEAST_CLIENT = 20  # images of each client, where there are so many
PAPER_ATTACK = "confidence"


class Groups:
    """The images that metrics are measured on, drawn once for all models of a case."""

    def __init__(self, case: Case, most: int = MOST) -> None:
        self.case, self.most = case, most

    @cached_property
    def _known(self) -> tuple[Tensor, Tensor]:
        return match_known(self.case.kept_train.labels, self.case.kept_test.labels, self.most, self.case.seed)

    @property
    def kept(self) -> Images:
        """Known members: retained training images, of each class as many as of known non-members."""
        return self.case.kept_train.subset(self._known[0])

    @property
    def others(self) -> Tensor:
        """Known non-members: positions of test images of classes that stay."""
        return (~self.mask(self.case.everything)).nonzero().flatten()[self._known[1]]

    def mask(self, request: ForgetRequest) -> Tensor:
        """Test images of the classes that a request names."""
        return ForgetRequest(request.classes).mask(self.case.data.test)

    @cached_property
    def gone(self) -> Images:
        """Training images that had to go: all, as forget accuracy is defined on them; of a class a sample."""
        gone = self.case.gone_train
        return draw(gone, self.most, self.case.seed) if self.case.request.kind == "class" else gone

    @cached_property
    def alike(self) -> Tensor:
        """Test images of the same kind as the forgotten ones, as a mask."""
        return torch.isin(self.case.data.test.rows, self.case.unseen(self.case.gone_train.labels).rows)

    @cached_property
    def clients(self) -> dict[int, Images]:
        """Of each client that stays, some of its retained training images."""
        held = self.case.clients or {}
        staying = [client for client in held if client not in self.case.everything.clients]
        share = max(self.most // max(len(staying), 1), LEAST_CLIENT)
        kept = self.case.kept_train
        found = {client: draw(kept.subset(torch.isin(kept.rows, held[client])), share, client) for client in staying}
        return {client: images for client, images in found.items() if len(images)}

    def images(self, name: str) -> Images:
        if name == "clients":
            return replace(self.case.data.train, rows=torch.cat([part.rows for part in self.clients.values()]))
        if name == "test":
            return self.case.data.test
        return self.gone if name == "gone" else self.kept


class ModelOutputs:
    """One model's answers to the groups, and what its classifier receives; each group is passed once."""

    def __init__(self, name: str, model: nn.Module, groups: Groups) -> None:
        self.name, self.groups = name, groups
        self.model = copy.deepcopy(model).to(groups.case.device).eval()
        self._passed: dict[str, tuple[Tensor, Tensor | None]] = {}
        self.attack = cache(self._attack)

    def _pass(self, group: str) -> tuple[Tensor, Tensor | None]:
        if group not in self._passed:
            seen: list[Tensor] = []
            device = self.groups.case.device
            with _classifier_watched(self.model, self.groups.case, seen):
                logits = logits_of(self.model, self.groups.images(group), device=device)
            self._passed[group] = logits, torch.cat(seen) if seen else None
        return self._passed[group]

    def answers(self, group: str, chosen: Tensor | None = None) -> Answers:
        """To a group or to some of its images; answers that are not finite are refused."""
        whole = answers_from(self._pass(group)[0], self.groups.images(group).labels, f"{self.name}, {group} images")
        return whole if chosen is None else whole.take(chosen)

    def features(self, group: str) -> Tensor:
        found = self._pass(group)[1]
        if found is None:
            raise BadSetting(f"{self.name} does not end in a linear layer; its features cannot be compared")
        return found

    @cached_property
    def forgotten(self) -> Answers:
        """To at most `most` of the forgotten training images."""
        answers = self.answers("gone")
        order = torch.randperm(len(answers), generator=torch.Generator().manual_seed(self.groups.case.seed))
        return answers.take(order[: self.groups.most])

    def _attack(self, name: str) -> Attack:
        known = KnownMembership(self.answers("kept"), self.answers("test", self.groups.others))
        return ATTACKS[name](self.forgotten, known, seed=self.groups.case.seed)


@contextmanager
def _classifier_watched(model: nn.Module, case: Case, seen: list[Tensor]) -> Iterator[None]:
    """Collect what the last linear layer receives meanwhile, float64; nothing if there is no such layer."""
    test = case.data.test
    with evaluating(model):
        example = test.normalise(test.pixels[test.rows[:2]].to(case.device))
        name = find_classifier(model, test.classes, example)
    if name is None:
        yield
        return
    with capture(model, [name], lambda given: given.cpu().double(), inputs=True) as received:
        yield
    seen += received.get(name, [])


def share_right(answers: Answers) -> float:
    if not len(answers):
        raise BadData("there is no image to measure this on")
    return float((answers.probabilities.argmax(1) == answers.labels).double().mean())  # on the CPU


def _accuracy(answers: Answers) -> Reading:
    return Reading(share_right(answers), len(answers))


def _forget(outputs: ModelOutputs) -> Reading:
    case = outputs.groups.case
    if case.request.kind != "class":
        return _accuracy(outputs.answers("gone"))
    return _accuracy(outputs.answers("test", outputs.groups.mask(case.request)))


def _retain(outputs: ModelOutputs) -> Reading:
    return _accuracy(outputs.answers("test", ~outputs.groups.mask(outputs.groups.case.everything)))


def _own_class(outputs: ModelOutputs) -> Reading:
    test, names = outputs.answers("test"), outputs.groups.case.data.test.names
    affected = outputs.groups.gone.labels.unique()
    reading = _accuracy(test.take(torch.isin(test.labels, affected)))
    each = {names[label]: _accuracy(test.take(test.labels == label)).value for label in affected.tolist()}
    return Reading(reading.value, reading.images, {"each": each})


def client_changes(outputs: ModelOutputs, original: ModelOutputs) -> Tensor:
    """By how much accuracy on each remaining client's own images has changed, (clients,)."""
    if not outputs.groups.clients:
        raise BadData("no client stays; there is nobody to compare")
    sizes = [len(part) for part in outputs.groups.clients.values()]
    right = [
        answers.probabilities.argmax(1) == answers.labels
        for answers in (outputs.answers("clients"), original.answers("clients"))
    ]
    change = right[0].double() - right[1].double()  # on the CPU
    return torch.stack([part.mean() for part in change.split(sizes)])


def _client_change(quantile: float, original: ModelOutputs, outputs: ModelOutputs) -> Reading:
    changes = client_changes(outputs, original)
    images = sum(len(part) for part in outputs.groups.clients.values())
    return Reading(float(changes.quantile(quantile)), images, {"clients": len(changes)})


def _member_rate(name: str, outputs: ModelOutputs) -> Reading:
    attack = outputs.attack(name)
    names = outputs.groups.case.data.test.names
    details = {
        "attack accuracy": attack.accuracy,
        "false positives": attack.false_positive_rate,
        "global threshold for": [names[label] for label in attack.fallback_classes],
        "known members": attack.members,
        "known non-members": attack.others,
    }
    return Reading(attack.member_rate, attack.forgotten, details)


def _separation(outputs: ModelOutputs) -> Reading:
    unseen = outputs.answers("test", outputs.groups.alike)
    gone = outputs.forgotten.take(torch.isin(outputs.forgotten.labels, unseen.labels))
    return Reading(loss_separation(gone, unseen, seed=outputs.groups.case.seed), len(gone) + len(unseen))


def js_divergence(p: Tensor, q: Tensor) -> Tensor:
    """½ KL(p‖m) + ½ KL(q‖m) with m = (p + q)/2, in bits, row by row: 0 for equal rows, 1 for disjoint ones.

    >>> js_divergence(torch.eye(2), torch.tensor([[1.0, 0.0], [1.0, 0.0]])).tolist()
    [0.0, 1.0]
    """
    middle = (p + q) / 2
    left, right = (torch.xlogy(x, x / middle.clamp_min(torch.finfo(middle.dtype).tiny)).sum(1) for x in (p, q))
    return ((left + right) / (2 * math.log(2))).clamp(0.0, 1.0)


def _output_distance(kind: str, group: str, outputs: ModelOutputs, retrain: ModelOutputs) -> Reading:
    mine, theirs = outputs.answers(group).probabilities, retrain.answers(group).probabilities
    each = (mine - theirs).norm(dim=1) if kind == "l2" else js_divergence(mine, theirs)
    return Reading(float(each.mean()), len(each))


def _activation_distance(group: str, outputs: ModelOutputs, retrain: ModelOutputs) -> Reading:
    """Features of separately trained networks are not aligned: a second Retrain tells what distance is usual."""
    mine, theirs = outputs.features(group), retrain.features(group)
    if mine.shape != theirs.shape:
        raise BadData(f"{outputs.name} has {mine.shape[1]} features, {retrain.name} {theirs.shape[1]}")
    if not bool(torch.isfinite(mine).all() & torch.isfinite(theirs).all()):
        raise BadData(f"features of {outputs.name} or {retrain.name} are not finite on {group} images")
    return Reading(float((mine - theirs).norm(dim=1).mean() / theirs.norm(dim=1).mean().clamp_min(1e-12)), len(mine))


def _mean_output(outputs: ModelOutputs, retrain: ModelOutputs) -> Reading:
    mine, theirs = outputs.answers("gone").probabilities, retrain.answers("gone").probabilities
    return Reading(float((mine.mean(0) - theirs.mean(0)).abs().sum() / 2), len(mine))


def _gaps(outputs: ModelOutputs, retrain: ModelOutputs) -> dict[str, float]:
    """Between accuracies on forgotten and retained training images and retained classes' test images; of the MIA."""
    kept = ~outputs.groups.mask(outputs.groups.case.everything)
    values = []
    for one in (outputs, retrain):
        groups = (one.answers("gone"), one.answers("kept"), one.answers("test", kept))
        values.append([*map(share_right, groups), one.attack(PAPER_ATTACK).member_rate])
    names = ("forget", "retain", "test", "mia")
    return {name: abs(mine - theirs) for name, mine, theirs in zip(names, *values, strict=True)}


def _average_gap(outputs: ModelOutputs, retrain: ModelOutputs) -> Reading:
    gaps = _gaps(outputs, retrain)
    return Reading(sum(gaps.values()) / len(gaps), len(outputs.groups.gone), {"gaps": gaps})


def _tug_of_war(first: str, outputs: ModelOutputs, retrain: ModelOutputs) -> Reading:
    gaps = _gaps(outputs, retrain)
    return Reading((1 - gaps[first]) * (1 - gaps["retain"]) * (1 - gaps["test"]), len(outputs.groups.gone))


def untrained_like(model: nn.Module, seed: int) -> nn.Module:
    """A copy with new weights from each layer's own initialisation; the caller's random state stays as it was."""
    fresh = copy.deepcopy(model).cpu()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for name, module in fresh.named_modules():
            reset = getattr(module, "reset_parameters", None)
            if callable(reset):
                reset()
            elif list(module.parameters(recurse=False)):
                raise BadSetting(f"{name or 'the model'} ({type(module).__name__}) has no reset_parameters")
    return fresh


def _zrf_against(untrained: ModelOutputs, outputs: ModelOutputs) -> Reading:
    return Reading(1 - _output_distance("js", "gone", outputs, untrained).value, len(outputs.groups.gone))


def _of_one(groups: Groups, original: ModelOutputs) -> dict[str, Callable[[ModelOutputs], Reading]]:
    """What is measured on a model alone, as far as it applies to the request."""
    request, found = groups.case.request, {"forget-accuracy": _forget, "retain-accuracy": _retain}
    found["test-accuracy"] = lambda outputs: _accuracy(outputs.answers("test"))
    if request.samples:
        found["class-accuracy"] = _own_class
    if groups.case.clients is not None:
        for name, quantile in (("min", 0.0), ("q1", 0.25), ("median", 0.5), ("q3", 0.75)):
            found[f"client-change-{name}"] = partial(_client_change, quantile, original)
    found |= {f"mia-{name}": partial(_member_rate, name) for name in ATTACKS}
    untrained = cache(
        lambda: ModelOutputs("an untrained network", untrained_like(original.model, groups.case.seed), groups)
    )
    return found | {"loss-separation": _separation, "zrf": lambda outputs: _zrf_against(untrained(), outputs)}


BESIDE: Mapping[
    str, Callable[[ModelOutputs, ModelOutputs], Reading]
] = {  # what is measured on a model and a retrained one
    "average-gap": _average_gap,
    "tug-of-war": partial(_tug_of_war, "forget"),
    "tug-of-war-mia": partial(_tug_of_war, "mia"),
    "output-l2-forget": partial(_output_distance, "l2", "gone"),
    "output-l2-retain": partial(_output_distance, "l2", "kept"),
    "output-js-forget": partial(_output_distance, "js", "gone"),
    "output-js-retain": partial(_output_distance, "js", "kept"),
    "activation-forget": partial(_activation_distance, "gone"),
    "activation-retain": partial(_activation_distance, "kept"),
    "mean-output-tv": _mean_output,
}


class MetricSuite:
    """What a case compares with, looked at once for any number of models that are said to have forgotten."""

    def __init__(self, case: Case, *, most: int = MOST) -> None:
        self.groups = Groups(case, most)
        self.original = ModelOutputs("the original", case.original, self.groups)
        self.retrain = (
            None if case.reference is None else ModelOutputs("the retrained model", case.reference, self.groups)
        )
        self.second = (
            None if case.second is None else ModelOutputs("the second retrained model", case.second, self.groups)
        )
        self.of_one = _of_one(self.groups, self.original)

    def measure(self, model: nn.Module) -> list[Metric]:
        """Every metric that applies; a gap to Retrain has for its reference a second Retrain's, or Retrain's to itself.

        What only concerns one kind of request or a federation is left out elsewhere; what fails is there as an ERROR.
        """
        forgot, retrain = ModelOutputs("the forgotten model", model, self.groups), self.retrain
        found = []
        for name, one in self.of_one.items():
            found.append(measured(name, partial(one, forgot), None if retrain is None else partial(one, retrain)))
        for name, beside in BESIDE.items():
            if retrain is None:
                found.append(Metric(name, None))
                continue
            usual = retrain if self.second is None else self.second
            metric = measured(name, partial(beside, forgot, retrain), partial(beside, usual, retrain))
            note = {"Retrain is read against": "itself" if self.second is None else "one of another seed"}
            found.append(replace(metric, details={**metric.details, **note}))
        return found


def measure_all(case: Case, *, most: int = MOST) -> list[Metric]:
    """Every metric of the case's forgotten model; for several models of one case, a `MetricSuite` spares passes."""
    return MetricSuite(case, most=most).measure(case.forgot)
