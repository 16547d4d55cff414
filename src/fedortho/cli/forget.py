"""The commands that change a model: forget and undo."""

import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from rich.progress import Progress as Bars
from typer import Argument, Option

from fedortho.audits.verdict import Verdict, read_verdict
from fedortho.cli import flags
from fedortho.cli.console import (
    bar,
    bars,
    err,
    federation_bar,
    frontier_table,
    print_plan,
    print_run,
    print_served,
    say,
    say_json,
    training_bar,
    warn,
)
from fedortho.cli.train import print_elsewhere
from fedortho.cli.verdict import Budget, Reference, ReferenceModels, References, Retrain, judging_bars, print_verdict
from fedortho.data.images import Dataset
from fedortho.data.request import ForgetRequest, as_request
from fedortho.errors import BadSetting, FedOrthoError
from fedortho.methods import LEVELS, find_method
from fedortho.methods.directions import Directions
from fedortho.methods.hide import Hide
from fedortho.methods.method import Method
from fedortho.methods.paper import Paper
from fedortho.requests.climbing import forget_until_passed
from fedortho.requests.federated_jobs import check_backend, forget_elsewhere, rewind_elsewhere
from fedortho.requests.forgetting import ServedRequest, forget_run
from fedortho.requests.judging import JudgeOptions, check_judge_options, check_trainable, judge_run
from fedortho.requests.levels import (
    chosen_method,
    hidden_path,
    level_for_run,
    level_method,
    levels_for,
    plan_request,
    ways,
)
from fedortho.requests.rewind import RewindPlan, find_rewind, rewind_run
from fedortho.requests.shadowing import shadowed_method
from fedortho.requests.transaction import find_ticket
from fedortho.requests.undoing import undo_run
from fedortho.runs.record import ServedRecord
from fedortho.runs.run import Run, check_unserved, open_run
from fedortho.storage.records import to_json
from fedortho.storage.settings import read_toml
from fedortho.unlearning.calibrate import Refused

FURTHER = "all metrics: fedortho judge {0}; a page to read: fedortho report {0}"


