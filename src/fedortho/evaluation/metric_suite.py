"""All metrics of one case: an unlearned model, compared with a reference model; every forward pass is made once."""

import math
from collections.abc import Callable, Mapping
from functools import cache, partial

import torch
from torch import Tensor, nn

from fedortho.errors import BadData
from fedortho.evaluation.accuracies import share_correct
from fedortho.evaluation.case import REFERENCES, Case
from fedortho.evaluation.membership_attacks import ATTACKS, Predictions, correctness, loss_separation
from fedortho.evaluation.metrics import Measurement, Metric, measure_metric
from fedortho.evaluation.model_outputs import EvaluationSets, ModelOutputs
from fedortho.models.zoo import reinitialised

PAPER_ATTACK = "confidence"


def _accuracy(predictions: Predictions) -> Measurement:
    return Measurement(share_correct(predictions.probabilities, predictions.labels), len(predictions))


def _forget_accuracy(outputs: ModelOutputs) -> Measurement:
    """On the images of `Case.forget_eval`, which are among those that passed through the model."""
    case = outputs.sets.case
    if case.request.kind != "class":
        return _accuracy(outputs.predictions("forget"))
    return _accuracy(outputs.predictions("test", outputs.sets.test_mask(case.request)))


def _class_accuracy(outputs: ModelOutputs) -> Measurement:
    test, names = outputs.predictions("test"), outputs.sets.case.data.test.names
    affected = outputs.sets.forget.labels.unique()
    whole = _accuracy(test.take(torch.isin(test.labels, affected)))
    per_class = {names[label]: _accuracy(test.take(test.labels == label)).value for label in affected.tolist()}
    return Measurement(whole.value, whole.images, {"each": per_class})


def _client_change(quantile: float, original: ModelOutputs, outputs: ModelOutputs) -> Measurement:
    """A quantile of the change of accuracy on the images of each remaining client."""
    if not outputs.sets.clients:
        raise BadData("no client remains; there is none to compare")
    after, before = (correctness(model.predictions("clients")) for model in (outputs, original))
    sizes = [len(part) for part in outputs.sets.clients.values()]
    changes = torch.stack([part.mean() for part in (after - before).split(sizes)])
    return Measurement(float(changes.quantile(quantile)), sum(sizes), {"clients": len(changes)})


def _member_rate(name: str, outputs: ModelOutputs) -> Measurement:
    attack = outputs.attack(name)
    names = outputs.sets.case.data.test.names
    details = {
        "attack accuracy": attack.accuracy,
        "false positives": attack.false_positive_rate,
        "global threshold for": [names[label] for label in attack.fallback_classes],
        "known members": attack.members,
        "known non-members": attack.non_members,
    }
    return Measurement(attack.member_rate, attack.forgotten, details)


def _separation(outputs: ModelOutputs) -> Measurement:
    unseen = outputs.predictions("test", outputs.sets.unseen)
    forget = outputs.attacked.take(torch.isin(outputs.attacked.labels, unseen.labels))
    return Measurement(loss_separation(forget, unseen, seed=outputs.sets.case.seed), len(forget) + len(unseen))


def js_divergence(p: Tensor, q: Tensor) -> Tensor:
    """½ KL(p‖m) + ½ KL(q‖m) with m = (p + q)/2, in bits, row by row: 0 for equal rows, 1 for disjoint ones.

    >>> js_divergence(torch.eye(2), torch.tensor([[1.0, 0.0], [1.0, 0.0]])).tolist()
    [0.0, 1.0]
    """
    from scipy.special import rel_entr

    middle = ((p + q) / 2).numpy()
    nats = (rel_entr(p.numpy(), middle) + rel_entr(q.numpy(), middle)).sum(1) / 2
    return (torch.from_numpy(nats) / math.log(2)).clamp(0.0, 1.0)


def _output_distance(kind: str, of: str, outputs: ModelOutputs, reference: ModelOutputs) -> Measurement:
    mine, theirs = outputs.predictions(of).probabilities, reference.predictions(of).probabilities
    if kind == "tv":
        return Measurement(total_variation(mine, theirs), len(mine))
    each = (mine - theirs).norm(dim=1) if kind == "l2" else js_divergence(mine, theirs)
    return Measurement(float(each.mean()), len(each))


def _activation_distance(of: str, outputs: ModelOutputs, reference: ModelOutputs) -> Measurement:
    """Features of separately trained models are not aligned: a second reference model gives the usual distance."""
    mine, theirs = outputs.features(of), reference.features(of)
    if mine.shape != theirs.shape:
        raise BadData(f"{outputs.name} has {mine.shape[1]} features, {reference.name} {theirs.shape[1]}")
    if not bool(torch.isfinite(mine).all() & torch.isfinite(theirs).all()):
        raise BadData(f"features of {outputs.name} or {reference.name} are not finite on {of} images")
    distance = (mine - theirs).norm(dim=1).mean() / theirs.norm(dim=1).mean().clamp_min(1e-12)
    return Measurement(float(distance), len(mine))


