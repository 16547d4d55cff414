"""One HTML page about a request: verdict, numbers, figures, images, audits, costs, what was not tested, settings.

The page needs nothing else: style, script and pictures are in it, and its own policy forbids the network.
"""

import base64
import hashlib
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from fedortho.audits.verdict import subject_of
from fedortho.data.request import ForgetRequest
from fedortho.errors import BadCheckpoint, FedOrthoError
from fedortho.evidence.markup import LEFT_OUT, MARKED, Cell, Html, image, showing_images, table, tag, together
from fedortho.reports.gallery import DPI, SHOWN_DPI, Example, Gallery, Picture
from fedortho.requests.judging import entry_for
from fedortho.runs.run import Run
from fedortho.runs.served import last_request
from fedortho.storage.provenance import judgements, read_verdict
from fedortho.storage.settings import as_mapping

SECTIONS = {
    "numbers": "Numbers",
    "figures": "Figures",
    "images": "Images",
    "audits": "Audits",
    "costs": "Costs",
    "not-tested": "What was not tested",
    "settings": "Settings",
}
SIGNS = {"PASS": "✓", "FAIL": "✗", "ERROR": "!", "NOT RUN": "–", "NO REFERENCE": "?"}
UNITS = {
    "seconds": "seconds",
    "images_read": "images read (forward passes)",
    "images_trained": "images trained on (forward and backward passes)",
    "flops": "floating-point operations",
    "exchanges": "exchanges with clients",
    "bytes_up": "bytes from all clients",
    "bytes_down": "bytes to all clients",
}


@dataclass(frozen=True)
class Page:
    """What a report is made of; what is not known stays empty, and the page says so."""

    run: Run
    request: ForgetRequest
    verdict: Mapping[str, Any] | None
    gallery: Gallery = field(default_factory=Gallery)
    audit_pictures: tuple[Picture, ...] = ()

    @property
    def entry(self) -> Mapping[str, Any]:
        """What the run recorded of this request; empty if it has served none."""
        return entry_for(self.run, self.request) if self.run.record.get("requests") else {}

    @property
    def subject(self) -> str:
        return subject_of(self.request, self.run.record["data"]["classes"])


def verdict_of(run: Run) -> dict[str, Any] | None:
    """The verdict on a run, if there is one; one on another model is refused."""
    verdict, mine = read_verdict(run.path), run.record["model"]["digest"]
    if verdict is not None and (verdict.get("digests") or {}).get("after", mine) != mine:
        path = run.path / "verdict.json"
        raise BadCheckpoint(f"{path} is about another model than the one in {run.path}; judge it again: fedortho judge")
    return verdict


def reported_request(run: Run, verdict: Mapping[str, Any] | None) -> ForgetRequest:
    """What the report is about: the verdict's request, or the last that the run has served."""
    return last_request(run) if verdict is None else ForgetRequest.parse(verdict["request"])


def render(page: Page) -> str:
    """The page as text."""
    style, script = (
        files("fedortho.reports").joinpath(name).read_text("utf-8") for name in ("report.css", "report.js")
    )
    policy = "; ".join(
        (
            *("default-src 'none'", "img-src data:", "base-uri 'none'", "form-action 'none'"),
            *(f"style-src {_hash(style)}", f"script-src {_hash(script)}"),
        )
    )
    title = f"Forgetting {page.subject}: {page.run.path.name}"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name_="viewport", content="width=device-width, initial-scale=1"),
        tag("link", rel="icon", href="data:,"),
        tag("title", title),
        tag("style", Html(style)),
    )
    body = tag(
        "body",
        tag("a", "Skip to the verdict", href="#verdict", class_="skip"),
        _top(page),
        tag("main", _verdict(page), *(_section(name, page) for name in SECTIONS)),
        tag("footer", tag("p", "This page is evidence, not a legal finding. Made by fedortho.", class_="soft")),
        tag("script", Html(script)),
    )
    return f"<!DOCTYPE html>\n{MARKED}\n{tag('html', head, body, lang='en')}\n"


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _top(page: Page) -> Html:
    links = [tag("li", tag("a", title, href=f"#{name}")) for name, title in SECTIONS.items()]
    return tag(
        "header",
        tag("h1", f"Did the model forget {page.subject}?"),
        tag("nav", tag("ul", *links), aria_label="Contents"),
    )


