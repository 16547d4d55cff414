"""C1, linear probe: does a ridge probe read the class, at any depth, better than in a retrained model?"""

from statistics import mean

import torch
from torch import Tensor
from torch.nn import functional

from fedortho.audits.audit import Audit
from fedortho.audits.measurements import MeasurementCache, balanced_sample, depth_features, roles_of
from fedortho.audits.result import ROUNDING, AuditResult, Limit, decide, original_exceeds, shares_text
from fedortho.evaluation.accuracies import share_correct
from fedortho.evaluation.case import Case

LIMIT = Limit("probe", 0.05, calibrated=0.082)  # recall of the probe, above the reference model's
ENTRY_LIMIT = Limit("entry probe", 0.05, calibrated=0.083)  # the same at the entry of a stage
PENALTY = 1e-3  # of the squared weights, per image, on features of deviation 1


def linear_probe(case: Case, cache: MeasurementCache, budget: str) -> AuditResult:
    """Recall of the forgotten class by a probe at the entry of every stage but the first, and before the classifier.

    Features separate classes that they were not trained on, so a reference model's recall is above 0 and only the gap
    to it counts, or to the mean of two. The largest gap decides, of the depths at which the original model would fail.
    """
    if case.request.kind != "class":
        return AuditResult("NOT RUN", "applies to class requests only: a probe reads classes from features")
    labels = balanced_sample(case).labels
    references = [role for role in ("reference", "second_reference") if getattr(case, role) is not None]
    single = {
        role: {
            depth: recall(*pair, labels, case.forget_eval.labels)
            for depth, pair in depth_features(case, cache, role).items()
        }
        for role in ("unlearned", "original", *references)
    }
    recalls = {role: single[role] for role in roles_of(case)}
    if case.reference is not None:
        recalls["reference"] = {
            depth: mean(single[role][depth] for role in references) for depth in single["reference"]
        }
    depths = {depth: {role: recalls[role][depth] for role in recalls} for depth in recalls["unlearned"]}
    limits = dict.fromkeys(depths, ENTRY_LIMIT) | {(last := list(depths)[-1]): LIMIT}
    worst, behind = last, ""
    if case.reference is not None:
        excess = {
            depth: shares["unlearned"] - shares["reference"] - limits[depth].value
            for depth, shares in depths.items()
            if original_exceeds(shares, limits[depth])
        }
        worst = max(excess, key=lambda depth: excess[depth], default=last)
        left = [depth for depth in excess if excess[depth] > ROUNDING]
        behind = left[-1] if left and left[-1] != last and last in excess else ""
    finding = f"a linear probe recalls {shares_text(depths[worst], len(references))} of the class"
    finding += f" at {worst}, the worst depth that can tell" if worst != last else " before the classifier"
    finding += f"; erased behind {behind} only" if behind else ""
    details = {"images": len(labels), "penalty": PENALTY, "stages": single}
    details |= {"references": len(references), "depth": "" if worst == last else worst, "erased_behind": behind}
    return decide(finding, depths[worst], limits[worst], details)


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


LINEAR_PROBE = Audit("C1", "linear probe", linear_probe, (LIMIT, ENTRY_LIMIT))
