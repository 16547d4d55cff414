"""The report of a request: one HTML page that holds its style, script and pictures and forbids the network."""

import base64
import hashlib
import re
from collections.abc import Callable, Iterable
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from fedortho.audits.verdict import Verdict, read_verdict
from fedortho.data.request import ForgetRequest
from fedortho.devices import choose_device
from fedortho.errors import BadCheckpoint, BadData, FedOrthoError
from fedortho.evaluation.case import REFERENCES
from fedortho.reports import summary, tables
from fedortho.reports.gallery import audit_pictures, draw_gallery
from fedortho.reports.pictures import Gallery
from fedortho.reports.summary import Report, find_refusal
from fedortho.requests.references import check_reference, find_original, find_references
from fedortho.runs.run import Run, last_request, open_run, served_requests
from fedortho.storage.files import write_text
from fedortho.storage.journal import JournalEntry, read_journal
from fedortho.storage.records import to_json
from fedortho.storage.settings import as_mapping

if TYPE_CHECKING:
    from jinja2 import Template

# Comments in HTML: text of a page is escaped, so no class name can imitate them.
MARKED = "<!-- images of data are marked in this page -->"
IMAGES_START, IMAGES_END = "<!-- images of data from here -->", "<!-- to here -->"
LEFT_OUT = "Images of the data are left out of this page on purpose: it has no examples and no Grad-CAM pictures."
SECTIONS = {
    "figures": "Figures",
    "audits": "Audits",
    "images": "Images",
    "not-tested": "What was not tested",
    "copies": "Copies of the data",
    "numbers": "All metrics",
    "costs": "Costs",
    "settings": "Settings and commands",
}
ORDER = ("classes", "probe", "relearning", "confidence", "confusion", "frontier", "grad-cam", "training")  # of figures


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

    A request that RUN has not served and that was refused has a page of its own, which says why. The runs to compare
    with, `original` and `reference`, are found beside the run unless they are given. Without `images` the page shows no
    image of the data. `on_remark` receives each remark on what the page lacks.
    """
    run = open_run(run)
    path = run.path / "report.html" if out is None else Path(out)
    if path.is_dir():
        raise FedOrthoError(f"{path} is a directory; give the file to write, such as --out {path / 'report.html'}")
    asked, entries = run.request(request, data_dir) if request else None, _journal(run)
    if refusal := find_refusal(run, asked, entries):
        refused = ForgetRequest.parse(refusal.request)
        write_text(path, render(Report(run, refused, None, entries=entries, refusal=refusal)))
        return path
    request, verdict = _subject(run, asked)
    before = original_for(run, request) if original is None else open_run(original)
    found = find_references(before, request) if before is not None and reference is None else []
    never = drawn_reference(found, verdict, run.record.model.digest) if reference is None else open_run(reference)
    if never is not None:
        check_reference(run, never, request)
    for role, named, given in (("original", original, before), ("reference", reference, never)):
        _check_same(verdict, run, role, None if named is None else given)
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
    pictures = tuple(audit_pictures(verdict.audits, verdict.digests)) if verdict is not None else ()
    entries = entries if before is None else _journal(before) or entries  # a request is told beside the run before it
    write_text(path, render(Report(run, request, verdict, gallery, pictures, entries)))
    return path


def _subject(run: Run, request: ForgetRequest | None) -> tuple[ForgetRequest, Verdict | None]:
    """The request of the report and the verdict on it; a verdict on another request is left aside."""
    verdict, names = verdict_of(run), run.record.data.class_names
    judged = None if verdict is None else ForgetRequest.parse(verdict.request)
    request = request or judged or last_request(run)
    is_judged = judged is not None and judged.settled(names) == request.settled(names)
    return request, verdict if is_judged else None


def drawn_reference(found: Iterable[Run], verdict: Verdict | None, judged: str) -> Run | None:
    """The reference model that figures show: the verdict's own, or without one the first that is not the judged model.

    A model that was retrained itself has the digest `judged` of the reference with its seed.
    """
    told = verdict.digests.get(REFERENCES[0]) if verdict is not None else None
    others = [each for each in found if each.record.model.digest != judged]
    return next((each for each in others if told in (None, each.record.model.digest)), None)


def _check_same(verdict: Verdict | None, run: Run, role: str, given: Run | None) -> None:
    """Refuse a given run of another model than the verdict's: its figures would stand beside numbers of the latter."""
    key = {"original": "before", "reference": REFERENCES[0]}[role]
    told = None if verdict is None else verdict.digests.get(key)
    if given is not None and told not in (None, given.record.model.digest):
        raise FedOrthoError(
            f"{given.path} is not the {role} model of {run.path / 'verdict.json'}; judge with it first (fedortho judge "
            f"{run.path} --{role} {given.path}), or leave --{role} out"
        )


