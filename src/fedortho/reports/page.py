"""The report of a request: one HTML page that holds its style, script and pictures and forbids the network."""

import base64
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from fedortho.audits.verdict import Verdict, read_verdict, subject_of
from fedortho.data.request import ForgetRequest
from fedortho.devices import choose_device
from fedortho.engines.cost import Cost
from fedortho.errors import BadCheckpoint, BadData, FedOrthoError
from fedortho.reports import tables
from fedortho.reports.gallery import audit_pictures, draw_gallery
from fedortho.reports.pictures import Gallery, Picture
from fedortho.reports.redaction import IMAGES_END, IMAGES_START, LEFT_OUT, MARKED
from fedortho.requests.references import check_reference, find_original, find_references
from fedortho.runs.record import ServedRecord
from fedortho.runs.run import Run, open_run
from fedortho.runs.served import last_request, served_record, served_requests
from fedortho.storage.files import write_text
from fedortho.storage.records import to_json
from fedortho.storage.settings import as_mapping

if TYPE_CHECKING:
    from jinja2 import Template

SECTIONS = {
    "numbers": "Numbers",
    "figures": "Figures",
    "images": "Images",
    "audits": "Audits",
    "costs": "Costs",
    "copies": "Copies of the data",
    "not-tested": "What was not tested",
    "settings": "Settings",
}


@dataclass(frozen=True)
class Report:
    """What a report shows; the page says what is missing."""

    run: Run
    request: ForgetRequest
    verdict: Verdict | None
    gallery: Gallery = field(default_factory=Gallery)
    audit_pictures: tuple[Picture, ...] = ()

    @property
    def served(self) -> ServedRecord | None:
        """The run's record of this request; None if it has served none."""
        return served_record(self.run, self.request) if self.run.record.requests else None


def write_report(
    run: Run | Path | str,
    request: ForgetRequest | str | None = None,
    *,
    out: Path | str | None = None,
    original: Run | Path | str | None = None,
    reference: Run | Path | str | None = None,
    images: bool = True,
    data_dir: str = "",
    device: str = "auto",
    on_remark: Callable[[str], None] | None = None,
) -> Path:
    """Write the report of a request (default: of the verdict, or the last) and return its path, RUN/report.html.

    The runs to compare with, `original` and `reference`, are found beside the run unless they are given. Without
    `images` the page shows no image of the data. `on_remark` receives each remark on what the page lacks.
    """
    run = open_run(run)
    path = run.path / "report.html" if out is None else Path(out)
    if path.is_dir():
        raise FedOrthoError(f"{path} is a directory; give the file to write, such as --out {path / 'report.html'}")
    request, verdict = _subject(run, run.request(request, data_dir) if request else None)
    before = original_for(run, request) if original is None else open_run(original)
    found = find_references(before, request) if before is not None and reference is None else []
    never = next(iter(found), None) if reference is None else open_run(reference)
    if never is not None:
        check_reference(run, never, request)
    try:
        data = run.load_data(data_dir)
    except BadData as error:
        gallery = Gallery(remarks=(f"There are no figures of images: {error}.",), has_images=images)
    else:
        where = choose_device(device)
        gallery = draw_gallery(run, data, request, original=before, reference=never, device=where, images=images)
    if on_remark is not None:
        for remark in gallery.remarks:
            on_remark(remark)
    pictures = tuple(audit_pictures(verdict.audits)) if verdict is not None else ()
    write_text(path, render(Report(run, request, verdict, gallery, pictures)))
    return path


def _subject(run: Run, request: ForgetRequest | None) -> tuple[ForgetRequest, Verdict | None]:
    """The request of the report and the verdict on it; a verdict on another request is left aside."""
    verdict, names = verdict_of(run), run.record.data.class_names
    judged = None if verdict is None else ForgetRequest.parse(verdict.request)
    request = request or judged or last_request(run)
    is_judged = judged is not None and judged.settled(names) == request.settled(names)
    return request, verdict if is_judged else None


def original_for(run: Run, request: ForgetRequest) -> Run | None:
    """The run before it served this request: its parent, or an earlier one if it has served others since."""
    names, before = run.record.data.class_names, find_original(run)
    wanted = request.settled(names)
    while before is not None and wanted in [other.settled(names) for other in served_requests(before)]:
        before = find_original(before)
    return before


def verdict_of(run: Run) -> Verdict | None:
    """The verdict on a run, if there is one; a verdict on another model is refused."""
    verdict, mine = read_verdict(run.path), run.record.model.digest
    if verdict is not None and verdict.digests.get("after", mine) != mine:
        path = run.path / "verdict.json"
        raise BadCheckpoint(f"{path} is about another model than the one in {run.path}; judge it again: fedortho judge")
    return verdict


