"""The command line: alone prints, draws progress bars, sets up logging and exits."""

import inspect
import json
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.table import Table

from fedortho.errors import FedOrthoError
from fedortho.runs import Run, TrainSettings, choose_device, import_run, open_run, train_run
from fedortho.settings import field_help, field_types, kebab, make_settings, read_toml
from fedortho.train import Evaluation, Progress, evaluate

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Make trained convolutional networks forget, and prove it.",
)
out = Console()
err = Console(stderr=True)

RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="a run directory")]
OutPath = Annotated[Path, typer.Option("--out", help="the run directory to write")]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON for machines")]
DataDir = Annotated[str, typer.Option("--data-dir", help="where the run's data lies on this machine")]


def main() -> None:
    """Run the command; what a user can mend becomes one line and exit code 2."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[RichHandler(console=err, show_path=False)])
    try:
        app()
    except FedOrthoError as error:
        err.print(f"[bold red]error:[/] {_plain(error)}", highlight=False, soft_wrap=True)
        sys.exit(2)
    except KeyboardInterrupt:
        err.print("interrupted; the same command goes on where it stopped")
        sys.exit(130)


def _plain(error: Exception) -> str:
    return " ".join(str(error).split()).replace("[", r"\[")


def takes_settings(kind: type[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command one flag per field of `kind`; it receives the flags that were used as `given`."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        types, texts = field_types(kind), field_help(kind)
        defaults = kind()
        parameters = [p for p in inspect.signature(function).parameters.values() if p.name != "given"]
        for name, type_ in types.items():
            text = f"{texts[name]} [default: {getattr(defaults, name)!r}]".replace("[default: '']", "")
            option = typer.Option(f"--{kebab(name)}", help=text.strip(), show_default=False)
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
    _use_threads(settings.threads)
    with _bars() as bars:
        run = train_run(out_path, settings, watch=_training_bar(bars), progress=_decoding_bar(bars))
    _print_run(run)


@app.command("import")
@takes_settings(TrainSettings)
def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="safetensors, or a .pt file with a state dict")],
    out_path: OutPath,
    *,
    given: dict[str, Any],
) -> None:
    """Make a run directory of a model that was trained elsewhere, and evaluate it."""
    settings = make_settings(TrainSettings, given)
    _use_threads(settings.threads)
    with _bars() as bars:
        run = import_run(out_path, file, settings, progress=_decoding_bar(bars))
    _print_run(run)


@app.command("evaluate")
def evaluate_(
    run_path: RunPath,
    split: Annotated[str, typer.Option(help="test, valid or train")] = "test",
    data_dir: DataDir = "",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or mps")] = "auto",
    as_json: AsJson = False,
) -> None:
    """Count what a trained model gets right, class by class."""
    if split not in ("test", "valid", "train"):
        raise FedOrthoError(f"no split {split!r}; choose from test, valid, train")
    run = open_run(run_path)
    place = choose_device(device)
    with _bars() as bars:
        data = run.load_data(data_dir, _decoding_bar(bars))
    images = getattr(data, split)
    score = evaluate(run.load_model().to(place), images, device=place)
    if as_json:
        value = {"run": str(run_path), "split": split, "images": score.images, "accuracy": score.accuracy}
        value |= {"loss": score.loss, "per-class": dict(zip(images.names, score.per_class, strict=True))}
        typer.echo(json.dumps(value, indent=2))
    else:
        out.print(_class_table(f"{run_path}: {split} images of {data.name}", score, images.names))


def _class_table(title: str, score: Evaluation, names: tuple[str, ...]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("class")
    table.add_column("images", justify="right")
    table.add_column("right", justify="right")
    for name, row, share in zip(names, score.confusion, score.per_class, strict=True):
        table.add_row(name, str(sum(row)), "–" if share is None else f"{share:.1%}")
    table.add_section()
    table.add_row("all", str(score.images), f"{score.accuracy:.1%}")
    return table


def _print_run(run: Run) -> None:
    result, about = run.record["result"], run.record["model"]
    scores = ", ".join(f"{name.removesuffix('-accuracy')} {value:.1%}" for name, value in result.items())
    history = run.history()
    ortho = f", orthogonality penalty {history[-1].ortho:.3g}" if history and run.settings.ortho else ""
    out.print(f"[bold]{run.path}[/]: {run.settings.model} ({about['weights']:,} weights) on {run.settings.data}")
    out.print(f"  accuracy: {scores}{ortho}", highlight=False)
    out.print(f"  model digest {about['digest'][:16]}", highlight=False)


def _use_threads(number: int) -> None:
    if number:
        torch.set_num_threads(number)


@contextmanager
def _bars() -> Iterator[Bars]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    news = TextColumn("{task.fields[news]}")
    with Bars(*columns, news, console=err, transient=True, disable=not err.is_terminal) as bars:
        yield bars


def _decoding_bar(bars: Bars) -> Callable[[int, int], None]:
    task = bars.add_task("decoding images", total=None, visible=False, news="")

    def show(done: int, total: int) -> None:
        bars.update(task, completed=done, total=total, visible=done < total)

    return show


def _training_bar(bars: Bars) -> Callable[[Progress], None]:
    task = bars.add_task("training", total=None, visible=False, news="")
    told = 0

    def show(now: Progress) -> None:
        nonlocal told
        news = f"loss {now.loss:.3f}  accuracy {now.accuracy:.1%}  {now.images_per_second:,.0f} images/s"
        if now.history:
            news += f"  orthogonality {now.history[-1].ortho:.3g}"
        text = f"epoch {now.epoch + 1}/{now.epochs}"
        bars.update(task, description=text, completed=now.step, total=now.steps, visible=True, news=news)
        if len(now.history) > max(told, now.epoch):
            told, entry = len(now.history), now.history[-1]
            valid = "" if entry.valid is None else f"  validation {entry.valid:.1%}"
            line = f"epoch {entry.epoch + 1}/{now.epochs}  loss {entry.loss:.3f}  accuracy {entry.accuracy:.1%}{valid}"
            bars.console.print(f"{line}  orthogonality {entry.ortho:.3g}  {entry.seconds:.0f} s", highlight=False)

    return show


if __name__ == "__main__":
    main()
