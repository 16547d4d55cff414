"""What a bundle claims, measured again: accuracies, the verdict's metrics and audits, the report, the journal's lines.

Here the run before the request, its data and the model that the repeated decision gave are at hand.
"""

import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from html import unescape
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

from fedortho.audits import find_audit, run_audits
from fedortho.audits.measurements import MeasurementCache
from fedortho.audits.qualification import Qualification, read_qualification
from fedortho.audits.relearn import RELEARNED
from fedortho.audits.result import ROUNDING
from fedortho.audits.retention import RETENTION
from fedortho.audits.verdict import Verdict, subject_of
from fedortho.data.images import Dataset
from fedortho.data.request import ForgetRequest
from fedortho.devices import choose_device
from fedortho.errors import FedOrthoError
from fedortho.evaluation.case import COUNTERFACTUALS, REFERENCES
from fedortho.evaluation.metric_suite import MetricSuite
from fedortho.evidence.bundle import lines_about
from fedortho.evidence.contents import Bundle, NetworkRecord, made_here
from fedortho.reports.gallery import NO_ORIGINAL, NO_REFERENCE, audit_pictures, draw_gallery
from fedortho.reports.page import LEFT_OUT, drawn_reference, render, without_images
from fedortho.reports.summary import Report
from fedortho.requests.forgetting import ServedRequest
from fedortho.requests.qualifying import QualifyOptions, draw_classes
from fedortho.requests.references import case_of, find_references, runs_beside
from fedortho.runs.derived import build_derived
from fedortho.runs.record import ResultRecord
from fedortho.runs.run import Run, open_run
from fedortho.storage.journal import read_journal
from fedortho.storage.records import to_json

# of entry.json, what another machine or another hour gives otherwise, and who took part
UNREPEATED = ("cost", "threads", "device", "ticket", "answered", "confirmed")
SHOWN = 5  # contradictions of one file
PICTURE = re.compile(r"data:image/png;base64,([A-Za-z0-9+/=]*)")


@dataclass(frozen=True)
class Claim:
    """A claim of a bundle, and whether it was checked: only what was computed again here is."""

    state: Literal["checked", "not checked", "absent"]
    text: str

    def __str__(self) -> str:
        return f"{self.state}: {self.text}"


@dataclass(frozen=True)
class BundleCheck:
    """A bundle that was not refused, and what was checked of it."""

    bundle: Bundle
    claims: tuple[Claim, ...]


@dataclass(frozen=True)
class Findings:
    """Findings as they are made, and claims that turned out not to be true."""

    made: list[Claim] = field(default_factory=list)
    lies: list[str] = field(default_factory=list)

    def checked(self, text: str) -> None:
        self.made.append(Claim("checked", text))

    def unchecked(self, text: str) -> None:
        self.made.append(Claim("not checked", text))

    def absent(self, text: str) -> None:
        self.made.append(Claim("absent", text))

    def either(self, is_checked: bool, checked: str, unchecked: str) -> None:
        """Note the first text if it was checked, else the second."""
        self.made.append(Claim("checked", checked) if is_checked else Claim("not checked", unchecked))

    def compare(self, place: str, told: Any, found: Any) -> bool:
        """Note every difference between what a file tells and what was found here; whether there is none."""
        pairs = list(_pairs(told, found))
        for at, mine, other in pairs[:SHOWN]:
            self.lies.append(f"{place}{at} is {_short(mine)}; here it is {_short(other)}")
        return not pairs


@dataclass(frozen=True)
class Repeated:
    """A decision that was repeated: the run before it, its data, what came out, and reference models that are here."""

    run: Run
    data: Dataset
    served: ServedRequest
    references: tuple[Run, ...]


