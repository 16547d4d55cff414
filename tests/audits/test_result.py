"""Shares are quotients of whole numbers: what lies exactly on a limit does not exceed it."""

from types import SimpleNamespace
from typing import Any

import pytest

from fedortho.audits import retention
from fedortho.audits.result import Limit, decide


def test_a_loss_of_exactly_the_limit_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    case: Any = SimpleNamespace(retain_test=None, references=(), retains_one_class=False)
    for unlearned, outcome in ((50 / 100, "PASS"), (49 / 100, "FAIL")):
        shares = {"unlearned": unlearned, "original": 55 / 100}
        monkeypatch.setattr(retention, "measure_models", lambda *_, shares=shares: shares)
        assert retention.RETENTION(case).outcome == outcome, "0.55 - 0.5 is above 0.05 by rounding alone"


@pytest.mark.parametrize(("original", "outcome"), [(55 / 100, "INCONCLUSIVE"), (56 / 100, "PASS")])
def test_an_audit_that_the_original_passes_exactly_shows_nothing(original: float, outcome: str) -> None:
    measured = {"unlearned": 0.5, "original": original, "reference": 50 / 100}
    assert decide("", measured, Limit("probe", 0.05), {}).outcome == outcome
