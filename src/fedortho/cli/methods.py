"""The commands about methods side by side: compare and tune."""

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
from fedortho.errors import FedOrthoError
from fedortho.methods import METHODS
from fedortho.methods.hyperparameters import read_settings
from fedortho.methods.method import serves
from fedortho.requests.comparing import chosen_methods, compare, table
from fedortho.requests.tuning import Budget, candidates, tune_all
from fedortho.runs.run import open_run


def compare_command(
    run_path: RunPath,
    request: Request,
    methods: Annotated[str, typer.Option(help="all, or names with commas between")] = "all",
    settings: Settings = "published",
    out_path: Annotated[Path | None, typer.Option("--out", help="directory of results (default: beside RUN)")] = None,
    references: Annotated[Path | None, typer.Option(help="directory of retrained runs (default: beside RUN)")] = None,
    data_dir: DataDir = "",
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Run methods from the same model, one after the other, and show how far each is from retraining, and its cost."""
    run, asked, names = open_run(run_path).at(data_dir, device), ForgetRequest.parse(request), chosen_methods(methods)
    place = out_path or run_path.with_name(f"{run_path.name}-compared-{asked.word}")
    chosen = read_settings(run.settings.data, run.settings.model, settings)
    with bars() as shown:
        task = shown.add_task("comparing", total=len(names), news="")
        rows = compare(
            run,
            run.load_data(),
            asked,
            names,
            place,
            settings=chosen,
            references=references,
            watch=lambda name, number, of: shown.update(task, completed=number, total=of, news=name),
        )
    if as_json:
        typer.echo(json.dumps([asdict(row) for row in rows], indent=2))
        return
    header, *lines = table(rows)
    out.print(words_table(header, [line for line in lines if len(line) == len(header)]))
    for name, *why in (line for line in lines if len(line) != len(header)):
        say(f"{name}: {' '.join(why)}")
    say("gap: mean distance of forget and retain accuracy to retrain; * nearest, controls aside; below is no better")
    say(f"results of each method: {place}")


def tune_command(
    methods: Annotated[str, typer.Argument(metavar="METHODS", help="all, or names with commas between")],
    run_path: RunPath,
    request: Request,
    out_path: Annotated[Path, typer.Option("--out", help="the JSON file to write, for compare --settings")],
    settings: Settings = "published",
    data_dir: DataDir = "",
    device: Device = "auto",
) -> None:
    """Search settings of methods on validation images, within a budget that is the same for every method."""
    run, asked = open_run(run_path).at(data_dir, device), ForgetRequest.parse(request)
    budget, names = Budget(), chosen_methods(methods)
    if methods != "all":
        for name in names:
            candidates(name, budget)  # refuses what has nothing to tune
            if not serves(METHODS[name], asked):
                raise FedOrthoError(f"{name} does not serve {asked}; leave it out")
    say(f"budget: {', '.join(f'{key} {value:,}' for key, value in asdict(budget).items())}; the same for each method")
    found = tune_all(
        run,
        run.load_data(),
        asked,
        names,
        out_path,
        budget,
        base=read_settings(run.settings.data, run.settings.model, settings),
        watch=lambda name, number, attempt: say(
            f"{name}, trial {number + 1}: {_words(attempt.settings)}: "
            f"forget {attempt.forget:.1%}  retain {attempt.retain:.1%}{'  ' * bool(attempt.error)}{attempt.error}"
        ),
    )
    for name in names:
        if name in found:
            say(f"best for {name}: {_words(found[name][0].settings)}")
    say(escape(f"written to {out_path}; all trials: {out_path.with_suffix('.trials.json')}"))


def _words(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in settings.items())