def check_entry(found: Findings, bundle: Bundle, again: Repeated) -> None:
    """Compare entry.json and settings.json with the repeated request and the run."""
    told, measured = (
        {key: value for key, value in to_json(record).items() if key not in UNREPEATED}
        for record in (bundle.entry, again.served.record)
    )
    record, network = again.run.record, bundle.settings.model
    known = to_json(NetworkRecord(again.run.settings.model, record.model.num_classes, record.model.channels))
    same = found.compare("entry.json: ", told, measured)
    same &= found.compare("settings.json: model.", to_json(network), known)
    same &= found.compare("settings.json: training.", dict(bundle.settings.training), dict(record.settings))
    same &= found.compare("environment.json: run.", to_json(bundle.environment.run), to_json(record.environment))
    if same:
        shares = ", ".join(f"{name} {share:.1%}" for name, share in asdict(bundle.entry.after).items())
        found.checked(f"accuracies, measured again: {shares}")


def references_of(run: Run, request: ForgetRequest, given: Sequence[Run], wanted: Sequence[str]) -> tuple[Run, ...]:
    """The runs with the digests that a verdict names, among those that are given or lie beside the run."""
    beside = [found for found in runs_beside(run) if found.settings.without]
    here = {found.record.model.digest: found for found in [*beside, *find_references(run, request), *given]}
    return tuple(here[digest] for digest in wanted if digest in here)


def check_verdict(
    found: Findings, bundle: Bundle, verdict: Verdict, derived: Run, again: Repeated, audits: str
) -> None:
    """Measure the metrics again and repeat audits; `audits` as in `chosen_audits`."""
    request, run, data = ForgetRequest.parse(bundle.entry.request), again.run, again.data
    names = [role for role in (*REFERENCES, *COUNTERFACTUALS) if role in verdict.digests]
    is_complete = len(again.references) == len(names)
    device = choose_device(verdict.environment.device if verdict.environment else "cpu")
    case = case_of(derived, request, data, run, again.references if is_complete else (), device)
    cache = MeasurementCache()
    metrics = MetricSuite(case).measure(case.unlearned)
    same = found.compare("verdict.json: subject", verdict.subject, subject_of(request, data.test.names))
    other = {metric.name for metric in verdict.metrics} - {metric.name for metric in metrics}
    same &= found.compare("verdict.json: metrics of other requests", sorted(other), [])
    keys = ("value", "images", "details", *(["reference"] if is_complete else []))
    for metric in metrics if verdict.metrics else ():
        if metric.value is not None or is_complete:
            told = verdict.metric(metric.name)
            values = ({key: getattr(each, key, None) for key in keys} for each in (told, metric))
            same &= found.compare(f"verdict.json: {metric.name} ", *values)
    same &= _origin(found, verdict, run)
    if not verdict.metrics:
        found.absent("verdict.json: no metric")
    elif same:
        without = "" if is_complete else ", without the reference model"
        found.checked(f"the verdict's metrics, measured again{without}")
    if names and is_complete:
        own = f"train one of your own (--without {request}) and judge against it"
        found.unchecked(f"whether its reference models never saw the forget set: that is their maker's word; {own}")
    if verdict.retention is not None and is_complete:
        _compare_audit(found, verdict.retention, RETENTION(case, cache))
    _repeat_audits(found, verdict, case, cache, audits, is_complete)


def _origin(found: Findings, verdict: Verdict, run: Run) -> bool:
    """Compare what the verdict tells of the run and of its qualification."""
    mine = {"data": to_json(run.record.data), "settings": dict(run.record.settings)}
    told = {key: verdict.origin[key] for key in mine if key in verdict.origin}
    same = found.compare("verdict.json: origin.", told, {key: mine[key] for key in told})
    if (qualified := verdict.qualification) is not None:
        same &= check_drawn(found, qualified, run)
        found.unchecked("what the qualification in verdict.json tells of the drawn classes: none was audited again")
        known = read_qualification(run.path)
        if known is None:
            found.unchecked(f"the qualification in verdict.json: {run.path} has none to compare with")
        else:
            same &= found.compare("verdict.json: qualification.", to_json(verdict.qualification), to_json(known))
    return same


