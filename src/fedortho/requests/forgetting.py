"""Serve a request on a run: plan, apply, judge, and write a new run that has forgotten; the old one stays."""

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
from fedortho.errors import FedOrthoError
from fedortho.evaluation.accuracies import accuracies_of
from fedortho.models.patch import NOTHING, Patch, undo_patch, write_undo
from fedortho.runs.derived import check_output_paths, write_derived
from fedortho.runs.record import Accuracies, ResultRecord, ServedRecord, TrialRecord
from fedortho.runs.run import Run
from fedortho.runs.served import excluded_by, last_request, served_requests
from fedortho.statistics.cost import Cost, Meter
from fedortho.statistics.engine import Engine
from fedortho.statistics.ledger import forget_lines, load_ledger, rebind_ledger
from fedortho.statistics.query import Query, Selection, Statistic
from fedortho.storage.files import tensors_digest
from fedortho.storage.journal import append_entry
from fedortho.storage.settings import as_mapping
from fedortho.unlearning.calibrate import Trial
from fedortho.unlearning.plan import ForgetPlan, ForgetSettings, plan_forgetting

logger = logging.getLogger(__name__)
RETRAIN_AFTER = 0.03  # retain accuracy lost over all requests, past which retraining is advised


@dataclass(frozen=True)
class ServedRequest:
    """A request that was served: its plan, the record of it, and the run that was written."""

    request: ForgetRequest
    outcome: ForgetPlan
    record: ServedRecord
    retain_paid: float  # retain accuracy lost over all requests so far
    run: Run | None  # None if nothing was written

    @property
    def advise_retraining(self) -> bool:
        return self.retain_paid > RETRAIN_AFTER


def forget_run(
    run: Run,
    data: Dataset,
    request: ForgetRequest,
    settings: ForgetSettings,
    *,
    out: Path | None,
    undo: Path | None = None,
    device: torch.device | str = "cpu",
    engine: Engine | None = None,
    clients: Clients | None = None,
) -> ServedRequest:
    """Forget on a run and write the result to `out`, or only tell what would be done (`out` is None).

    A federation passes itself as the `engine`, and the rows that its `clients` hold so that it can be judged.
    """
    check_output_paths(out, undo)
    serve = partial(_served, run, data, request, settings, out, undo, device, engine, clients)
    return serve() if out is None else _recorded(serve, run, request, out.name)


def _recorded(serve: Callable[[], ServedRequest], run: Run, request: ForgetRequest, name: str) -> ServedRequest:
    """Serve, and tell the journal beside the runs that it was asked for and what became of it."""
    place, before = run.path.absolute().parent, run.record.model.digest
    append_entry(place, "received", run.path.name, str(request), before=before)
    try:
        served = serve()
    except FedOrthoError as error:
        append_entry(place, "refused", run.path.name, str(request), before=before, details={"reason": str(error)})
        raise
    append_entry(place, "executed", name, str(request), before=before, after=served.outcome.patch.after)
    return served


def _served(
    run: Run,
    data: Dataset,
    request: ForgetRequest,
    settings: ForgetSettings,
    out: Path | None,
    undo: Path | None,
    device: torch.device | str,
    engine: Engine | None,
    clients: Clients | None,
) -> ServedRequest:
    earlier = served_requests(run)
    forgotten = excluded_by(run)
    model = run.load_model().to(device)
    ledger = load_ledger(run.path / "ledger.safetensors", model)
    engine = engine or CentralEngine(data, ledger, clients, device)
    meter = Meter(engine, model)
    outcome = plan_forgetting(model, meter, request, settings, forgotten=forgotten)
    cost = meter.cost()
    edited = outcome.patch.apply(model)
    is_afar = engine.is_federated and clients is None  # the images of clients and samples are not here
    asked = is_afar and request.kind != "class"
    told = _told(engine, model, outcome.patch, request, forgotten, settings) if asked else (None, None)
    before, after = (
        accuracies_of(m, data, request, forgotten=forgotten, clients=clients, device=device, forget=forget)
        for m, forget in zip((model, edited), told, strict=True)
    )
    if request.kind == "class" and before.forget <= settings.target:
        share = f"{before.forget:.1%}"
        logger.warning("%s was named rightly in %s of its images before: there was nothing to hide", request, share)
    judged = [r for r in earlier if r.kind == "class" or not is_afar]
    old = {str(r): accuracies_of(edited, data, r, clients=clients, device=device).forget for r in judged}
    scores = old | {str(request): after.forget}
    record = replace(
        _record(outcome, request, settings, before, after, cost),
        all_forgotten=scores,
        threads=torch.get_num_threads(),
        device=str(device),
        ledger=None if ledger is None else ledger.digest,
    )
    paid = record.retain_paid + sum(other.retain_paid for other in run.record.requests)
    served = ServedRequest(request, outcome, record, paid, None)
    if out is None:
        return served
    if undo is not None:
        write_undo(undo, outcome.patch, model)
    changed = replace(run.record, requests=(*run.record.requests, record), result=ResultRecord(after.test))
    bound = None
    if ledger is not None:
        stays = data.train.subset(~request.mask(data.train, clients))
        bound = forget_lines(rebind_ledger(ledger, model, edited, data.train), stays)
    return replace(served, run=write_derived(out, run, edited, changed, patch=outcome.patch, ledger=bound))


def _told(
    engine: Engine,
    model: nn.Module,
    patch: Patch,
    request: ForgetRequest,
    forgotten: ForgetRequest | None,
    settings: ForgetSettings,
) -> tuple[float, float]:
    """Accuracy on what must go, before and after, as the holders of those images count it."""
    statistic = Statistic("right", settings.layers, settings.edit, settings.tap, (NOTHING, patch))
    ((seen,),) = engine.measure(model, [Query((Selection("train", request, forgotten),), statistic)])
    return float(seen.mean("0")), float(seen.mean("1"))


def _record(
    outcome: ForgetPlan,
    request: ForgetRequest,
    settings: ForgetSettings,
    before: Accuracies,
    after: Accuracies,
    cost: Cost,
) -> ServedRecord:
    method = "directions" if settings.erase else "paper" if settings.edit == "conv" else "hide"
    return ServedRecord(
        request=str(request),
        method=method,
        settings=as_mapping(settings),
        before=before,
        after=after,
        retain_paid=before.retain - after.retain,
        cost=cost,
        model_before=outcome.patch.before,
        model_after=outcome.patch.after,
        kernels={site: len(found["kernels"]) for site, found in outcome.patch.note["sites"].items()},
        directions=dict(outcome.patch.note.get("directions", {})),
        opposed_kernels=outcome.opposed,
        sample_correlation=outcome.sample_correlation,
        chosen=None if outcome.chosen is None else _trial(outcome.chosen),
        trials=tuple(_trial(trial) for trial in outcome.trials),
    )


def _trial(trial: Trial) -> TrialRecord:
    return TrialRecord(trial.ratio, trial.scrub, trial.forget, trial.retain)


def undo_run(run: Run, undo: Path, out: Path) -> Run:
    """The run as it was before its last request, from the undo file that was kept."""
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
