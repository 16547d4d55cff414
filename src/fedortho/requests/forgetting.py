"""Serve a request on a run: unlearn, measure, and write a new run that has forgotten; the old run is not changed."""

import logging
import math
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fedortho.data.cache import DataCopy
from fedortho.data.images import Dataset
from fedortho.data.request import Clients, ForgetRequest, as_request
from fedortho.data.sources import DATASETS
from fedortho.devices import choose_device
from fedortho.engines.central import CentralEngine
from fedortho.engines.engine import Engine
from fedortho.errors import BadData, BadSetting, FedOrthoError
from fedortho.federated.engine import FederatedEngine
from fedortho.federated.roster import NODES, NodesRecord, ranges
from fedortho.federated.server import (
    confirmed_by,
    copied_clients,
    federated_engine,
    federation_lock,
    local_grid,
    patches_of,
)
from fedortho.federated.transport import append_wire_log
from fedortho.methods import MUCH_LOST, unlearn
from fedortho.methods.method import CannotServe, ForgetResult, Method
from fedortho.methods.regrow import Regrow
from fedortho.methods.retrain import Retrain
from fedortho.models.patch import patch_between, write_undo
from fedortho.models.predictions import accuracy
from fedortho.requests.levels import chosen_method, hidden_path, level_for_run, level_method, training_cost_words
from fedortho.requests.measuring import measured_record
from fedortho.requests.references import reference_cost
from fedortho.requests.rewind import RewindPlan, find_rewind, rewind_run
from fedortho.requests.shadowing import shadowed_method
from fedortho.requests.transaction import (
    Step,
    Transaction,
    Unconfirmed,
    find_served,
    find_ticket,
    relative_out,
    ticket_details,
    transaction,
)
from fedortho.runs.continuing import stages_of
from fedortho.runs.derived import build_derived, building
from fedortho.runs.purge import purge_run
from fedortho.runs.record import ResultRecord, ServedRecord
from fedortho.runs.rows import hash_key
from fedortho.runs.run import Run, check_unserved, open_run, served_requests
from fedortho.runs.settings import FederateSettings
from fedortho.statistics.ledger import forget_lines, load_ledger, rebind_ledger
from fedortho.storage.records import write_record
from fedortho.unlearning.calibrate import Refused, Unmeasured

if TYPE_CHECKING:
    from flwr.serverapp import Grid

logger = logging.getLogger(__name__)
APART = 4.0  # times as far from the median client as the clients in the middle are


@dataclass(frozen=True)
class ServedRequest:
    """A request that was served: the result of the method, the record of it, and the run that was written."""

    result: ForgetResult
    record: ServedRecord
    retain_paid: float  # retain accuracy lost over all requests so far
    run: Run | None = None  # None: nothing was written
    was_finished: bool = False  # it was served before; nothing was done now
    copies: tuple[DataCopy, ...] = ()  # of the images, where they were purged
    rewind: RewindPlan | None = None  # of a run that was trained again from a round before it met the data

    @property
    def advice(self) -> str:
        """What to do where much retain accuracy was lost; empty if it was not."""
        if self.retain_paid <= MUCH_LOST:
            return ""
        if self.record.method == Regrow.name and self.record.retain_paid > MUCH_LOST:
            more = 3 * int(self.record.settings["epochs"])
            return (
                f"erasing lost {self.record.retain_paid:.1%} of retain accuracy; more passes keep more: --set "
                f"epochs={more}; --set stages=1 --set frozen=true keeps earlier stages and what they know of the class"
            )
        return "these requests have lost much retain accuracy: retrain before the next one"


