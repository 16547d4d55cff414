"""The top of a report: the answer, the facts, four tiles, and a scale for each audit."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from fedortho.audits.result import AuditResult
from fedortho.audits.verdict import HIDDEN, Verdict, subject_of
from fedortho.data.request import ForgetRequest
from fedortho.engines.cost import Cost
from fedortho.evaluation.case import COUNTERFACTUALS
from fedortho.methods import level_of_method, meaning_of
from fedortho.reports.pictures import Gallery, Picture
from fedortho.reports.tables import amount, number
from fedortho.runs.record import ServedRecord
from fedortho.runs.run import Run, served_record, served_requests
from fedortho.storage.journal import JournalEntry

FORGOTTEN, JUDGED = "forgotten", "judged"
EVENTS = {"executed": FORGOTTEN, "unconfirmed": FORGOTTEN, "judged": JUDGED, "verified": JUDGED}
EVENTS |= {"refused": "refused", "unmeasured": "refused"}
OWN_UNITS = ("C4", "C5")  # audits that measure no shares: an area under a curve, a similarity
TREATED = ("C1", "C3", "C5")  # audits that compare with counterfactuals, where there are any


@dataclass(frozen=True)
class Report:
    """What a report shows; the page says what is missing."""

    run: Run
    request: ForgetRequest
    verdict: Verdict | None
    gallery: Gallery = field(default_factory=Gallery)
    audit_pictures: tuple[Picture, ...] = ()
    entries: tuple[JournalEntry, ...] = ()  # of the journal beside the run; those about its model are shown
    refusal: JournalEntry | None = None  # the request was refused: there is nothing else to show

    @property
    def served(self) -> ServedRecord | None:
        """The run's record of this request; None if it has served none."""
        return served_record(self.run, self.request) if self.run.record.requests and not self.refusal else None


@dataclass(frozen=True)
class Tile:
    """A number that decides, and what it is compared with."""

    title: str
    value: str
    beside: tuple[tuple[str, str], ...] = ()  # words and numbers


@dataclass(frozen=True)
class Scale:
    """A line from the original model to a retrained one, 0 to 100, with the place of the judged model and the limit."""

    model: float
    limit: float | None
    numbers: tuple[tuple[str, str, str], ...]  # CSS class, name and measurement of each model


def find_refusal(run: Run, request: ForgetRequest | None, entries: Sequence[JournalEntry]) -> JournalEntry | None:
    """The last refusal of a request (default: of any) on this model, unless the run has served it."""
    names, served = run.record.data.class_names, served_requests(run)
    request = None if request is None else request.settled(names)
    if served and request in (None, *(other.settled(names) for other in served)):
        return None
    mine = (run.path.name, run.record.model.digest)
    refused = [each for each in entries if EVENTS.get(each.event) == "refused" and (each.run, each.before) == mine]
    for entry in reversed(refused):
        if request in (None, ForgetRequest.parse(entry.request).settled(names)):
            return entry
    return None


def answer_of(report: Report) -> dict[str, str]:
    """The title and what stands below it: sentence, advice, and the kind (good, bad, open), which colours them."""
    if report.refusal is not None or report.verdict is None:
        return dict(zip(("kind", "title", "sentence", "advice"), (*_unjudged(report), ""), strict=True))
    verdict, outcomes = report.verdict, {result.outcome for result in report.verdict.results}
    kind = "bad" if {"FAIL", "ERROR"} & outcomes else "good" if outcomes == {"PASS"} else "open"
    return {"kind": kind, "title": verdict.answer, "sentence": verdict.sentence, "advice": verdict.advice}


def _unjudged(report: Report) -> tuple[str, str, str]:
    """Kind, title and sentence where no verdict was written: of a refusal, or without audits; retraining needs none."""
    subject = subject_of(report.request, report.run.record.data.class_names)
    named = subject[:1].upper() + subject[1:]
    if report.refusal is not None:
        reason = str(report.refusal.details.get("reason", "the reason was not recorded"))
        sentence = f"{reason[:1].upper()}{reason[1:]}."
        if report.refusal.event == "unmeasured":
            return "open", f"{named}: nothing that only the forget set taught can be measured", sentence
        return "bad", f"{named}: refused, nothing was changed", sentence
    assert report.served is not None, "a report without a verdict is about the last request"
    before, after = report.served.before, report.served.after
    sentence = f"Forget accuracy went from {before.forget:.1%} to {after.forget:.1%}, "
    sentence += f"retain accuracy from {before.retain:.1%} to {after.retain:.1%}."
    if level_of_method(report.served.method) == "exact":
        return "good", f"{named} is erased exactly: the model was retrained without it", sentence
    sentence += " No audit was run: whether the forget set can be recovered is not known."
    is_hidden = report.request.kind == "class" and after.forget <= HIDDEN
    return "open", f"{named} {'is hidden; it was' if is_hidden else 'was'} not audited", sentence


def source_of(run: Run) -> str:
    """Data, network and seed, as captions name them."""
    seed = "trained elsewhere" if run.record.imported_from else f"seed {run.settings.seed}"
    return f"{run.record.data.name}, {run.settings.model}, {seed}"


