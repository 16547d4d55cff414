"""The commands that show results: a report of one request, and all runs of a directory."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from fedortho.cli.console import bars, out, say, words_table
from fedortho.cli.flags import AsJson, DataDir, Device, RunPath
from fedortho.data.request import ForgetRequest
from fedortho.devices import choose_device
from fedortho.errors import BadData
from fedortho.reports.gallery import Gallery, audit_pictures, illustrate
from fedortho.reports.page import Report, check_place, render, reported_request, verdict_of
from fedortho.reports.run_table import COLUMNS, SORTED_BY, by_directory, list_runs, ordered
from fedortho.requests.references import check_reference, find_original, find_references
from fedortho.runs.run import Run, open_run
from fedortho.runs.served import served_requests
from fedortho.storage.files import write_text

OutPath = Annotated[Path | None, typer.Option("--out", help="the HTML file to write (default: RUN/report.html)")]


def report_command(
    run_path: RunPath,
    out_path: OutPath = None,
    original: Annotated[Path | None, typer.Option(help="the run before it forgot (default: found beside RUN)")] = None,
    reference: Annotated[Path | None, typer.Option(help="a run trained without it (default: found beside RUN)")] = None,
    images: Annotated[
        bool, typer.Option(help="show images of the data: test images, those of a forgotten class too")
    ] = True,
    data_dir: DataDir = "",
    device: Device = "auto",
) -> None:
    """Write one HTML page that opens anywhere: verdict, numbers, figures, images, audits, costs, what is untested."""
    run, place, where = open_run(run_path), out_path or run_path / "report.html", choose_device(device)
    check_place(place)
    verdict = verdict_of(run)
    request = reported_request(run, verdict)
    before = open_run(original) if original else original_for(run, request)
    known = find_references(before, request) if before is not None else []
    never = open_run(reference) if reference else next(iter(known), None)
    if never is not None:
        check_reference(run, never, request)
    with bars() as shown:
        shown.add_task("drawing", total=None, news="")
        how = {"original": before, "reference": never, "device": where}
        gallery = draw_gallery(run, request, data_dir, images=images, **how)
        found = tuple(audit_pictures((verdict or {}).get("audits", [])))
    text = render(Report(run, request, verdict, gallery, found))
    write_text(place, text)
    for remark in gallery.remarks:
        say(remark)
    say(f"written to {place} ({len(text.encode()) / 1e6:.1f} MB); open it in any browser")


def original_for(run: Run, request: ForgetRequest) -> Run | None:
    """The run before it served this request: its parent, or that one's if more was forgotten since."""
    names, before = run.record["data"]["classes"], find_original(run)
    asked = request.settled(names)
    while before is not None and asked in [other.settled(names) for other in served_requests(before)]:
        before = find_original(before)
    return before


def draw_gallery(run: Run, request: ForgetRequest, data_dir: str, *, images: bool, **how: Any) -> Gallery:
    """The pictures; without the images that a run was trained on there are none, and the report says so."""
    try:
        data = run.load_data(data_dir)
    except BadData as error:
        return Gallery(remarks=(f"There are no figures of images: {error}.",), has_images=images)
    return illustrate(run, data, request, images=images, **how)


def results_command(
    place: Annotated[Path, typer.Argument(metavar="DIR", help="a directory of runs")] = Path("runs"),
    data: Annotated[str, typer.Option(help="only runs on data of this name")] = "",
    model: Annotated[str, typer.Option(help="only this model")] = "",
    request: Annotated[str, typer.Option(help="only requests with these words, such as class:3")] = "",
    method: Annotated[str, typer.Option(help="only this method; without class:3: retrained ones")] = "",
    sort: Annotated[str, typer.Option(help=f"order by {', '.join(SORTED_BY)}; smallest first")] = "",
    as_json: AsJson = False,
) -> None:
    """List the runs of a directory: what they forgot, what is left, what audits say."""
    wanted = {"data": data, "model": model, "request": request, "method": method}
    lines = ordered([line for line in list_runs(place) if line.fits(wanted)], sort)
    if not lines:
        given = ", ".join(f"{key} {word}" for key, word in wanted.items() if word)
        raise BadData(f"no run in {place} fits {given}; leave a filter out")
    if as_json:
        typer.echo(json.dumps([asdict(line) for line in lines], indent=2))
    else:
        for directory, found in ({"": lines} if sort else by_directory(lines)).items():
            if directory:
                say(escape(f"{directory}:"))
            print_lines([line.words() for line in found])
        say("forget, retain, test: accuracy; probe: what a linear probe still finds; failed: audits; – not measured")


def print_lines(lines: Sequence[Sequence[str]]) -> None:
    """Runs in a table: on a narrow screen names are folded and numbers stay whole; a file gets all in one line."""
    table = words_table(COLUMNS, lines)
    for place, column in enumerate(table.columns):
        column.no_wrap, column.overflow = place > 1, "fold"
    (out if out.is_terminal else Console(emoji=False, width=1000)).print(table)
