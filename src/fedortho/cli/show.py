"""The commands that show what there is: evaluate, check, report, results and data."""

import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer import Argument, Option

from fedortho.cli.console import bar, bars, class_table, out, print_check, say, say_json, say_table, words_table
from fedortho.cli.flags import AsJson, DataDir, Device, RunPath
from fedortho.data.images import Dataset
from fedortho.data.listing import ImageRow, list_images
from fedortho.data.sources import load_images
from fedortho.devices import choose_device
from fedortho.engines.query import draw
from fedortho.errors import FedOrthoError, unknown
from fedortho.experiments.theory import HEADER, LayerTheory, measure_theory, theory_figure, theory_sentences
from fedortho.models.predictions import evaluate
from fedortho.models.zoo import build_model
from fedortho.reports.figures.style import png
from fedortho.reports.page import write_report
from fedortho.reports.run_table import COLUMNS, SORTED_BY, by_directory, list_runs
from fedortho.requests.checking import check
from fedortho.runs.purge import purge_run
from fedortho.runs.run import open_run
from fedortho.storage.files import replacing
from fedortho.storage.records import to_json
from fedortho.storage.trusted_code import remember_code

data_app = typer.Typer(
    no_args_is_help=True, help="List or find images; remove copies of those that a run has forgotten."
)

Place = Annotated[str, Argument(metavar="RUN_OR_DATA", help="a run directory, a dataset's name, or its files")]


