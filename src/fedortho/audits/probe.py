"""C1, linear probe: does a ridge probe read the class, at any depth, better than in a retrained model?"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from fedortho.audits.audit import Audit
from fedortho.audits.measurements import MeasurementCache, balanced_sample, depth_features
from fedortho.audits.result import ROUNDING, AuditResult, Limit, compared, decide, doubts, original_exceeds, shares_text
from fedortho.evaluation.accuracies import share_correct
from fedortho.evaluation.case import Case

LIMIT = Limit("probe", 0.05, calibrated=0.082)  # recall of the probe, above the reference model's
LAST_ENTRY_LIMIT = Limit("last entry probe", 0.05)  # the same at the entry of the last stage
ENTRY_LIMIT = Limit("entry probe", 0.05, calibrated=0.083)  # the same at entries before it
PENALTY = 1e-3  # of the squared weights, per image, on features of deviation 1


def linear_probe(case: Case, cache: MeasurementCache, budget: str) -> AuditResult:
    """Recall of the forgotten class by a probe at the entry of every stage but the first, and before the classifier.

    Features separate classes that they were not trained on, so a reference model's recall is above 0 and only the gap
    to it counts, or to the mean of several. The largest gap beyond its limit decides, of the depths at which the
    original model would fail. Where counterfactuals decide, the recall in the models as retrained stands beside it, and
    the original, which nobody treated, is held against those: where it shows no more, there is nothing to find.
    """
    if case.request.kind != "class":
        return AuditResult("NOT RUN", "applies to class requests only: a probe reads classes from features")
    retrained, case = case, case.treated_alike
    single = depth_recalls(case, cache)
    as_retrained = depth_recalls(retrained, cache) if retrained.counterfactuals else {}
    depths, untreated = _by_depth(single), _by_depth(as_retrained or single)
    limits, excess = depth_limits(list(depths)), dict[str, float]()
    worst, behind = (last := list(depths)[-1]), ""
    if case.references:
        excess = {
            depth: shares["unlearned"] - shares["reference"] - limits[depth].value
            for depth, shares in depths.items()
            if original_exceeds(untreated[depth], limits[depth])
        }
        worst = max(excess, key=lambda depth: excess[depth], default=last)
        left = [depth for depth in excess if excess[depth] > ROUNDING]
        behind = left[-1] if left and left[-1] != last and last in excess else ""
    finding = f"a linear probe recalls {shares_text(depths[worst], len(case.references))} of the class"
    finding += f" at {worst}, the worst depth that can tell" if worst != last else " before the classifier"
    finding += f"; erased behind {behind} only" if behind else ""
    if as_retrained:
        shown = untreated[worst]["reference"]
        finding += f"; reference models were treated alike, as retrained they show {100 * shown:.1f} %"
    details = {
        "images": len(balanced_sample(case)),
        "as_retrained": as_retrained,
        "penalty": PENALTY,
        "stages": single,
        "depths": list(depths),
    }
    details |= {"references": len(case.references), "depth": "" if worst == last else worst, "erased_behind": behind}
    result = decide(finding, depths[worst], limits[worst], details, has_power=worst in excess)
    if result.outcome in ("PASS", "FAIL") and (doubt := doubts(case, result.value, limits[worst])):
        return replace(result, outcome="INCONCLUSIVE", finding=f"{finding}; {doubt}")
    return result


def _by_depth(recalls: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """The recall at each depth: of the unlearned model, the original, and the mean of the reference models."""
    return {depth: compared({role: recalls[role][depth] for role in recalls}) for depth in recalls["unlearned"]}


def depth_recalls(case: Case, cache: MeasurementCache) -> dict[str, dict[str, float]]:
    """The probe's recall of the class in each model of a case, by role and depth."""
    labels, single = balanced_sample(case).labels, dict[str, dict[str, float]]()
    for role in case.models:
        found = depth_features(case, cache, role).items()
        single[role] = {depth: recall(*pair, labels, case.forget_eval.labels) for depth, pair in found}
    return single


def depth_limits(depths: Sequence[str]) -> dict[str, Limit]:
    """The limit at each depth, given in the order of a forward pass, the classifier last."""
    limits = dict.fromkeys(depths, ENTRY_LIMIT) | dict.fromkeys(depths[-2:-1], LAST_ENTRY_LIMIT)
    return limits | {depths[-1]: LIMIT}


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


LINEAR_PROBE = Audit("C1", "linear probe", linear_probe, (LIMIT, LAST_ENTRY_LIMIT, ENTRY_LIMIT))
