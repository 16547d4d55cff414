"""Attempts to undo forgetting, or to tell it from never having known: the table, and one run over it."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from fedortho.audits.audit import Audit
from fedortho.audits.copies import deployed_copies
from fedortho.audits.distance import distance
from fedortho.audits.measurements import MeasurementCache, judged_answers, who_is_there
from fedortho.audits.norms import norm_attacks
from fedortho.audits.probe import linear_probe
from fedortho.audits.relearn import relearning
from fedortho.errors import unknown
from fedortho.evaluation.case import Case

logger = logging.getLogger(__name__)
BUDGETS = ("quick", "full", "none")
Membership = Callable[[Case], Audit]


@dataclass(frozen=True)
class AuditSpec:
    """An audit as the table has it."""

    title: str
    run: Callable[[Case, MeasurementCache, str], Audit] | None  # None: comes from elsewhere
    quick: bool  # part of the quick budget


AUDITS: Mapping[str, AuditSpec] = {
    "C1": AuditSpec("linear probe", linear_probe, True),
    "C2": AuditSpec("batch-norm and kernel-norm attacks", norm_attacks, True),
    "C3": AuditSpec("relearning and prototype", relearning, True),
    "C4": AuditSpec("membership (U-LiRA-lite)", None, False),
    "C5": AuditSpec("distance to retrained models", distance, False),
    "C6": AuditSpec("deployed copies", deployed_copies, True),
}


def run_audits(
    case: Case,
    budget: str = "quick",
    *,
    only: Sequence[str] = (),
    watch: Callable[[str], None] | None = None,
    membership: Membership | None = None,
    cache: MeasurementCache | None = None,
) -> list[Audit]:
    """All six audits in order; `watch` is told the title of each that begins.

    What is not run says why, what raises is an ERROR and none is ever left out. A model that answers with NaN is
    refused before anything is run. `cache` keeps measurements for a next case with the same original and images.
    """
    if budget not in BUDGETS:
        raise unknown("audit budget", budget, BUDGETS)
    if wrong := [name for name in only if name not in AUDITS]:
        raise unknown("audit", wrong[0], AUDITS)
    cache = cache or MeasurementCache()
    if budget != "none":
        for who in [*who_is_there(case), *(["second"] if case.second is not None else [])]:
            judged_answers(case, cache, who)  # refuses NaN
    return [_run(name, case, budget, only, watch, membership, cache) for name in AUDITS]


def _run(
    name: str,
    case: Case,
    budget: str,
    only: Sequence[str],
    watch: Callable[[str], None] | None,
    membership: Membership | None,
    cache: MeasurementCache,
) -> Audit:
    entry = AUDITS[name]
    run = entry.run if entry.run is not None or membership is None else lambda case, *_: membership(case)
    if reason := _reason_not_to(name, entry, run is not None, budget, only):
        return Audit(name, "NOT RUN", reason)
    assert run is not None, "else there was a reason"
    if watch is not None:
        watch(entry.title)
    started = time.perf_counter()
    try:
        audit = run(case, cache, budget)
    except Exception as error:  # whatever goes wrong in an audit is its result
        logger.warning("audit %s failed", name, exc_info=True)
        audit = Audit(name, "ERROR", f"{entry.title}: {str(error) or type(error).__name__}")
    return replace(audit, seconds=time.perf_counter() - started)


def _reason_not_to(name: str, entry: AuditSpec, there: bool, budget: str, only: Sequence[str]) -> str | None:
    if budget == "none":
        return "no audit was asked for (--audit none)"
    if only and name not in only:
        return f"not asked for, only {', '.join(only)}"
    if not there:
        return "needs shadow models: --audit full --shadows N"
    if budget == "quick" and not entry.quick and name not in only:
        return "not part of --audit quick: --audit full"
    return None


def label(audits: Sequence[Audit]) -> str:
    """The audits in one line; what failed comes first, and what was not run is never left out.

    >>> label([Audit("C1", "PASS", ""), Audit("C2", "NOT RUN", "")])
    'passed 1 of 2, 1 not run'
    >>> label([Audit("C1", "FAIL", ""), Audit("C2", "PASS", "")])
    'FAILED C1; passed 1 of 2'
    """
    named = {
        outcome: [audit.name for audit in audits if audit.outcome == outcome]
        for outcome in ("PASS", "FAIL", "ERROR", "NO REFERENCE", "NOT RUN")
    }
    parts = [
        f"{word} {', '.join(named[outcome])}"
        for outcome, word in (("FAIL", "FAILED"), ("ERROR", "ERROR in"))
        if named[outcome]
    ]
    skipped = f", {len(named['NOT RUN'])} not run" if named["NOT RUN"] else ""
    if named["NO REFERENCE"]:
        parts.append(f"no reference, {len(named['NO REFERENCE'])} of {len(audits)} measured{skipped}")
    elif len(named["NOT RUN"]) == len(audits):
        parts.append(f"none of {len(audits)} run")
    else:
        parts.append(f"passed {len(named['PASS'])} of {len(audits)}{skipped}")
    return "; ".join(parts)
