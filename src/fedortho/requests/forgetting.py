"""Serve a request on a run: unlearn, measure, and write a new run that has forgotten; the old run is not changed."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fedortho.audits.verdict import spoken_time
from fedortho.data.cache import DataCopy
from fedortho.data.images import Dataset
from fedortho.data.request import Clients, ForgetRequest, as_request
from fedortho.data.sources import DATASETS
from fedortho.devices import choose_device
from fedortho.engines.central import CentralEngine
from fedortho.engines.engine import Engine
from fedortho.engines.query import Query, Selection, Statistic
from fedortho.errors import FedOrthoError
from fedortho.evaluation.accuracies import accuracies_of, forget_eval_images
from fedortho.federated.engine import FederatedEngine
from fedortho.federated.server import copied_clients, federated_engine, local_grid, patches_of
from fedortho.federated.transport import append_wire_log
from fedortho.methods import find_method, make_method, unlearn
from fedortho.methods.hyperparameters import read_settings
from fedortho.methods.method import ForgetResult, Method
from fedortho.models.patch import NOTHING, Patch, undo_patch, write_undo
from fedortho.requests.run_context import method_for_run
from fedortho.requests.tickets import Ticket
from fedortho.runs.derived import check_output_paths, write_derived
from fedortho.runs.federation import held_rows
from fedortho.runs.purge import purge_run
from fedortho.runs.record import Accuracies, ResultRecord, ServedRecord, TrialRecord
from fedortho.runs.rows import hash_key
from fedortho.runs.run import Run, open_run
from fedortho.runs.served import excluded_by, last_request, served_requests
from fedortho.runs.settings import FederateSettings
from fedortho.statistics.ledger import forget_lines, load_ledger, rebind_ledger
from fedortho.statistics.observe import Observation
from fedortho.storage.files import tensors_digest
from fedortho.storage.journal import append_entry
from fedortho.storage.settings import as_mapping
from fedortho.unlearning.calibrate import Refused
from fedortho.unlearning.trials import Trial

if TYPE_CHECKING:
    from flwr.serverapp import Grid

logger = logging.getLogger(__name__)
RETRAIN_AFTER = 0.03  # retain accuracy lost over all requests, above which retraining is advised


@dataclass(frozen=True)
class ServedRequest:
    """A request that was served: the result of the method, the record of it, and the run that was written."""

    result: ForgetResult
    record: ServedRecord
    retain_paid: float  # retain accuracy lost over all requests so far
    run: Run | None = None  # None: nothing was written
    was_finished: bool = False  # its ticket was served before; nothing was done now
    copies: tuple[DataCopy, ...] = ()  # of the images, where they were purged

    @property
    def advise_retraining(self) -> bool:
        return self.retain_paid > RETRAIN_AFTER


def forget_run(
    run: Run | Path | str,
    request: ForgetRequest | str,
    method: Method | str = "hide",
    *,
    out: Path | str | None = None,
    undo: Path | str | None = None,
    ticket: str = "",
    purge: bool | None = None,
    hash_ids: bool = False,
    data: Dataset | None = None,
    data_dir: str = "",
    device: str = "auto",
) -> ServedRequest:
    """Make the model of a run forget and write a new run to `out`; the given run stays as it is.

    `method` is a name or a method with its hyper-parameters. Without `out` nothing is written and the result shows
    what the method finds. `undo` is a file for the tensors that are changed, from which `undo_run` restores them. A
    request with a `ticket` is served once: asked for again, it returns the run that was written the first time. With
    `purge` forgotten images are removed from the decoded images on this machine, as by `purge_run`; None: if they are
    samples of your own data. With `hash_ids` the records name samples by keyed hashes; the key is
    beside the run, not in it. `data` is the run's data if it is already loaded. A federation is
    simulated with its clients on this machine. Raises `Refused`, with the trials that were measured, if target and
    budget cannot both hold.
    """
    run = open_run(run)
    request = ForgetRequest.parse(request) if isinstance(request, str) else request
    method = chosen_method(run, method) if isinstance(method, str) else method
    paths: dict[str, Any] = {"out": None if out is None else Path(out), "undo": None if undo is None else Path(undo)}
    if ticket:
        paths["ticket"] = Ticket(ticket, run, request, paths["out"])
        if finished := paths["ticket"].finished():
            return _served_before(finished)
    data = data or run.load_data(data_dir)
    request = run.request(as_request(request, data), hashed=hash_ids)
    data = data.with_key(hash_key(run.path))
    try:
        if isinstance(run.settings, FederateSettings):
            served = forget_federated_run(run.at(data_dir, device), request, method, data=data, **paths)
        else:
            served = serve_request(run, data, request, method, device=choose_device(device), **paths)
    except Refused as refusal:
        seconds = sum(entry.seconds for entry in run.history())
        cost = f"training took {spoken_time(seconds)}" if seconds else "its cost is unknown"
        flags = "--max-retain-drop or --target" if request.classes else "--max-retain-drop"
        advice = f"raise {flags}, edit more layers with --layers mid,deep, or retrain ({cost})"
        raise Refused(f"{refusal}; {advice}", refusal.frontier) from refusal
    is_own = bool(request.samples) and run.settings.data not in DATASETS
    if served.run is None or not (is_own if purge is None else purge):
        return served
    return replace(served, copies=tuple(purge_run(served.run, data=data)))


def _served_before(finished: Run) -> ServedRequest:
    record, (patch, _) = finished.record.requests[-1], patches_of(finished)[-1]
    request = last_request(finished)
    assert record.cost is not None, "tickets are younger than records without it"
    result = ForgetResult(request, record.method, record.settings, finished.load_model(), patch, record.cost)
    paid = sum(served.retain_paid for served in finished.record.requests)
    return ServedRequest(result, record, paid, finished, was_finished=True)


def chosen_method(run: Run, name: str, settings: str = "published", changes: Mapping[str, Any] | None = None) -> Method:
    """A method with its hyper-parameters for a run: those of `settings`, overridden by `changes`.

    `settings` is `published`, `short`, `tuned` or a JSON file. Methods that train use the run's augmentation and seed,
    and retraining its recipe.
    """
    known = read_settings(run.settings.data, run.settings.model, settings).get(name, {})
    is_planning = hasattr(find_method(name), "plan")  # a method of ours, whose seed is not the run's
    base = make_method(name, known) if is_planning else method_for_run(run, name, known)
    return make_method(name, as_mapping(base), changes or {})


def serve_request(
    run: Run,
    data: Dataset,
    request: ForgetRequest | str,
    method: Method | str = "hide",
    *,
    out: Path | None,
    undo: Path | None = None,
    device: torch.device | str = "cpu",
    engine: Engine | None = None,
    clients: Clients | None = None,
    ticket: Ticket | None = None,
) -> ServedRequest:
    """Forget on a run by any method and write the run that has forgotten to `out`; None: write nothing.

    `undo` is a file that keeps the removed weights, for `undo_run`. A federation passes itself as the `engine`, and the
    rows that its `clients` hold so that their images can be measured here.
    """
    check_output_paths(out, undo)
    request, details = as_request(request, data), {} if ticket is None else ticket.details
    with _journaled(run, request, out, details):
        model = run.load_model().to(device)
        ledger = load_ledger(run.path / "ledger.safetensors", model)
        engine = engine or CentralEngine(data, ledger, clients, device, build=run.new_model)
        result = unlearn(model, engine, request, method, forgotten=excluded_by(run))
        before, after, all_forgotten = _measure(run, model, result, data, engine, clients, device)
        record = replace(
            _served_record(result, before, after),
            all_forgotten=all_forgotten,
            threads=torch.get_num_threads(),
            device=str(device),
            ledger=None if ledger is None else ledger.digest,
            ticket=details.get("ticket"),
        )
        retain_paid = record.retain_paid + sum(earlier.retain_paid for earlier in run.record.requests)
        served = ServedRequest(result, record, retain_paid)
        if out is None:
            return served
        if undo is not None:
            write_undo(undo, result.patch, model)
        changed = replace(run.record, requests=(*run.record.requests, record), result=ResultRecord(after.test))
        kept = None if ledger is None else _kept_ledger(ledger, model, result, data, clients)
        served = replace(served, run=write_derived(out, run, result.model, changed, patch=result.patch, ledger=kept))
    append_entry(
        run.path.absolute().parent,
        "executed",
        out.name,
        str(request),
        before=run.record.model.digest,
        after=result.patch.after,
        details=details,
    )
    return served


@contextmanager
def _journaled(run: Run, request: ForgetRequest, out: Path | None, details: Mapping[str, str]) -> Iterator[None]:
    """Record in the journal beside the run that a request was received and, after an error, refused."""
    if out is None:
        yield
        return
    directory, before = run.path.absolute().parent, run.record.model.digest
    append_entry(directory, "received", run.path.name, str(request), before=before, details=details)
    try:
        yield
    except FedOrthoError as error:
        details = {**details, "reason": str(error)}
        append_entry(directory, "refused", run.path.name, str(request), before=before, details=details)
        raise


def forget_federated_run(
    run: Run,
    request: ForgetRequest,
    method: Method | str = "hide",
    grid: "Grid | None" = None,
    *,
    out: Path | None,
    undo: Path | None = None,
    data: Dataset | None = None,
    ticket: Ticket | None = None,
) -> ServedRequest:
    """Serve a request in a federation: unlearn with its clients, write the new run, send the patch.

    Without a grid the clients of the run are simulated here, on a copy of their directories. With `out` None nothing
    is written and no patch is sent.
    """
    check_output_paths(out, undo)
    settings, fresh = run.settings, out
    assert isinstance(settings, FederateSettings), "the caller looked"
    with ExitStack() as stack:
        if grid is None:
            store, fresh = stack.enter_context(copied_clients(run, out))
            grid = stack.enter_context(local_grid(settings, store, run=run.path))
        data = data or run.load_data()
        engine = federated_engine(grid, settings, data, served_requests(run))
        engine.bring_up_to_date(run.load_model(), patches_of(run))
        is_remote = any(info.has_own_images for info in engine.clients.values())
        clients = None if is_remote else held_rows(data, settings, settings.partition_seed)
        if clients is not None:  # all images are known here, so ids are checked before any client is asked
            for holder in (engine, CentralEngine(data, clients=clients)):
                holder.check(request, excluded_by(run))
        how: dict[str, Any] = {"device": choose_device(settings.device), "engine": engine, "clients": clients}
        served = serve_request(run, data, request, method, out=fresh, undo=undo, ticket=ticket, **how)
        if fresh is not None:
            _send_patch(engine, served, settings.clients, fresh)
    return served if out is None else replace(served, run=open_run(out))


def _send_patch(engine: FederatedEngine, served: ServedRequest, clients: int, out: Path) -> None:
    """Send the patch to the clients, name those that have not confirmed it, and write what travelled."""
    try:
        engine.send_patch(served.result.patch, served.result.request)
    except FedOrthoError as error:  # too few clients confirmed; the run is written, and sync sends the patch again
        logger.warning("%s", error)
    after = served.result.patch.after
    done = {client for client, info in engine.clients.items() if info.model == after or info.has_left} | engine.left
    if late := sorted(set(range(clients)) - done):
        logger.warning("clients %s have not confirmed the patch; fedortho sync %s sends it again", late[:5], out.name)
    append_wire_log(out / "wire.json", engine.transport.log)


def _kept_ledger(
    ledger: Observation, model: nn.Module, result: ForgetResult, data: Dataset, clients: Clients | None
) -> Observation:
    """The ledger for the edited model, without sums over forgotten images."""
    retained = data.train.subset(~result.request.mask(data.train, clients))
    return forget_lines(rebind_ledger(ledger, model, result.model, data.train), retained)


def _measure(
    run: Run,
    model: nn.Module,
    result: ForgetResult,
    data: Dataset,
    engine: Engine,
    clients: Clients | None,
    device: torch.device | str,
) -> tuple[Accuracies, Accuracies, dict[str, float]]:
    """Accuracies before and after, and the forget accuracy of every request that the run has served so far."""
    request, forgotten = result.request, excluded_by(run)
    is_remote = engine.info.is_federated and clients is None  # training images lie with the clients only
    counted: tuple[float | None, float | None] = (None, None)
    if is_remote and request.kind != "class":
        counted = _counted_by_clients(engine, model, result.patch, request, forgotten)
    before, after = (
        accuracies_of(net, data, request, forgotten=forgotten, clients=clients, device=device, forget=forget)
        for net, forget in zip((model, result.model), counted, strict=True)
    )
    target = result.settings.get("target")
    if request.kind == "class" and target is not None and before.forget <= target:
        share = f"{before.forget:.1%}"
        logger.warning("forget accuracy of %s was %s before the edit: already below the target", request, share)
    measured = [earlier for earlier in served_requests(run) if earlier.kind == "class" or not is_remote]
    if len(data.gone):  # images of earlier requests that were deleted can no longer be measured
        measured = [earlier for earlier in measured if len(forget_eval_images(data, earlier, clients))]
    all_forgotten = {
        str(earlier): accuracies_of(result.model, data, earlier, clients=clients, device=device).forget
        for earlier in measured
    }
    return before, after, all_forgotten | {str(request): after.forget}


def _counted_by_clients(
    engine: Engine, model: nn.Module, patch: Patch, request: ForgetRequest, forgotten: ForgetRequest | None
) -> tuple[float, float]:
    """Forget accuracy before and after the patch, as the clients that hold the images count it."""
    statistic = Statistic("right", layers="all", edit="conv", tap="conv", patches=(NOTHING, patch))
    ((correct,),) = engine.measure(model, [Query((Selection("train", request, forgotten),), statistic)])
    return float(correct.mean("0")), float(correct.mean("1"))


def _served_record(result: ForgetResult, before: Accuracies, after: Accuracies) -> ServedRecord:
    patch, plan = result.patch, result.plan
    return ServedRecord(
        request=str(result.request),
        method=result.method,
        settings=result.settings,
        before=before,
        after=after,
        retain_paid=before.retain - after.retain,
        cost=result.cost,
        model_before=patch.before,
        model_after=patch.after,
        kernels={site: len(edit["kernels"]) for site, edit in patch.note["sites"].items()},
        directions=dict(patch.note.get("directions", {})),
        opposed_kernels=0 if plan is None else plan.opposed,
        sample_correlation=None if plan is None else plan.sample_correlation,
        effect=None if plan is None else plan.effect,
        chosen=None if result.chosen is None else _trial_record(result.chosen),
        trials=tuple(_trial_record(trial) for trial in result.trials),
    )


def _trial_record(trial: Trial) -> TrialRecord:
    return TrialRecord(trial.ratio, trial.scrub, trial.forget, trial.retain)


def undo_run(run: Run | Path | str, undo: Path | str, out: Path | str) -> Run:
    """Restore the model that a run had before its last request, bit for bit, and write the run to `out`.

    `undo` is the file that `forget_run(undo=…)` wrote.
    """
    run, undo, out = open_run(run), Path(undo), Path(out)
    last_request(run)  # refuses a run that has none
    check_output_paths(out, None)
    restored = undo_patch(undo, run.load_model())
    before, after = run.record.model.digest, tensors_digest(restored.state_dict())
    *earlier, last = run.record.requests
    undone = (*run.record.undone, last.request)
    changed = replace(run.record, requests=tuple(earlier), undone=undone, result=ResultRecord(last.before.test))
    derived = write_derived(out, run, restored, changed, patch=None, ledger=None)
    append_entry(run.path.absolute().parent, "undone", run.path.name, last.request, before=before, after=after)
    return derived
