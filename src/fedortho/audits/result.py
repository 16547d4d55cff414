"""What an audit returns, and how measured shares become an outcome."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import Any, Literal, get_args

from fedortho.evaluation.case import REFERENCES, Case

# INCONCLUSIVE: the audit ran and cannot tell; NOT RUN: it did not run
Outcome = Literal["PASS", "FAIL", "INCONCLUSIVE", "NOT RUN", "NO REFERENCE", "ERROR"]
ROUNDING = 1e-9  # 0.55 − 0.5 does not exceed 0.05
ONE_REFERENCE = 0.03  # deviation of a recall between reference models: nearer to its limit one model cannot decide
TOO_FEW = f"within {100 * ONE_REFERENCE:.0f} points of the limit one reference model is too few to decide: give three"
TOO_FEW += " (--retrain --reference-models 3)"
NO_POWER = "the original model passes too, so this audit shows nothing here"


@dataclass(frozen=True)
class Limit:
    """The largest value with which an audit passes: a default, raised to the spread between reference models.

    Calibrated values come from benchmarks/calibration.py, which audits every pair of reference models.
    """

    name: str
    proposed: float
    calibrated: float | None = None  # None: the proposal holds

    @property
    def value(self) -> float:
        return self.proposed if self.calibrated is None else self.calibrated


@dataclass(frozen=True)
class AuditResult:
    """The outcome of one audit, with the numbers behind it."""

    outcome: Outcome
    finding: str  # one sentence for a person, with the numbers
    value: float | None = None  # compared with the limit
    limit: float | None = None  # PASS up to here
    unlearned: float | None = None  # the measurement on each model, as a share or in its own unit
    original: float | None = None
    reference: float | None = None
    details: Mapping[str, Any] = field(default_factory=dict)  # plain JSON values: per layer, per step, settings
    name: str = ""  # these three are filled in by whoever runs the audit
    title: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Attack:
    """One of several attacks of an audit, with its measurement on each model."""

    name: str
    finding: str
    measured: Mapping[str, float]
    limit: Limit
    value: float | None = None  # None without a reference model
    has_power: bool = True  # passing shows something: the original model would fail
    is_undecided: bool = False  # the reference model does not reach the target and nothing fails, or one is too few
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def fails(self) -> bool:
        return self.has_power and not self.is_undecided and (self.value or 0.0) > self.limit.value + ROUNDING


def decide(
    finding: str,
    measured: Mapping[str, float],
    limit: Limit,
    details: Mapping[str, Any],
    value: float | None = None,
    *,
    expected: float | None = None,
    has_power: bool | None = None,
) -> AuditResult:
    """PASS or FAIL by the limit; without a reference model NO REFERENCE.

    `measured` has one number for each model. The value is the gap to the reference model unless another is given; if
    that gap is within the limit for the original model as well, passing shows nothing: INCONCLUSIVE (`has_power` says
    it where the original is held against other models). Where every reference model is `expected` to have the same
    number, the result without one has a value and a limit too.
    """
    shown = (measured.get("unlearned"), measured.get("original"), measured.get("reference"))
    if "reference" not in measured:
        finding = f"{finding}; no reference model to compare with"
        value = measured["unlearned"] - expected if value is None and expected is not None else value
        return AuditResult("NO REFERENCE", finding, value, None if value is None else limit.value, *shown, details)
    if has_power is None:
        has_power = value is not None or original_exceeds(measured, limit)
    value = measured["unlearned"] - measured["reference"] if value is None else value
    outcome: Outcome = "PASS" if value <= limit.value + ROUNDING else "FAIL"
    if not has_power:
        outcome, finding = "INCONCLUSIVE", f"{finding}; {NO_POWER}"
    return AuditResult(outcome, finding, value, limit.value, *shown, details)


def original_exceeds(measured: Mapping[str, float], limit: Limit) -> bool:
    """Whether the original model exceeds the reference by more than the limit; if not, forgetting nothing passes."""
    return measured["original"] - measured["reference"] > limit.value + ROUNDING


def doubts(case: Case, value: float | None, limit: Limit) -> str:
    """TOO_FEW where a recall is so near its limit that another reference model might decide otherwise, else empty."""
    is_near = len(case.references) == 1 and value is not None and abs(value - limit.value) <= ONE_REFERENCE
    return TOO_FEW if is_near else ""


def compared(measured: Mapping[str, float]) -> dict[str, float]:
    """What a limit is compared with: the unlearned model and the original, and the mean over the reference models.

    >>> compared({"unlearned": 0.5, "original": 0.75, "reference": 0.25, "second_reference": 0.375})
    {'unlearned': 0.5, 'original': 0.75, 'reference': 0.3125}
    """
    references = [measured[role] for role in REFERENCES if role in measured]
    own = {role: share for role, share in measured.items() if role not in REFERENCES}
    return own | ({"reference": mean(references)} if references else {})


def shares_text(measured: Mapping[str, float], references: int = 1) -> str:
    """The shares of all models in words: 82.0 % (one reference model 51.0 %, original 83.0 %).

    >>> shares_text({"unlearned": 0.5, "original": 0.75})
    '50.0 % (original 75.0 %)'
    """
    named = "one reference model" if references == 1 else f"mean of {references} reference models"
    others = [(named, measured.get("reference")), ("original", measured.get("original"))]
    beside = ", ".join(f"{name} {100 * share:.1f} %" for name, share in others if share is not None)
    return f"{100 * measured['unlearned']:.1f} % ({beside})"


def label(results: Sequence[AuditResult]) -> str:
    """The outcomes in one line: failures first; audits that cannot tell or were not run are always counted.

    >>> label([AuditResult("PASS", "", name="C1"), AuditResult("NOT RUN", "", name="C2")])
    'passed 1 of 2, 1 not run'
    >>> label([AuditResult("FAIL", "", name="C1"), AuditResult("INCONCLUSIVE", "", name="C2")])
    'FAILED C1; passed 0 of 2, 1 inconclusive'
    """
    names = {outcome: [result.name for result in results if result.outcome == outcome] for outcome in get_args(Outcome)}
    loud = {"FAILED": names["FAIL"], "ERROR in": names["ERROR"]}
    parts = [f"{word} {', '.join(found)}" for word, found in loud.items() if found]
    undecided = "".join(f", {len(names[key])} {key.lower()}" for key in ("INCONCLUSIVE", "NOT RUN") if names[key])
    if names["NO REFERENCE"]:
        parts.append(f"no reference, {len(names['NO REFERENCE'])} of {len(results)} measured{undecided}")
    elif len(names["NOT RUN"]) == len(results):
        parts.append(f"none of {len(results)} run")
    else:
        parts.append(f"passed {len(names['PASS'])} of {len(results)}{undecided}")
    return "; ".join(parts)
