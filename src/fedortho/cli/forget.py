"""The commands that change a model: forget and undo."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from fedortho.audits.verdict import read_verdict
from fedortho.cli.console import bar, bars, err, frontier_table, print_served, say, say_json
from fedortho.cli.flags import (
    AsJson,
    Backend,
    DataDir,
    Deployment,
    Device,
    OutPath,
    RecipeFile,
    RunPath,
    Settings,
    method_changes,
    read_recipe,
    takes_settings,
)
from fedortho.cli.train import log_line, print_elsewhere
from fedortho.cli.verdict import Budget, Reference, References, Retrain, judging_bars, print_verdict
from fedortho.data.images import Dataset
from fedortho.data.request import ForgetRequest
from fedortho.errors import FedOrthoError
from fedortho.methods import find_method
from fedortho.methods.directions import Directions
from fedortho.methods.hide import Hide
from fedortho.methods.method import Method
from fedortho.methods.paper import Paper
from fedortho.requests.federated_jobs import check_backend, forget_elsewhere
from fedortho.requests.forgetting import ServedRequest, chosen_method, forget_run, undo_run
from fedortho.requests.judging import JudgeOptions, check_judge_options, judge_run
from fedortho.requests.tickets import Ticket
from fedortho.runs.run import Run, open_run
from fedortho.storage.records import to_json
from fedortho.storage.settings import read_toml
from fedortho.unlearning.calibrate import Refused


@takes_settings(Hide, Directions, Paper)
def forget_command(
    run_path: RunPath,
    request: Annotated[
        list[str], typer.Argument(help="class:3, class:3,7, class:cat, client:3, samples:FILE; several at once")
    ],
    out_path: Annotated[Path | None, typer.Option("--out", help="new run directory (default: RUN-REQUEST)")] = None,
    method_name: Annotated[
        str,
        typer.Option(
            "--method", help="hide (default), directions (classes only), paper, or a method of fedortho compare"
        ),
    ] = "",
    config: Annotated[
        Path | None, typer.Option(help="a TOML file: method and its hyper-parameters; flags override it")
    ] = None,
    ticket: Annotated[
        str, typer.Option("--id", metavar="TICKET", help="id of the request: served once, however often it is given")
    ] = "",
    settings: Settings = "published",
    assignments: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="NAME=VALUE", help="a hyper-parameter of any method, such as lr=0.01; repeatable"
        ),
    ] = None,
    backend: Backend = "inprocess",
    deployment: Deployment = None,
    audit: Budget = "quick",
    reference: Reference = None,
    references: References = None,
    retrain: Retrain = False,
    recipe: RecipeFile = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="show the patch and write nothing")] = False,
    keep_undo: Annotated[
        Path | None, typer.Option(help="a file for the tensors that are changed, for fedortho undo")
    ] = None,
    purge: Annotated[
        bool | None,
        typer.Option(
            "--purge/--keep-cache",
            help="remove the images from the cache of decoded images (default: if they are samples of your own data)",
        ),
    ] = None,
    hash_ids: Annotated[
        bool, typer.Option("--hash-ids", help="name samples by keyed hashes in all records; the key is beside RUN")
    ] = False,
    data_dir: DataDir = "",
    device: Device = "auto",
    as_json: AsJson = False,
    *,
    given: dict[str, Any],
) -> None:
    """Make the model of a run forget and judge the result; writes a new run directory and leaves RUN as it is."""
    run, parsed = open_run(run_path).at(recipe=read_recipe(recipe)), ForgetRequest.parse(shlex.join(request))
    out_dir = out_path or run_path.with_name(f"{run_path.name}-{run.hashed(parsed, hash_ids).word}")
    if ticket and not dry_run and (finished := Ticket(ticket, run, parsed, out_dir).finished()):
        _print_finished(finished, ticket, as_json)
        return
    asked = run.request(parsed, data_dir, hashed=hash_ids)
    wishes = read_toml(config) if config else {}
    method_name = method_name or str(wishes.pop("method", "hide"))
    wishes |= method_changes(find_method(method_name), given, assignments or ())
    method = chosen_method(run, method_name, settings, wishes)
    options = JudgeOptions(audit, (), reference, references, retrain, data_dir=data_dir, device=device)
    check_judge_options(run, asked, options)
    check_backend(backend, deployment)
    if audit == "none":
        _refuse_with("--audit none, which judges nothing", reference=reference, references=references, retrain=retrain)
    if dry_run:
        _refuse_with("--dry-run, which changes nothing", keep_undo=keep_undo, purge=purge, id=ticket)
    if backend != "inprocess":
        here = {"dry_run": dry_run, "keep_undo": keep_undo, "data_dir": data_dir, "device": device != "auto"}
        here |= {"purge": purge, "id": ticket}
        judging = {"reference": reference, "references": references, "retrain": retrain, "json": as_json}
        _refuse_with(f"--backend {backend}, which works elsewhere and does not judge", **here, **judging)
        print_elsewhere(forget_elsewhere(run, asked, method, out=out_dir, deployment=deployment, log=log_line), out_dir)
        say(escape(f"not audited yet: fedortho judge {out_dir}"))
        return
    out = None if dry_run else out_dir
    served, data = _serve(run, parsed, method, out, keep_undo, purge, options, ticket, hash_ids)
    if not as_json:
        print_served(served, run_path)
        for copy in served.copies:
            say(escape(f"copy of the data: {copy}"))
        if served.run is not None and asked.samples:
            say(escape(f"you may now delete the files of these images: {served.run.path} stays usable without them"))
    verdict = None
    is_edited = served.run is not None and served.run.record.model.digest != run.record.model.digest
    if served.run is not None and not is_edited and not as_json:
        say("[yellow]nothing was edited: the new model has the weights of the old one, so it is not judged[/]")
    if served.run is not None and is_edited and audit != "none":
        try:
            with judging_bars() as progress:
                verdict = judge_run(served.run, asked, options, original=run, data=data, **progress)
        except KeyboardInterrupt:
            say(escape(f"interrupted while judging; the run is written: fedortho judge {served.run.path}"))
            raise
    if as_json:
        value = to_json(served.record) | ({} if verdict is None else {"verdict": verdict.to_json()})
        say_json(value)
    elif verdict is not None and served.run is not None:
        print_verdict(verdict, whole=False)
        say(escape(f"all metrics: fedortho judge {served.run.path}; a page to read: fedortho report {served.run.path}"))


def _print_finished(finished: Run, ticket: str, as_json: bool) -> None:
    """What a ticket led to when it was served before."""
    record, verdict = finished.record.requests[-1], read_verdict(finished.path)
    if as_json:
        say_json(to_json(record) | ({} if verdict is None else {"verdict": verdict.to_json()}))
        return
    say(escape(f"the ticket {ticket} was served before: {record.request} by {record.method}, in {finished.path}"))
    if verdict is None:
        say(escape(f"not judged yet: fedortho judge {finished.path}"))
    else:
        print_verdict(verdict, whole=False)


def _refuse_with(flag: str, **given: object) -> None:
    """Refuse flags that have no effect together with another."""
    if used := [f"--{name.replace('_', '-')}" for name, value in given.items() if value]:
        raise FedOrthoError(f"{' and '.join(used)} has no effect with {flag}; leave it out")


def _serve(
    run: Run,
    request: ForgetRequest,
    method: Method,
    out: Path | None,
    undo: Path | None,
    purge: bool | None,
    options: JudgeOptions,
    ticket: str,
    hash_ids: bool,
) -> tuple[ServedRequest, Dataset]:
    """Serve a request and return the data that was loaded for it; a refusal prints its trials."""
    where: Mapping[str, str] = {"data_dir": options.data_dir, "device": options.device}
    with bars() as shown:
        data = run.load_data(options.data_dir, bar(shown, "decoding images"))
        shown.add_task(f"forgetting {request.word}", total=None, news="")
        try:
            how: dict[str, Any] = {"undo": undo, "purge": purge, "ticket": ticket, "hash_ids": hash_ids, **where}
            return forget_run(run, request, method, out=out, data=data, **how), data
        except Refused as refusal:
            shown.stop()
            err.print(frontier_table(refusal.frontier))
            raise


def undo_command(
    run_path: RunPath,
    undo_file: Annotated[Path, typer.Argument(metavar="FILE", help="the file that forget --keep-undo wrote")],
    out_path: OutPath,
) -> None:
    """Restore the model that a run had before its last request, bit for bit, from its undo file."""
    run = undo_run(run_path, undo_file, out_path)
    say(f"written to {escape(str(run.path))}: model {run.record.model.digest[:16]}")
