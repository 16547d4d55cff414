"""The commands judge, audit and qualify, and what forget shows of a verdict."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from typer import Argument, Option

from fedortho.audits import AUDITS
from fedortho.audits.qualification import Qualification
from fedortho.audits.verdict import Verdict, spoken_time
from fedortho.cli.console import bars, say, say_json, say_table, training_bar, words_table
from fedortho.cli.flags import AsJson, DataDir, Device, RecipeFile, RunPath, read_recipe
from fedortho.errors import BadSetting
from fedortho.evaluation.metrics import Metric
from fedortho.evaluation.shadows import ShadowSettings
from fedortho.requests.judging import JudgeOptions, audit_run, check_rounds, judge_run
from fedortho.requests.qualifying import QualifyOptions, check_clients, draw_classes, qualify_run
from fedortho.runs.run import Run, open_run
from fedortho.storage.records import to_json

COLOURS = {"PASS": "green", "FAIL": "bold red", "ERROR": "bold red"}  # others are open: yellow

Judged = Annotated[str, Argument(metavar="REQUEST", help="a request that RUN has served (default: its last)")]
Budget = Annotated[str, Option("--audit", help="quick (under a minute for small models), full or none")]
Reference = Annotated[
    list[Path] | None, Option(help="run of a reference model, trained --without the forget set; at most three")
]
References = Annotated[Path | None, Option(help="directory of such runs (default: references beside RUN)")]
Retrain = Annotated[bool, Option("--retrain", help="train a missing reference model and keep it")]
ReferenceModels = Annotated[
    int, Option(help="reference models that there are after --retrain, 1 to 3; 0: one, with --audit full two")
]
Original = Annotated[Path | None, Option(help="the run before forgetting (default: the run that RUN is made from)")]
Shadows = Annotated[int, Option(help="shadow models of the membership audit, 8 to 64; 0: do not run it")]
ShadowImages = Annotated[int, Option(help="images of which each shadow model is trained on a half; 0: all")]


@contextmanager
def judging_bars() -> Iterator[dict[str, Any]]:
    """Progress bars of a judgement: training of reference models, and the measurement under way."""
    with bars() as shown:
        on_training = training_bar(shown)
        task = shown.add_task("judging", total=None, news="")
        yield {"on_training": on_training, "on_step": lambda title: shown.update(task, description=f"judging: {title}")}


def judge_command(
    run_path: RunPath,
    request: Judged = "",
    audit: Budget = "quick",
    reference: Reference = None,
    references: References = None,
    retrain: Retrain = False,
    reference_models: ReferenceModels = 0,
    original: Original = None,
    shadows: Shadows = 0,
    shadow_images: ShadowImages = ShadowSettings.images,
    strict: Annotated[bool, Option("--strict", help="exit code 1 unless every audit ran and passed")] = False,
    recipe: RecipeFile = None,
    data_dir: DataDir = "",
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Judge a run that has forgotten: metrics and audits against a reference model; writes verdict.json."""
    run = open_run(run_path)
    models, where = (reference, references, retrain, reference_models), (data_dir, device)
    options = JudgeOptions(audit, (), *models, shadows, *where, read_recipe(recipe), shadow_images)
    with judging_bars() as progress:
        verdict = judge_run(run, request or None, options, original=original, **progress)
    if as_json:
        say_json(verdict.to_json())
    else:
        print_verdict(verdict)
        say(f"written to {run.path / 'verdict.json'}")
    if strict and not verdict.passes:
        raise typer.Exit(1)