def _verdict(page: Page) -> Html:
    verdict = page.verdict
    if verdict is None:
        sentence = _recorded_sentence(page.entry)
        label = "No audit was run: whether it can be recovered is not known."
        parts = [tag("p", sentence, class_="sentence"), tag("p", label, class_="label")]
        return tag("section", tag("h2", "Verdict"), *parts, id="verdict", class_="verdict open")
    outcomes = [audit["outcome"] for audit in judgements(verdict)]
    kind = "bad" if {"FAIL", "ERROR"} & set(outcomes) else "good" if outcomes and set(outcomes) == {"PASS"} else "open"
    parts = [
        tag("p", str(verdict.get("sentence", "")), class_="sentence"),
        tag("p", f"Audits: {verdict.get('label', 'none')}", class_="label"),
    ]
    if verdict.get("advice"):
        parts.append(tag("p", tag("strong", "Advice: "), str(verdict["advice"])))
    return tag("section", tag("h2", "Verdict"), *parts, id="verdict", class_=f"verdict {kind}")


def _recorded_sentence(entry: Mapping[str, Any]) -> str:
    gone, kept = ([entry[when][key] for when in ("before", "after")] for key in ("forget", "retain"))
    text = f"Accuracy on what had to go went from {gone[0]:.1%} to {gone[1]:.1%}, on the rest from {kept[0]:.1%}"
    return f"{text} to {kept[1]:.1%}."


def _section(name: str, page: Page) -> Html:
    inside = {
        "numbers": _numbers,
        "figures": _figures,
        "images": _images,
        "audits": _audits,
        "costs": _costs,
        "not-tested": _not_tested,
        "settings": _settings,
    }[name](page)
    return tag("section", tag("h2", SECTIONS[name]), inside, id=name)


def number(value: float | None, low: float | None = None, high: float | None = None) -> str:
    """A number as people read it: of a range of shares in percent, none as a dash.

    >>> number(0.1234, 0, 1), number(0.1234), number(1234567.0), number(None)
    ('12.3 %', '0.123', '1,234,567', '–')
    """
    if value is None or math.isnan(value):
        return "–"
    if high == 1 and low in (0, -1):
        return f"{100 * value:.1f} %"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def unbroken(text: str) -> str:
    """The same with every number on the line of its sign.

    >>> unbroken("5 % of it")
    '5\\xa0% of it'
    """
    return text.replace(" %", "\N{NO-BREAK SPACE}%")


def _figure_cell(value: float | None, low: float | None = None, high: float | None = None) -> Cell:
    return Cell(number(value, low, high), value, is_number=True)


def _numbers(page: Page) -> Html:
    if page.verdict is None or not page.verdict.get("metrics"):
        rows: list[list[str | Cell]] = []
        for key in page.entry.get("before", {}):
            before, after = (float(page.entry[when][key]) for when in ("before", "after"))
            rows.append([f"{key} accuracy", _figure_cell(before, 0, 1), _figure_cell(after, 0, 1)])
        shown = table("Accuracy before and after", ["accuracy", "before", "after"], rows)
        return together([tag("p", "No metrics were measured; this is what the run recorded.", class_="soft"), shown])
    header = ["metric", "value", "retrained", "ideal", "better is", "images", "source"]
    rows = [_metric_row(metric) for metric in page.verdict["metrics"]]
    note = "“Retrained” is the same number of a model that never saw what had to go; going beyond it is no better."
    return together([tag("p", note, class_="soft"), table("Metrics, each with what it should be", header, rows)])


