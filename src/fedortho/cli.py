"""The command line: alone prints, draws progress bars, sets up logging and exits."""

import dataclasses
import inspect
import json
import logging
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn

import click
import typer
from rich.console import Console
from rich.logging import RichHandler
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.table import Table

from fedortho.calibrate import Refused, Trial
from fedortho.errors import FedOrthoError
from fedortho.methods import preset
from fedortho.methods.fedortho import ForgetSettings
from fedortho.models import build_model
from fedortho.request import ForgetRequest
from fedortho.runs import ImportSettings, Run, TrainSettings, choose_device, import_run, open_run, train_run
from fedortho.serve import Served, describe, serve_request, undo_run
from fedortho.settings import field_help, field_types, kebab, make_settings, read_toml
from fedortho.sites import Finding, check_model
from fedortho.train import Evaluation, Progress, evaluate

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Make trained convolutional networks forget, and prove it.",
)
out = Console()
err = Console(stderr=True)
INTERRUPTED = 130  # what typer makes of ctrl-C

RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="a run directory")]
OutPath = Annotated[Path, typer.Option("--out", help="the run directory to write")]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON for machines")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or mps")]
DataDir = Annotated[str, typer.Option("--data-dir", help="where the run's data lies on this machine")]


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
        err.print("interrupted; fedortho train goes on where it stopped if it is given again")
    sys.exit(code)


def _refuse(message: str) -> NoReturn:
    err.print(f"[bold red]error:[/] {escape(' '.join(message.split()))}", highlight=False, soft_wrap=True)
    sys.exit(2)


def say(text: str) -> None:
    out.print(text, highlight=False, soft_wrap=True)


def takes_settings(kind: type[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command one flag per field of `kind`; it receives the flags that were used as `given`."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        types, texts = field_types(kind), field_help(kind)
        defaults = kind()
        parameters = [p for p in inspect.signature(function).parameters.values() if p.name != "given"]
        for name, type_ in types.items():
            default = getattr(defaults, name)
            text = texts[name] if default in ("", -1e30) else f"{texts[name]} (default: {default})"
            flag = f"--{kebab(name)}/--no-{kebab(name)}" if type_ is bool else f"--{kebab(name)}"
            option = typer.Option(flag, help=text, show_default=False)
            annotation = Annotated[type_ | None, option]  # type: ignore[valid-type]  # made at run time
            parameters.append(
                inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
            )

        def command(**values: Any) -> None:
            flags = {name: values.pop(name) for name in types}
            function(given={name: value for name, value in flags.items() if value is not None}, **values)

        command.__doc__, command.__name__ = function.__doc__, function.__name__
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # as inspect documents
        command.__annotations__ = {p.name: p.annotation for p in parameters}
        return command

    return decorate


@app.command()
@takes_settings(TrainSettings)
def train(
    out_path: OutPath,
    config: Annotated[Path | None, typer.Option(help="a TOML file of settings; flags win over it")] = None,
    *,
    given: dict[str, Any],
) -> None:
    """Train a model with orthogonal kernels; a killed run goes on where it stopped."""
    settings = make_settings(TrainSettings, read_toml(config) if config else {}, given)
    with _bars() as bars:
        observing = _bar(bars, "writing the ledger")
        decoding = _bar(bars, "decoding images")
        run = train_run(out_path, settings, watch=_training_bar(bars), progress=decoding, observing=observing)
    _print_run(run)


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
    with _bars() as bars:
        decoding, observing = _bar(bars, "decoding images"), _bar(bars, "writing the ledger")
        run = import_run(out_path, file, settings, progress=decoding, observing=observing)
    _print_run(run)


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
        raise FedOrthoError(f"no split {split!r}; choose from test, valid, train")
    run = open_run(run_path)
    place = choose_device(device)
    with _bars() as bars:
        data = run.load_data(data_dir, _bar(bars, "decoding images"))
    images = getattr(data, split)
    score = evaluate(run.load_model().to(place), images, device=place)
    if as_json:
        value = {"run": str(run_path), "split": split, "images": score.images, "accuracy": score.accuracy}
        value |= {"loss": score.loss, "per-class": dict(zip(images.names, score.per_class, strict=True))}
        typer.echo(json.dumps(value, indent=2))
    else:
        say(escape(f"{run_path}: {split} images of {data.name}"))
        out.print(_class_table(score, images.names))


@app.command()
@takes_settings(ForgetSettings)
def forget(
    run_path: RunPath,
    request: Annotated[list[str], typer.Argument(help="class:3, class:3,7, class:cat, samples:FILE; several at once")],
    out_path: Annotated[Path | None, typer.Option("--out", help="new run directory (default: RUN-REQUEST)")] = None,
    preset_name: Annotated[str, typer.Option("--preset", help="robust or paper")] = "robust",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="find the patch and show it; write nothing")] = False,
    keep_undo: Annotated[Path | None, typer.Option(help="keep what is removed in this file, for fedortho undo")] = None,
    data_dir: DataDir = "",
    device: Device = "auto",
    as_json: AsJson = False,
    *,
    given: dict[str, Any],
) -> None:
    """Make a trained model forget; writes a new run directory and leaves the old one as it was."""
    settings = preset(preset_name, **given)
    asked = ForgetRequest.parse(shlex.join(request))
    run = open_run(run_path)
    place = choose_device(device)
    out_dir = out_path or run_path.with_name(f"{run_path.name}-{_file_name(asked)}")
    with _bars() as bars:
        data = run.load_data(data_dir, _bar(bars, "decoding images"))
        bars.add_task(f"forgetting {_file_name(asked)}", total=None, news="")
        try:
            served = serve_request(
                run, data, asked, settings, out=None if dry_run else out_dir, undo=keep_undo, device=place
            )
        except Refused as refusal:
            bars.stop()
            err.print(_frontier_table(refusal.frontier))
            raise FedOrthoError(f"{refusal}; {_retrain_advice(run)}") from refusal
    if as_json:
        typer.echo(json.dumps(describe(served), indent=2))
    else:
        _print_served(served, run_path)


