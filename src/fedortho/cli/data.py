"""The commands data ls, find and purge: what images are known by, and removing copies of those forgotten."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from fedortho.cli.console import bar, bars, out, say, say_json, words_table
from fedortho.cli.flags import AsJson, DataDir, RunPath
from fedortho.data.images import Dataset
from fedortho.data.listing import ImageRow, list_images
from fedortho.data.sources import load_images
from fedortho.runs.purge import purge_run
from fedortho.runs.run import open_run

data_app = typer.Typer(
    no_args_is_help=True, help="List or find images; remove copies of those that a run has forgotten."
)

Place = Annotated[str, typer.Argument(metavar="RUN_OR_DATA", help="a run directory, a dataset's name, or its files")]


def data_ls(
    place: Place,
    label: Annotated[str, typer.Option("--class", help="only this class, by name or number")] = "",
    limit: Annotated[int, typer.Option(min=0, help="at most so many images; 0: all")] = 0,
    data_dir: DataDir = "",
    as_json: AsJson = False,
) -> None:
    """List images with their set, row, class, file name and SHA-256; a request names them by any of the last three."""
    _show(list_images(_load(place, data_dir), label=label, limit=limit), as_json)


def data_find(
    place: Place,
    words: Annotated[list[str], typer.Argument(metavar="WORD...", help="a row, a file name, a glob or sha256:DIGEST")],
    data_dir: DataDir = "",
    as_json: AsJson = False,
) -> None:
    """Show which images words name, as samples:WORD in a request does."""
    _show(list_images(_load(place, data_dir), words), as_json)


def data_purge(run_path: RunPath, data_dir: DataDir = "", as_json: AsJson = False) -> None:
    """Remove what RUN has forgotten from the decoded images here; later trainings leave it out. RUN stays usable."""
    copies = purge_run(run_path, data_dir=data_dir)
    if as_json:
        say_json([asdict(copy) for copy in copies])
        return
    for copy in copies:
        say(str(copy))
    if copies[0].images:
        say("delete the files of these images yourself: fedortho data find RUN WORD shows their names")


def _load(place: str, data_dir: str) -> Dataset:
    with bars() as shown:
        progress = bar(shown, "decoding images")
        if (Path(place) / "run.json").exists():
            return open_run(place).load_data(data_dir, progress)
        return load_images(place, data_dir or None, forgotten=True, progress=progress)


def _show(rows: Sequence[ImageRow], as_json: bool) -> None:
    if as_json:
        say_json([asdict(row) for row in rows])
        return
    lines = [(row.split, str(row.row), row.label, row.file or "–", row.digest[:16]) for row in rows]
    out.print(words_table(("set", "row", "class", "file", "sha256"), lines))


data_app.command("ls")(data_ls)
data_app.command("find")(data_find)
data_app.command("purge")(data_purge)