def forget_run(
    run: Run | Path | str,
    request: ForgetRequest | str,
    method: Method | str = "",
    *,
    level: str = "",
    out: Path | str | None = None,
    undo: Path | str | None = None,
    hide_first: bool = True,
    accept: Callable[[ForgetResult], None] | None = None,
    ticket: str = "",
    purge: bool | None = None,
    hash_ids: bool = False,
    shadows: int = 0,
    data: Dataset | None = None,
    data_dir: str = "",
    device: str = "auto",
) -> ServedRequest:
    """Make the model of a run forget and write a new run to `out`; the given run stays as it is.

    `level` is `hide`, `erase` (the default for classes) or `exact`; `method` is another method, or the level's with its
    hyper-parameters. Without `out` nothing is written. Before a class is erased, a hidden model is written to
    `out`-hidden if `hide_first`. `undo` is a file for the tensors that change, for `undo_run`. `accept` receives the
    result before test images are read, and raises an error to refuse it. The same call again returns what it wrote, or
    completes what a killed process began; with a `ticket` also after the images were deleted. `purge` removes forgotten
    images from the decoded ones here; None: samples of your own data. With `hash_ids` the records name samples by keyed
    hashes; the key is beside the run. So many `shadows`, models trained like the run, choose the limit of clients and
    samples at the level `hide`, or how far `r2d` goes back. `data` is the run's data if it is already loaded.

    A federation is simulated here. At the level `exact` one that kept rounds goes back to one of them, as by
    `rewind_run`; with an undo file, a ticket or `purge`, which a rewind has no use for, it is retrained.
    Raises `Refused`, with the trials that were measured, if target and budget cannot both hold; `Unmeasured` if clients
    or samples are within their limit before any edit.
    """
    run = open_run(run).at(data_dir)
    request = ForgetRequest.parse(request) if isinstance(request, str) else request
    out, undo = (None if path is None else Path(path) for path in (out, undo))
    level = level_for_run(run, request, level, method)
    if level == "exact" and shadows:
        raise BadSetting(f"shadows is {shadows}; at the level exact shadow models choose nothing; leave them out")
    if level == "exact" and not method and out is not None:
        given = {"undo": undo, "accept": accept, "ticket": ticket, "purge": purge, "hash_ids": hash_ids}
        unused = [name for name, value in given.items() if value]
        if served := _serve_by_rewind(run.at(device=device), request, out, unused):
            return served
    if isinstance(method, str):
        method = chosen_method(run, method) if method else level_method(run, level)
    if isinstance(method, Retrain) and run.record.began_with:
        raise CannotServe(
            f"{run.path} was continued; retrain has one schedule: choose the level exact, and name an out"
        )
    if ticket and (finished := find_ticket(ticket, run, request, out)):
        return _served_before(finished)
    details = {} if out is None else {"out": relative_out(run, out)}
    details |= ticket_details(ticket, run, request, out) if ticket else {}
    data = data or run.load_data()
    request = run.request(as_request(request, data), hashed=hash_ids)
    check_unserved(run, request)
    if shadows:
        method, told = shadowed_method(run, request, method, shadows, data, device)
        logger.info("%s", told)
    data, step = data.with_key(hash_key(run.path)), Step(details=details, accept=accept)
    if found := find_served(run, request, method, out, undo, step):
        served = _served_before(found)
    else:
        if level == "erase" and hide_first and out is not None:
            with building(out, undo):  # refuses what cannot be written before anything is hidden
                pass
            step = replace(step, is_first=not _hide_first(run, request, data, out, details, device))
        served = _serve_run(run, data, request, method, device, out=out, undo=undo, step=step)
    if purge is None:
        purge = bool(request.samples) and (run.settings.data not in DATASETS or bool(run.settings.new_images))
    if not purge or served.run is None:
        return served
    return replace(served, copies=tuple(purge_run(served.run, data=data, original=run)))


def _hide_first(
    run: Run, request: ForgetRequest, data: Dataset, out: Path, details: dict[str, str], device: str
) -> bool:
    """Write the hidden run, if it is not there; whether the journal was told that the request was received."""
    no_edit = (Refused, BadSetting, BadData)  # or a network or data that have none
    step, hidden = Step("hidden", details=details, optional=no_edit), hidden_path(out)
    method = level_method(run, "hide")
    if find_served(run, request, method, hidden, None, step):
        logger.info("%s has hidden %s before; erasing goes on", hidden, request)
        return False
    try:
        _serve_run(run, data, request, method, device, out=hidden, step=step)
        logger.info("%s no longer predicts %s and can be used until the erased model is written", hidden, request)
    except no_edit as refusal:
        logger.warning("not hidden first, erasing goes on: %s", refusal)
    return True


def _serve_run(
    run: Run, data: Dataset, request: ForgetRequest, method: Method, device: str, **how: Any
) -> ServedRequest:
    """Serve a request on a run of either kind; a refusal says what else can be done."""
    try:
        if isinstance(run.settings, FederateSettings):
            return forget_federated_run(run.at(device=device), request, method, data=data, **how)
        return serve_request(run, data, request, method, device=choose_device(device), **how)
    except Unmeasured:
        raise
    except Refused as refusal:
        flags = "--max-retain-drop or --target" if request.classes else "--max-retain-drop"
        advice = f"raise {flags}, edit more layers with --layers mid,deep, or retrain ({training_cost_words(run)})"
        raise Refused(f"{refusal}; {advice}", refusal.frontier) from refusal


