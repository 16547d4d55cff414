"""A verdict as a run keeps it, and a name that would be dangerous if it were not escaped."""

from typing import Any

from fedortho.audits.result import AuditResult
from fedortho.audits.verdict import Verdict
from fedortho.engines.cost import Cost
from fedortho.evaluation.metrics import Metric
from fedortho.storage.provenance import environment

EVIL = "<script>alert('x')</script>"
AUDITS = (
    AuditResult(
        "FAIL",
        "a probe recalls 80 %",
        0.3,
        0.05,
        unlearned=0.8,
        original=0.9,
        reference=0.5,
        details={"stages": {"unlearned": {"a": 0.4, "b": 0.8}, "reference": {"a": 0.4, "b": 0.5}}},
        name="probe",
        seconds=1.5,
    ),
    AuditResult(
        "PASS",
        "nothing came back",
        0.0,
        0.02,
        unlearned=0.005,
        original=0.921,
        reference=0.0,
        name="norms",
        title="batch-norm and kernel-norm attacks",
        seconds=0.5,
    ),
    AuditResult(
        "NOT RUN",
        "ask for it",
        details={"steps": 60, "relearning": {"10": {"unlearned": 12, "reference": None}}},
        name="relearn",
    ),
)
RECORD = Verdict(
    "class:3",
    "class 3",
    "hide",
    metrics=(
        Metric("forget-accuracy", 0.0125, 0.0, images=180),
        Metric("mia-confidence", None, error="too few images"),
    ),
    audits=AUDITS,
    retention=None,
    has_reference=True,
    cost=Cost(2.0, 1500, 0, 1e9, 0, 0, 0),
    settings={"target": 0.01},
    environment=environment(),
)
VERDICT: dict[str, Any] = RECORD.to_json()
