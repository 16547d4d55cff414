"""C5: is the forgotten model as near to a retrained one as two retrained ones are to each other?"""

from torch import Tensor

from fedortho.audits.audit import Audit
from fedortho.audits.measurements import MeasurementCache, judged_answers, last_features, ruled
from fedortho.audits.thresholds import LIMITS
from fedortho.evaluation.case import Case

SPAN = 0.01  # CKA between two references must be so far above CKA of the original, or there is no scale


def distance(case: Case, cache: MeasurementCache, budget: str) -> Audit:
    """1 − ρ on the images judged, ρ = (CKA(u,r) − CKA(o,r)) / (CKA(r,r') − CKA(o,r)); total variation beside it."""
    if case.reference is None:
        return _without_reference(case, cache)
    if case.second is None:
        return Audit(
            "C5", "NOT RUN", "needs a second reference, retrained by another seed, for a scale (--audit full --retrain)"
        )
    seen = {who: last_features(case, cache, who)[1] for who in ("forgot", "original", "reference", "second")}
    near = {who: cka(seen[who], seen["reference"]) for who in ("forgot", "original", "second")}
    span = near["second"] - near["original"]
    details = {"cka": near, "total_variation": _variation(case, cache, "forgot")}
    details["total_variation_second"] = _variation(case, cache, "second")
    told = f"CKA to the retrained model is {near['forgot']:.2f} (original {near['original']:.2f}, "
    told += f"a second retrained one {near['second']:.2f})"
    if span < SPAN:
        says = f"{told}: the original is as near as a second reference, so there is no scale"
        return Audit("C5", "NOT RUN", says, forgot=near["forgot"], original=near["original"], details=details)
    rho = (near["forgot"] - near["original"]) / span
    measured = {"forgot": near["forgot"], "original": near["original"], "reference": near["second"]}
    says = f"{told}: {100 * rho:.0f} % of the way; mean answers differ by {details['total_variation']:.2f}"
    return ruled("C5", says, case, measured, 1 - rho, LIMITS["distance"], details | {"rho": rho})


def _without_reference(case: Case, cache: MeasurementCache) -> Audit:
    near = cka(last_features(case, cache, "forgot")[1], last_features(case, cache, "original")[1])
    says = f"CKA to the original is {near:.2f}"
    return ruled("C5", says, case, {"forgot": near, "original": 1.0}, None, LIMITS["distance"], {"cka": near})


def cka(first: Tensor, second: Tensor) -> float:
    """Linear CKA of two representations (n, d) of the same images: ‖YᵀX‖² / (‖XᵀX‖ ‖YᵀY‖), columns centred.

    0 if one of them is the same for all images: it resembles nothing.
    """
    x, y = (part.double() - part.double().mean(0) for part in (first, second))
    own = float((x.T @ x).norm() * (y.T @ y).norm())
    return float((y.T @ x).norm() ** 2) / own if own > 0 else 0.0


def total_variation(first: Tensor, second: Tensor) -> float:
    """Half the sum of differences between two mean answers (softmax of logits)."""
    means = [logits.double().softmax(1).mean(0) for logits in (first, second)]
    return float((means[0] - means[1]).abs().sum() / 2)


def _variation(case: Case, cache: MeasurementCache, who: str) -> float:
    return total_variation(judged_answers(case, cache, who), judged_answers(case, cache, "reference"))