def _serve_by_rewind(run: Run, request: ForgetRequest, out: Path, unused: Sequence[str]) -> ServedRequest | None:
    """Go back to a round that the run kept, and measure the new run; None where it is to be retrained."""
    if (plan := find_rewind(run, request)) is None:
        return None
    if unused and plan.stages:
        raise FedOrthoError(f"a rewind has no {' and no '.join(unused)}, and {run.path} was continued; leave it out")
    if unused:
        logger.warning("a rewind has no %s: the federation is retrained from the start", " and no ".join(unused))
        return None
    for line in plan.lines():
        logger.info("%s", line)
    new = rewind_run(plan.run, plan.request, out).run
    assert new is not None, "it was written"
    data, before, after = run.load_data(), run.load_model(), new.load_model()
    patch = patch_between(before, after, request=str(plan.request), method="rewind")
    trained = stages_of(new)[-len(plan.stages) :] if plan.stages else []
    history = [entry for stage in trained for entry in stage.history()] or new.history()[plan.begin :]
    result = ForgetResult(plan.request, "rewind", {}, after, patch, reference_cost(new, data, history))
    record = measured_record(run, before, result, data, CentralEngine(data), run.clients(data), "cpu")
    return ServedRequest(result, record, _paid((*run.record.requests, record)), new, rewind=plan)


def _served_before(finished: Run) -> ServedRequest:
    record, (patch, request) = finished.record.requests[-1], patches_of(finished)[-1]
    assert request is not None, "a run that was served"
    assert record.cost is not None, "records without it are older than repeated requests"
    result = ForgetResult(request, record.method, record.settings, finished.load_model(), patch, record.cost)
    return ServedRequest(result, record, _paid(finished.record.requests), finished, was_finished=True)


def _paid(requests: Sequence[ServedRecord]) -> float:
    return sum(served.retain_paid for served in requests)


def serve_request(
    run: Run,
    data: Dataset,
    request: ForgetRequest | str,
    method: Method | str,
    *,
    out: Path | None,
    undo: Path | None = None,
    device: torch.device | str = "cpu",
    step: Step | None = None,
) -> ServedRequest:
    """Forget on a run by any method and write the run that has forgotten to `out`; None: write nothing."""
    request, step = as_request(request, data), step or Step()
    with transaction(run, request, out, undo, step) as writing:
        served = serve_in(writing, run, data, request, method, step, device)
        return served if writing is None else replace(served, run=writing.commit())


def serve_in(
    writing: Transaction | None,
    run: Run,
    data: Dataset,
    request: ForgetRequest,
    method: Method | str,
    step: Step,
    device: torch.device | str,
    engine: Engine | None = None,
    clients: Clients | None = None,
) -> ServedRequest:
    """Unlearn, measure, and build the new run; a federation passes its `engine` and the rows of its `clients`."""
    model, earlier = run.load_model().to(device), run.record.requests
    ledger = load_ledger(run.path / "ledger.safetensors", model)
    engine = engine or CentralEngine(data, ledger, clients, device, build=run.new_model)
    result = unlearn(model, engine, request, method, forgotten=run.excluded)
    if step.accept is not None:
        step.accept(result)
    record = measured_record(run, model, result, data, engine, clients, device)
    record = replace(record, ledger=None if ledger is None else ledger.digest, ticket=step.details.get("ticket"))
    if writing is not None:
        if writing.place.undo is not None:
            write_undo(writing.place.undo_file, result.patch, model)
        if ledger is not None:  # for the edited model, without sums over forgotten images
            retained = data.train.subset(~request.mask(data.train, clients))
            ledger = forget_lines(rebind_ledger(ledger, model, result.model, data.train), retained)
        changed = replace(run.record, requests=(*earlier, record), result=ResultRecord(record.after.test))
        build_derived(writing.place.run, run, result.model, changed, patch=result.patch, ledger=ledger)
    return ServedRequest(result, record, _paid((*earlier, record)))


