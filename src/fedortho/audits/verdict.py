"""The verdict on one request: what was edited, measured, audited and spent, and what it comes to in a sentence."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from fedortho.audits import AUDITS, Membership, label, run_audits
from fedortho.audits.audit import Audit
from fedortho.audits.measurements import MeasurementCache
from fedortho.audits.retention import retention
from fedortho.data.images import Dataset
from fedortho.data.request import Clients, ForgetRequest
from fedortho.evaluation.case import Case
from fedortho.evaluation.metric_suite import MetricSuite
from fedortho.evaluation.metrics import Metric
from fedortho.statistics.cost import Cost
from fedortho.storage.provenance import SCHEMA, environment
from fedortho.storage.records import to_json

HIDDEN = 0.02  # forget accuracy of a class up to which it counts as no longer predicted
NEVER_TESTED = (
    "backdoors and other poison in the forgotten images",
    "what a comparison of the models before and after tells about the forgotten images",
    "copies of the data or of the model outside this run",
    "whether a law is satisfied: this is evidence, not a legal finding",
)


@dataclass(frozen=True)
class Verdict:
    """All that is known about one request and the model that is said to have served it."""

    request: str
    subject: str  # the same in words: class automobile
    method: str
    metrics: tuple[Metric, ...]
    audits: tuple[Audit, ...]  # C1 to C6, whatever became of them
    retention: Audit | None
    has_reference: bool
    edited: Mapping[str, Any] = field(default_factory=dict)
    cost: Cost | None = None
    retrain_seconds: float | None = None  # what retraining took, or would take
    settings: Mapping[str, Any] = field(default_factory=dict)
    digests: Mapping[str, str] = field(default_factory=dict)
    origin: Mapping[str, Any] = field(default_factory=dict)  # the training's settings, with seeds, and its data

    @property
    def label(self) -> str:
        """The audits in one line; without a reference it never says passed."""
        kept = "" if self.retention is None or self.retention.outcome == "PASS" else "; FAILED retention"
        told = label(self.audits)
        lacking = "" if self.has_reference or "no reference" in told else "no reference; "
        return lacking + told + kept

    @property
    def passes(self) -> bool:
        """Every audit was run against a reference and passed, and what had to stay has stayed."""
        judged = [*self.audits, *([] if self.retention is None else [self.retention])]
        return self.retention is not None and all(audit.outcome == "PASS" for audit in judged)

    @property
    def failed(self) -> list[str]:
        judged = [*self.audits, *([] if self.retention is None else [self.retention])]
        return [audit.name for audit in judged if audit.outcome in ("FAIL", "ERROR")]

    @property
    def sentence(self) -> str:
        """For a person who reads nothing else."""
        return " ".join(part for part in (self._seen(), self._found(), self._price()) if part)

    @property
    def _named(self) -> str:
        return self.subject[:1].upper() + self.subject[1:]

    def _seen(self) -> str:
        metric = self.metric("forget-accuracy")
        if metric is None or metric.value is None:
            return f"{self._named}: its accuracy could not be measured."
        other = "" if metric.reference is None else f" (a retrained model: {metric.reference:.1%})"
        if not self.subject.startswith("class") or " and " in self.subject:
            return f"{self._named}: {metric.value:.1%} of the images are still named rightly{other}."
        if metric.value <= HIDDEN:
            return f"{self._named} is no longer predicted ({metric.value:.1%} of its test images are)."
        return f"{self._named} is still named rightly in {metric.value:.1%} of its test images{other}."

    def _found(self) -> str:
        probe = next((audit for audit in self.audits if audit.name == "C1"), None)
        read = ""
        if probe is not None and probe.forgot is not None:
            theirs = "" if probe.reference is None else f", in a retrained model in {probe.reference:.0%}"
            read = f"A linear probe still finds it in {probe.forgot:.0%} of images{theirs}: "
        said = self._conclusion(probe)
        return f"{read}{said}." if read else f"{said[:1].upper()}{said[1:]}."

    def _conclusion(self, probe: Audit | None) -> str:
        ran = [audit for audit in self.audits if audit.outcome not in ("NOT RUN",)]
        if not ran:
            return "how far it is erased was not tested: no audit was run"
        if not self.has_reference:
            return "how far it is erased is not known, because there is no retrained model to compare with"
        if not self.failed:
            left = len(self.audits) - len(ran)
            told = f"{len(ran)} audits find no more of it than in a retrained model"
            return told + (f"; {left} {'was' if left == 1 else 'were'} not run" if left else "")
        if self.failed == ["retention"]:
            return "erased as far as audits tell, but what had to stay has suffered"
        return f"{self._depth(probe)} (failed: {', '.join(self.failed)})"

    def _depth(self, probe: Audit | None) -> str:
        """How much of the way from the original to a retrained model the probe's recall has gone."""
        if not any(audit.outcome == "FAIL" for audit in self.audits):
            return "audits ended in errors, so nothing can be said"
        seen = self.metric("forget-accuracy")
        is_class = self.subject.startswith("class") and " and " not in self.subject
        hidden = "hidden" if is_class and seen is not None and (seen.value or 0.0) <= HIDDEN else "not hidden"
        if not is_class:
            return "not as in a model that never knew"
        if self.failed == ["C5"] and probe is not None and probe.outcome == "PASS":
            return f"{hidden}, and no more of it can be read than there, but features are unlike a retrained model's"
        if probe is None or probe.outcome != "FAIL":
            return f"{hidden}, and not beyond recovery"
        if probe.forgot is None or probe.original is None or probe.reference is None:
            return f"{hidden}, how far erased is not known"
        whole = probe.original - probe.reference
        gone = (probe.original - probe.forgot) / whole if whole > 0.01 else 0.0
        return f"{hidden}, {'partly' if gone > 0.2 else 'not'} erased"

    def _price(self) -> str:
        if self.retrain_seconds is None:
            return ""
        return f"Retraining costs about {spoken_time(self.retrain_seconds)} here."

    @property
    def advice(self) -> str:
        """What to do about it; empty if there is nothing to advise."""
        if self.passes:
            return ""
        cost = "" if self.retrain_seconds is None else f" (about {spoken_time(self.retrain_seconds)} here)"
        if self.failed == ["retention"]:
            return f"Too much was lost: ask for less (--max-retain-drop), or retrain without it{cost}."
        if "retention" in self.failed and not self.subject.startswith("class"):
            return f"More was lost than forgotten: ask for less (--max-retain-drop), or retrain without it{cost}."
        if self.failed:
            return f"To erase it, retrain without it{cost}; {self._stronger} may erase more, at a price."
        if not self.has_reference:
            return f"Give a retrained model to compare with (--reference RUN), or have one trained (--retrain){cost}."
        return "Run the audits that were left out (--audit full --retrain, and --shadows 16 for membership)."

    @property
    def _stronger(self) -> str:
        if self.settings.get("erase"):
            return "--layers mid,deep, or a larger --max-retain-drop,"
        return "--preset erase" if self.subject.startswith("class") else "a larger --max-retain-drop"

    @property
    def not_tested(self) -> list[str]:
        skipped = [audit for audit in self.audits if audit.outcome == "NOT RUN"]
        return [f"{audit.name}, {AUDITS[audit.name].title}: {audit.says}" for audit in skipped] + list(NEVER_TESTED)

    def metric(self, name: str) -> Metric | None:
        return next((metric for metric in self.metrics if metric.name == name), None)

    def as_mapping(self) -> dict[str, Any]:
        """For JSON; every number comes with what is needed to read it."""
        titles = {name: entry.title for name, entry in AUDITS.items()}
        audits = [asdict(audit) | {"title": titles[audit.name]} for audit in self.audits]
        return {
            "schema": SCHEMA,
            "request": self.request,
            "subject": self.subject,
            "method": self.method,
            "sentence": self.sentence,
            "label": self.label,
            "passes": self.passes,
            "advice": self.advice,
            "has-reference": self.has_reference,
            "metrics": [metric.as_mapping() for metric in self.metrics],
            "audits": audits,
            "retention": None if self.retention is None else asdict(self.retention),
            "edited": dict(self.edited),
            "cost": None if self.cost is None else asdict(self.cost),
            "retrain-seconds": self.retrain_seconds,
            "not_tested": self.not_tested,
            "settings": dict(self.settings),
            "digests": dict(self.digests),
            "origin": dict(self.origin),
            "environment": to_json(environment()),
        }

    def __str__(self) -> str:
        return f"{self.sentence} [{self.label}]"