@flags.takes_settings(Hide, Directions, Paper)
def forget_command(
    run_path: flags.RunPath,
    request: Annotated[list[str], Argument(help="class:3, class:3,7, class:cat, client:3, samples:FILE; or several")],
    out_path: Annotated[Path | None, Option("--out", help="new run directory (default: RUN-REQUEST)")] = None,
    level: Annotated[str, Option(help="hide (at once), erase (default of classes), exact (rewind or retraining)")] = "",
    method_name: Annotated[str, Option("--method", help="a method instead of a level: directions, paper, ssd, …")] = "",
    until: Annotated[
        str, Option(metavar="passed", help="climb from hide to exact until the audits pass on validation images")
    ] = "",
    hide_first: Annotated[
        bool, Option("--hide-first/--no-hide-first", help="before erasing write a hidden model to OUT-hidden")
    ] = True,
    config: Annotated[Path | None, Option(help="TOML file of level or method and its hyper-parameters")] = None,
    ticket: Annotated[str, Option("--id", metavar="TICKET", help="id of the request: it is served once")] = "",
    settings: flags.Settings = "published",
    assignments: Annotated[
        list[str] | None,
        Option("--set", metavar="NAME=VALUE", help="a hyper-parameter of any method, such as lr=0.01; repeatable"),
    ] = None,
    backend: flags.Backend = "inprocess",
    deployment: flags.Deployment = None,
    timeout: flags.Timeout = 0.0,
    sums: Annotated[str, Option(help="in a federation: open or masked sums (default: as it was trained)")] = "",
    shadows: Annotated[
        int, Option(help="shadow models, 8 to 64: for the limit of clients and samples at --level hide, or r2d's back")
    ] = 0,
    audit: Budget = "quick",
    reference: Reference = None,
    references: References = None,
    retrain: Retrain = False,
    reference_models: ReferenceModels = 0,
    recipe: flags.RecipeFile = None,
    dry_run: Annotated[bool, Option("--dry-run", help="show the plan with its estimated costs and do nothing")] = False,
    keep_undo: Annotated[Path | None, Option(help="a file for the tensors that are changed, for fedortho undo")] = None,
    purge: Annotated[
        bool | None,
        Option("--purge/--keep-cache", help="remove the decoded images here (default: samples of your own data)"),
    ] = None,
    delete_before: Annotated[
        bool, Option("--delete-before", help="after a rewind delete what earlier runs have that met the data")
    ] = False,
    hash_ids: Annotated[bool, Option("--hash-ids", help="name samples by keyed hashes; the key is beside RUN")] = False,
    data_dir: flags.DataDir = "",
    device: flags.Device = "auto",
    as_json: flags.AsJson = False,
    *,
    given: dict[str, Any],
) -> None:
    """Make the model of a run forget and judge the result; writes a new run directory and leaves RUN as it is."""
    _check_until(until)
    run = open_run(run_path).at(data_dir, device, flags.read_recipe(recipe), timeout, sums)
    parsed = ForgetRequest.parse(shlex.join(request)).spelled(run.record.data.class_names)
    out = out_path or run_path.with_name(f"{run_path.name}-{run.hashed(parsed, hash_ids).word}")
    if ticket and not dry_run and (finished := find_ticket(ticket, run, parsed, out)):
        return _print_finished(finished, ticket, as_json)
    asked = run.request(parsed, hashed=hash_ids)
    check_unserved(run, asked)
    wishes = read_toml(config) if config else {}
    level, method_name = level or str(wishes.pop("level", "")), method_name or str(wishes.pop("method", ""))
    options = JudgeOptions(
        audit, (), reference, references, retrain, reference_models, data_dir=data_dir, device=device
    )
    check_judge_options(run, asked, options)
    check_backend(backend, deployment)
    judging, is_here = {"reference": reference, "references": references, "retrain": retrain}, backend == "inprocess"
    if audit == "none":
        _refuse_with("--audit none, which judges nothing", **judging)
    if not is_here:
        here = {"until": until, "keep_undo": keep_undo, "data_dir": data_dir, "device": device != "auto"}
        here |= {"purge": purge, "id": ticket, "json": as_json, "shadows": bool(shadows)}
        _refuse_with(f"--backend {backend}, which works elsewhere and does not judge", **here, **judging)
    chosen = {"set": assignments, "settings": settings != "published", "config": wishes, **dict.fromkeys(given, True)}
    is_open = asked.kind != "class" and not (level or method_name or until)
    is_exact = is_open or (level == "exact" and not (method_name or until))
    if is_exact and (rewind := find_rewind(run, asked)) and (rewind.begin or level):
        unused = {"keep_undo": keep_undo, "id": ticket, "hash_ids": hash_ids, "purge": purge, "shadows": bool(shadows)}
        _refuse_with("a rewind, which is checked by its digest", **unused, **chosen, **judging)
        return _rewind(rewind, out, backend, deployment, delete_before, dry_run, as_json)
    _refuse_with("a request that is not served by a rewind", delete_before=delete_before)
    if dry_run and is_open:
        return _print_ways(asked, ways(run, asked), as_json)
    if until:
        _refuse_with("--until passed, which chooses level and method", level=level, method=method_name, **chosen)
        steps = [(each, level_method(run, each), out) for each in levels_for(run, asked)]
    else:
        level, method = _chosen(run, asked, level, method_name, settings, wishes, given, assignments or ())
        is_hidden = level == "erase" and hide_first and is_here
        steps = [("hide", level_method(run, "hide"), hidden_path(out))] * is_hidden + [(level, method, out)]
    plan = plan_request(run, asked, steps, keep_undo, options, until_passed=bool(until))
    print_plan(plan, as_json=as_json, alone=dry_run)
    if dry_run:
        return
    if not is_here:
        print_elsewhere(forget_elsewhere(run, asked, method, out=out, deployment=deployment, log=warn), out)
        say(f"not audited yet: fedortho judge {out}")
        return
    how = {"out": out, "undo": keep_undo, "purge": purge, "ticket": ticket, "hash_ids": hash_ids}
    with bars() as shown:
        data = run.load_data(progress=bar(shown, "decoding images"))
        steps = _shadowed(run, asked, steps, shadows, device, as_json)
        served = _serve(shown, run, parsed, steps, bool(until), options, as_json, data=data, **how)
    if not as_json:
        print_served(served, run_path)
    verdict = None if served.rewind else _judged(served, run, asked, options, data, as_json)
    _print_outcome(served.record, verdict, as_json, FURTHER.format(out) if verdict else "")


