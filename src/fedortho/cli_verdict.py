"""The commands about the verdict: judge and audit, and what forget shows of it."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.markup import escape
from rich.table import Table

from fedortho.audits import AUDITS, BUDGETS, Membership
from fedortho.audits.membership import audit_membership
from fedortho.data import Dataset
from fedortho.devices import choose_device, using_threads
from fedortho.engine import CentralEngine
from fedortho.errors import BadSetting, unknown
from fedortho.journal import append_entry
from fedortho.methods import METHODS, make_method, unlearn
from fedortho.metrics import Metric
from fedortho.references import (
    find_original,
    find_reference,
    reference_name,
    reference_settings,
    train_reference,
)
from fedortho.request import ForgetRequest
from fedortho.runs import Run, open_run
from fedortho.screen import bars, out, say, training_bar
from fedortho.shadows import ShadowSettings
from fedortho.verify import Verdict, entry_for, judge_run

COLOURS = {"PASS": "green", "FAIL": "bold red", "ERROR": "bold red", "NOT RUN": "yellow", "NO REFERENCE": "yellow"}

RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="a run that has forgotten")]
Asked = Annotated[str, typer.Argument(metavar="REQUEST", help="what it has forgotten (default: its last request)")]
Budget = Annotated[str, typer.Option("--audit", help="quick (under a minute for small models), full or none")]
Reference = Annotated[Path | None, typer.Option(help="a run that was trained --without what had to go")]
References = Annotated[Path | None, typer.Option(help="directory of such runs (default: references beside RUN)")]
Retrain = Annotated[bool, typer.Option("--retrain", help="train a reference if none is there, and keep it")]
Original = Annotated[Path | None, typer.Option(help="the run before forgetting (default: where RUN came from)")]
Shadows = Annotated[int, typer.Option(help="shadow models for the membership audit, 8 to 64; 0: leave it out")]
DataDir = Annotated[str, typer.Option("--data-dir", help="where the run's data lies on this machine")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or mps")]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON for machines")]


def judge_command(
    run_path: RunPath,
    request: Asked = "",
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
    verdict = judged(
        run,
        _asked(run, request),
        run.load_data(data_dir),
        original=open_run(original) if original else find_original(run),
        reference=reference,
        references=references,
        retrain=retrain,
        audit=audit,
        shadows=shadows,
        data_dir=data_dir,
        device=device,
    )
    if as_json:
        typer.echo(json.dumps(verdict.as_mapping(), indent=2))
    else:
        print_verdict(verdict)
        say(escape(f"written to {run.path / 'verdict.json'}"))


def audit_command(
    run_path: RunPath,
    request: Asked = "",
    attack: Annotated[str, typer.Option(help=f"one or several of {', '.join(AUDITS)}, with commas; empty: all")] = "",
    reference: Reference = None,
    references: References = None,
    retrain: Retrain = False,
    original: Original = None,
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
    verdict = judged(
        run,
        _asked(run, request),
        run.load_data(data_dir),
        original=open_run(original) if original else find_original(run),
        reference=reference,
        references=references,
        retrain=retrain,
        audit="full",
        only=only,
        shadows=shadows,
        data_dir=data_dir,
        device=device,
    )
    if as_json:
        found = verdict.as_mapping()
        typer.echo(json.dumps({key: found[key] for key in ("request", "label", "audits", "retention")}, indent=2))
    else:
        say(escape(f"{run.path}: {verdict.request}: {verdict.label}"))
        out.print(audit_table(verdict))


def _asked(run: Run, words: str) -> ForgetRequest:
    served = run.record.get("requests", [])
    return ForgetRequest.parse(words or (served[-1]["request"] if served else "class:0"))


def judged(
    run: Run,
    request: ForgetRequest,
    data: Dataset,
    *,
    original: Run,
    reference: Path | None = None,
    references: Path | None = None,
    retrain: bool = False,
    audit: str = "quick",
    only: Sequence[str] = (),
    shadows: int = 0,
    data_dir: str = "",
    device: str = "auto",
) -> Verdict:
    """Find or train the references, judge, and tell the journal."""
    if audit not in BUDGETS:
        raise unknown("audit budget", audit, BUDGETS)
    if shadows and audit != "full":
        raise BadSetting(f"--shadows {shadows} belongs to --audit full, not to --audit {audit}")
    entry = entry_for(run, request)
    place = choose_device(device)
    kept = references or run.path.parent / "references"
    with bars() as shown, using_threads(original.settings.threads):
        found = [open_run(reference)] if reference else _references(original, request, kept, data_dir)
        if not found and retrain:
            settings = reference_settings(original, request, data_dir=data_dir)
            name = reference_name(original, request, settings)
            found = [train_reference(kept, name, settings, watch=training_bar(shown))]
        task = shown.add_task("judging", total=None, news="")
        membership = _membership(original, request, entry, kept, shadows, place) if shadows else None
        verdict = judge_run(
            run,
            request,
            data,
            original,
            reference=found[0] if found else None,
            second=found[1] if len(found) > 1 else None,
            audit=audit,
            only=only,
            device=place,
            watch=lambda title: shown.update(task, description=f"judging: {title}"),
            membership=membership,
        )
    append_entry(
        run.path.parent,
        "verified",
        run.path.name,
        str(request),
        before=verdict.digests["before"],
        after=verdict.digests["after"],
        details={"label": verdict.label},
    )
    return verdict


def _references(original: Run, request: ForgetRequest, kept: Path, data_dir: str) -> list[Run]:
    """The retrained model of the run's own seed and, if one is there, one of another."""
    found = []
    seeds = [original.settings.seed, *(seed for seed in range(10) if seed != original.settings.seed)]
    for seed in seeds:
        settings = reference_settings(original, request, seed=seed, data_dir=data_dir)
        if (run := find_reference(kept, settings, original.record["data"]["digest"])) is not None:
            found.append(run)
    return found[:2]