def total_variation(mine: Tensor, theirs: Tensor) -> float:
    """Half the L1 distance between two models' mean probabilities; both are (n, classes)."""
    return float((mine.mean(0) - theirs.mean(0)).abs().sum() / 2)


def _gaps(outputs: ModelOutputs, reference: ModelOutputs) -> dict[str, float]:
    """Gaps of accuracy on the forget set, the retain set and the retained classes' test images, and of the MIA."""
    retained = ~outputs.sets.test_mask(outputs.sets.case.all_requests)
    values = []
    for one in (outputs, reference):
        sets = (one.predictions("forget"), one.predictions("retain"), one.predictions("test", retained))
        values.append([*(_accuracy(part).value for part in sets), one.attack(PAPER_ATTACK).member_rate])
    names = ("forget", "retain", "test", "mia")
    return {name: abs(mine - theirs) for name, mine, theirs in zip(names, *values, strict=True)}


def _average_gap(outputs: ModelOutputs, reference: ModelOutputs) -> Measurement:
    gaps = _gaps(outputs, reference)
    return Measurement(sum(gaps.values()) / len(gaps), len(outputs.sets.forget), {"gaps": gaps})


def _tug_of_war(first: str, outputs: ModelOutputs, reference: ModelOutputs) -> Measurement:
    gaps = _gaps(outputs, reference)
    return Measurement((1 - gaps[first]) * (1 - gaps["retain"]) * (1 - gaps["test"]), len(outputs.sets.forget))


def _model_metrics(sets: EvaluationSets, original: ModelOutputs) -> dict[str, Callable[[ModelOutputs], Measurement]]:
    """The metrics of a model by itself that apply to the request."""
    retained = ~sets.test_mask(sets.case.all_requests)
    metrics = {
        "forget-accuracy": _forget_accuracy,
        "retain-accuracy": lambda outputs: _accuracy(outputs.predictions("test", retained)),
        "test-accuracy": lambda outputs: _accuracy(outputs.predictions("test")),
    }
    if sets.case.request.samples:
        metrics["class-accuracy"] = _class_accuracy
    if sets.case.clients is not None:
        for name, quantile in (("min", 0.0), ("q1", 0.25), ("median", 0.5), ("q3", 0.75)):
            metrics[f"client-change-{name}"] = partial(_client_change, quantile, original)
    metrics |= {f"mia-{name}": partial(_member_rate, name) for name in ATTACKS}
    untrained = cache(lambda: ModelOutputs("an untrained model", reinitialised(original.model, sets.case.seed), sets))

    def zrf(outputs: ModelOutputs) -> Measurement:
        distance = _output_distance("js", "forget", outputs, untrained())
        return Measurement(1 - distance.value, distance.images)

    return metrics | {"loss-separation": _separation, "zrf": zrf}


# of a model and the reference model
REFERENCE_METRICS: Mapping[str, Callable[[ModelOutputs, ModelOutputs], Measurement]] = {
    "average-gap": _average_gap,
    "tug-of-war": partial(_tug_of_war, "forget"),
    "tug-of-war-mia": partial(_tug_of_war, "mia"),
    "output-l2-forget": partial(_output_distance, "l2", "forget"),
    "output-l2-retain": partial(_output_distance, "l2", "retain"),
    "output-js-forget": partial(_output_distance, "js", "forget"),
    "output-js-retain": partial(_output_distance, "js", "retain"),
    "activation-forget": partial(_activation_distance, "forget"),
    "activation-retain": partial(_activation_distance, "retain"),
    "mean-output-tv": partial(_output_distance, "tv", "forget"),
}


class MetricSuite:
    """The metrics of a case, for any number of unlearned models; outputs of the other models are computed once."""

    def __init__(self, case: Case) -> None:
        self.sets = EvaluationSets(case)
        self.references = [
            ModelOutputs(f"the {role.replace('_', ' ')} model", model, self.sets)
            for role, model in zip(REFERENCES[:2], case.references, strict=False)
        ]
        self.model_metrics = _model_metrics(self.sets, ModelOutputs("the original", case.original, self.sets))

    def measure(self, model: nn.Module) -> list[Metric]:
        """Every metric that applies to the request; a metric that fails has an error.

        The reference value of a gap to the reference model is the gap of a second reference model; without one it is
        None: no model is compared with itself.
        """
        unlearned = ModelOutputs("the unlearned model", model, self.sets)
        reference, second = (*self.references, None, None)[:2]
        metrics = []
        for name, one in self.model_metrics.items():
            theirs = None if reference is None else partial(one, reference)
            metrics.append(measure_metric(name, partial(one, unlearned), theirs))
        for name, gap in REFERENCE_METRICS.items():
            if reference is None:
                metrics.append(Metric(name, None))
                continue
            usual = None if second is None else partial(gap, second, reference)
            metrics.append(measure_metric(name, partial(gap, unlearned, reference), usual))
        if not len(self.sets.forget):  # the images were deleted: what needs them cannot be measured
            metrics = [Metric(metric.name, None) if metric.error else metric for metric in metrics]
        return metrics
