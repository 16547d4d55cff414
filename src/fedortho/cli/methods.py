"""The commands compare and tune."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from fedortho.cli.console import bars, out, say, words_table
from fedortho.cli.flags import AsJson, DataDir, Device, Request, RunPath, Settings
from fedortho.data.request import ForgetRequest
from fedortho.requests.comparing import compare, compared_path, comparison_table
from fedortho.requests.tuning import Attempt, Budget, tune
from fedortho.runs.run import open_run
from fedortho.storage.records import to_json


def compare_command(
    run_path: RunPath,
    request: Request,
    methods: Annotated[str, typer.Option(help="all, or names with commas between")] = "all",
    settings: Settings = "published",
    out_path: Annotated[
        Path | None, typer.Option("--out", help="directory of results (default: RUN-compared-REQUEST)")
    ] = None,
    references: Annotated[
        Path | None, typer.Option(help="directory of reference models (default: references beside RUN)")
    ] = None,
    data_dir: DataDir = "",
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Run several methods from the same model and show accuracies, cost and the gap to retraining of each."""
    run, parsed = open_run(run_path).at(data_dir, device), ForgetRequest.parse(request)
    directory = out_path or compared_path(run, parsed)
    with bars() as shown:
        task = shown.add_task("comparing", total=None, news="")
        rows = compare(
            run,
            parsed,
            methods,
            out=directory,
            settings=settings,
            references=references,
            watch=lambda name, number, total: shown.update(task, completed=number, total=total, news=name),
        )
    if as_json:
        typer.echo(json.dumps([to_json(row) for row in rows], indent=2))
        return
    header, *lines = comparison_table(rows)
    out.print(words_table(header, [line for line in lines if len(line) == len(header)]))
    for name, *why in (line for line in lines if len(line) != len(header)):
        say(escape(f"{name}: {' '.join(why)}"))
    say("gap: mean distance of forget and retain accuracy to retrain; * the smallest, without controls")
    say("a forget accuracy below that of retrain is as far from it as one above")
    say(escape(f"results of each method: {directory}"))


def tune_command(
    methods: Annotated[str, typer.Argument(metavar="METHODS", help="all, or names with commas between")],
    run_path: RunPath,
    request: Request,
    out_path: Annotated[Path, typer.Option("--out", help="the JSON file to write, for --settings")],
    settings: Settings = "published",
    data_dir: DataDir = "",
    device: Device = "auto",
) -> None:
    """Search hyper-parameters of methods on validation images, with the same budget for every method."""
    budget = Budget()
    say(f"budget of each method: {', '.join(f'{key} {value:,}' for key, value in asdict(budget).items())}")
    run = open_run(run_path).at(data_dir, device)
    tuned = tune(run, request, methods, out=out_path, settings=settings, budget=budget, watch=_print_attempt)
    for name, attempts in tuned.items():
        say(f"best for {name}: {_words(attempts[0].settings)}")
    say(escape(f"written to {out_path}; all trials: {out_path.with_suffix('.trials.json')}"))


def _print_attempt(name: str, number: int, attempt: Attempt) -> None:
    accuracies = f"forget {attempt.forget:.1%}  retain {attempt.retain:.1%}"
    failure = f"  {attempt.error}" if attempt.error else ""
    say(escape(f"{name}, trial {number + 1}: {_words(attempt.settings)}: {accuracies}{failure}"))


def _words(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in settings.items())
