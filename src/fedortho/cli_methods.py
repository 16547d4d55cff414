"""The commands about methods side by side: compare and tune."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from fedortho.cli_flags import AsJson, Asked, DataDir, RunPath
from fedortho.compare import chosen_methods, compare, read_settings, table
from fedortho.request import ForgetRequest
from fedortho.runs import open_run
from fedortho.screen import bars, out, say, words_table
from fedortho.tune import Budget, tune, write_tuning


def compare_command(
    run_path: RunPath,
    request: Asked,
    methods: Annotated[str, typer.Option(help="all, or names with commas between")] = "all",
    preset: Annotated[str, typer.Option(help="settings: published, or short (minutes on two cores)")] = "published",
    settings: Annotated[Path | None, typer.Option(help="a JSON file that fedortho tune wrote; wins over it")] = None,
    out_path: Annotated[Path | None, typer.Option("--out", help="directory of results (default: beside RUN)")] = None,
    references: Annotated[Path | None, typer.Option(help="directory of retrained runs (default: in --out)")] = None,
    data_dir: DataDir = "",
    as_json: AsJson = False,
) -> None:
    """Run methods from the same model, one after the other, and show how far each is from retraining, and its cost."""
    run, asked, names = open_run(run_path), ForgetRequest.parse(request), chosen_methods(methods)
    place = out_path or run_path.with_name(f"{run_path.name}-compared-{asked.word}")
    chosen = read_settings(settings, preset)
    with bars() as shown:
        task = shown.add_task("comparing", total=len(names), news="")
        rows = compare(
            run,
            run.load_data(data_dir),
            asked,
            names,
            place,
            settings=chosen,
            references=references,
            data_dir=data_dir,
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
    method: Annotated[str, typer.Argument(help="a method's name")],
    run_path: RunPath,
    request: Asked,
    out_path: Annotated[Path, typer.Option("--out", help="the JSON file to write, for compare --settings")],
    data_dir: DataDir = "",
) -> None:
    """Search a method's settings on validation images, within a budget that is the same for every method."""
    run, asked, budget = open_run(run_path), ForgetRequest.parse(request), Budget()
    say(f"budget: {', '.join(f'{key} {value:,}' for key, value in asdict(budget).items())}")
    found = tune(
        run,
        run.load_data(data_dir),
        asked,
        method,
        budget,
        watch=lambda number, attempt: say(
            f"trial {number + 1}: {dict(attempt.settings)}  forget {attempt.forget:.1%}  retain {attempt.retain:.1%}"
        ),
    )
    write_tuning(out_path, run, asked, {method: found}, budget)
    say(f"best: {dict(found[0].settings)}; written to {out_path}")
