"""The command line: alone prints, draws progress bars, sets up logging and exits."""

import dataclasses
import json
import logging
import re
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, NoReturn

import click
import typer
from rich.logging import RichHandler
from rich.markup import escape

from fedortho.board import board
from fedortho.cli_evidence import bundle_app, journal_app
from fedortho.cli_federation import deploy_command, federate_command, sync_command
from fedortho.cli_flags import AsJson, Board, Config, DataDir, Device, OutPath, RunPath, takes_settings
from fedortho.cli_forget import forget_command, undo_command
from fedortho.cli_methods import compare_command, tune_command
from fedortho.cli_report import report_command, results_command
from fedortho.cli_reproduce import reproduce_command
from fedortho.cli_verdict import audit_command, judge_command
from fedortho.devices import choose_device
from fedortho.errors import FedOrthoError, unknown
from fedortho.models import build_model
from fedortho.runs import ImportSettings, TrainSettings, import_run, open_run, train_run
from fedortho.scores import evaluate
from fedortho.screen import bar, bars, check_table, class_table, err, out, print_run, say, training_bar
from fedortho.settings import make_settings, read_toml
from fedortho.sites import check_model

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
INTERRUPTED = 130  # what typer makes of ctrl-C


def main() -> None:
    """Run the command; what a user can mend becomes one line and exit code 2."""
    handler = RichHandler(console=err, show_time=False, show_path=False)
    logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[handler])
    if "" not in sys.path:
        sys.path.append("")  # --model package.module:function may lie where the user stands
    try:
        code = app(standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(2)
    except click.ClickException as error:
        _refuse(error.format_message())
    except FedOrthoError as error:
        _refuse(str(error))
    if code == INTERRUPTED:
        err.print(
            "interrupted; what is finished is kept, "
            "and a training goes on where it stopped if the same command is given again"
        )
    sys.exit(code)


def _refuse(message: str) -> NoReturn:
    err.print(f"[bold red]error:[/] {escape(' '.join(message.split()))}", highlight=False, soft_wrap=True)
    sys.exit(2)


def _tell_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fedortho {version('fedortho')}")
        raise typer.Exit


@app.callback()
def common(
    _: Annotated[
        bool, typer.Option("--version", callback=_tell_version, is_eager=True, help="tell the version")
    ] = False,
) -> None:
    """Make trained convolutional networks forget, and prove it."""


@app.command()
@takes_settings(TrainSettings)
def train(
    out_path: OutPath,
    config: Config = None,
    tensorboard: Board = None,
    *,
    given: dict[str, Any],
) -> None:
    """Train a model with orthogonal kernels; a killed run goes on where it stopped."""
    settings = make_settings(TrainSettings, read_toml(config) if config else {}, given)
    with bars() as shown, board(tensorboard, out_path, settings, training_bar(shown)) as watch:
        observing = bar(shown, "writing the ledger")
        decoding = bar(shown, "decoding images")
        run = train_run(out_path, settings, watch=watch, progress=decoding, observing=observing)
    print_run(run)


@app.command("import")
@takes_settings(ImportSettings)
def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="safetensors, or a .pt file with a state dict")],
    out_path: OutPath,
    *,
    given: dict[str, Any],
) -> None:
    """Make a run directory of a model that was trained elsewhere, and evaluate it."""
    settings = make_settings(ImportSettings, given)
    with bars() as shown:
        decoding, observing = bar(shown, "decoding images"), bar(shown, "writing the ledger")
        run = import_run(out_path, file, settings, progress=decoding, observing=observing)
    print_run(run)


@app.command("evaluate")
def evaluate_(
    run_path: RunPath,
    split: Annotated[str, typer.Option(help="test, valid or train")] = "test",
    data_dir: DataDir = "",
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Count what a trained model gets right, class by class."""
    if split not in ("test", "valid", "train"):
        raise unknown("split", split, ("test", "valid", "train"))
    run = open_run(run_path)
    place = choose_device(device)
    with bars() as shown:
        data = run.load_data(data_dir, bar(shown, "decoding images"))
    images = getattr(data, split)
    score = evaluate(run.load_model().to(place), images, device=place)
    if as_json:
        value = {"run": str(run_path), "split": split, "images": score.images, "accuracy": score.accuracy}
        value |= {"loss": score.loss, "per-class": dict(zip(images.names, score.per_class, strict=True))}
        typer.echo(json.dumps(value, indent=2))
    else:
        say(escape(f"{run_path}: {split} images of {data.name}"))
        out.print(class_table(score, images.names))


@app.command()
def check(
    model: Annotated[str, typer.Argument(help="a run directory, a model's name, or package.module:function")],
    shape: Annotated[str, typer.Option(help="channels x height x width of its images, unless it is a run")] = "3x32x32",
    classes: Annotated[int, typer.Option(help="number of classes, unless it is a run")] = 10,
    data_dir: DataDir = "",
    as_json: AsJson = False,
) -> None:
    """List every convolution and the edits that apply to it; exit code 1 if some layer cannot be treated."""
    if (Path(model) / "run.json").exists():
        run = open_run(Path(model))
        net, sizes = run.load_model(), run.load_data(data_dir).train.shape
    else:
        if not re.fullmatch(r"\d+x\d+x\d+", shape):
            raise FedOrthoError(f"shape must be like 3x32x32, not {shape!r}")
        channels, height, width = map(int, shape.split("x"))
        net, sizes = build_model(model, classes=classes, channels=channels), (channels, height, width)
    findings = check_model(net, sizes)
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
    else:
        say(f"{model}: what can be edited")
        out.print(check_table(findings))
    if any(finding.conv or finding.channel or finding.group for finding in findings):
        raise typer.Exit(1)


app.command("federate")(federate_command)
app.command("sync")(sync_command)
app.command("deploy")(deploy_command)
app.command("forget")(forget_command)
app.command("undo")(undo_command)
app.command("judge")(judge_command)
app.command("audit")(audit_command)
app.command("compare")(compare_command)
app.command("tune")(tune_command)
app.command("reproduce")(reproduce_command)
app.command("report")(report_command)
app.command("results")(results_command)
app.add_typer(bundle_app, name="bundle")
app.add_typer(journal_app, name="journal")


if __name__ == "__main__":
    main()