def _journal(run: Run) -> tuple[JournalEntry, ...]:
    """The entries of the journal beside the run; none if there is no journal."""
    return read_journal(run.path.absolute().parent).entries


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
        answer=summary.answer_of(report),
        facts=summary.facts_of(report),
        tiles=summary.tiles_of(report),
        source=summary.source_of(report.run),
        is_refused=report.refusal is not None,
        numbers=tables.metrics_table(verdict.metrics if verdict is not None else ()),
        pictures=sorted((*report.audit_pictures, *report.gallery.pictures), key=lambda each: ORDER.index(each.name)),
        gallery=report.gallery,
        is_class=report.request.kind == "class",
        audits=summary.audit_scales(verdict),
        signs=tables.SIGNS,
        costs=tables.costs_table(summary.cost_of(report)),
        copies=[str(copy) for copy in verdict.copies] if verdict is not None else [],
        not_tested=_not_tested(verdict),
        settings=_settings(report),
    )


def without_images(page: str) -> str:
    """The page without the parts that show images of the data; a sentence stands in place of each."""
    if MARKED not in page:
        raise FedOrthoError("images of data are not marked in it, as this version of fedortho report does")
    marked = re.compile(f"{re.escape(IMAGES_START)}.*?{re.escape(IMAGES_END)}", re.DOTALL)
    return marked.sub(f'<p class="soft">{LEFT_OUT}</p>', page)


def _template() -> "Template":
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("fedortho", "reports")
    options = {"autoescape": True, "trim_blocks": True, "lstrip_blocks": True, "undefined": StrictUndefined}
    environment = Environment(loader=loader, keep_trailing_newline=True, **options)  # type: ignore[arg-type]  # mixed
    environment.filters |= {"plain": tables.plain, "data_uri": _data_uri}
    return environment.get_template("report.html.j2")


def _data_uri(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def _policy(style: str, script: str) -> str:
    """The page's Content-Security-Policy: pictures from the page itself, this style, this script, nothing else."""
    rules = ["default-src 'none'", "img-src data:", "base-uri 'none'", "form-action 'none'"]
    for kind, text in (("style", style), ("script", script)):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        rules.append(f"{kind}-src 'sha256-{digest}'")
    return "; ".join(rules)


def _not_tested(verdict: Verdict | None) -> list[str]:
    if verdict is None:
        return ["all audits: there is no verdict.json in the run"]
    without_result = [audit for audit in verdict.audits if audit.outcome in ("INCONCLUSIVE", "NO REFERENCE", "ERROR")]
    return [*(f"{audit.name} has no result: {audit.finding}" for audit in without_result), *verdict.not_tested]


def _settings(report: Report) -> list[tables.Table]:
    verdict, record, served = report.verdict, report.run.record, report.served
    judged = verdict or served
    about = {
        "run": report.run.path.name,
        "request": str(report.request),
        "method": judged and judged.method,
        "model digest": record.model.digest,
        "digest of the model before": (served and served.model_before) or record.parent,
        "data digest": record.data.digest,
        "validation images": record.data.valid_source or "part of the training split",
        "all requests served": "; ".join(other.request for other in record.requests),
        "entries of the journal": ", ".join(entry.hash for entry in summary.dated_entries(report).values()),
        "verdict": verdict and verdict.sentence,
        "outcome of the audits": verdict and verdict.label,
        "effect of pruning and classifier edit": served and served.effect,
        "advice with flags": verdict and verdict.advice,
        "this page again": f"fedortho report {report.run.path.name}",
    }
    groups = {
        "Run and request": about,
        "Settings of the method": judged.settings if judged is not None else {},
        "Settings of the training": as_mapping(report.run.settings),
        "Environment": to_json((verdict and verdict.environment) or record.environment),
    }
    return [tables.settings_table(caption, group) for caption, group in groups.items() if group]