def facts_of(report: Report) -> dict[str, str]:
    """Which model forgot what, when, and where that is recorded."""
    record, served, data = report.run.record, report.served, report.run.record.data
    entries = dated_entries(report)
    dates = [f"{event} {entry.time[:16].replace('T', ' ')} UTC" for event, entry in entries.items()]
    last = next(reversed(entries.values()), None)
    level = level_of_method(served.method) if served is not None else ""
    how = "" if served is None else f" by {served.method}"
    how = f" at level {level}: {meaning_of(level, served.settings)}" if served is not None and level else how
    return {
        "Request": f"{report.request}{how}",
        "Model and data": f"{source_of(report.run)}; run {report.run.path.name}",
        "Size": f"{record.model.weights:,} weights, {data.train:,} training and {data.test:,} test images",
        "Date": ", ".join(dates) or "not recorded",
        "Journal": f"entry {last.number}, head {last.hash[:16]}" if last else "no entry beside the run",
        "Signed": "not here: a bundle of this request is what can be signed",
    }


def dated_entries(report: Report) -> dict[str, JournalEntry]:
    """The first entries about forgetting and judging this model, or the refusal; later ones change no page."""
    found: dict[str, JournalEntry] = {}
    for entry in (report.refusal,) if report.refusal else report.entries:
        if entry.event in EVENTS and (report.refusal or entry.after == report.run.record.model.digest):
            found.setdefault(EVENTS[entry.event], entry)
    return found


def tiles_of(report: Report) -> list[Tile]:
    """The four numbers that decide: forget, retain, probe and cost, beside those of the other models."""
    verdict, served, cost = report.verdict, report.served, cost_of(report)
    tiles = []
    for name in ("forget", "retain"):
        metric = verdict.metric(f"{name}-accuracy") if verdict is not None else None
        measured = metric.value if metric is not None else getattr(served.after, name) if served is not None else None
        others = [getattr(served.before, name) if served else None, metric.reference if metric is not None else None]
        tiles.append(_compared(f"{name.capitalize()} accuracy", measured, *others))
    probe = verdict.audit("C1") if verdict is not None else None
    found = (probe.unlearned, probe.original, probe.reference) if probe is not None else (None, None, None)
    tiles.append(_compared("Found by a linear probe", *found, never=_never(verdict, "C1", "retrained")))
    spent = "–" if cost is None else amount(cost.seconds, "s")
    beside = [] if cost is None else [("computation", amount(cost.flops, "FLOPs"))]
    if cost is not None and cost.exchanges:
        beside.append(("sent by clients", amount(cost.bytes_up, "B")))
    if verdict is not None and verdict.retrain_seconds is not None:
        beside.append(("retraining", amount(verdict.retrain_seconds, "s")))
    return [*tiles, Tile("Cost", spent, tuple(beside))]


def _compared(title: str, *shares: float | None, never: str = "retrained") -> Tile:
    after, before, reference = (number(share, 0, 1) for share in shares)
    return Tile(title, after, (("before", before), (never, reference)))


def _never(verdict: Verdict | None, audit: str, retrained: str) -> str:
    """What an audit calls the models that never saw the forget set; their number is of what the method made of them."""
    is_treated = verdict is not None and COUNTERFACTUALS[0] in verdict.digests and audit in TREATED
    return "retrained and treated alike" if is_treated else retrained


def audit_scales(verdict: Verdict | None) -> list[tuple[AuditResult, Scale | None]]:
    """Every audit of a verdict, and retention, with its scale."""
    results = () if verdict is None else verdict.results
    return [(each, audit_scale(each, _never(verdict, each.name, "retrained without it"))) for each in results]


def cost_of(report: Report) -> Cost | None:
    measured = report.verdict.cost if report.verdict is not None else None
    return measured or (report.served.cost if report.served is not None else None)


def audit_scale(audit: AuditResult, retrained: str = "retrained without it") -> Scale | None:
    """Where the audit places the model; None without a reference model, or where that is as the original."""
    mine, before, never = audit.unlearned, audit.original, audit.reference
    if mine is None or before is None or never is None or abs(before - never) < 0.01:
        return None
    is_gap = audit.outcome in ("PASS", "FAIL") and audit.value is not None and abs(audit.value - (mine - never)) < 1e-6
    limit = never + audit.limit if audit.limit is not None and is_gap else None  # where the gap to it decides
    model, mark = (None if at is None else 10 + 80 * (before - at) / (before - never) for at in (mine, limit))
    is_share = audit.name not in OWN_UNITS and max(mine, before, never) <= 1
    shown = [number(each, 0, 1) if is_share else f"{each:.3g}" for each in (before, mine, never)]
    names = (("original", "original"), ("model", "this model"), ("retrained", retrained))
    numbers = tuple((css, name, text) for (css, name), text in zip(names, shown, strict=True))
    assert model is not None, "it was measured"
    return Scale(min(max(model, 2), 98), None if mark is None else min(max(mark, 2), 98), numbers)