def _check_until(word: str) -> None:
    if word not in ("", "passed"):
        raise BadSetting(f"--until is {word!r}; expected passed")


def _shadowed(
    run: Run, request: ForgetRequest, steps: list[tuple[str, Method, Path]], shadows: int, device: str, as_json: bool
) -> list[tuple[str, Method, Path]]:
    """The steps, the last one with what shadow models are asked for."""
    if not shadows:
        return steps
    *_, (level, method, out) = steps
    method, told = shadowed_method(run, request, method, shadows, device=device)
    if not as_json:
        say(told)
    return [(level, method, out)]


def _print_finished(finished: Run, ticket: str, as_json: bool) -> None:
    """What a ticket led to when it was served before."""
    record, verdict = finished.record.requests[-1], read_verdict(finished.path)
    if not as_json:
        say(f"the ticket {ticket} was served before: {record.request} by {record.method}, in {finished.path}")
    _print_outcome(record, verdict, as_json, "" if verdict else f"not judged yet: fedortho judge {finished.path}")


def _print_outcome(record: ServedRecord, verdict: Verdict | None, as_json: bool, last: str) -> None:
    """The verdict on a request that was served and a last line, or record and verdict as JSON."""
    if as_json:
        say_json(to_json(record) | ({} if verdict is None else {"verdict": verdict.to_json()}))
        return
    if verdict is not None:
        print_verdict(verdict, whole=False)
    if last:
        say(last)


def _print_ways(request: ForgetRequest, found: Sequence[str], as_json: bool) -> None:
    """How a request could be served that is served by nothing unless it is named."""
    if as_json:
        return say_json({"request": str(request), "ways": list(found)})
    for line in (f"ways to serve {request}, in order of cost; choose one:", *(f"  {way}" for way in found)):
        say(line)


def _rewind(
    plan: RewindPlan, out: Path, backend: str, deployment: Path | None, delete: bool, dry_run: bool, as_json: bool
) -> None:
    """Print the plan of a rewind, do it, and tell how to check it."""
    if backend != "inprocess":
        _refuse_with(f"--backend {backend}, whose runs are elsewhere", delete_before=delete, dry_run=dry_run)
        print_elsewhere(rewind_elsewhere(plan.run, plan.request, out=out, deployment=deployment, log=warn), out)
        return
    for line in () if as_json else plan.lines():
        say(line)
    with bars() as shown:
        watch: Callable[[Any], None] = training_bar(shown) if plan.stages else federation_bar(shown)
        rewound = rewind_run(plan.run, plan.request, None if dry_run else out, purge=delete, watch=watch)
    if as_json:
        unit = plan.settings.passes.unit
        told = {"without": plan.settings.without, "first-contact": plan.contacts, f"{unit}-saved": plan.begin}
        told |= {"expected-saved": plan.expected, unit: plan.planned}
        after = None if rewound.run is None else rewound.run.record.model.digest
        say_json(told | {"model": after, "deleted": list(map(str, rewound.deleted))})
    elif rewound.run is not None:
        print_run(rewound.run)
        for path in rewound.deleted:
            say(f"deleted: {path}")
        without = shlex.quote(plan.settings.without)
        say(f"the same as {plan.command} --without {without}: docs/exact.md has the check")