def _print_served(served: Served, run_path: Path) -> None:
    say(escape(f"{run_path}: {served.request}"))
    table = Table()
    for name in ("accuracy", "before", "after"):
        table.add_column(name, justify="left" if name == "accuracy" else "right")
    for name in ("forget", "retain", "test"):
        table.add_row(name, f"{getattr(served.before, name):.1%}", f"{getattr(served.after, name):.1%}")
    out.print(table)
    outcome = served.outcome
    sites = outcome.patch.note["sites"]
    say("kernels edited: " + ", ".join(f"{len(v['kernels'])} in {k}" for k, v in sites.items()))
    if outcome.chosen is not None:
        scrub = f", scrub at strength {outcome.chosen.scrub:g}" if outcome.chosen.scrub else ", no scrub"
        say(f"ratio {outcome.chosen.ratio:g}{scrub}, {len(outcome.trials)} trials")
    parts = [f"{k} {v:.2f} s ({outcome.images_read[k]:,} images read)" for k, v in outcome.seconds.items()]
    say("; ".join(parts))
    if len(served.all_forgotten) > 1:
        told = ", ".join(f"{k} {v:.1%}" for k, v in served.all_forgotten.items())
        say(f"forgotten so far: {told}; retention paid in all: {served.retain_paid:.1%}")
    if served.advise_retraining:
        say("[yellow]these requests have cost much retention: retrain before the next one[/]")
    if served.run is None:
        say(str(outcome.patch).replace("[", r"\["))
    say("dry run: nothing was written" if served.run is None else f"written to {escape(str(served.run.path))}")


def _frontier_table(frontier: Sequence[Trial]) -> Table:
    table = Table(caption="tried, on the images set aside", caption_justify="left")
    for name in ("ratio", "scrub", "forget", "retain"):
        table.add_column(name, justify="right")
    for trial in frontier:
        table.add_row(f"{trial.ratio:g}", f"{trial.scrub:g}", f"{trial.forget:.1%}", f"{trial.retain:.1%}")
    return table


def _retrain_advice(run: Run) -> str:
    seconds = sum(entry.seconds for entry in run.history())
    cost = f"that took {seconds / 60:.1f} minutes here the last time" if seconds else "its cost is not known"
    return f"allow more with --max-retain-drop or --target, edit more with --layers mid,deep, or retrain ({cost})"


def _file_name(request: ForgetRequest) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", str(request))[:40].strip("-")


@app.command()
def undo(
    run_path: RunPath,
    undo_file: Annotated[Path, typer.Argument(metavar="FILE", help="what --keep-undo wrote")],
    out_path: OutPath,
) -> None:
    """Restore the model of before the last request, bit for bit, from its undo file."""
    run = undo_run(open_run(run_path), undo_file, out_path)
    say(f"written to {escape(str(run.path))}: model {run.record['model']['digest'][:16]}")


