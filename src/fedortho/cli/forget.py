"""The commands that change a model: forget and undo."""

import json
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from fedortho.audits.verdict import spoken_time
from fedortho.cli.console import bar, bars, err, frontier_table, print_served, say
from fedortho.cli.federation import log_line, print_elsewhere
from fedortho.cli.flags import AsJson, DataDir, Deployment, Device, EngineName, OutPath, RunPath, takes_settings
from fedortho.cli.verdict import Budget, Reference, References, Retrain, judging_bars, print_verdict
from fedortho.data.images import Dataset
from fedortho.data.request import ForgetRequest
from fedortho.devices import choose_device
from fedortho.errors import FedOrthoError
from fedortho.methods import Method, make_method
from fedortho.methods.hide import Hide
from fedortho.requests.forgetting import ServedRequest, forget_run, undo_run
from fedortho.requests.judging import JudgeOptions, check_judge_options, judge_run
from fedortho.runs.run import Run, open_run
from fedortho.runs.settings import FederateSettings
from fedortho.storage.records import to_json
from fedortho.unlearning.calibrate import Refused


@takes_settings(Hide)
def forget_command(
    run_path: RunPath,
    request: Annotated[
        list[str], typer.Argument(help="class:3, class:3,7, class:cat, client:3, samples:FILE; several at once")
    ],
    out_path: Annotated[Path | None, typer.Option("--out", help="new run directory (default: RUN-REQUEST)")] = None,
    method_name: Annotated[str, typer.Option("--method", help="hide, directions (classes) or paper")] = "hide",
    engine: EngineName = "inprocess",
    deployment: Deployment = None,
    audit: Budget = "quick",
    reference: Reference = None,
    references: References = None,
    retrain: Retrain = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="find the patch and show it; write nothing")] = False,
    keep_undo: Annotated[Path | None, typer.Option(help="keep what is removed in this file, for fedortho undo")] = None,
    data_dir: DataDir = "",
    device: Device = "auto",
    as_json: AsJson = False,
    *,
    given: dict[str, Any],
) -> None:
    """Make a trained model forget; writes a new run directory and leaves the old one as it was."""
    from fedortho.requests.federated_jobs import check_engine, forget_elsewhere

    method = make_method(method_name, given)
    asked = ForgetRequest.parse(shlex.join(request))
    run = open_run(run_path)
    options = JudgeOptions(audit, (), reference, references, retrain, data_dir=data_dir, device=device)
    check_engine(engine, deployment)
    check_judge_options(run, asked, options)
    if audit == "none" and (reference or references or retrain):
        raise FedOrthoError("--audit none compares with nothing; leave --retrain, --reference and --references out")
    if dry_run and keep_undo:
        raise FedOrthoError("--dry-run changes nothing, so there is nothing to undo; leave --keep-undo out")
    if engine != "inprocess" and not isinstance(run.settings, FederateSettings):
        raise FedOrthoError(f"{run_path} was not trained by a federation; leave --engine out")
    out_dir = out_path or run_path.with_name(f"{run_path.name}-{asked.word}")
    if engine != "inprocess":
        if dry_run or keep_undo or data_dir or device != "auto":
            only = "--dry-run, --keep-undo, --data-dir and --device"
            raise FedOrthoError(f"{only} work here only; with --engine {engine} clients have their own places")
        if reference or references or retrain or as_json:
            only = "--reference, --references, --retrain and --json"
            raise FedOrthoError(f"with --engine {engine} nothing is audited, so {only} have no use; leave them out")
        forget_elsewhere(run, asked, method, out=out_dir, deployment=deployment, say=log_line)
        print_elsewhere(open_run(out_dir) if (out_dir / "run.json").exists() else None, out_dir)
        say(escape(f"not audited yet: fedortho judge {out_dir}"))
        return
    served, data = _served(run, asked, method, None if dry_run else out_dir, keep_undo, options)
    if not as_json:
        print_served(served, run_path)
    verdict = None
    if served.run is not None and audit != "none":
        try:
            with judging_bars() as progress:
                verdict = judge_run(served.run, asked, options, original=run, data=data, **progress)
        except KeyboardInterrupt:
            say(escape(f"interrupted while it was judged; the run is written: fedortho judge {served.run.path}"))
            raise
    if as_json:
        told = to_json(served.record) | ({} if verdict is None else {"verdict": verdict.as_mapping()})
        typer.echo(json.dumps(told, indent=2))
    elif verdict is not None and served.run is not None:
        print_verdict(verdict, whole=False)
        say(escape(f"all metrics: fedortho judge {served.run.path}; a page to read: fedortho report {served.run.path}"))


def _served(
    run: Run, asked: ForgetRequest, method: Method, out: Path | None, undo: Path | None, options: JudgeOptions
) -> tuple[ServedRequest, Dataset]:
    """Serve a request here, on one machine's images or by a simulated federation; a refusal shows its frontier."""
    from fedortho.requests.federated_forgetting import forget_federated_run

    place = choose_device(options.device)
    with bars() as shown:
        data = run.load_data(options.data_dir, bar(shown, "decoding images"))
        shown.add_task(f"forgetting {asked.word}", total=None, news="")
        try:
            if isinstance(run.settings, FederateSettings):
                here: dict[str, Any] = {"data_dir": options.data_dir, "device": options.device}
                return forget_federated_run(run, asked, method, data=data, out=out, undo=undo, **here), data
            return forget_run(run, data, asked, method, device=place, out=out, undo=undo), data
        except Refused as refusal:
            shown.stop()
            err.print(frontier_table(refusal.frontier))
            raise FedOrthoError(f"{refusal}; {_retrain_advice(run, asked)}") from refusal


def _retrain_advice(run: Run, asked: ForgetRequest) -> str:
    seconds = sum(entry.seconds for entry in run.history())
    cost = f"that took {spoken_time(seconds)} here the last time" if seconds else "its cost is not known"
    more = "--max-retain-drop or --target" if asked.classes else "--max-retain-drop"
    return f"allow more with {more}, edit more with --layers mid,deep, or retrain ({cost})"


def undo_command(
    run_path: RunPath,
    undo_file: Annotated[Path, typer.Argument(metavar="FILE", help="what --keep-undo wrote")],
    out_path: OutPath,
) -> None:
    """Restore the model of before the last request, bit for bit, from its undo file."""
    run = undo_run(open_run(run_path), undo_file, out_path)
    say(f"written to {escape(str(run.path))}: model {run.record.model.digest[:16]}")