def render(report: Report) -> str:
    """The page as text."""
    from markupsafe import Markup

    style, script = (files("fedortho.reports").joinpath(f"report.{kind}").read_text("utf-8") for kind in ("css", "js"))
    verdict = report.verdict
    return _template().render(
        marked=Markup(MARKED),
        images_start=Markup(IMAGES_START),
        images_end=Markup(IMAGES_END),
        left_out=LEFT_OUT,
        policy=_policy(style, script),
        style=Markup(style),  # the package's own files
        script=Markup(script),
        sections=SECTIONS,
        subject=subject_of(report.request, report.run.record.data.class_names),
        name=report.run.path.name,
        verdict=_summary(report),
        is_measured=verdict is not None and bool(verdict.metrics),
        numbers=_numbers(report),
        effect=report.served.effect if report.served is not None else None,
        gallery=report.gallery,
        is_class=report.request.kind == "class",
        audits=tables.audits_table(verdict.results if verdict is not None else ()),
        audit_pictures=report.audit_pictures,
        costs=tables.costs_table(_cost(report)),
        copies=[str(copy) for copy in verdict.copies] if verdict is not None else [],
        not_tested=_not_tested(verdict),
        settings=_settings(report),
    )


def _template() -> "Template":
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("fedortho", "reports")
    options = {"autoescape": True, "trim_blocks": True, "lstrip_blocks": True, "undefined": StrictUndefined}
    environment = Environment(loader=loader, keep_trailing_newline=True, **options)  # type: ignore[arg-type]  # mixed
    environment.filters |= {"unbroken": tables.unbroken, "data_uri": _data_uri}
    return environment.get_template("report.html.j2")


def _data_uri(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def _policy(style: str, script: str) -> str:
    """The page's Content-Security-Policy: pictures from the page itself, this style, this script, nothing else."""
    rules = ("default-src 'none'", "img-src data:", "base-uri 'none'", "form-action 'none'")
    return "; ".join((*rules, f"style-src {_hash(style)}", f"script-src {_hash(script)}"))


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _numbers(report: Report) -> tables.Table:
    """The metrics of the verdict, or the accuracies that the run recorded."""
    if report.verdict is not None and report.verdict.metrics:
        return tables.metrics_table(report.verdict.metrics)
    if report.served is None:
        return tables.build_table("Accuracy", [], [])
    return tables.accuracy_table(report.served.before, report.served.after)


def _cost(report: Report) -> Cost | None:
    measured = report.verdict.cost if report.verdict is not None else None
    return measured or (report.served.cost if report.served is not None else None)


def _summary(report: Report) -> dict[str, str]:
    """The verdict's box: sentence, label, advice, and its kind (good, bad, open), which colours it."""
    verdict = report.verdict
    if verdict is None:
        assert report.served is not None, "a report without a verdict is about the last request"
        before, after = report.served.before, report.served.after
        sentence = f"Forget accuracy went from {before.forget:.1%} to {after.forget:.1%}, "
        sentence += f"retain accuracy from {before.retain:.1%} to {after.retain:.1%}."
        label = "No audit was run: whether the forget set can be recovered is not known."
        return {"kind": "open", "sentence": sentence, "label": label, "advice": ""}
    outcomes = {result.outcome for result in verdict.results}
    return {
        "kind": "bad" if {"FAIL", "ERROR"} & outcomes else "good" if outcomes == {"PASS"} else "open",
        "sentence": verdict.sentence,
        "label": f"Audits: {verdict.label}",
        "advice": verdict.advice,
    }


def _not_tested(verdict: Verdict | None) -> list[str]:
    if verdict is None:
        return ["all audits: there is no verdict.json in the run"]
    without_result = [audit for audit in verdict.audits if audit.outcome in ("INCONCLUSIVE", "NO REFERENCE", "ERROR")]
    return [*(f"{audit.name} has no result: {audit.finding}" for audit in without_result), *verdict.not_tested]


def _settings(report: Report) -> list[tables.Table]:
    verdict, record, served = report.verdict, report.run.record, report.served
    judged = verdict or served
    before = (served.model_before if served else None) or record.parent
    about = {
        "run": report.run.path.name,
        "request": str(report.request),
        "method": judged.method if judged is not None else "–",
        "model digest": record.model.digest,
        "digest of the model before": str(before or "–"),
        "data digest": record.data.digest,
        "validation images": record.data.valid_source or "part of the training split",
        "all requests served": "; ".join(other.request for other in record.requests) or "–",
    }
    groups = {
        "Run and request": about,
        "Settings of the method": judged.settings if judged is not None else {},
        "Settings of the training": as_mapping(report.run.settings),
        "Environment": to_json((verdict.environment if verdict is not None else None) or record.environment),
    }
    return [tables.settings_table(caption, group) for caption, group in groups.items() if group]