def evaluate_command(
    run_path: RunPath,
    split: Annotated[str, Option(help="images to evaluate on: test, valid or train")] = "test",
    data_dir: DataDir = "",
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Measure the accuracy of a run, in all and by class."""
    if split not in ("test", "valid", "train"):
        raise unknown("split", split, ("test", "valid", "train"))
    run = open_run(run_path)
    chosen = choose_device(device)
    with bars() as shown:
        data = run.load_data(data_dir, bar(shown, "decoding images"))
    images = getattr(data, split)
    score = evaluate(run.load_model().to(chosen), images, device=chosen)
    if as_json:
        value = {"run": str(run_path), "split": split, "images": score.images, "accuracy": score.accuracy}
        value |= {"loss": score.loss, "per-class": dict(zip(images.names, score.per_class, strict=True))}
        say_json(value)
    else:
        source = run.record.data.valid_source if split == "valid" else ""
        say(f"{run_path}: {split} images of {data.name}{': ' * bool(source)}{source}")
        out.print(class_table(score, images.names))


def theory_command(
    run_path: RunPath,
    beside: Annotated[
        Path | None, Option(help="another run to compare with, such as one without orthogonality")
    ] = None,
    layers: Annotated[
        str, Option(help="depth (shallow, mid, deep, all), names or patterns, with commas between")
    ] = "deep",
    images: Annotated[int, Option(help="training images whose patches are measured")] = 500,
    figure: Annotated[Path | None, Option(help="PNG file to draw")] = None,
    data_dir: DataDir = "",
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Measure the paper's theory on a run: orthogonality, covariances of responses and their bounds, by layer."""
    if images < 1:
        raise FedOrthoError(f"--images is {images}; expected at least 1")
    if figure is not None and figure.suffix.lower() != ".png":
        raise FedOrthoError(f"--figure is {figure}; expected a name that ends with .png")
    chosen, found, about = choose_device(device), dict[str, list[LayerTheory]](), dict[str, str]()
    for run in (open_run(path) for path in (run_path, beside) if path is not None):
        with bars() as shown:
            data = run.load_data(data_dir, bar(shown, "decoding images"))
        drawn, name = draw(data.train, images, 0), run.path.name
        name = f"{name}, beside" if name in found else name
        found[name] = measure_theory(run.load_model(), drawn, layers, device=chosen)
        settings = run.settings
        about[name] = f"{settings.model} on {data.name}, seed {settings.seed}, {len(drawn)} training images"
    if figure is not None:
        with replacing(figure) as file:
            file.write_bytes(png(theory_figure(found, "; ".join(f"{name}: {words}" for name, words in about.items()))))
    if as_json:
        say_json({name: [to_json(layer) for layer in measured] for name, measured in found.items()})
        return
    for name, measured in found.items():
        say(f"{name}: {about[name]}")
        say_table(words_table(HEADER, [layer.cells for layer in measured]))
    for sentence in theory_sentences(found):
        say(sentence)


def check_command(
    model: Annotated[str, Argument(help="a run directory, a model's name, or package.module:function")],
    shape: Annotated[str, Option(help="CHANNELSxHEIGHTxWIDTH of its images; a run knows its own")] = "3x32x32",
    classes: Annotated[int, Option(help="number of classes; a run knows its own")] = 10,
    data_dir: DataDir = "",
    as_json: AsJson = False,
) -> None:
    """Try every step of forgetting on a few images, list the edits of each layer; exit code 1 if hide cannot serve."""
    images: Dataset | tuple[int, int, int]
    if (Path(model) / "run.json").exists():
        run = open_run(Path(model))
        net, images = run.load_model(), run.load_data(data_dir)
    else:
        if not re.fullmatch(r"[1-9]\d*x[1-9]\d*x[1-9]\d*", shape):
            raise FedOrthoError(f"--shape is {shape!r}; expected CHANNELSxHEIGHTxWIDTH, such as 3x32x32")
        channels, height, width = map(int, shape.split("x"))
        remember_code(model)
        net, images = build_model(model, num_classes=classes, channels=channels), (channels, height, width)
    with bars() as shown:
        task = shown.add_task("checking", total=None, news="")
        found = check(net, images, num_classes=classes, on_step=lambda step: shown.update(task, news=step))
    if as_json:
        say_json(asdict(found) | {"is_served": found.is_served})
    else:
        say(f"{model}: edits that apply to each layer")
        print_check(found)
    if not found.is_served:
        raise typer.Exit(1)


def report_command(
    run_path: RunPath,
    request: Annotated[
        str, Argument(metavar="REQUEST", help="a request served or refused on RUN (default: the judged or last)")
    ] = "",
    out_path: Annotated[Path | None, Option("--out", help="the HTML file to write (default: RUN/report.html)")] = None,
    original: Annotated[Path | None, Option(help="run before forgetting (default: found beside RUN)")] = None,
    reference: Annotated[Path | None, Option(help="run of a reference model (default: found beside RUN)")] = None,
    images: Annotated[bool, Option(help="show test images, those of a forgotten class too")] = True,
    data_dir: DataDir = "",
    device: Device = "auto",
) -> None:
    """Write one HTML page: the answer, four numbers, figures, audits, images, and what was not tested."""
    with bars() as shown:
        shown.add_task("drawing", total=None, news="")
        how: dict[str, Any] = {"original": original, "reference": reference, "images": images, "on_remark": say}
        path = write_report(run_path, request or None, out=out_path, data_dir=data_dir, device=device, **how)
    say(f"written to {path} ({path.stat().st_size / 1e6:.1f} MB); open it in any browser")


def results_command(
    place: Annotated[Path, Argument(metavar="DIR", help="a directory of runs")] = Path("runs"),
    data: Annotated[str, Option(help="only this dataset")] = "",
    model: Annotated[str, Option(help="only this model")] = "",
    request: Annotated[str, Option(help="only requests that contain this text, such as class:3")] = "",
    method: Annotated[str, Option(help="only this method; 'without class:3' finds reference models")] = "",
    sort: Annotated[str, Option(help=f"order by {', '.join(SORTED_BY)}; smallest first")] = "",
    as_json: AsJson = False,
) -> None:
    """List the runs of a directory with their requests, accuracies and failed audits."""
    rows = list_runs(place, data=data, model=model, request=request, method=method, sort=sort)
    if as_json:
        say_json([asdict(row) for row in rows])
        return
    console = out if out.is_terminal else Console(emoji=False, width=1000)  # a file gets whole lines
    for directory, inside in ({"": rows} if sort else by_directory(rows)).items():
        if directory:
            say(f"{directory}:")
        table = words_table(COLUMNS, [row.words() for row in inside])
        console.print(table)
    say("forget, retain, test: accuracy; probe: recall of a linear probe; failed: audits; – not measured")


@data_app.command("ls")
def data_ls(
    place: Place,
    label: Annotated[str, Option("--class", help="only this class, by name or number")] = "",
    limit: Annotated[int, Option(min=0, help="at most so many images; 0: all")] = 0,
    data_dir: DataDir = "",
    as_json: AsJson = False,
) -> None:
    """List images with their set, row, class, file name and SHA-256; a request names them by any of the last three."""
    _show(list_images(_load(place, data_dir), label=label, limit=limit), as_json)


@data_app.command("find")
def data_find(
    place: Place,
    words: Annotated[list[str], Argument(metavar="WORD...", help="a row, a file name, a glob or sha256:DIGEST")],
    data_dir: DataDir = "",
    as_json: AsJson = False,
) -> None:
    """Show which images words name, as samples:WORD in a request does."""
    _show(list_images(_load(place, data_dir), words), as_json)


@data_app.command("purge")
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
    say_table(words_table(("set", "row", "class", "file", "sha256"), lines))
