"""What the page says of each audit."""

from dataclasses import replace

import pytest
from verdicts import RECORD

from fedortho.audits.result import AuditResult
from fedortho.reports.summary import audit_scale, audit_scales


def test_an_audit_places_the_model_between_the_original_and_a_retrained_one() -> None:
    scale = audit_scale(AuditResult("FAIL", "", 0.3, 0.1, unlearned=0.8, original=0.9, reference=0.5, name="C1"))
    assert scale is not None
    assert scale.model == pytest.approx(30.0), "a quarter of the way from 10 to 90"
    assert scale.limit == pytest.approx(70.0)
    assert [text for _, _, text in scale.numbers] == ["90.0 %", "80.0 %", "50.0 %"]
    assert audit_scale(AuditResult("PASS", "", 0.0, 0.1, unlearned=0.8, original=0.9, name="C1")) is None
    alike = AuditResult("PASS", "", 0.0, 0.1, unlearned=0.8, original=0.9, reference=0.9, name="C1")
    assert audit_scale(alike) is None, "no scale where the original is as a retrained model"


def test_models_that_were_treated_alike_are_called_that() -> None:
    audits = [AuditResult("PASS", "", 0.0, 0.1, 0.5, 0.9, 0.5, name=name) for name in ("C1", "C2")]
    for digests, words in (
        ({}, ["retrained without it"] * 2),
        ({"counterfactual": "a"}, ["retrained and treated alike", "retrained without it"]),
    ):
        scales = [scale for _, scale in audit_scales(replace(RECORD, audits=tuple(audits), digests=digests))]
        assert [scale and scale.numbers[-1][1] for scale in scales] == words
