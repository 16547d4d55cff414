"""A verdict in plain English: what is visible, what the audits find, what to do about it."""

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from fedortho.audits.result import AuditResult
from fedortho.data.request import ForgetRequest
from fedortho.evaluation.metrics import Metric

HIDDEN = 0.02  # forget accuracy up to which a class counts as no longer predicted


class Judged(Protocol):
    """What these sentences read of a verdict."""

    @property
    def subject(self) -> str: ...
    @property
    def method(self) -> str: ...
    @property
    def audits(self) -> tuple[AuditResult, ...]: ...
    @property
    def has_reference(self) -> bool: ...
    @property
    def retrain_seconds(self) -> float | None: ...
    @property
    def failed(self) -> list[str]: ...
    @property
    def passes(self) -> bool: ...
    def metric(self, name: str) -> Metric | None: ...
    def audit(self, name: str) -> AuditResult | None: ...


def sentence_on(verdict: Judged) -> str:
    """The verdict for a person who reads nothing else."""
    price = ""
    if verdict.retrain_seconds is not None:
        price = f"Retraining takes about {spoken_time(verdict.retrain_seconds)} here."
    return " ".join(part for part in (_accuracy_sentence(verdict), _audit_sentence(verdict), price) if part)


def _is_one_class(verdict: Judged) -> bool:
    return verdict.subject.startswith("class") and " and " not in verdict.subject


def _accuracy_sentence(verdict: Judged) -> str:
    metric, named = verdict.metric("forget-accuracy"), verdict.subject[:1].upper() + verdict.subject[1:]
    if metric is None or metric.value is None:
        return f"{named}: its accuracy could not be measured."
    reference = "" if metric.reference is None else f" (one retrained model: {metric.reference:.1%})"
    image = "one image" if metric.images == 1 else "the images"
    tested = image.replace("image", "test image").replace("the ", "")
    verb = "is" if metric.images == 1 else "are"
    if not _is_one_class(verdict):
        return f"{named}: {metric.value:.1%} of {image} {verb} still classified correctly{reference}."
    if metric.value <= HIDDEN:
        return f"{named} is no longer predicted ({metric.value:.1%} of its {tested} {verb})."
    return f"{named} is still predicted for {metric.value:.1%} of its {tested}{reference}."


def _audit_sentence(verdict: Judged) -> str:
    probe, conclusion = verdict.audit("C1"), _conclusion(verdict)
    if probe is None or probe.unlearned is None:
        return f"{conclusion[:1].upper()}{conclusion[1:]}."
    reference = "" if probe.reference is None else f", in one retrained model in {probe.reference:.0%}"
    return f"A linear probe still finds it in {probe.unlearned:.0%} of images{reference}: {conclusion}."


def _conclusion(verdict: Judged) -> str:
    if all(audit.outcome == "NOT RUN" for audit in verdict.audits):
        return "erasure was not tested: no audit was run"
    if not verdict.has_reference:
        return "erasure cannot be assessed without a retrained model to compare with"
    if not verdict.failed:
        return _passed(verdict)
    if verdict.failed == ["retention"]:
        return f"{_passed(verdict)}, but accuracy on the retain set has suffered"
    return f"{_depth(verdict)} (failed: {', '.join(verdict.failed)})"


def _passed(verdict: Judged) -> str:
    """What a verdict without a failed audit claims: no more than the audits that passed."""
    number = Counter(audit.outcome for audit in verdict.audits)
    notes = [
        f"{number[outcome]} {'was' if number[outcome] == 1 else 'were'} {outcome.lower()}"
        for outcome in ("INCONCLUSIVE", "NOT RUN")
        if number[outcome]
    ]
    if not number["PASS"]:
        return f"no audit can tell whether it is erased ({', '.join(notes)})"
    found = "1 audit finds" if number["PASS"] == 1 else f"{number['PASS']} audits find"
    return "; ".join([f"{found} no more of it than in one retrained model", *notes])


def _depth(verdict: Judged) -> str:
    """How far the probe's recall has moved from the original model's to a retrained model's."""
    if not any(audit.outcome == "FAIL" for audit in verdict.audits):
        return "audits ended in errors, so nothing is known"
    if not _is_one_class(verdict):
        return "it differs from one model that was never trained on it"
    metric, probe = verdict.metric("forget-accuracy"), verdict.audit("C1")
    hidden = "hidden" if metric is not None and (metric.value or 0.0) <= HIDDEN else "not hidden"
    if verdict.failed == ["C5"] and probe is not None and probe.outcome == "PASS":
        return f"{hidden}, and no more readable than in one retrained model, but the features differ from that model's"
    if probe is None or probe.outcome != "FAIL":
        return f"{hidden}, but recoverable"
    if probe.unlearned is None or probe.original is None or probe.reference is None:
        return f"{hidden}; how far it is erased is unknown"
    span = probe.original - probe.reference
    erased = (probe.original - probe.unlearned) / span if span > 0.01 else 0.0
    return f"{hidden}, {'partly' if erased > 0.2 else 'not'} erased"


def advice_on(verdict: Judged) -> str:
    """What to do next; empty if the verdict passes."""
    if verdict.passes:
        return ""
    is_class = verdict.subject.startswith("class")
    cost = "" if verdict.retrain_seconds is None else f" (about {spoken_time(verdict.retrain_seconds)} here)"
    if verdict.failed == ["retention"]:
        return f"The edit costs too much accuracy: lower --max-retain-drop, or retrain without the forget set{cost}."
    if "retention" in verdict.failed and not is_class:
        return f"The edit costs more than it forgets: lower --max-retain-drop, or retrain without the forget set{cost}."
    if verdict.failed:
        stronger = "--method directions" if is_class else "a larger --max-retain-drop"
        if verdict.method == "directions":
            stronger = "--layers mid,deep, or a larger --max-retain-drop,"
        return f"To erase it, retrain without the forget set{cost}; {stronger} may erase more, at a cost in accuracy."
    if not verdict.has_reference:
        return f"Give a reference model (--reference RUN), or have one trained (--retrain){cost}."
    if any(audit.outcome == "NOT RUN" for audit in verdict.audits):
        return "Run the remaining audits (--audit full --retrain, and --shadows 16 for membership)."
    return "An inconclusive audit is not passed: judge against a reference model of another seed (--reference RUN)."


def spoken_time(seconds: float) -> str:
    """A duration in words, rounded.

    >>> spoken_time(0.7), spoken_time(90.0), spoken_time(400.0)
    ('1 second', '90 seconds', '7 minutes')
    """
    number = max(round(seconds), 1)
    if seconds >= 120:
        return f"{seconds / 60:.0f} minutes"
    return f"{number} second{'s' * (number > 1)}"


def subject_of(request: ForgetRequest, names: Sequence[str]) -> str:
    """A request in words.

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