def _membership(
    original: Run, request: ForgetRequest, entry: Any, kept: Path, shadows: int, place: torch.device
) -> Membership:
    """The membership audit with shadows that forget by the method, and with the settings, of the run."""
    name = entry.get("method", "fedortho")
    method = make_method(name if name in METHODS else "fedortho", entry.get("settings", {}))

    def forgetful(model: torch.nn.Module, data: Dataset, request: ForgetRequest) -> torch.nn.Module:
        return unlearn(model, CentralEngine(data, device=place), request, method)

    settings = ShadowSettings(models=shadows)
    return lambda case: audit_membership(case, forgetful, kept / "shadows", settings)


def print_verdict(verdict: Verdict) -> None:
    """The verdict as one page."""
    say(
        escape(f"[{verdict.label}]"),
    )
    say(f"[bold]{escape(verdict.sentence)}[/]")
    if verdict.advice:
        say(f"[yellow]{escape(verdict.advice)}[/]")
    out.print(metric_table(verdict.metrics))
    out.print(audit_table(verdict))
    if verdict.cost is not None:
        cost = verdict.cost
        sent = f", {cost.bytes_up / 1e6:.2f} MB up, {cost.bytes_down / 1e6:.2f} MB down" if cost.exchanges else ""
        say(
            f"cost: {cost.seconds:.1f} s, {cost.images_read:,} images read, {cost.images_trained:,} trained on, "
            f"{cost.flops / 1e9:,.1f} GFLOPs{sent}"
        )
    say("not tested: " + escape("; ".join(verdict.not_tested)))


def metric_table(metrics: Sequence[Metric]) -> Table:
    """Every number with Retrain's, its range, what is better and what would be ideal."""
    table = Table(caption="retrain: the same on a model that never knew; better: which way; source in --json")
    for name in ("metric", "value", "retrain", "range", "better", "ideal"):
        table.add_column(name, justify="left" if name in ("metric", "better") else "right", overflow="fold")
    for metric in metrics:
        known = metric.described
        value = f"ERROR: {metric.error}" if metric.error else "–" if metric.value is None else f"{metric.value:.3f}"
        theirs = "no reference" if metric.reference is None else f"{metric.reference:.3f}"
        words = (known.title, value, theirs, known.range_text(), known.direction, known.ideal_text())
        table.add_row(*map(escape, words), style="red" if metric.error else None)
    return table


def audit_table(verdict: Verdict) -> Table:
    table = Table()
    table.add_column("audit", no_wrap=True)
    table.add_column("outcome", no_wrap=True)
    table.add_column("what it found", overflow="fold")
    for audit in [*verdict.audits, *([verdict.retention] if verdict.retention else [])]:
        title = AUDITS[audit.name].title if audit.name in AUDITS else ""
        limit = (
            f" (limit {audit.limit:g}, found {audit.value:.3f})"
            if audit.limit is not None and audit.value is not None
            else ""
        )
        name = f"{audit.name} {title}".strip()
        table.add_row(escape(name), f"[{COLOURS[audit.outcome]}]{audit.outcome}[/]", escape(audit.says + limit))
    return table
