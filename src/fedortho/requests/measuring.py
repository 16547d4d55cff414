"""The record of a request that a method has served: accuracies before and after, cost, trials."""

import logging
from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

from fedortho.data.images import Dataset
from fedortho.data.request import Clients
from fedortho.engines.engine import Engine
from fedortho.engines.query import Query, Selection, Statistic
from fedortho.evaluation.accuracies import accuracies_of, forget_eval_images
from fedortho.methods.method import ForgetResult
from fedortho.models.patch import NOTHING
from fedortho.runs.record import ServedRecord, TrialRecord
from fedortho.runs.run import Run, served_requests
from fedortho.unlearning.trials import Trial

logger = logging.getLogger(__name__)


def measured_record(
    run: Run,
    model: nn.Module,
    result: ForgetResult,
    data: Dataset,
    engine: Engine,
    clients: Clients | None,
    device: torch.device | str,
) -> ServedRecord:
    """The record of a result, with accuracies on test images before and after; `model` is that of the run."""
    request, forgotten, patch, plan = result.request, run.excluded, result.patch, result.plan
    measure = partial(accuracies_of, data=data, clients=clients, device=device)
    is_remote = engine.info.is_federated and clients is None  # training images lie with the clients only
    counted: Sequence[float | None] = (None, None)
    if is_remote and request.kind != "class":  # as the clients that hold the images count it
        statistic = Statistic("right", layers="all", edit="conv", tap="conv", patches=(NOTHING, patch))
        ((correct,),) = engine.measure(model, [Query((Selection("train", request, forgotten),), statistic)])
        counted = correct.mean("right").tolist()
    before, after = (
        measure(net, request=request, forgotten=forgotten, forget=forget)
        for net, forget in zip((model, result.model), counted, strict=True)
    )
    target = result.settings.get("target")
    if request.kind == "class" and target is not None and before.forget <= target:
        share = f"{before.forget:.1%}"
        logger.warning("forget accuracy of %s was %s before the edit: already below the target", request, share)
    earlier = [each for each in served_requests(run) if each.kind == "class" or not is_remote]
    if len(data.gone):  # images of earlier requests that were deleted can no longer be measured
        earlier = [each for each in earlier if len(forget_eval_images(data, each, clients))]
    return ServedRecord(
        request=str(request),
        method=result.method,
        settings=result.settings,
        before=before,
        after=after,
        retain_paid=before.retain - after.retain,
        cost=result.cost,
        model_before=patch.before,
        model_after=patch.after,
        all_forgotten={str(each): measure(result.model, request=each).forget for each in earlier}
        | {str(request): after.forget},
        kernels={site: len(edit["kernels"]) for site, edit in patch.note["sites"].items()},
        directions=dict(patch.note.get("directions", {})),
        opposed_kernels=0 if plan is None else plan.opposed,
        sample_correlation=None if plan is None else plan.sample_correlation,
        effect=None if plan is None else plan.effect,
        chosen=None if result.chosen is None else _trial_record(result.chosen),
        trials=tuple(map(_trial_record, result.trials)),
        threads=torch.get_num_threads(),
        device=str(device),
    )


def _trial_record(trial: Trial) -> TrialRecord:
    return TrialRecord(trial.ratio, trial.scrub, trial.forget, trial.retain)
