"""C1, linear probe: does a ridge probe read the class from the features better than from a retrained model's?"""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedortho.audits.audit import Audit
from fedortho.audits.measurements import (
    MeasurementCache,
    balanced_sample,
    classifier_features,
    classifier_name,
    features,
    measure_models,
    roles_of,
)
from fedortho.audits.result import AuditResult, Limit, decide, shares_text
from fedortho.evaluation.accuracies import share_correct
from fedortho.evaluation.case import Case
from fedortho.models.graph import trace_layers

LIMIT = Limit("probe", 0.05, calibrated=0.082)  # recall of the probe, above the reference model's
PENALTY = 1e-3  # of the squared weights, per image, on features of deviation 1


def linear_probe(case: Case, cache: MeasurementCache, budget: str) -> AuditResult:
    """Recall of the forgotten class by a probe on the classifier's inputs; `full` also probes every stage.

    The outcome is that of the classifier's inputs. Features separate classes that they were not trained on, so a
    reference model's recall is above 0 and only the gap to it counts.
    """
    if case.request.kind != "class":
        return AuditResult("NOT RUN", "applies to class requests only: a probe reads classes from features")
    labels = balanced_sample(case).labels
    measured = {
        role: recall(*classifier_features(case, cache, role), labels, case.forget_eval.labels)
        for role in roles_of(case)
    }
    details: dict[str, object] = {"images": len(labels), "penalty": PENALTY}
    if budget == "full":
        details["stages"] = measure_models(case, cache, "stage probes", partial(stage_recalls, case))
    finding = f"a linear probe on the features recalls {shares_text(measured)} of the class"
    return decide(finding, measured, LIMIT, details)


def stage_recalls(case: Case, twin: nn.Module, _: str) -> dict[str, float]:
    """The probe's recall at the entry of each stage but the first, and before the classifier."""
    sample = balanced_sample(case)
    names = [*stage_entries(twin, sample.shape), classifier_name(case, twin)]
    train, evaluated = (features(case, twin, images, names) for images in (sample, case.forget_eval))
    return {name: recall(train[name], evaluated[name], sample.labels, case.forget_eval.labels) for name in names}


def stage_entries(model: nn.Module, shape: tuple[int, int, int]) -> list[str]:
    """The first main-path convolution of every stage but the first: it receives the output of the stage before."""
    first: dict[int, str] = {}
    for layer in trace_layers(model, shape):
        if not layer.is_shortcut and layer.stage > 0:
            first.setdefault(layer.stage, layer.name)
    return list(first.values())


def recall(train: Tensor, evaluated: Tensor, labels: Tensor, evaluated_labels: Tensor) -> float:
    """The share of evaluated images that a probe fitted on the training features classifies correctly."""
    weight, bias = ridge(train, labels, PENALTY)
    return share_correct(evaluated @ weight + bias, evaluated_labels)


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


LINEAR_PROBE = Audit("C1", "linear probe", linear_probe, (LIMIT,))
