"""The verdict on one request, a record and in words: what was edited, measured, audited and spent; what to do next."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

from fedortho.audits.qualification import Qualification
from fedortho.audits.result import ROUNDING, AuditResult, label
from fedortho.data.cache import DataCopy
from fedortho.data.request import ForgetRequest
from fedortho.engines.cost import Cost
from fedortho.errors import BadRecord, FedOrthoError
from fedortho.evaluation.case import COUNTERFACTUALS, REFERENCES
from fedortho.evaluation.metrics import Metric
from fedortho.storage.files import read_json, write_json
from fedortho.storage.provenance import Environment
from fedortho.storage.records import Migration, from_json, to_json
from fedortho.unlearning.plan import Effect

FILE = "verdict.json"
HIDDEN = 0.02  # forget accuracy up to which a class counts as no longer predicted
NEVER_TESTED = (
    "backdoors and other poison in the forgotten images",
    "what a comparison of the models before and after forgetting reveals about the forgotten images",
    "copies of the data or of the model outside this run",
    "whether a law is satisfied: this is evidence, not a legal finding",
)
IMPORTS = "imported-references"  # key of `origin`: runs of the reference models that were trained elsewhere
IMPORTED = "whether an imported reference model was trained without the forget set: that is its maker's word"
TRAINED_ANEW = ("regrow", "retrain")  # methods beyond which only more of their kind erases more
ALL_STAGES = "reset every stage (--set stages=99: the same cost, and no weight of the original is left), or "
ABSOLUTE = ("C2", "C6")  # audits with a limit that holds without a reference model
DERIVED = ("answer", "sentence", "label", "passes", "advice", "not-tested")  # for readers; computed anew here


def _from_schema_2(value: dict[str, Any]) -> dict[str, Any]:
    """Schema 2 called an audit that ran and could not tell NOT RUN, with its measurements."""

    def renamed(audit: dict[str, Any]) -> dict[str, Any]:
        has_run = audit.get("unlearned") is not None or audit.get("details")
        return audit | {"outcome": "INCONCLUSIVE"} if audit["outcome"] == "NOT RUN" and has_run else audit

    return value | {"audits": [renamed(audit) for audit in value["audits"]]}


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
    effect: Effect | None = None  # of pruning and of the classifier edit, by a method of ours
    cost: Cost | None = None
    retrain_seconds: float | None = None  # measured or estimated duration of retraining
    settings: Mapping[str, Any] = field(default_factory=dict)
    digests: Mapping[str, str] = field(default_factory=dict)
    origin: Mapping[str, Any] = field(default_factory=dict)  # the run, its settings with seeds, and its data
    environment: Environment | None = None
    copies: tuple[DataCopy, ...] = ()  # of the forgotten images, as far as they are known
    qualification: Qualification | None = None  # of the method on this model, where this class has no reference model

    @property
    def results(self) -> tuple[AuditResult, ...]:
        """The audits, and retention if it was measured: a ruined model has forgotten, but is of no use."""
        return self.audits if self.retention is None else (*self.audits, self.retention)

    @property
    def label(self) -> str:
        """The outcomes in one line; without a reference model it never says passed."""
        retention = "" if self.retention is None or self.retention.outcome == "PASS" else "; FAILED retention"
        outcomes = label(self.audits)
        if self.is_qualified and self.qualification is not None:
            number = len(self.qualification.confirming)
            return f"QUALIFIED on {number} of {number} drawn classes; no reference for this class was measured"
        missing = "" if self.has_reference or "no reference" in outcomes else "no reference; "
        return missing + outcomes + retention

    @property
    def passes(self) -> bool:
        """Every audit ran against a reference model and passed, and so did retention; INCONCLUSIVE is not passed."""
        return self.retention is not None and all(result.outcome == "PASS" for result in self.results)

    @property
    def is_qualified(self) -> bool:
        """No PASS, but every drawn class passed by this method on this model, and every number here keeps its limit.

        Every audit whose limit needs no reference model was run.
        """
        results = [result for result in self.results if result.value is not None and result.limit is not None]
        kept = all((result.value or 0.0) <= (result.limit or 0.0) + ROUNDING for result in results)
        is_known = self.qualification is not None and self.qualification.is_qualified
        is_whole = self.retention is not None and {*ABSOLUTE, self.retention.name} <= {each.name for each in results}
        return is_known and is_whole and kept and not self.has_reference and not self.failed

    @property
    def failed(self) -> list[str]:
        """Names of the audits that failed or raised an error."""
        return [result.name for result in self.results if result.outcome in ("FAIL", "ERROR")]

    @property
    def answer(self) -> str:
        """The verdict in a title: erased, hidden and not erased, or open, with the number of audits that say so."""
        named, number = self.subject[:1].upper() + self.subject[1:], len(self.audits)
        outcomes = Counter(audit.outcome for audit in self.audits)
        is_class, many = _is_class(self), _names_many(self)
        verb, they_are = ("are", "they are") if many else ("is", "it is")
        if self.passes:
            return f"{named} {verb} erased: {number} of {number} audits passed"
        state = f"{named} {verb} {'hidden' if _is_hidden(self) else 'still predicted'}" if is_class else named
        if outcomes["FAIL"]:
            joined = f"{state}, not erased" if is_class else f"{named} {verb} not erased"
            return f"{joined}: {outcomes['FAIL']} of {number} audits failed"
        if self.failed == ["retention"]:
            return f"{named} {verb} forgotten at a price: accuracy on the retain set has suffered"
        if self.is_qualified:
            missing = "these have" if many else "this one has"
            return f"{state}; the method is qualified on other classes, {missing} no retrained model to compare with"
        known = f"{outcomes['PASS']} of {number} audits passed" if self.has_reference else "there is no retrained model"
        known = "no audit was run" if outcomes["NOT RUN"] == number else known
        return f"{state}; whether {they_are} erased is open: {known}"

    @property
    def sentence(self) -> str:
        """The verdict for a person who reads nothing else."""
        sentences = [_accuracy_sentence(self), _audit_sentence(self)]
        if self.retrain_seconds is not None:
            sentences.append(f"Retraining takes about {spoken_time(self.retrain_seconds)} here.")
        return " ".join(sentences)

    @property
    def advice(self) -> str:
        """What to do next; empty if the verdict passes."""
        if self.passes:
            return ""
        is_class = _is_class(self)
        cost = "" if self.retrain_seconds is None else f", about {spoken_time(self.retrain_seconds)} here"
        retrain = f"retrain without the forget set (--level exact{cost})"
        if "retention" in self.failed and (self.failed == ["retention"] or not is_class):
            price = "too much accuracy" if self.failed == ["retention"] else "more than it forgets"
            return f"The edit costs {price}: lower --max-retain-drop, or {retrain}."
        if self.failed:
            erase = "forget it with --level erase, or " if is_class and self.method not in TRAINED_ANEW else ""
            return f"To erase it, {ALL_STAGES if _keeps_a_stage(self) else erase}{retrain}."
        if not self.has_reference:
            return f"Give a reference model (--reference RUN), or have one trained (--retrain{cost})."
        if any(audit.outcome == "NOT RUN" for audit in self.audits):
            return "Run the remaining audits (fedortho judge RUN --audit full --retrain; --shadows 16 for membership)."
        more = "judge against three reference models, each of another seed (--retrain --reference-models 3)"
        return f"An inconclusive audit is not passed: {more}."

    @property
    def not_tested(self) -> list[str]:
        """Audits that were not run, each with its reason, and what no audit tests."""
        skipped = [audit for audit in self.audits if audit.outcome == "NOT RUN"]
        told = [f"{audit.name}, {audit.title}: {audit.finding}" for audit in skipped]
        return [*told, *([IMPORTED] if self.origin.get(IMPORTS) else []), *NEVER_TESTED]

    def metric(self, name: str) -> Metric | None:
        """The metric of that name; None if it was not measured."""
        return next((metric for metric in self.metrics if metric.name == name), None)

    def audit(self, name: str) -> AuditResult | None:
        """The result of that audit; None if it is not in the verdict."""
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
            verdict = from_json(cls, value, source)
            ForgetRequest.parse(verdict.request)
        except BadRecord:
            raise
        except (ValueError, FedOrthoError) as error:  # a metric outside its range, or no request
            raise BadRecord(f"{source}: {error}") from error
        try:
            _audit_sentence(verdict)  # it reads details, which may be anything
        except (LookupError, TypeError, ValueError) as error:
            raise BadRecord(f"{source}: details of its audits are not what audits write ({error})") from error
        return verdict

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


def _is_class(verdict: Verdict) -> bool:
    return ForgetRequest.parse(verdict.request).kind == "class"


def _names_many(verdict: Verdict) -> bool:
    """Whether the request names several classes, clients or samples."""
    request = ForgetRequest.parse(verdict.request)
    return len(request.classes) + len(request.clients) + len(request.samples) > 1


def _is_hidden(verdict: Verdict) -> bool:
    metric = verdict.metric("forget-accuracy")
    return metric is not None and (metric.value or 0.0) <= HIDDEN


def _accuracy_sentence(verdict: Verdict) -> str:
    metric, named = verdict.metric("forget-accuracy"), verdict.subject[:1].upper() + verdict.subject[1:]
    if metric is None or metric.value is None:
        return f"{named}: its accuracy could not be measured."
    kind = "imported" if verdict.origin.get(IMPORTS) else "retrained"
    reference = "" if metric.reference is None else f" (one {kind} model: {metric.reference:.1%})"
    is_one = metric.images == 1  # a claim on one image is called that
    if not _is_class(verdict):
        images = "one image is" if is_one else "the images are"
        return f"{named}: {metric.value:.1%} of {images} still classified correctly{reference}."
    verb, their, them = ("are", "their", "them") if _names_many(verdict) else ("is", "its", "it")
    images = f"{their} {'one test image' if is_one else 'test images'}"
    if metric.value <= HIDDEN:
        share = f"{metric.value:.1%} of {images} {'is' if is_one else 'are'}"
        if (metric.reference or 0.0) <= HIDDEN:
            return f"{named} {verb} no longer predicted ({share})."
        doubt = f"but the reference model predicts {them}{reference}: was it trained without {them}?"
        return f"{named} {verb} no longer predicted ({share}), {doubt}"
    return f"{named} {verb} still predicted for {metric.value:.1%} of {images}{reference}."


def _audit_sentence(verdict: Verdict) -> str:
    probe, conclusion = verdict.audit("C1"), _conclusion(verdict)
    if probe is None or probe.unlearned is None:
        return f"{conclusion[:1].upper()}{conclusion[1:]}."
    models = f"{_retrained(verdict)} on average" if _references(verdict) > 1 else _retrained(verdict)
    reference = "" if probe.reference is None else f", in {models} in {probe.reference:.1%}"
    depth = f" at {entry}" if (entry := probe.details.get("depth")) else ""
    them = "them" if _names_many(verdict) else "it"
    return f"A linear probe{depth} still finds {them} in {probe.unlearned:.1%} of images{reference}: {conclusion}."


def _conclusion(verdict: Verdict) -> str:
    if all(audit.outcome == "NOT RUN" for audit in verdict.audits):
        return "erasure was not tested: no audit was run"
    if verdict.is_qualified and verdict.qualification is not None:
        return f"no reference for this class was measured, but {verdict.qualification.sentence.rstrip('.')}"
    if not verdict.has_reference:
        return "erasure cannot be assessed without a retrained model to compare with"
    if not verdict.failed:
        return _passed(verdict)
    if verdict.failed == ["retention"]:
        return f"{_passed(verdict)}, but accuracy on the retain set has suffered"
    return f"{_depth(verdict)} (failed: {', '.join(verdict.failed)})"


def _passed(verdict: Verdict) -> str:
    """What a verdict without a failed audit claims: no more than the audits that passed."""
    number = Counter(audit.outcome for audit in verdict.audits)
    opened = [(number[outcome], outcome.lower()) for outcome in ("INCONCLUSIVE", "NOT RUN") if number[outcome]]
    notes = [f"{many} {'was' if many == 1 else 'were'} {outcome}" for many, outcome in opened]
    if verdict.digests.get("after", "-") in [verdict.digests.get(role) for role in COUNTERFACTUALS]:
        notes.append("the same method makes the same model, byte for byte, of one that never saw it")
    if not number["PASS"]:
        return f"no audit can tell whether it is erased ({', '.join(notes)})"
    found = "1 audit finds" if number["PASS"] == 1 else f"{number['PASS']} audits find"
    return "; ".join([f"{found} no more of it than in {_retrained(verdict)}", *notes])


def _references(verdict: Verdict) -> int:
    """How many reference models the audits compared with."""
    probe = verdict.audit("C1")
    counted = 1 if probe is None else int(probe.details.get("references", 1))
    return max(sum(role in verdict.digests for role in REFERENCES), counted, 1)


def _retrained(verdict: Verdict) -> str:
    named = ("one retrained model", "two retrained models", "three retrained models")[_references(verdict) - 1]
    named = named.replace("retrained", "imported") if verdict.origin.get(IMPORTS) else named
    return f"{named} treated alike" if COUNTERFACTUALS[0] in verdict.digests else named


def _depth(verdict: Verdict) -> str:
    """How far the probe's recall has moved from the original model's to a retrained model's."""
    if not any(audit.outcome == "FAIL" for audit in verdict.audits):
        return "audits ended in errors, so nothing is known"
    if not _is_class(verdict):
        return "it differs from a model that was never trained on it"
    probe, hidden = verdict.audit("C1"), "hidden" if _is_hidden(verdict) else "not hidden"
    if verdict.failed == ["C5"] and probe is not None and probe.outcome == "PASS":
        readable = f"no more readable than in {_retrained(verdict)}"
        return f"{hidden}, and {readable}, but the features differ from such a model's"
    if behind := _erased_behind(verdict):
        return f"{hidden}, erased behind {behind} only"
    if probe is None or probe.outcome != "FAIL":
        return f"{hidden}, but recoverable"
    if probe.unlearned is None or probe.original is None or probe.reference is None:
        return f"{hidden}; how far it is erased is unknown"
    span = probe.original - probe.reference
    erased = (probe.original - probe.unlearned) / span if span > 0.01 else 0.0
    return f"{hidden}, {'partly' if erased > 0.2 else 'not'} erased"


