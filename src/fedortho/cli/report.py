"""The commands that show results: a report of one request, and all runs of a directory."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from fedortho.cli.console import bars, out, say, words_table
from fedortho.cli.flags import AsJson, DataDir, Device, RunPath
from fedortho.reports.page import write_report
from fedortho.reports.run_table import COLUMNS, SORTED_BY, by_directory, list_runs

OutPath = Annotated[Path | None, typer.Option("--out", help="the HTML file to write (default: RUN/report.html)")]


def report_command(
    run_path: RunPath,
    out_path: OutPath = None,
    original: Annotated[Path | None, typer.Option(help="run before forgetting (default: found beside RUN)")] = None,
    reference: Annotated[Path | None, typer.Option(help="run of a reference model (default: found beside RUN)")] = None,
    images: Annotated[bool, typer.Option(help="show test images, those of a forgotten class too")] = True,
    data_dir: DataDir = "",
    device: Device = "auto",
) -> None:
    """Write one HTML page: verdict, numbers, figures, images, audits, costs, and what was not tested."""
    with bars() as shown:
        shown.add_task("drawing", total=None, news="")
        path = write_report(
            run_path,
            out=out_path,
            original=original,
            reference=reference,
            images=images,
            data_dir=data_dir,
            device=device,
            on_remark=say,
        )
    say(f"written to {path} ({path.stat().st_size / 1e6:.1f} MB); open it in any browser")


def results_command(
    place: Annotated[Path, typer.Argument(metavar="DIR", help="a directory of runs")] = Path("runs"),
    data: Annotated[str, typer.Option(help="only this dataset")] = "",
    model: Annotated[str, typer.Option(help="only this model")] = "",
    request: Annotated[str, typer.Option(help="only requests that contain this text, such as class:3")] = "",
    method: Annotated[str, typer.Option(help="only this method; 'without class:3' finds reference models")] = "",
    sort: Annotated[str, typer.Option(help=f"order by {', '.join(SORTED_BY)}; smallest first")] = "",
    as_json: AsJson = False,
) -> None:
    """List the runs of a directory with their requests, accuracies and failed audits."""
    rows = list_runs(place, data=data, model=model, request=request, method=method, sort=sort)
    if as_json:
        typer.echo(json.dumps([asdict(row) for row in rows], indent=2))
        return
    for directory, inside in ({"": rows} if sort else by_directory(rows)).items():
        if directory:
            say(escape(f"{directory}:"))
        print_rows([row.words() for row in inside])
    say("forget, retain, test: accuracy; probe: recall of a linear probe; failed: audits; – not measured")


def print_rows(rows: Sequence[Sequence[str]]) -> None:
    """Print runs as a table: a narrow terminal folds names and keeps numbers whole, a file gets whole lines."""
    table = words_table(COLUMNS, rows)
    for place, column in enumerate(table.columns):
        column.no_wrap, column.overflow = place > 1, "fold"
    (out if out.is_terminal else Console(emoji=False, width=1000)).print(table)