def audit_command(
    run_path: RunPath,
    request: Judged = "",
    attack: Annotated[str, Option(help=f"audits to run: some of {', '.join(AUDITS)}, with commas; empty: all")] = "",
    reference: Reference = None,
    references: References = None,
    retrain: Retrain = False,
    reference_models: ReferenceModels = 0,
    original: Original = None,
    after_rounds: Annotated[str, Option(help="federations: audit again after so many more rounds: 1,5,20")] = "",
    shadows: Shadows = 0,
    shadow_images: ShadowImages = ShadowSettings.images,
    recipe: RecipeFile = None,
    data_dir: DataDir = "",
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Try to undo a run's forgetting: all audits at their full budget, or those named."""
    run, only = open_run(run_path), tuple(word.strip() for word in attack.split(",") if word.strip())
    models, where = (reference, references, retrain, reference_models), (data_dir, device)
    options = JudgeOptions("full", only, *models, shadows, *where, read_recipe(recipe), shadow_images)
    verdicts: dict[int, Verdict] = {}
    for rounds in [0, *_rounds(run, after_rounds)]:
        with judging_bars() as progress:
            verdict = audit_run(run, request or None, options, after_rounds=rounds, original=original, **progress)
        verdicts[rounds] = verdict
        if not as_json:
            later = f", {rounds} rounds later" if rounds else ""
            say(f"{run.path}{later}: {verdict.request}: {verdict.label}")
            print_audits(verdict)
    if as_json:
        keys = ("request", "label", "audits", "retention")
        shown = {str(n): {key: verdict.to_json()[key] for key in keys} for n, verdict in verdicts.items()}
        say_json(shown if after_rounds else shown["0"])


def _rounds(run: Run, text: str) -> list[int]:
    """Numbers of further rounds, ascending; only a simulated federation has them."""
    numbers = [word.strip() for word in text.split(",") if word.strip()]
    if wrong := [word for word in numbers if not word.isdecimal() or not int(word)]:
        raise BadSetting(f"--after-rounds must be numbers from 1 on with commas between, not {wrong[0]!r}")
    if numbers:
        check_rounds(run)
    return sorted(map(int, numbers))


def print_verdict(verdict: Verdict, *, whole: bool = True) -> None:
    """The verdict as one page; unless `whole` without metrics, cost and what was not tested."""
    say("")
    say((verdict.answer, "bold"))
    say(verdict.sentence)
    say(f"audits: {verdict.label}")
    if verdict.advice:
        say((verdict.advice, "yellow"))
    if not whole:
        print_audits(verdict)
        return
    if verdict.effect is not None:
        say(str(verdict.effect))
    say_table(metric_table(verdict.metrics))
    say("retrain: the value of one reference model, for a gap to it that of a second one; sources: judge --json")
    print_audits(verdict)
    if (cost := verdict.cost) is not None:
        sent = f", {cost.bytes_up / 1e6:.2f} MB up, {cost.bytes_down / 1e6:.2f} MB down" if cost.exchanges else ""
        say(
            f"cost: {cost.seconds:.1f} s, {cost.images_read:,} images read, {cost.images_trained:,} trained on, "
            f"{cost.flops / 1e9:,.1f} GFLOPs ({cost.request_flops / 1e9:,.1f} without kept statistics){sent}"
        )
    for copy in verdict.copies:
        say(f"copy of the data: {copy}")
    say("not tested: " + "; ".join(verdict.not_tested))


def metric_table(metrics: Sequence[Metric]) -> Table:
    """Every metric with the reference model's value, its range, direction and ideal."""
    lines = []
    missing = "no reference" if all(metric.reference is None for metric in metrics) else "no second"
    for metric in metrics:
        info = metric.info
        value = f"ERROR: {metric.error}" if metric.error else "–" if metric.value is None else f"{metric.value:.3f}"
        theirs = missing if metric.reference is None else f"{metric.reference:.3f}"
        lines.append((metric.name, value, theirs, info.range_text(), info.direction, info.ideal_text()))
    return words_table(("metric", "value", "retrain", "range", "better", "ideal"), lines)


def print_audits(verdict: Verdict) -> None:
    """One line for each audit: outcome, finding, value and limit."""
    for result in verdict.results:
        has_limit = result.limit is not None and result.value is not None
        limit = f" ({result.value:.3f}, limit {result.limit:g})" if has_limit else ""
        outcome = (result.outcome, COLOURS.get(result.outcome, "yellow"))
        say("  ", outcome, f" {result.name} {result.title}: {result.finding}{limit}")


def qualify_command(
    run_path: RunPath,
    classes: Annotated[int, Option(help="drawn classes on whose test images the method is confirmed")] = 3,
    choosing: Annotated[int, Option(help="further ones, on whose validation images it is chosen")] = 1,
    seed: Annotated[int, Option(help="of the draw")] = 0,
    per_class: Annotated[int, Option(help="reference models for each class")] = 2,
    references: References = None,
    data_dir: DataDir = "",
    device: Device = "auto",
    dry_run: Annotated[bool, Option("--dry-run", help="show the draw and the number of trainings only")] = False,
    as_json: AsJson = False,
) -> None:
    """Try forgetting on drawn classes, against reference models, so that later requests can cite it.

    Writes qualification.json into RUN after every class; a stopped qualification goes on where it was.
    """
    check_clients(run := open_run(run_path))
    options = QualifyOptions(classes, choosing, seed, per_class, (), references, data_dir, device)
    drawn, number = draw_classes(run, options), (classes + choosing) * per_class
    if not as_json:
        seconds = number * sum(epoch.seconds for epoch in run.history())
        about = f", about {spoken_time(seconds)} if none exists, besides the method and the audits" if seconds else ""
        choose, confirm = ", ".join(drawn.choosing), ", ".join(drawn.confirming)
        say(f"drawn by seed {seed}: {choose} to choose, {confirm} to confirm")
        say(f"{number} reference models are needed, those that exist are used{about}")
    if dry_run:
        return say_json(to_json(drawn)) if as_json else None
    with judging_bars() as progress:
        found = qualify_run(run, replace(options, **progress))
    if as_json:
        say_json(to_json(found))
    else:
        _print_qualification(found)


def _print_qualification(found: Qualification) -> None:
    lines = []
    for tried in (*found.tried, *([found.confirmed] if found.confirmed else [])):
        for trial in tried.classes:
            failed = ", ".join(name for name, outcome in trial.outcomes.items() if outcome in ("FAIL", "ERROR"))
            outcome = "passed" if trial.passed else f"failed {failed}" if failed else "not decided"
            shares = [f"{share:.1%}" for share in (trial.forget, trial.retain, trial.reference_retain)]
            cost = "–" if trial.share_of_training is None else f"{trial.share_of_training:.0%}"
            lines.append((tried.method, trial.request, trial.split, *shares, cost, outcome))
    say_table(words_table(("method", "class", "images", "forget", "retain", "retrained", "cost", "outcome"), lines))
    if found.chosen is None:
        say("no method passed on the classes of the choice: this model is not qualified; retrain, or try --level exact")
    else:
        say(found.sentence)