def _metric_row(metric: Mapping[str, Any]) -> list[str | Cell]:
    low, high = metric.get("low"), metric.get("high")
    title, value = str(metric.get("title") or metric["name"]), _figure_cell(metric.get("value"), low, high)
    if metric.get("value") is None and metric.get("error"):
        title, value = f"{title}: {metric['error']}", Cell(tag("span", "! ERROR", class_="ERROR"), is_number=True)
    ideal = metric.get("ideal")
    is_number = isinstance(ideal, int | float)
    wanted = _figure_cell(ideal, low, high) if is_number else Cell(str(ideal or "as retrained"), is_number=True)
    return [
        title,
        value,
        _figure_cell(metric.get("reference"), low, high),
        wanted,
        str(metric.get("direction") or "–"),
        _figure_cell(metric.get("images")),
        str(metric.get("source") or "–"),
    ]


def _figures(page: Page) -> Html:
    shown = [_figure(picture) for picture in page.gallery.pictures]
    remarks = [tag("p", remark, class_="soft") for remark in page.gallery.remarks]
    if not shown:
        remarks.insert(0, tag("p", "No figure could be drawn."))
    return together([*remarks, *shown])


def _figure(picture: Picture) -> Html:
    from PIL import Image

    with Image.open(io.BytesIO(picture.data)) as opened:
        wide, high = (round(side * SHOWN_DPI / DPI) for side in opened.size)
    drawn = image(picture.data, picture.alt, size=(wide, high))
    box = tag("div", drawn, class_="scroll", role="region", aria_label=picture.finding, tabindex=0)
    inside = (tag("h3", unbroken(picture.finding)), box, tag("figcaption", picture.about))
    shape = "tall" if high > 0.7 * wide else None
    figure = tag("figure", *inside, id=f"figure-{picture.name}", class_=shape)
    return showing_images(figure) if picture.shows_images else figure


def _images(page: Page) -> Html:
    gallery = page.gallery
    if not gallery.has_images:
        return tag("p", LEFT_OUT)
    none = "None of the images that had to go fits here."
    if page.request.kind != "class":
        none = "Images of clients and samples had to go; none of them is kept in this page."
    left = _side("No longer recognised", gallery.lost, none)
    right = _side("Still recognised", gallery.kept, "None of the other images fits here.")
    note = "Small images, enlarged without smoothing. Under each: its class, and what the model calls it now."
    return showing_images(together([tag("p", note, class_="soft"), tag("div", left, right, class_="sides")]))


def _side(title: str, examples: Sequence[Example], empty: str) -> Html:
    if not examples:
        return tag("div", tag("h3", title), tag("p", empty))
    items = []
    for example in examples:
        was = "" if example.before is None else f" (before: {example.before})"
        alt = f"{example.truth}, now called {example.after}{was}"
        now = "still recognised" if example.after == example.truth else f"now “{example.after}”"
        drawn = image(example.data, alt, size=(96, 96))
        items.append(tag("li", drawn, tag("strong", example.truth), tag("br"), now))
    return tag("div", tag("h3", title), tag("ul", *items, class_="examples"))


def _audits(page: Page) -> Html:
    audits = judgements(page.verdict)
    if not audits:
        return tag("p", "No audit was run: nobody has tried to bring back what had to go.")
    header = ["audit", "outcome", "finding", "value", "limit", "forgot", "original", "retrained", "seconds"]
    rows: list[list[str | Cell]] = []
    for audit in audits:
        outcome = str(audit["outcome"])
        badge = tag("span", f"{SIGNS.get(outcome, '')} {outcome}".strip(), class_=outcome.replace(" ", "-"))
        measured = [_figure_cell(audit.get(key)) for key in ("value", "limit", "forgot", "original", "reference")]
        took = _figure_cell(audit.get("seconds"))
        name = f"{audit['name']} {audit.get('title') or ''}".strip()
        rows.append([name, Cell(badge), unbroken(str(audit.get("says", ""))), *measured, took])
    note = "Each audit tries to undo the forgetting, or to tell it from never having known. PASS: up to the limit."
    return together([tag("p", note, class_="soft"), table("Audits", header, rows), *map(_figure, page.audit_pictures)])


