"""The commands about the verdict: judge and audit, and what forget shows of it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.markup import escape
from rich.table import Table

from fedortho.audits import AUDITS, BUDGETS, Membership
from fedortho.audits.membership import audit_membership
from fedortho.audits.verdict import Verdict
from fedortho.cli.console import bars, out, say, training_bar, words_table
from fedortho.cli.flags import AsJson, DataDir, Device, RunPath
from fedortho.data.images import Dataset
from fedortho.data.request import ForgetRequest
from fedortho.devices import choose_device, using_threads
from fedortho.engines.central import CentralEngine
from fedortho.errors import BadSetting, unknown
from fedortho.evaluation.metrics import Metric
from fedortho.evaluation.shadows import ShadowSettings
from fedortho.federated.server import train_on
from fedortho.methods import METHODS, make_method, unlearn
from fedortho.methods.retrain import Retrain as RetrainMethod
from fedortho.models.zoo import build_model
from fedortho.requests.judging import entry_for, judge_run
from fedortho.requests.references import (
    check_reference,
    find_references,
    original_of,
    reference_name,
    reference_settings,
    train_reference,
)
from fedortho.runs.run import Run, open_run
from fedortho.runs.served import last_request
from fedortho.runs.settings import FederateSettings, TrainSettings
from fedortho.storage.files import check_writable
from fedortho.storage.journal import append_entry
from fedortho.training.loop import Watch
from fedortho.training.recipe import Recipe

SHADOW_EPOCHS = 6  # at most
COLOURS = {"PASS": "green", "FAIL": "bold red", "ERROR": "bold red", "NOT RUN": "yellow", "NO REFERENCE": "yellow"}

Judged = Annotated[str, typer.Argument(metavar="REQUEST", help="what it has forgotten (default: its last request)")]
Budget = Annotated[str, typer.Option("--audit", help="quick (under a minute for small models), full or none")]
Reference = Annotated[Path | None, typer.Option(help="a run that was trained --without what had to go")]
References = Annotated[Path | None, typer.Option(help="directory of such runs (default: references beside RUN)")]
Retrain = Annotated[bool, typer.Option("--retrain", help="train a reference if none is there, and keep it")]
Original = Annotated[Path | None, typer.Option(help="the run before forgetting (default: where RUN came from)")]
Shadows = Annotated[int, typer.Option(help="shadow models for the membership audit, 8 to 64; 0: leave it out")]


@dataclass(frozen=True)
class JudgeOptions:
    """How a run is to be judged."""

    audit: str = "quick"
    reference: Path | None = None
    references: Path | None = None
    retrain: bool = False
    only: tuple[str, ...] = ()  # audits
    shadows: int = 0
    data_dir: str = ""
    device: str = "auto"


def judge_command(
    run_path: RunPath,
    request: Judged = "",
    audit: Budget = "quick",
    reference: Reference = None,
    references: References = None,
    retrain: Retrain = False,
    original: Original = None,
    shadows: Shadows = 0,
    data_dir: DataDir = "",
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Judge a run that has forgotten: accuracies, membership, audits against a retrained model; writes verdict.json."""
    run = open_run(run_path)
    options = JudgeOptions(audit, reference, references, retrain, (), shadows, data_dir, device)
    verdict = judged(run, _asked(run, request), run.load_data(data_dir), original_of(run, original), options)
    if as_json:
        typer.echo(json.dumps(verdict.as_mapping(), indent=2))
    else:
        print_verdict(verdict)
        say(escape(f"written to {run.path / 'verdict.json'}"))


