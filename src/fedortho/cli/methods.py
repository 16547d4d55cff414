"""The commands compare and tune."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from fedortho.cli.console import bars, out, say, say_json, words_table
from fedortho.cli.flags import AsJson, DataDir, Device, RecipeFile, Request, RunPath, Settings, read_recipe
from fedortho.requests.comparing import NOTES, compare, compared_path, comparison_table
from fedortho.requests.search import Attempt, Budget, Search
from fedortho.requests.tuning import tune
from fedortho.runs.run import open_run
from fedortho.storage.records import to_json


def compare_command(
    run_path: RunPath,
    request: Request,
    methods: Annotated[str, Option(help="all, or names with commas between")] = "all",
    settings: Settings = "published",
    passes: Annotated[str, Option(help="of methods that train: settings, one, published, or several")] = "settings",
    out_path: Annotated[Path | None, Option("--out", help="results directory (default: RUN-compared-REQUEST)")] = None,
    references: Annotated[Path | None, Option(help="directory of references (default: references beside RUN)")] = None,
    recipe: RecipeFile = None,
    data_dir: DataDir = "",
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Run several methods from the same model and show accuracies, cost and the gap to retraining of each."""
    run = open_run(run_path).at(data_dir, device, read_recipe(recipe))
    parsed = run.request(request)
    directory = out_path or compared_path(run, parsed)
    with bars() as shown:
        task = shown.add_task("comparing", total=None, news="")
        rows = compare(
            run,
            parsed,
            methods,
            out=directory,
            settings=settings,
            passes=passes,
            references=references,
            watch=lambda name, number, total: shown.update(task, completed=number, total=total, news=name),
        )
    if as_json:
        say_json([to_json(row) for row in rows])
        return
    header, *lines = comparison_table(rows)
    out.print(words_table(header, [line for line in lines if len(line) == len(header)]))
    for name, *why in (line for line in lines if len(line) != len(header)):
        say(f"{name}: {' '.join(why)}")
    for note in NOTES:
        say(note)
    say(f"results of each method: {directory}")


def tune_command(
    methods: Annotated[str, Argument(metavar="METHODS", help="all, or names with commas between")],
    run_path: RunPath,
    request: Request,
    out_path: Annotated[Path, Option("--out", help="the JSON file to write, for --settings")],
    on: Annotated[str | None, Option(help="the request of trials (default: another like REQUEST, drawn)")] = None,
    settings: Settings = "published",
    data_dir: DataDir = "",
    device: Device = "auto",
) -> None:
    """Search hyper-parameters of methods on validation images, with the same budget for every method."""
    budget = Budget()
    say(f"budget of each method: {', '.join(f'{key} {value:,}' for key, value in asdict(budget).items())}")
    run = open_run(run_path).at(data_dir, device)
    tuned = tune(run, request, methods, on=on, out=out_path, settings=settings, budget=budget, watch=_print_attempt)
    for name, search in tuned.items():
        say(f"best for {name}: {_chosen(search)}")
    say(f"written to {out_path}; all trials: {out_path.with_suffix('.trials.json')}")


def _print_attempt(name: str, number: int, attempt: Attempt) -> None:
    accuracies = f"forget {attempt.forget:.1%}  retain {attempt.retain:.1%}"
    failure = f"  {attempt.error}" if attempt.error else ""
    settings = ", ".join(f"{key} {value:g}" for key, value in attempt.settings.items())
    say(f"{name}, trial {number + 1} on {attempt.images:,} images: {settings}: {accuracies}{failure}")


def _chosen(search: Search) -> str:
    return ", ".join(
        f"{key} {choice.value} ({'inside' if choice.inside else 'at the edge of'} {choice.lowest} to {choice.highest})"
        for key, choice in search.choices.items()
    )
