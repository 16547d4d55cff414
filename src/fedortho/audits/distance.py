"""C5, distance: is the unlearned model as close to a reference model as two reference models are to each other?"""

from collections.abc import Callable, Mapping
from itertools import combinations
from statistics import mean

from torch import Tensor

from fedortho.audits.audit import Audit
from fedortho.audits.measurements import MeasurementCache, classifier_features, eval_logits
from fedortho.audits.result import AuditResult, Limit, decide
from fedortho.evaluation.case import REFERENCES, Case
from fedortho.evaluation.metric_suite import total_variation

LIMIT = Limit("distance", 0.5)  # 1 − ρ: 0 as close as two reference models are, 1 as far as the original
MIN_SPAN = 0.01  # CKA between two reference models less that of the original; below it there is no scale


def distance(case: Case, cache: MeasurementCache, budget: str) -> AuditResult:
    """1 − ρ, with ρ = (CKA(u,r) − CKA(o,r)) / (CKA(r,r') − CKA(o,r)) on the evaluated forget images.

    u is the unlearned model, o the original, r and r' two reference models, and each CKA a mean over all of them. The
    total variation between mean predictions is reported beside it.
    """
    case = case.treated_alike
    if len(case.references) == 1:
        reason = "needs a second reference model of another seed as a scale (--audit full --retrain)"
        return AuditResult("NOT RUN", reason)
    features = {role: classifier_features(case, cache, role)[1] for role in case.models}
    if not case.references:
        near = cka(features["unlearned"], features["original"])
        measured = {"unlearned": near, "original": 1.0}
        return decide(f"CKA to the original is {near:.2f}", measured, LIMIT, {"cka": near})
    similar = _mean_over_pairs(features, cka)
    outputs = {role: eval_logits(case, cache, role).double().softmax(1) for role in case.models}
    variation = _mean_over_pairs(outputs, total_variation)
    span = similar["reference"] - similar["original"]
    details = {"cka": similar, "total_variation": variation}
    finding = f"CKA to {len(case.references)} reference models is {similar['unlearned']:.2f} on average "
    finding += f"(original {similar['original']:.2f}, between reference models {similar['reference']:.2f})"
    if span < MIN_SPAN:
        finding += ": the original is as close as reference models are to each other, so there is no scale"
        unlearned, original = similar["unlearned"], similar["original"]
        return AuditResult("INCONCLUSIVE", finding, unlearned=unlearned, original=original, details=details)
    rho = (similar["unlearned"] - similar["original"]) / span
    finding += f": {100 * rho:.0f} % of the way from the original to a reference model; "
    finding += f"total variation of mean predictions {variation['unlearned']:.2f}"
    return decide(finding, similar, LIMIT, details | {"rho": rho}, 1 - rho)


def _mean_over_pairs(values: Mapping[str, Tensor], measure: Callable[[Tensor, Tensor], float]) -> dict[str, float]:
    """Of the unlearned model and the original with each reference model; under `reference`, of all pairs of these."""
    references = [values[role] for role in REFERENCES if role in values]
    means = {role: mean(measure(values[role], other) for other in references) for role in ("unlearned", "original")}
    return means | {"reference": mean(measure(one, other) for one, other in combinations(references, 2))}


def cka(first: Tensor, second: Tensor) -> float:
    """Linear CKA of representations (n, d): ‖YᵀX‖² / (‖XᵀX‖ ‖YᵀY‖), columns centred; 0 if one of them is constant."""
    x, y = (part.double() - part.double().mean(0) for part in (first, second))
    norms = float((x.T @ x).norm() * (y.T @ y).norm())
    return float((y.T @ x).norm() ** 2) / norms if norms > 0 else 0.0


DISTANCE = Audit("C5", "distance to retrained models", distance, (LIMIT,), is_quick=False)
