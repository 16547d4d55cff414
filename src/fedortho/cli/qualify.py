"""The command qualify."""

from typing import Annotated

import typer

from fedortho.audits.qualification import MethodTrial, Qualification
from fedortho.cli.console import out, say, say_json, words_table
from fedortho.cli.flags import AsJson, DataDir, Device, RunPath
from fedortho.cli.verdict import References, judging_bars
from fedortho.requests.qualifying import QualifyOptions, draw_classes, qualify_run
from fedortho.runs.run import open_run
from fedortho.storage.records import to_json


def qualify_command(
    run_path: RunPath,
    classes: Annotated[int, typer.Option(help="drawn classes on whose test images the method is confirmed")] = 3,
    choosing: Annotated[int, typer.Option(help="further ones, on whose validation images it is chosen")] = 1,
    seed: Annotated[int, typer.Option(help="of the draw")] = 0,
    per_class: Annotated[int, typer.Option(help="reference models for each class")] = 2,
    references: References = None,
    data_dir: DataDir = "",
    device: Device = "auto",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="show the draw and the number of trainings only")] = False,
    as_json: AsJson = False,
) -> None:
    """Try forgetting on drawn classes, against reference models, so that later requests can cite it.

    Writes qualification.json into RUN after every class; a stopped qualification goes on where it was.
    """
    run = open_run(run_path)
    options = QualifyOptions(classes, choosing, seed, per_class, (), references, data_dir, device)
    drawn, number = draw_classes(run, options), (classes + choosing) * per_class
    if not as_json:
        seconds = number * sum(epoch.seconds for epoch in run.history())
        about = f", about {seconds / 60:.0f} minutes at the speed of this run's training" if seconds else ""
        confirming = ", ".join(drawn.confirming)
        say(f"drawn by seed {seed}: {', '.join(drawn.choosing)} to choose, {confirming} to confirm")
        say(f"{number} reference models are needed, those that exist are used{about}")
    if dry_run:
        return
    with judging_bars() as progress:
        found = qualify_run(run, QualifyOptions(**(vars(options) | dict(progress))))
    if as_json:
        say_json(to_json(found))
    else:
        _print(found)


def _print(found: Qualification) -> None:
    every = [*found.tried, *([found.confirmed] if found.confirmed else [])]
    header = ("method", "class", "images", "forget", "retain", "retrained", "cost", "outcome")
    out.print(words_table(header, [line for method in every for line in _lines(method)]))
    if found.chosen is None:
        say("no method passed on the classes of the choice: this model is not qualified; retrain, or try --level exact")
    else:
        say(found.sentence)


def _lines(tried: MethodTrial) -> list[tuple[str, ...]]:
    lines = []
    for trial in tried.classes:
        failed = ", ".join(name for name, outcome in trial.outcomes.items() if outcome in ("FAIL", "ERROR"))
        outcome = "passed" if trial.passed else f"failed {failed}" if failed else "not decided"
        shares = [f"{share:.1%}" for share in (trial.forget, trial.retain, trial.reference_retain)]
        cost = f"{trial.flops / trial.reference_flops:.0%}"
        lines.append((tried.method, trial.request, trial.split, *shares, cost, outcome))
    return lines
