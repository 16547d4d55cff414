"""Audits: attempts to recover the forget set, or to tell the unlearned model from a retrained one."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import entry_points

from fedortho.audits.audit import Audit
from fedortho.audits.copies import DEPLOYED_COPIES
from fedortho.audits.distance import DISTANCE
from fedortho.audits.measurements import MeasurementCache, eval_logits
from fedortho.audits.membership import MEMBERSHIP
from fedortho.audits.norms import NORM_ATTACKS
from fedortho.audits.probe import LINEAR_PROBE
from fedortho.audits.relearn import RELEARNING
from fedortho.audits.result import AuditResult
from fedortho.errors import BadSetting, unknown
from fedortho.evaluation.case import Case

BUDGETS = ("quick", "full", "none")
DELETED = "images of the forget set were deleted, nothing is left to audit on"
GROUP = "fedortho.audits"  # entry points by which other packages add audits
AUDITS: Mapping[str, Audit] = {
    "C1": LINEAR_PROBE,
    "C2": NORM_ATTACKS,
    "C3": RELEARNING,
    "C4": MEMBERSHIP,
    "C5": DISTANCE,
    "C6": DEPLOYED_COPIES,
}


def known_audits() -> dict[str, Audit]:
    """The audits of this package, then those that other installed packages add by entry points, by name."""
    audits = dict(AUDITS)
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        if entry.name in audits:
            raise BadSetting(f"the entry point {entry.value} adds an audit {entry.name!r}, which exists; rename it")
        audit = entry.load()
        if not isinstance(audit, Audit) or audit.name != entry.name:
            raise BadSetting(f"the entry point {entry.value} is {audit!r:.60}; expected an Audit named {entry.name!r}")
        audits[entry.name] = audit
    return audits


def find_audit(name: str) -> Audit:
    """The audit of this name."""
    audits = known_audits()
    if name not in audits:
        raise unknown("audit", name, audits)
    return audits[name]


def run_audits(
    case: Case,
    budget: str = "quick",
    *,
    only: Sequence[str] = (),
    on_step: Callable[[str], None] | None = None,
    cache: MeasurementCache | None = None,
) -> list[AuditResult]:
    """The results of all audits, in order; `on_step` receives the title of each audit that begins.

    An audit that is not run gives the reason, an audit that raises is an ERROR, and none is left out. A model whose
    logits are not finite is refused before any audit runs. `cache` can be shared by cases that differ only in models.
    """
    check_audits(budget, only)
    cache = cache or MeasurementCache()
    deleted = not (len(case.forget_eval) and len(case.forget_train)) and len(case.data.gone)
    if budget != "none" and not deleted:
        for role in case.models:
            eval_logits(case, cache, role)  # refuses NaN
    results = []
    for audit in known_audits().values():
        if reason := _reason_to_skip(audit, budget, only) or (DELETED if deleted else ""):
            results.append(AuditResult("NOT RUN", reason, name=audit.name, title=audit.title))
            continue
        if on_step is not None:
            on_step(audit.title)
        result = audit(case, cache, budget)
        if result.unlearned is not None:
            one = "; measured on one image" if len(case.forget_eval) == 1 else ""
            lost = f"; {case.deleted} deleted images of the forget set are not measured" if case.deleted else ""
            result = replace(result, finding=f"{result.finding}{one}{lost}")
        results.append(result)
    return results


def check_audits(budget: str, only: Sequence[str] = ()) -> None:
    """Refuse a budget or an audit that does not exist."""
    if budget not in BUDGETS:
        raise unknown("audit budget", budget, BUDGETS)
    for name in only:
        find_audit(name)


def _reason_to_skip(audit: Audit, budget: str, only: Sequence[str]) -> str:
    """Why an audit is not run; empty if it is."""
    if budget == "none":
        return "no audits requested (--audit none)"
    if only:
        return "" if audit.name in only else f"not requested, only {', '.join(only)}"
    return "" if audit.is_quick or budget == "full" else "not part of the quick budget; use --audit full"