def forget_federated_run(
    run: Run,
    request: ForgetRequest,
    method: Method | str,
    grid: "Grid | None" = None,
    *,
    out: Path | None,
    undo: Path | None = None,
    data: Dataset | None = None,
    store: Path | None = None,
    step: Step | None = None,
) -> ServedRequest:
    """Serve a request in a federation: unlearn with its clients, write the new run, send the patch.

    Without a grid the clients of the run are simulated here, on a copy of their directories. `store` are those of the
    clients that a given grid simulates; they become part of the new run. Without `out` nothing is written or sent.
    """
    settings, step = run.settings, step or Step()
    assert isinstance(settings, FederateSettings), "the caller looked"
    with ExitStack() as stack:
        if grid is not None and store is None:  # real clients; those simulated here are copied for each job
            stack.enter_context(federation_lock(run.path))
        writing = stack.enter_context(transaction(run, request, out, undo, step))
        if grid is None:
            store = stack.enter_context(copied_clients(run, None if writing is None else writing.place.path))
            grid = stack.enter_context(local_grid(settings, store, run=run.path))
        data = data or run.load_data()
        engine = federated_engine(grid, settings, data, served_requests(run), run.path)
        engine.check_quorum()
        engine.bring_up_to_date(run.load_model(), patches_of(run), run.excluded)
        is_remote = any(info.has_own_images for info in engine.clients.values())
        clients = None if is_remote else run.clients(data)
        if clients is not None:  # all images are known here, so ids are checked before any client is asked
            for holder in (engine, CentralEngine(data, clients=clients)):
                holder.check(request, run.excluded)
        device = choose_device(settings.device)
        served = serve_in(writing, run, data, request, method, step, device, engine, clients)
        check_retention(engine, served, run, data)
        if writing is None:
            return served
        if store is None:  # real clients: what they are sent must not be lost, so the run comes first
            done = writing.place.place()
            writing.tell(done, _send_patch(engine, served, writing, done.path))
        else:
            clients_told = _send_patch(engine, served, writing, writing.place.run)
            shutil.move(store, writing.place.run / "clients")
            done = writing.commit(clients_told)
    return replace(served, run=done, record=open_run(done.path).record.requests[-1])


def check_retention(engine: FederatedEngine, served: ServedRequest, run: Run, data: Dataset) -> None:
    """Refuse a patch that breaks the budget on images of the server, whatever the clients have counted.

    The images are for validation, or for testing where there are no others. The drop must be beyond the budget by three
    standard deviations. Clients whose statistics stood apart are named. With a ratio that is given there is no budget.
    """
    result = served.result
    budget, images = result.settings.get("max-retain-drop"), data.valid if len(data.valid) else data.test
    gone = result.request if run.excluded is None else result.request + run.excluded
    images = images.subset(~ForgetRequest(gone.classes).mask(images))
    if not isinstance(budget, float) or result.settings.get("ratio") or not len(images):
        return
    device = next(result.model.parameters()).device
    before, after = (accuracy(model, images, device=device) for model in (run.load_model().to(device), result.model))
    if before - after <= budget + 3 * math.sqrt(before * (1 - before) / len(images)):
        return
    apart = sorted(client for client, ratio in engine.apart.items() if ratio > APART)
    who = f"the statistics of clients {ranges(apart)} stand apart" if apart else "no client's statistics stand apart"
    raise FedOrthoError(
        f"retain accuracy falls from {before:.1%} to {after:.1%} on {len(images)} images of the server, beyond "
        f"--max-retain-drop {budget:g}; the patch was not sent; {who}"
    )


def _send_patch(
    engine: FederatedEngine, served: ServedRequest, writing: Transaction, directory: Path
) -> dict[str, str]:
    """Send the patch to the clients and write who confirmed it, which is returned; too few are an error.

    If all clients refused it, nobody has the new model and its run is taken back.
    """
    patch, asked, reason = served.result.patch, engine.present(), ""
    try:
        engine.send_patch(patch, served.result.request)
    except FedOrthoError as error:  # by the quorum
        reason = str(error)
    told, exchange, out = confirmed_by(engine, patch.after), engine.transport.log[-1], writing.place.out
    append_wire_log(directory / "wire.json", engine.transport.log)
    write_record(directory / NODES, NodesRecord(engine.bindings()))
    told.write(directory)
    if not told.confirmed and exchange.bytes_up.keys() == set(asked):
        if directory == out:
            writing.place.take_back()
        raise FedOrthoError(f"no client took the patch, and nothing was changed: {reason}")
    late = f"clients {ranges(told.unconfirmed)} have not confirmed the patch; fedortho sync {out.name} sends it again"
    if not told.is_enough:
        number = f"{len(told.confirmed)} of {len(told.confirmed) + len(told.unconfirmed)}"
        raise Unconfirmed(f"only {number} clients took the patch: {late}")
    if told.unconfirmed:
        logger.warning("%s", late)
    return told.details
