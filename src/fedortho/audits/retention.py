"""Beside the audits: is the forgotten model still good for what it was meant to keep?"""

from fedortho.audits.audit import Audit
from fedortho.audits.measurements import MeasurementCache, compared, each, ready, right
from fedortho.audits.thresholds import RETENTION
from fedortho.evaluation.case import Case


def retention(case: Case, cache: MeasurementCache | None = None) -> Audit:
    """Retain accuracy that was lost on test images: against the original, or a retrained model if that has less."""
    shares = each(
        case,
        cache or MeasurementCache(),
        "retain",
        lambda model, who: right(case, ready(case, model), case.kept_test, who),
    )
    lost = min(shares["original"], shares.get("reference", 1.0)) - shares["forgot"]
    says = f"retain accuracy is {compared(shares)}, {100 * lost:.1f} points lost of {100 * RETENTION:.1f} allowed"
    outcome = "PASS" if lost <= RETENTION else "FAIL"
    reference = shares.get("reference")
    return Audit("retention", outcome, says, lost, RETENTION, shares["forgot"], shares["original"], reference)
