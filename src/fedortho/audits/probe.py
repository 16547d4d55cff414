"""C1: is the class still there to be read from the features? A ridge probe tells, against a retrained model's."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedortho.audits.audit import Audit
from fedortho.audits.measurements import (
    MeasurementCache,
    classifier_of,
    compared,
    each,
    features,
    gap,
    last_features,
    ready,
    ruled,
    sampled,
    who_is_there,
)
from fedortho.audits.thresholds import LIMITS
from fedortho.evaluation.case import Case
from fedortho.models.graph import trace_layers

PENALTY = 1e-3  # of the squared weights, per image, on features of deviation 1


def linear_probe(case: Case, cache: MeasurementCache, budget: str) -> Audit:
    """Recall of what had to go by a probe on the classifier's inputs; in `full` behind every stage as well.

    The verdict is that of the classifier's inputs. A retrained model's recall is not 0: features tell classes
    apart that they were never trained on, so only what is above it counts.
    """
    if case.request.kind != "class":
        return Audit("C1", "NOT RUN", "a class of its own is needed: a probe reads classes from features")
    labels = sampled(case).labels
    measured = {who: recall(*last_features(case, cache, who), labels, case.judged.labels) for who in who_is_there(case)}
    details: dict[str, object] = {"images": len(labels), "penalty": PENALTY}
    if budget == "full":
        details["stages"] = each(case, cache, "stage probes", lambda model, _: stage_recalls(case, model))
    says = f"a linear probe on the features recalls {compared(measured)} of the class"
    return ruled("C1", says, case, measured, gap(measured), LIMITS["probe"], details, is_gap=True)


def stage_recalls(case: Case, model: nn.Module) -> dict[str, float]:
    """The probe's recall at the entry of each stage but the first, and before the classifier."""
    twin, images = ready(case, model), sampled(case)
    names = [*stage_entries(twin, images.shape), classifier_of(case, twin)]
    train, judged = (features(case, twin, part, names) for part in (images, case.judged))
    return {name: recall(train[name], judged[name], images.labels, case.judged.labels) for name in names}


def stage_entries(model: nn.Module, shape: tuple[int, int, int]) -> list[str]:
    """The first main-path convolution of every stage but the first: it receives what the stage before it made."""
    first: dict[int, str] = {}
    for layer in trace_layers(model, shape):
        if not layer.is_shortcut and layer.stage > 0:
            first.setdefault(layer.stage, layer.name)
    return list(first.values())


def recall(train: Tensor, judged: Tensor, labels: Tensor, judged_labels: Tensor) -> float:
    """The share of the judged images that a probe fitted on the others names rightly."""
    weight, bias = ridge(train, labels, PENALTY)
    return float(((judged @ weight + bias).argmax(1) == judged_labels).double().mean())


def ridge(train: Tensor, labels: Tensor, penalty: float) -> tuple[Tensor, Tensor]:
    """Weights (d, classes) and bias that minimise Σ ‖xW + b − onehot(y)‖² + n · penalty · ‖diag(σ) W‖².

    σ is the deviation of each feature, so the result does not depend on the features' scales; the bias is free.
    """
    targets = functional.one_hot(labels).double()
    mean, deviation = train.mean(0), train.std(0, correction=0)
    deviation = deviation.clamp_min(1e-9 * float(deviation.max()) + 1e-12)  # a dead feature stays at 0
    scaled = (train - mean) / deviation
    system = scaled.T @ scaled + len(train) * penalty * torch.eye(train.shape[1], dtype=torch.float64)
    weight = torch.linalg.solve(system, scaled.T @ (targets - targets.mean(0))) / deviation.unsqueeze(1)
    return weight, targets.mean(0) - mean @ weight