def _costs(page: Page) -> Html:
    cost = (page.verdict or {}).get("cost") or _recorded_cost(page.entry)
    if not cost:
        return tag("p", "What this cost was not recorded.")
    known = [*(key for key in UNITS if key in cost), *(key for key in cost if key not in UNITS)]
    rows: list[list[str | Cell]] = [
        [UNITS.get(key, key.replace("_", " ")), _figure_cell(float(cost[key]))]
        for key in known
        if cost[key] is not None
    ]
    return table("What forgetting took", ["of what", "how much"], rows)


def _recorded_cost(entry: Mapping[str, Any]) -> dict[str, float]:
    if entry.get("cost"):
        return dict(entry["cost"])
    if "seconds" not in entry:
        return {}
    found = {
        "seconds": sum(entry.get("seconds", {}).values()),
        "images_read": sum(entry.get("images-read", {}).values()),
    }
    for phase in entry.get("wire", {}).values():
        for key in ("exchanges", "bytes_up", "bytes_down"):
            found[key] = found.get(key, 0) + phase[key]
    return found


def _not_tested(page: Page) -> Html:
    verdict = page.verdict
    if verdict is None:
        untested = ["any audit: there is no verdict.json in the run"]
    else:
        skipped = [audit for audit in verdict.get("audits", []) if audit["outcome"] not in ("PASS", "FAIL")]
        untested = [str(text) for text in verdict.get("not_tested", [])]
        untested += [
            f"{audit['name']} came to no result: {audit.get('says', '')}"
            for audit in skipped
            if not any(text.startswith(f"{audit['name']},") for text in untested)
        ]
    if not untested:
        return tag("p", "The verdict names nothing that was left out; that is no proof that nothing was.")
    return tag("ul", *(tag("li", text) for text in dict.fromkeys(untested)))


def _settings(page: Page) -> Html:
    verdict, record, entry = page.verdict or {}, page.run.record, page.entry
    before = (entry.get("digests") or {}).get("before") or record.get("parent")
    about = {
        "run": str(page.run.path),
        "request": str(page.request),
        "method": str(verdict.get("method") or entry.get("method") or "hide"),
        "model digest": record["model"]["digest"],
        "digest of the model before": str(before or "–"),
        "data digest": record["data"]["digest"],
        "all requests served": "; ".join(other["request"] for other in record.get("requests", [])) or "–",
    }
    groups = {
        "What this is about": about,
        "Settings of the request": verdict.get("settings") or entry.get("settings", {}),
        "Settings of the training": as_mapping(page.run.settings),
        "Environment": _flat(verdict.get("environment") or record.get("environment", {})),
    }
    return together(
        tag(
            "div", table(name, ["setting", "value"], [[str(k), _plain(v)] for k, v in group.items()]), class_="settings"
        )
        for name, group in groups.items()
        if group
    )


def _flat(value: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Nested values in one row each, their keys together by dots.

    >>> _flat({"a": {"b": 1}, "c": 2})
    {'a.b': 1, 'c': 2}
    """
    found: dict[str, Any] = {}
    for key, inner in value.items():
        found |= _flat(inner, f"{before}{key}.") if isinstance(inner, Mapping) else {f"{before}{key}": inner}
    return found


def _plain(value: Any) -> str:
    return "–" if value is None or value == "" else str(value)


def check_place(path: Path) -> None:
    """Refuse a place for the report that is a directory, before any work is done."""
    if path.is_dir():
        raise FedOrthoError(f"{path} is a directory; give the file to write, such as --out {path / 'report.html'}")