def audit_command(
    run_path: RunPath,
    request: Judged = "",
    attack: Annotated[str, typer.Option(help=f"one or several of {', '.join(AUDITS)}, with commas; empty: all")] = "",
    reference: Reference = None,
    references: References = None,
    retrain: Retrain = False,
    original: Original = None,
    after_rounds: Annotated[str, typer.Option(help="federations: again after so many more rounds: 1,5,20")] = "",
    shadows: Shadows = 0,
    data_dir: DataDir = "",
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Try to undo a run's forgetting: all audits at their full budget, or those named."""
    run, only = open_run(run_path), [word.strip() for word in attack.split(",") if word.strip()]
    for word in only:
        if word not in AUDITS:
            raise unknown("audit", word, AUDITS)
    options = JudgeOptions("full", reference, references, retrain, tuple(only), shadows, data_dir, device)
    asked, before, found = _asked(run, request), original_of(run, original), {}
    for rounds in [0, *_rounds(run, after_rounds)]:
        audited = train_on(run.at(data_dir, device), rounds) if rounds else run
        found[rounds] = judged(audited, asked, run.load_data(data_dir), before, options)
        if not as_json:
            later = f", {rounds} rounds later" if rounds else ""
            say(escape(f"{run.path}{later}: {found[rounds].request}: {found[rounds].label}"))
            print_audits(found[rounds])
    if as_json:
        told = {str(rounds): verdict.as_mapping() for rounds, verdict in found.items()}
        keys = ("request", "label", "audits", "retention")
        short = {rounds: {key: verdict[key] for key in keys} for rounds, verdict in told.items()}
        typer.echo(json.dumps(short if after_rounds else short["0"], indent=2))


def _rounds(run: Run, words: str) -> list[int]:
    """Numbers of further rounds, ascending; only a federation has rounds."""
    numbers = [word.strip() for word in words.split(",") if word.strip()]
    if wrong := [word for word in numbers if not word.isdecimal() or not int(word)]:
        raise BadSetting(f"--after-rounds must be numbers from 1 on with commas between, not {wrong[0]!r}")
    if numbers and not (isinstance(run.settings, FederateSettings) and (run.path / "clients").is_dir()):
        raise BadSetting(f"{run.path} is no federation that is simulated here; leave --after-rounds out")
    return sorted(map(int, numbers))


def _asked(run: Run, words: str) -> ForgetRequest:
    last = last_request(run)
    return ForgetRequest.parse(words) if words else last


def check_judge_options(original: Run, request: ForgetRequest, options: JudgeOptions) -> None:
    """Refuse what cannot be, before anything is done."""
    if options.audit not in BUDGETS:
        raise unknown("audit budget", options.audit, BUDGETS)
    if options.shadows and options.audit != "full":
        raise BadSetting(f"--shadows {options.shadows} belongs to --audit full, not to --audit {options.audit}")
    if options.reference is not None:
        check_reference(original, open_run(options.reference), request)


def judged(run: Run, request: ForgetRequest, data: Dataset, original: Run, options: JudgeOptions) -> Verdict:
    """Find or train the references, judge, and tell the journal."""
    check_judge_options(original, request, options)
    entry = entry_for(run, request)
    place, asked = choose_device(options.device), original.path.absolute().parent  # whose journal tells of the request
    for needed in [asked, *([] if options.only else [run.path])]:
        check_writable(needed)
    kept = options.references or run.path.parent / "references"
    with bars() as shown, using_threads(original.settings.threads):
        found = _references(original, request, kept, options, training_bar(shown))
        task = shown.add_task("judging", total=None, news="")
        membership = shadowed(original, entry, kept / "shadows", options.shadows, place) if options.shadows else None
        verdict = judge_run(
            run,
            request,
            data,
            original,
            reference=found[0] if found else None,
            second=found[1] if len(found) > 1 else None,
            audit=options.audit,
            only=options.only,
            device=place,
            watch=lambda title: shown.update(task, description=f"judging: {title}"),
            membership=membership,
        )
    append_entry(
        asked,
        "verified" if verdict.passes else "judged",
        run.path.name,
        str(request),
        before=verdict.digests["before"],
        after=verdict.digests["after"],
        details={"label": verdict.label, "passes": verdict.passes},
    )
    return verdict


def _references(original: Run, request: ForgetRequest, kept: Path, options: JudgeOptions, watch: Watch) -> list[Run]:
    """The retrained models to judge by; if wished, trained: one, or two for the full audits' distance."""
    if options.reference is not None:
        found = [open_run(options.reference)]
    else:  # where the user says, or else beside the original and where compare and --retrain put them
        found = find_references(original, request, options.references, options.data_dir)
        found = found or find_references(original, request, kept, options.data_dir)
    while options.retrain and len(found) < (2 if options.audit == "full" else 1):
        used = {run.settings.seed for run in found}
        seed = next(n for n in range(original.settings.seed, 10**6) if n not in used)
        settings = reference_settings(original, request, seed=seed, data_dir=options.data_dir)
        found.append(train_reference(kept, reference_name(original, request, settings), settings, watch=watch))
    return found


def shadowed(run: Run, entry: Mapping[str, Any], kept: Path, shadows: int, place: torch.device) -> Membership:
    """The membership audit with shadows trained as the run was, that forget by the method and settings of an entry."""
    name, recipe = entry.get("method", "hide"), shadow_recipe(run.settings)
    if name not in METHODS:
        raise unknown("method", name, METHODS)
    same = {"epochs": recipe.epochs} if issubclass(METHODS[name], RetrainMethod) else {}  # no longer than the shadows
    method, about = make_method(name, entry.get("settings", {}), same), run.record["model"]
    build = partial(build_model, run.settings.model, num_classes=about["classes"], channels=about["channels"])

    def forgetful(model: torch.nn.Module, data: Dataset, request: ForgetRequest) -> torch.nn.Module:
        engine = CentralEngine(data, device=place, build=lambda seed: build(seed=seed))
        return unlearn(model, engine, request, method)

    settings = ShadowSettings(models=shadows, recipe=recipe)
    return lambda case: audit_membership(case, forgetful, kept, settings)


def shadow_recipe(settings: TrainSettings) -> Recipe:
    """The run's own recipe with its number of passes over the images, but at most 6; each shadow has its own seed.

    A federation's recipe is that of a client in one round: its shadows are trained by it in one place, a pass for each
    that the rounds made. How an imported model was trained is not known: the default recipe.
    """
    passes = settings.epochs * (settings.rounds if isinstance(settings, FederateSettings) else 1)
    return replace(settings.recipe, epochs=min(passes or SHADOW_EPOCHS, SHADOW_EPOCHS), seed=0)


def print_verdict(verdict: Verdict, *, whole: bool = True) -> None:
    """The verdict as one page; or, after forgetting, without the metrics."""
    say("")
    say(f"[bold]{escape(verdict.sentence)}[/]")
    say(escape(f"audits: {verdict.label}"))
    if verdict.advice:
        say(f"[yellow]{escape(verdict.advice)}[/]")
    if whole:
        out.print(metric_table(verdict.metrics))
        say("retrain: the same on a model that never knew; fedortho judge --json tells sources and images")
    print_audits(verdict)
    if whole and verdict.cost is not None:
        cost = verdict.cost
        sent = f", {cost.bytes_up / 1e6:.2f} MB up, {cost.bytes_down / 1e6:.2f} MB down" if cost.exchanges else ""
        say(
            f"cost: {cost.seconds:.1f} s, {cost.images_read:,} images read, {cost.images_trained:,} trained on, "
            f"{cost.flops / 1e9:,.1f} GFLOPs{sent}"
        )
    if whole:
        say("not tested: " + escape("; ".join(verdict.not_tested)))


def metric_table(metrics: Sequence[Metric]) -> Table:
    """Every number with Retrain's, its range, what is better and what would be ideal."""
    lines = []
    for metric in metrics:
        known = metric.described
        value = f"ERROR: {metric.error}" if metric.error else "–" if metric.value is None else f"{metric.value:.3f}"
        theirs = "no reference" if metric.reference is None else f"{metric.reference:.3f}"
        lines.append((metric.name, value, theirs, known.range_text(), known.direction, known.ideal_text()))
    return words_table(("metric", "value", "retrain", "range", "better", "ideal"), lines)


def print_audits(verdict: Verdict) -> None:
    """One line for each audit, with what it found and up to where it would have passed."""
    for audit in [*verdict.audits, *([verdict.retention] if verdict.retention else [])]:
        title = f" {AUDITS[audit.name].title}" if audit.name in AUDITS else ""
        is_held = audit.limit is not None and audit.value is not None
        limit = f" ({audit.value:.3f}, limit {audit.limit:g})" if is_held else ""
        outcome = f"[{COLOURS[audit.outcome]}]{audit.outcome}[/]"
        say(f"  {outcome} {escape(audit.name + title)}: {escape(audit.says)}{limit}")
