"""C5, distance: is the unlearned model as close to a reference model as two reference models are to each other?"""

from torch import Tensor

from fedortho.audits.audit import Audit
from fedortho.audits.measurements import MeasurementCache, classifier_features, eval_logits
from fedortho.audits.result import AuditResult, Limit, decide
from fedortho.evaluation.case import Case
from fedortho.evaluation.metric_suite import total_variation

LIMIT = Limit("distance", 0.5)  # 1 − ρ: 0 as close as two reference models are, 1 as far as the original
MIN_SPAN = 0.01  # CKA between two reference models less that of the original; below it there is no scale


def distance(case: Case, cache: MeasurementCache, budget: str) -> AuditResult:
    """1 − ρ, with ρ = (CKA(u,r) − CKA(o,r)) / (CKA(r,r') − CKA(o,r)) on the evaluated forget images.

    u is the unlearned, o the original, r and r' two reference models. The total variation between mean predictions is
    reported beside it.
    """
    if case.reference is None:
        return _without_reference(case, cache)
    if case.second_reference is None:
        reason = "needs a second reference model of another seed as a scale (--audit full --retrain)"
        return AuditResult("NOT RUN", reason)
    others = ("unlearned", "original", "second_reference")
    features = {role: classifier_features(case, cache, role)[1] for role in (*others, "reference")}
    similar = {role: cka(features[role], features["reference"]) for role in others}
    span = similar["second_reference"] - similar["original"]
    predictions = {role: eval_logits(case, cache, role).double().softmax(1) for role in features}
    variation = total_variation(predictions["unlearned"], predictions["reference"])
    second = total_variation(predictions["second_reference"], predictions["reference"])
    details = {"cka": similar, "total_variation": variation, "total_variation_second": second}
    finding = f"CKA to the reference model is {similar['unlearned']:.2f} (original {similar['original']:.2f}, "
    finding += f"second reference model {similar['second_reference']:.2f})"
    if span < MIN_SPAN:
        finding += ": the original is as close as the second reference model, so there is no scale"
        unlearned, original = similar["unlearned"], similar["original"]
        return AuditResult("INCONCLUSIVE", finding, unlearned=unlearned, original=original, details=details)
    rho = (similar["unlearned"] - similar["original"]) / span
    measured = similar | {"reference": similar["second_reference"]}
    finding += f": {100 * rho:.0f} % of the way from the original to a reference model; "
    finding += f"total variation of mean predictions {variation:.2f}"
    return decide(finding, measured, LIMIT, details | {"rho": rho}, 1 - rho)


def _without_reference(case: Case, cache: MeasurementCache) -> AuditResult:
    similar = cka(classifier_features(case, cache, "unlearned")[1], classifier_features(case, cache, "original")[1])
    finding, measured = f"CKA to the original is {similar:.2f}", {"unlearned": similar, "original": 1.0}
    return decide(finding, measured, LIMIT, {"cka": similar})


def cka(first: Tensor, second: Tensor) -> float:
    """Linear CKA of two representations (n, d) of the same images: ‖YᵀX‖² / (‖XᵀX‖ ‖YᵀY‖), columns centred.

    0 if one of them is constant over the images.
    """
    x, y = (part.double() - part.double().mean(0) for part in (first, second))
    norms = float((x.T @ x).norm() * (y.T @ y).norm())
    return float((y.T @ x).norm() ** 2) / norms if norms > 0 else 0.0


DISTANCE = Audit("C5", "distance to retrained models", distance, (LIMIT,), is_quick=False)
