"""Serve a request on a run: unlearn, measure, and write a new run that has forgotten; the old run is not changed."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from fedortho.data.images import Dataset
from fedortho.data.request import Clients, ForgetRequest
from fedortho.engines.central import CentralEngine
from fedortho.engines.engine import Engine
from fedortho.engines.query import Query, Selection, Statistic
from fedortho.errors import FedOrthoError
from fedortho.evaluation.accuracies import accuracies_of
from fedortho.methods import unlearn
from fedortho.methods.method import ForgetResult, Method
from fedortho.models.patch import NOTHING, Patch, undo_patch, write_undo
from fedortho.models.zoo import build_model
from fedortho.runs.derived import check_output_paths, write_derived
from fedortho.runs.record import Accuracies, ResultRecord, ServedRecord, TrialRecord
from fedortho.runs.run import Run, open_run
from fedortho.runs.served import excluded_by, last_request, served_requests
from fedortho.statistics.ledger import forget_lines, load_ledger, rebind_ledger
from fedortho.statistics.observe import Observation
from fedortho.storage.files import tensors_digest
from fedortho.storage.journal import append_entry
from fedortho.unlearning.trials import Trial

logger = logging.getLogger(__name__)
RETRAIN_AFTER = 0.03  # retain accuracy lost over all requests, above which retraining is advised


@dataclass(frozen=True)
class ServedRequest:
    """A request that was served: the result of the method, the record of it, and the run that was written."""

    result: ForgetResult
    record: ServedRecord
    retain_paid: float  # retain accuracy lost over all requests so far
    run: Run | None = None  # None: nothing was written

    @property
    def advise_retraining(self) -> bool:
        return self.retain_paid > RETRAIN_AFTER


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
) -> ServedRequest:
    """Forget on a run by any method and write the run that has forgotten to `out`; None: write nothing.

    `undo` is a file that keeps the removed weights, for `undo_run`. A federation passes itself as the `engine`, and the
    rows that its `clients` hold so that their images can be measured here.
    """
    check_output_paths(out, undo)
    request = ForgetRequest.parse(request) if isinstance(request, str) else request
    serve = partial(_serve, run, data, request, method, out, undo, device, engine, clients)
    return serve() if out is None else _journaled(serve, run, request, out.name)


def _journaled(serve: Callable[[], ServedRequest], run: Run, request: ForgetRequest, name: str) -> ServedRequest:
    """Serve, and record in the journal beside the run that the request was received, and executed or refused."""
    directory, before = run.path.absolute().parent, run.record.model.digest
    append_entry(directory, "received", run.path.name, str(request), before=before)
    try:
        served = serve()
    except FedOrthoError as error:
        append_entry(directory, "refused", run.path.name, str(request), before=before, details={"reason": str(error)})
        raise
    append_entry(directory, "executed", name, str(request), before=before, after=served.result.patch.after)
    return served


def _serve(
    run: Run,
    data: Dataset,
    request: ForgetRequest,
    method: Method | str,
    out: Path | None,
    undo: Path | None,
    device: torch.device | str,
    engine: Engine | None,
    clients: Clients | None,
) -> ServedRequest:
    model = run.load_model().to(device)
    ledger = load_ledger(run.path / "ledger.safetensors", model)
    engine = engine or CentralEngine(data, ledger, clients, device, build=partial(_fresh_model, run))
    result = unlearn(model, engine, request, method, forgotten=excluded_by(run))
    before, after, all_forgotten = _measure(run, model, result, data, engine, clients, device)
    record = replace(
        _served_record(result, before, after),
        all_forgotten=all_forgotten,
        threads=torch.get_num_threads(),
        device=str(device),
        ledger=None if ledger is None else ledger.digest,
    )
    retain_paid = record.retain_paid + sum(earlier.retain_paid for earlier in run.record.requests)
    served = ServedRequest(result, record, retain_paid)
    if out is None:
        return served
    if undo is not None:
        write_undo(undo, result.patch, model)
    changed = replace(run.record, requests=(*run.record.requests, record), result=ResultRecord(after.test))
    kept = None if ledger is None else _kept_ledger(ledger, model, result, data, clients)
    return replace(served, run=write_derived(out, run, result.model, changed, patch=result.patch, ledger=kept))


def _fresh_model(run: Run, seed: int) -> nn.Module:
    known = run.record.model
    return build_model(run.settings.model, num_classes=known.num_classes, channels=known.channels, seed=seed)


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