def check_drawn(found: Findings, qualified: Qualification, run: Run) -> bool:
    """Compare the classes of a qualification with those that its seed draws for this model."""
    wanted = QualifyOptions(len(qualified.confirming), len(qualified.choosing), qualified.seed)
    try:
        drawn = draw_classes(run, wanted)
    except FedOrthoError as error:
        found.lies.append(f"verdict.json: qualification, which no run like this one has: {error}")
        return False
    pairs = ({"choosing": each.choosing, "confirming": each.confirming} for each in (qualified, drawn))
    return found.compare("verdict.json: qualification: drawn by its seed: ", *pairs)


def chosen_audits(verdict: Verdict, audits: str) -> list[str]:
    """The audits to repeat, of those that the verdict has results of: names, `all`, `none`, or `quick` (the budget)."""
    claimed = [result.name for result in verdict.audits if result.outcome != "NOT RUN"]
    if audits in ("", "quick"):
        return [name for name in claimed if find_audit(name).is_quick]
    if audits in ("all", "none"):
        return claimed if audits == "all" else []
    wanted = [name.strip() for name in audits.split(",")]
    for name in wanted:
        find_audit(name)  # refuses a name that does not exist
    return [name for name in claimed if name in wanted]


def budget_of(verdict: Verdict) -> str:
    """The budget of a verdict's audits; with one reference model the full one may have no audit that quick has not."""
    claimed = [result for result in verdict.audits if result.outcome != "NOT RUN"]
    is_full = any(not find_audit(each.name).is_quick or RELEARNED in each.details for each in claimed)
    return "full" if is_full else "quick"


def _repeat_audits(
    found: Findings, verdict: Verdict, case: Any, cache: MeasurementCache, audits: str, is_complete: bool
) -> None:
    names = chosen_audits(verdict, audits) if is_complete else []
    again = run_audits(case, budget_of(verdict), only=names, cache=cache) if names else []
    repeated = {each.name: each for each in again}
    for told in verdict.audits:
        result, claim = repeated.get(told.name), f"audit {told.name}, said to be {told.outcome}"
        if told.outcome == "NOT RUN":
            found.absent(f"audit {told.name}, {told.title}: not run; the reason is its maker's word")
        elif not is_complete:
            found.unchecked(f"{claim}: a reference model is not here; --reference RUN")
        elif told.name not in names or result is None:
            found.unchecked(f"{claim}: not repeated; --audits {told.name}")
        elif result.outcome in ("NOT RUN", "ERROR") and result.outcome != told.outcome:
            found.unchecked(f"{claim}: it cannot be repeated here: {result.finding}")
        else:
            _compare_audit(found, told, result)


def _compare_audit(found: Findings, told: Any, result: Any) -> None:
    values = [{key: value for key, value in to_json(each).items() if key != "seconds"} for each in (told, result)]
    if found.compare(f"verdict.json: {told.name} ", *values):
        found.checked(f"audit {told.name}, repeated: {told.outcome}")


@contextmanager
def derived_run(bundle: Bundle, again: Repeated) -> Iterator[Run]:
    """The run that has forgotten, as the bundle tells it, in a temporary directory."""
    record, result = again.run.record, again.served.result
    told = replace(record, requests=(*record.requests, bundle.entry), result=ResultRecord(bundle.entry.after.test))
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / bundle.request.run
        build_derived(path, again.run, result.model, told, patch=result.patch, ledger=None)
        yield replace(again.run, path=path, record=open_run(path).record)