def _keeps_a_stage(verdict: Verdict) -> bool:
    """Whether the level erase left a stage of the original in the network; C1 knows how many stages there are."""
    probe = verdict.audit("C1")
    entries = len(probe.details.get("depths", ())) - 1 if probe is not None else 0
    return verdict.method == "regrow" and (int(verdict.settings.get("stages", 0)) or max(entries, 2)) <= entries


def _erased_behind(verdict: Verdict) -> str:
    """The deepest layer at whose entry the probe or a reset tail still finds the class; empty if it is found behind it.

    No other audit may have failed: what a prototype, a norm attack or a copy brings back is not erased anywhere.
    """
    audits = [verdict.audit(name) for name in verdict.failed if name not in ("retention", "C5")]
    found = [str(audit.details.get("erased_behind", "")) if audit is not None else "" for audit in audits]
    if not found or not all(found) or not {audit.name for audit in audits if audit is not None} <= {"C1", "C3"}:
        return ""
    probe = verdict.audit("C1")
    depths = list(probe.details.get("depths", ())) if probe is not None else []
    return max(found, key=lambda name: depths.index(name) if name in depths else -1)


def spoken_time(seconds: float) -> str:
    """A duration in words, rounded.

    >>> spoken_time(0.7), spoken_time(90.0), spoken_time(400.0)
    ('1 second', '90 seconds', '7 minutes')
    """
    number = max(round(seconds), 1)
    return f"{seconds / 60:.0f} minutes" if seconds >= 120 else f"{number} second{'s' * (number > 1)}"


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
