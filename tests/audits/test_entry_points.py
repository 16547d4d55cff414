"""Audits of other packages: found by entry points, run with the rest, refused where they clash."""

from dataclasses import dataclass
from typing import Any

import pytest
from small import TinyNet

import fedortho.audits
from fedortho.audits import AUDITS, find_audit, known_audits, run_audits
from fedortho.audits.audit import Audit
from fedortho.audits.judge import judge
from fedortho.audits.measurements import MeasurementCache, forget_accuracy
from fedortho.audits.result import AuditResult, Limit
from fedortho.data.images import Images, make_dataset
from fedortho.data.request import ForgetRequest
from fedortho.errors import BadSetting, UnknownName
from fedortho.evaluation.case import Case

LIMIT = Limit("guess", 1.0)


def guess(case: Case, cache: MeasurementCache, budget: str) -> AuditResult:
    share = forget_accuracy(case, cache, "unlearned")
    return AuditResult("PASS", f"{share:.0%} at {budget}", share, LIMIT.value)


@dataclass(frozen=True)
class Entry:
    name: str
    loaded: Any
    value: str = "elsewhere:GUESS"

    def load(self) -> Any:
        return self.loaded


def install(monkeypatch: pytest.MonkeyPatch, *entries: Entry) -> None:
    def installed(*, group: str) -> tuple[Entry, ...]:
        assert group == "fedortho.audits"
        return entries

    monkeypatch.setattr(fedortho.audits, "entry_points", installed)


def test_an_audit_of_another_package_runs_and_counts(monkeypatch: pytest.MonkeyPatch, toy: Images) -> None:
    install(monkeypatch, Entry("guess", Audit("guess", "plain guessing", guess, (LIMIT,))))
    assert list(known_audits()) == [*AUDITS, "guess"]
    data, model = make_dataset(toy, toy), TinyNet().eval()
    case = Case(model, model, (model,), data, ForgetRequest.parse("class:1"))
    result = run_audits(case, only=["guess"])[-1]
    assert (result.name, result.title, result.outcome) == ("guess", "plain guessing", "PASS")
    assert "quick" in result.finding
    verdict = judge(model, data, "class:1", original=TinyNet().eval(), reference=TinyNet().eval(), only=["guess"])
    assert verdict.audit("guess") is not None
    assert "of 7" in verdict.label


def test_a_name_that_is_taken_or_an_object_that_is_no_audit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, Entry("C1", Audit("C1", "mine", guess, (LIMIT,))))
    with pytest.raises(BadSetting, match="'C1'"):
        known_audits()
    install(monkeypatch, Entry("guess", guess))
    with pytest.raises(BadSetting, match="expected an Audit"):
        find_audit("guess")
    install(monkeypatch)
    with pytest.raises(UnknownName, match="guess"):
        find_audit("guess")