def spoken_time(seconds: float) -> str:
    """Roughly, in words.

    >>> spoken_time(0.7), spoken_time(90.0), spoken_time(400.0)
    ('1 second', '90 seconds', '7 minutes')
    """
    number = max(round(seconds), 1)
    if seconds >= 120:
        return f"{seconds / 60:.0f} minutes"
    return f"{number} second{'s' * (number > 1)}"


def judge(
    model: nn.Module,
    data: Dataset,
    request: ForgetRequest | str,
    *,
    original: nn.Module | None = None,
    reference: nn.Module | None = None,
    second: nn.Module | None = None,
    clients: Clients | None = None,
    device: torch.device | str = "cpu",
    audit: str = "quick",
) -> Verdict:
    """Measure a model that is said to have forgotten, and try to undo it.

    Without a `reference`, a model that was retrained without what had to go, the verdict cannot be PASS. Audits
    need the `original`; without it none is run.
    """
    request = ForgetRequest.parse(request) if isinstance(request, str) else request
    before = model if original is None else original
    case = Case(model, before, reference, second, data, request, None, clients, device)
    return judge_case(case, "none" if original is None else audit)


def judge_case(
    case: Case,
    audit: str = "quick",
    *,
    only: Sequence[str] = (),
    watch: Callable[[str], None] | None = None,
    membership: Membership | None = None,
    suite: MetricSuite | None = None,
    cache: MeasurementCache | None = None,
    **about: Any,
) -> Verdict:
    """The same for a case; `about` fills the fields of the verdict that measuring does not."""
    if watch is not None:
        watch("metrics")
    metrics = (suite or MetricSuite(case)).measure(case.forgot)
    cache = cache or MeasurementCache()
    audits = run_audits(case, audit, only=only, watch=watch, membership=membership, cache=cache)
    kept = retention(case, cache=cache) if audit != "none" else None
    about = {"method": "", "subject": subject_of(case.request, case.data.test.names)} | about
    return Verdict(str(case.request), metrics=tuple(metrics), audits=tuple(audits), retention=kept,
                   has_reference=case.reference is not None, **about)  # fmt: skip


def subject_of(request: ForgetRequest, names: Sequence[str]) -> str:
    """What a request names, in words.

    >>> subject_of(ForgetRequest.parse("class:1"), ["cat", "dog"])
    'class dog'
    """
    parts = []
    if request.classes:
        words = [names[label] for label in request.labels(names)]
        parts.append(f"class {words[0]}" if len(words) == 1 else f"classes {', '.join(words)}")
    if request.clients:
        parts.append(f"client{'s' if len(request.clients) > 1 else ''} {', '.join(map(str, request.clients))}")
    if request.samples:
        parts.append(f"{len(request.samples)} sample{'s' if len(request.samples) > 1 else ''}")
    return " and ".join(parts)
