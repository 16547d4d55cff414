"""Retention: does the unlearned model keep its accuracy on the retain set? Judged beside the audits."""

from fedortho.audits.audit import Audit
from fedortho.audits.measurements import MeasurementCache, accuracy_on, measure_models
from fedortho.audits.result import ROUNDING, AuditResult, Limit, Outcome, compared, shares_text
from fedortho.evaluation.case import Case

LIMIT = Limit("retention", 0.05)  # loss of retain accuracy on test images


def lost_accuracy(case: Case, cache: MeasurementCache, budget: str) -> AuditResult:
    """Loss of retain accuracy on test images, against the original or the reference model, whichever is lower."""
    images = case.retain_test
    kept = measure_models(case, cache, "retain", lambda model, role: accuracy_on(case, model, images, role))
    shares = compared(kept)
    reference = shares.get("reference")
    lost = min(shares["original"], 1.0 if reference is None else reference) - shares["unlearned"]
    change = f"{100 * abs(lost):.1f} points {'lost' if lost >= 0 else 'gained'}"
    beside = "" if reference is None else " against the lower of them"
    finding = f"retain accuracy is {shares_text(shares, len(case.references))}: {change}{beside}; "
    finding += f"a loss of {100 * LIMIT.value:.1f} is the limit"
    finding += "; one class is retained, so a constant answer keeps it all" if case.retains_one_class else ""
    outcome: Outcome = "PASS" if lost <= LIMIT.value + ROUNDING else "FAIL"
    return AuditResult(outcome, finding, lost, LIMIT.value, shares["unlearned"], shares["original"], reference)


RETENTION = Audit("retention", "accuracy on the retain set", lost_accuracy, (LIMIT,))
