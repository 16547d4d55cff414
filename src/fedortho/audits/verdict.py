"""The verdict on one request, a record: what was edited, measured, audited and spent; verdict.json holds one."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

from fedortho.audits.result import AuditResult, label
from fedortho.audits.sentences import advice_on, sentence_on
from fedortho.engines.cost import Cost
from fedortho.errors import BadRecord
from fedortho.evaluation.metrics import Metric
from fedortho.storage.files import read_json, write_json
from fedortho.storage.provenance import Environment
from fedortho.storage.records import Migration, from_json, to_json

FILE = "verdict.json"
NEVER_TESTED = (
    "backdoors and other poison in the forgotten images",
    "what a comparison of the models before and after forgetting reveals about the forgotten images",
    "copies of the data or of the model outside this run",
    "whether a law is satisfied: this is evidence, not a legal finding",
)
DERIVED = ("sentence", "label", "passes", "advice", "not-tested")  # written for readers of the file, computed anew here


def _from_schema_2(value: dict[str, Any]) -> dict[str, Any]:
    """Schema 2 called an audit that ran and could not tell NOT RUN, with its measurements."""
    audits = [
        audit | {"outcome": "INCONCLUSIVE"}
        if audit["outcome"] == "NOT RUN" and (audit.get("unlearned") is not None or audit.get("details"))
        else audit
        for audit in value["audits"]
    ]
    return value | {"audits": audits}


@dataclass(frozen=True)
class Verdict:
    """All that is known about one request and the model that is said to have forgotten."""

    schema: ClassVar[int] = 3
    migrations: ClassVar[Mapping[int, Migration]] = {2: _from_schema_2}

    request: str
    subject: str  # the request in words: class automobile
    method: str
    metrics: tuple[Metric, ...]
    audits: tuple[AuditResult, ...]  # every audit, whatever its outcome
    retention: AuditResult | None
    has_reference: bool
    edited: Mapping[str, Any] = field(default_factory=dict)
    cost: Cost | None = None
    retrain_seconds: float | None = None  # measured or estimated duration of retraining
    settings: Mapping[str, Any] = field(default_factory=dict)
    digests: Mapping[str, str] = field(default_factory=dict)
    origin: Mapping[str, Any] = field(default_factory=dict)  # the run, its settings with seeds, and its data
    environment: Environment | None = None

    @property
    def results(self) -> tuple[AuditResult, ...]:
        """The audits, and retention if it was measured: a ruined model has forgotten, but is of no use."""
        return self.audits if self.retention is None else (*self.audits, self.retention)

    @property
    def label(self) -> str:
        """The outcomes in one line; without a reference model it never says passed."""
        retention = "" if self.retention is None or self.retention.outcome == "PASS" else "; FAILED retention"
        outcomes = label(self.audits)
        missing = "" if self.has_reference or "no reference" in outcomes else "no reference; "
        return missing + outcomes + retention

    @property
    def passes(self) -> bool:
        """Every audit ran against a reference model and passed, and so did retention; INCONCLUSIVE is not passed."""
        return self.retention is not None and all(result.outcome == "PASS" for result in self.results)

    @property
    def failed(self) -> list[str]:
        return [result.name for result in self.results if result.outcome in ("FAIL", "ERROR")]

    @property
    def sentence(self) -> str:
        """The verdict for a person who reads nothing else."""
        return sentence_on(self)

    @property
    def advice(self) -> str:
        """What to do next; empty if the verdict passes."""
        return advice_on(self)

    @property
    def not_tested(self) -> list[str]:
        skipped = [audit for audit in self.audits if audit.outcome == "NOT RUN"]
        return [f"{audit.name}, {audit.title}: {audit.finding}" for audit in skipped] + list(NEVER_TESTED)

    def metric(self, name: str) -> Metric | None:
        return next((metric for metric in self.metrics if metric.name == name), None)

    def audit(self, name: str) -> AuditResult | None:
        return next((audit for audit in self.audits if audit.name == name), None)

    def to_json(self) -> dict[str, Any]:
        """The record for JSON; every metric comes with its description, and the sentences with the numbers."""
        derived = {key: getattr(self, key.replace("-", "_")) for key in DERIVED}
        return to_json(self) | {"metrics": [metric.to_json() for metric in self.metrics]} | derived

    @classmethod
    def from_json(cls, value: Any, source: Path | str) -> "Verdict":
        """The verdict in a JSON value; anything that is not one is refused, naming `source`."""
        if isinstance(value, dict):
            value = {key: each for key, each in value.items() if key not in DERIVED}
            stored, metrics = {field.name for field in fields(Metric)}, value.get("metrics")
            if isinstance(metrics, list) and all(isinstance(metric, dict) for metric in metrics):
                value["metrics"] = [{key: metric[key] for key in metric if key in stored} for metric in metrics]
        try:
            return from_json(cls, value, source)
        except ValueError as error:  # a metric outside its range
            raise BadRecord(f"{source}: {error}") from error

    def __str__(self) -> str:
        return f"{self.sentence} [{self.label}]"


def read_verdict(directory: Path) -> Verdict | None:
    """The verdict of a run directory; None if there is none."""
    path = directory / FILE
    if not path.exists():
        return None
    try:
        return Verdict.from_json(read_json(path), path)
    except BadRecord as error:
        raise BadRecord(f"{error}; judge again: fedortho judge {directory}") from error


def write_verdict(directory: Path, verdict: Verdict) -> None:
    """Write verdict.json into a run directory."""
    write_json(directory / FILE, verdict.to_json())