def _chosen(
    run: Run,
    request: ForgetRequest,
    level: str,
    name: str,
    settings: str,
    wishes: dict[str, Any],
    given: Mapping[str, Any],
    assignments: Sequence[str],
) -> tuple[str, Method]:
    """The level, empty if a method is named, and the method with the hyper-parameters of file and flags."""
    is_default = not level and not name
    level = level_for_run(run, request, level, name)
    kind = find_method(name or LEVELS[level])
    try:
        wishes = wishes | flags.method_changes(kind, given, assignments)
    except BadSetting as error:
        if is_default and flags.method_changes(Hide, given, ()):
            raise BadSetting(f"{error}; the default level is {level}: --level hide has it") from error
        raise
    return level, chosen_method(run, kind.name, settings, wishes)


def _serve(
    shown: Bars,
    run: Run,
    request: ForgetRequest,
    steps: Sequence[tuple[str, Method, Path]],
    until_passed: bool,
    options: JudgeOptions,
    as_json: bool,
    **how: Any,
) -> ServedRequest:
    """Serve a request as planned; a refusal prints its trials, an interruption what can be used."""
    *first, (level, method, _) = steps
    asked = run.hashed(as_request(request, how["data"]), how["hash_ids"])
    check_trainable(run, asked, options, how["data"])
    try:
        if until_passed:
            on_attempt = None if as_json else lambda attempt: say(f"  {attempt}")
            how |= {"on_training": training_bar(shown), "on_attempt": on_attempt}
            return forget_until_passed(run, request, options, **how)[0]
        shown.add_task(f"forgetting {request.word}", total=None, news="")
        return forget_run(run, request, method, level=level, device=options.device, hide_first=bool(first), **how)
    except Refused as refusal:
        shown.stop()
        if refusal.frontier:
            err.print(frontier_table(refusal.frontier))
        raise
    except KeyboardInterrupt:
        if first and first[0][2].exists() and not until_passed:
            command = shlex.join(["fedortho", *sys.argv[1:]])
            say(f"interrupted; {first[0][2]} has hidden {request.word} and can be used; go on: {command}")
        raise


def _judged(
    served: ServedRequest, run: Run, request: ForgetRequest, options: JudgeOptions, data: Dataset, as_json: bool
) -> Verdict | None:
    """The verdict on a request that was served; None if there is nothing to judge."""
    assert served.run is not None, "it was written"
    if served.was_finished and (verdict := read_verdict(served.run.path)):
        return verdict
    digest, problem = served.run.record.model.digest, ""
    if digest == run.record.model.digest:
        problem = "nothing was edited: the new model has the weights of the old one, so it is not judged"
    elif same := [each.path for each in options.given if each.record.model.digest == digest]:
        problem = f"the new model has the same weights as {same[0]}: it needs no judging"
    if problem and not as_json:
        say((problem, "yellow"))
    if problem or options.audit == "none":
        return None
    try:
        with judging_bars() as progress:
            return judge_run(served.run, request, options, original=run, data=data, **progress)
    except KeyboardInterrupt:
        say(f"interrupted while judging; the run is written: fedortho judge {served.run.path}")
        raise


def _refuse_with(flag: str, **given: object) -> None:
    """Refuse flags that have no effect together with another."""
    if used := [f"--{name.replace('_', '-')}" for name, value in given.items() if value]:
        raise FedOrthoError(f"{' and '.join(used)} has no effect with {flag}; leave it out")


def undo_command(
    run_path: flags.RunPath,
    undo_file: Annotated[Path, Argument(metavar="FILE", help="the file that forget --keep-undo wrote")],
    out_path: flags.OutPath,
) -> None:
    """Restore the model that a run had before its last request, bit for bit, from its undo file."""
    run = undo_run(run_path, undo_file, out_path)
    say(f"written to {run.path}: model {run.record.model.digest[:16]}")
