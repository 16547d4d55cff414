"""Judge a model: measure all metrics, run the audits, and sum them up as a verdict."""

from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

import torch
from torch import nn

from fedortho.audits import run_audits
from fedortho.audits.measurements import MeasurementCache, keep_measurement
from fedortho.audits.retention import RETENTION
from fedortho.audits.verdict import Verdict, subject_of
from fedortho.data.request import Clients, ForgetRequest, as_request
from fedortho.errors import BadData, BadSetting
from fedortho.evaluation.case import Case
from fedortho.evaluation.metric_suite import MetricSuite
from fedortho.evaluation.metrics import Metric
from fedortho.methods import Data, as_dataset, as_model
from fedortho.storage.files import tensors_digest
from fedortho.storage.provenance import environment


def judge(
    model: nn.Module,
    data: Data,
    request: ForgetRequest | str,
    *,
    original: nn.Module | None = None,
    reference: nn.Module | Sequence[nn.Module] | None = None,
    counterfactual: nn.Module | Sequence[nn.Module] | None = None,
    clients: Clients | None = None,
    device: torch.device | str = "cpu",
    audit: str = "quick",
    only: Sequence[str] = (),
) -> Verdict:
    """Measure a model that is said to have forgotten, and try to recover the forget set.

    `data` is the original model's data, as in `forget`, with test images. Without a `reference`, a model retrained
    without the forget set, the verdict cannot pass; several, up to three, are averaged. Audits need the `original`
    model; without it none is run. `counterfactual` is what the same method makes of the reference model: the probe,
    relearning and distance then compare with it. `audit` is their budget (`quick`, `full` or `none`), `only` the names
    of those to run. A model is not judged against itself: two models with the same weights are refused.
    """
    dataset = as_dataset(data)
    request = as_request(request, dataset)
    if not len(dataset.test):
        raise BadData('the data has no test images, on which a model is judged; pass {"train": ..., "test": ...}')
    before = model if original is None else original
    references, treated = (
        tuple(as_model(each, dataset) for each in ([given] if isinstance(given, nn.Module) else given or ()))
        for given in (reference, counterfactual)
    )
    if treated and len(treated) != len(references):
        raise BadSetting(f"{len(treated)} counterfactuals and {len(references)} reference models; give one for each")
    models = as_model(model, dataset), as_model(before, dataset), references
    case = Case(*models, dataset, request, None, clients, device, counterfactuals=treated)
    return judge_case(case, "none" if original is None else audit, only=only)


def judge_case(
    case: Case,
    audit: str = "quick",
    *,
    only: Sequence[str] = (),
    on_step: Callable[[str], None] | None = None,
    suite: MetricSuite | None = None,
    cache: MeasurementCache | None = None,
    **about: Any,
) -> Verdict:
    """The verdict on a case; `about` sets fields of the verdict that are not measured (method, cost, digests, …)."""
    refuse_same_models(case, audit)
    if on_step is not None:
        on_step("metrics")
    cache, suite = cache or MeasurementCache(), suite or MetricSuite(case)
    about = {"method": "", "subject": subject_of(case.request, case.data.test.names)} | about
    metrics = tuple(suite.measure(case.unlearned))
    if suite.sets.case.references[:1] == case.references[:1]:
        _keep_retain_accuracies(case, cache, metrics)
    return Verdict(
        str(case.request),
        metrics=metrics,
        audits=tuple(run_audits(case, audit, only=only, on_step=on_step, cache=cache)),
        retention=RETENTION(case, cache) if audit != "none" else None,
        has_reference=bool(case.references),
        environment=environment(case.device),
        **about,
    )


def _keep_retain_accuracies(case: Case, cache: MeasurementCache, metrics: Sequence[Metric]) -> None:
    """Retention needs the accuracies of two models that are among the metrics: their images are not read again."""
    for metric in metrics:
        if metric.name == "retain-accuracy":
            for role, share in (("unlearned", metric.value), ("reference", metric.reference)):
                if share is not None:
                    keep_measurement(case, cache, role, "retain", share)


def refuse_same_models(case: Case, audit: str = "quick") -> None:
    """Refuse a case in which two models have the same weights; without audits the original is compared with nothing."""
    models = {role: model for role, model in case.models.items() if role != "original" or audit != "none"}
    identities = {role: (type(model), tensors_digest(model.state_dict())) for role, model in models.items()}
    for one, other in combinations(models, 2):
        if identities[one] == identities[other]:
            names = f"the {one.replace('_', ' ')} model and the {other.replace('_', ' ')} model"
            fix = "nothing was edited" if (one, other) == ("unlearned", "original") else "give one of another seed"
            raise BadSetting(f"{names} have the same weights; {fix}, no model is judged against itself")
