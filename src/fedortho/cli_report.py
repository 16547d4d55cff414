"""The command that writes a report."""

from pathlib import Path
from typing import Annotated

import typer

from fedortho.errors import BadData
from fedortho.files import write_text
from fedortho.illustrate import Gallery, audit_pictures, illustrate
from fedortho.references import check_reference, find_original, find_references
from fedortho.report import Page, check_place, read_verdict, render, reported_request
from fedortho.request import ForgetRequest
from fedortho.runs import Run, open_run
from fedortho.screen import bars, say

RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="the directory of a run that has forgotten something")]
OutPath = Annotated[Path | None, typer.Option("--out", help="the HTML file to write (default: RUN/report.html)")]


def report_command(
    run_path: RunPath,
    out_path: OutPath = None,
    original: Annotated[Path | None, typer.Option(help="the run before it forgot (default: found beside RUN)")] = None,
    reference: Annotated[Path | None, typer.Option(help="a run trained without it (default: found beside RUN)")] = None,
    data_dir: Annotated[str, typer.Option("--data-dir", help="where the run's data lies on this machine")] = "",
) -> None:
    """Write one HTML page that opens anywhere: verdict, numbers, figures, images, audits, costs, what is untested."""
    run, place = open_run(run_path), out_path or run_path / "report.html"
    check_place(place)
    verdict = read_verdict(run)
    request = reported_request(run, verdict)
    before = open_run(original) if original else find_original(run)
    known = find_references(before, request) if before is not None else []
    never = open_run(reference) if reference else next(iter(known), None)
    if never is not None:
        check_reference(run, never, request)
    with bars() as shown:
        shown.add_task("drawing", total=None, news="")
        gallery = draw_gallery(run, request, before, never, data_dir)
        found = tuple(audit_pictures((verdict or {}).get("audits", [])))
    text = render(Page(run, request, verdict, gallery, found))
    write_text(place, text)
    for remark in gallery.remarks:
        say(remark)
    say(f"written to {place} ({len(text.encode()) / 1e6:.1f} MB); open it in any browser")


def draw_gallery(run: Run, request: ForgetRequest, before: Run | None, never: Run | None, data_dir: str) -> Gallery:
    """The pictures; without the images that a run was trained on there are none, and the report says so."""
    try:
        data = run.load_data(data_dir)
    except BadData as error:
        return Gallery(remarks=(f"There are no figures of images: {error}.",))
    return illustrate(run, data, request, original=before, reference=never)
