"""The commands evaluate and check."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from fedortho.cli.console import bar, bars, check_table, class_table, out, say
from fedortho.cli.flags import AsJson, DataDir, Device, RunPath
from fedortho.devices import choose_device
from fedortho.errors import FedOrthoError, unknown
from fedortho.models.predictions import evaluate
from fedortho.models.sites import check_model
from fedortho.models.zoo import build_model
from fedortho.runs.run import open_run


def evaluate_command(
    run_path: RunPath,
    split: Annotated[str, typer.Option(help="images to evaluate on: test, valid or train")] = "test",
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
        typer.echo(json.dumps(value, indent=2))
    else:
        say(escape(f"{run_path}: {split} images of {data.name}"))
        out.print(class_table(score, images.names))


def check_command(
    model: Annotated[str, typer.Argument(help="a run directory, a model's name, or package.module:function")],
    shape: Annotated[str, typer.Option(help="CHANNELSxHEIGHTxWIDTH of its images; a run knows its own")] = "3x32x32",
    classes: Annotated[int, typer.Option(help="number of classes; a run knows its own")] = 10,
    data_dir: DataDir = "",
    as_json: AsJson = False,
) -> None:
    """List every convolution and the edits that apply to it; exit code 1 if a layer cannot be edited."""
    if (Path(model) / "run.json").exists():
        run = open_run(Path(model))
        net, sizes = run.load_model(), run.load_data(data_dir).train.shape
    else:
        if not re.fullmatch(r"\d+x\d+x\d+", shape):
            raise FedOrthoError(f"--shape is {shape!r}; expected CHANNELSxHEIGHTxWIDTH, such as 3x32x32")
        channels, height, width = map(int, shape.split("x"))
        net, sizes = build_model(model, num_classes=classes, channels=channels), (channels, height, width)
    findings = check_model(net, sizes)
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
    else:
        say(escape(f"{model}: edits that apply to each layer"))
        out.print(check_table(findings))
    if any(finding.conv or finding.channel or finding.group for finding in findings):
        raise typer.Exit(1)