def check_report(found: Findings, bundle: Bundle, derived: Run, again: Repeated) -> None:
    """Render the report again from the bundle's records and the data, and compare it line by line."""
    maker = bundle.manifest.made_by
    if maker != made_here():
        found.unchecked(f"report.html: made by {maker}, and this is {made_here()}, which renders another page")
        return
    page = bundle.files["report.html"].decode("utf-8", "replace")
    words, request = unescape(page), ForgetRequest.parse(bundle.entry.request)
    original = None if NO_ORIGINAL in words else again.run
    beside = [] if NO_REFERENCE in words else [*again.references, *find_references(again.run, request)]
    reference = drawn_reference(beside, bundle.verdict, bundle.digests.after)
    others: dict[str, Any] = {"original": original, "reference": reference}
    gallery = draw_gallery(derived, again.data, request, **others, images=f'<p class="soft">{LEFT_OUT}</p>' in page)
    try:
        verdict = bundle.verdict
        pictures = tuple(audit_pictures(verdict.audits, verdict.digests)) if verdict is not None else ()
    except (AttributeError, LookupError, TypeError, ValueError):  # a stranger's values
        found.lies.append("verdict.json: details of its audits are not what audits write; they cannot be drawn")
        return
    report = Report(derived, request, bundle.verdict, gallery, pictures, bundle.chain.entries)
    rendered = without_images(render(report))
    told, mine = _lines(page), _lines(rendered)
    if reference is None and NO_REFERENCE not in words:
        told, mine = _without_figures(told), _without_figures(mine)
        found.unchecked("figures of report.html: they show a reference model that is not here; --reference RUN")
    if told == mine:
        found.checked("report.html, rendered again from the records")
        return
    at = next(place for place, (one, other) in enumerate(zip_longest(told, mine)) if one != other)
    shown = [repr(lines[at][:160]) if at < len(lines) else "not there" for lines in (told, mine)]
    found.lies.append(f"report.html: line {at + 1} is {shown[0]}; rendered again from the records it is {shown[1]}")


def _lines(page: str) -> list[str]:
    """The lines of a page, with a digest in place of each picture."""
    return PICTURE.sub(lambda uri: f"picture {sha256(uri[1].encode()).hexdigest()}", page).splitlines()


def _without_figures(lines: list[str]) -> list[str]:
    start = next((n for n, line in enumerate(lines) if line.startswith('<section id="figures">')), len(lines))
    end = next((n for n, line in enumerate(lines) if n > start and line == "</section>"), len(lines))
    return lines[:start] + lines[end:]


def check_lines(found: Findings, bundle: Bundle, directory: Path, *, is_given: bool) -> None:
    """Compare the bundle's lines with the journal of a directory: none may be changed, left out or added."""
    path, entries = directory / "journal.jsonl", read_journal(directory).entries
    about = lines_about(entries, bundle.request.run, bundle.entry)
    end = bundle.digests.journal
    if "journal.jsonl" not in bundle.files:
        if done := ", ".join(str(entry.number) for entry in about if entry.after == bundle.digests.after):
            found.lies.append(f"journal.jsonl is missing, though entries {done} of {path} tell of this model")
        return
    if end is None or end.number > len(entries) or entries[end.number - 1].hash != end.hash:
        other = f"journal.jsonl: {path} does not have the entry at which it ends"
        if is_given:
            found.lies.append(other)
        else:
            found.unchecked(f"{other}; --journal DIR names the journal to compare with")
        return
    mine = [entry.line for entry in about if entry.number <= end.number]
    if found.compare("journal.jsonl: ", [entry.line for entry in bundle.chain.entries], mine):
        found.checked(f"journal.jsonl: every entry of {path} that tells of this request or run, and no other")


def _pairs(told: Any, found: Any, at: str = "") -> Iterator[tuple[str, Any, Any]]:
    """The places at which two JSON values differ; numbers may differ by rounding."""
    if isinstance(told, Mapping) and isinstance(found, Mapping):
        for key in sorted({*told, *found}):
            yield from _pairs(told.get(key), found.get(key), f"{at}.{key}" if at else str(key))
    elif _is_list(told) and _is_list(found) and len(told) == len(found):
        for number, (mine, other) in enumerate(zip(told, found, strict=True)):
            yield from _pairs(mine, other, f"{at}[{number}]")
    elif _is_number(told) and _is_number(found):
        if not abs(told - found) <= ROUNDING * max(1.0, abs(found)):
            yield at, told, found
    elif told != found or isinstance(told, bool) != isinstance(found, bool):
        yield at, told, found


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _short(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"