@app.command()
def check(
    model: Annotated[str, typer.Argument(help="a run directory, a model's name, or package.module:function")],
    shape: Annotated[str, typer.Option(help="channels x height x width of its images, unless it is a run")] = "3x32x32",
    classes: Annotated[int, typer.Option(help="number of classes, unless it is a run")] = 10,
    as_json: AsJson = False,
) -> None:
    """List every convolution and the edits that apply to it; exit code 1 if some layer cannot be treated."""
    if (Path(model) / "run.json").exists():
        run = open_run(Path(model))
        net, sizes = run.load_model(), run.load_data().train.shape
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
        out.print(_check_table(findings))
    if any(finding.conv or finding.channel or finding.group for finding in findings):
        raise typer.Exit(1)


def _check_table(findings: Sequence[Finding]) -> Table:
    table = Table(caption_justify="left")
    for name in ("layer", "kernels", "norm", "conv", "channel", "residual group"):
        table.add_column(name, justify="right" if name == "kernels" else "left", overflow="fold")
    for finding in findings:
        layer = finding.layer
        group = "–" if len(layer.writers) == 1 else finding.group or f"with {len(layer.writers) - 1} more"
        edits = [finding.conv or ("yes*" if finding.is_undone else "yes"), finding.channel or "yes"]
        table.add_row(layer.name, str(layer.kernels), layer.norm_kind or "none", *edits, group)
    if any(finding.is_undone for finding in findings):
        table.caption = "* undone by re-estimating batch-norm statistics; the channel edit is not"
    return table


def _class_table(score: Evaluation, names: tuple[str, ...]) -> Table:
    table = Table()
    table.add_column("class")
    table.add_column("images", justify="right")
    table.add_column("right", justify="right")
    for name, row, share in zip(names, score.confusion, score.per_class, strict=True):
        table.add_row(escape(name), str(sum(row)), "–" if share is None else f"{share:.1%}")
    table.add_section()
    table.add_row("all", str(score.images), f"{score.accuracy:.1%}")
    return table


def _print_run(run: Run) -> None:
    result, about = run.record["result"], run.record["model"]
    scores = ", ".join(f"{name.removesuffix('-accuracy')} {value:.1%}" for name, value in result.items())
    history = run.history()
    ortho = f", orthogonality penalty {history[-1].ortho:.3g}" if history and history[-1].ortho is not None else ""
    title = f"[bold]{escape(str(run.path))}[/]: {escape(run.settings.model)}"
    say(f"{title} ({about['weights']:,} weights) on {escape(run.settings.data)}")
    say(f"  accuracy: {scores}{ortho}")
    say(f"  model digest {about['digest'][:16]}")


@contextmanager
def _bars() -> Iterator[Bars]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    news = TextColumn("{task.fields[news]}")
    with Bars(*columns, news, console=err, transient=True, disable=not err.is_terminal) as bars:
        yield bars


def _bar(bars: Bars, text: str) -> Callable[[int, int], None]:
    task = bars.add_task(text, total=None, visible=False, news="")

    def show(done: int, total: int) -> None:
        bars.update(task, completed=done, total=total, visible=done < total)

    return show


def _training_bar(bars: Bars) -> Callable[[Progress], None]:
    task = bars.add_task("training", total=None, visible=False, news="")
    told = 0

    def show(now: Progress) -> None:
        nonlocal told
        news = f"loss {now.loss:.3f}  accuracy {now.accuracy:.1%}  {now.images_per_second:,.0f} images/s"
        news += "" if now.ortho is None else f"  orthogonality {now.ortho:.3g}"
        text = f"epoch {now.epoch + 1}/{now.epochs}"
        bars.update(task, description=text, completed=now.step, total=now.steps, visible=True, news=news)
        if len(now.history) > max(told, now.epoch):
            told, entry = len(now.history), now.history[-1]
            valid = "" if entry.valid is None else f"  validation {entry.valid:.1%}"
            line = f"epoch {entry.epoch + 1}/{now.epochs}  loss {entry.loss:.3f}  accuracy {entry.accuracy:.1%}{valid}"
            line += "" if entry.ortho is None else f"  orthogonality {entry.ortho:.3g}"
            line += f"  {entry.seconds:.0f} s"
            bars.console.print(line, highlight=False, soft_wrap=True)

    return show


if __name__ == "__main__":
    main()
