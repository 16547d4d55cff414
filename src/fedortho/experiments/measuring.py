"""What a table shows of a model besides its accuracies: a membership attack, and the images behind each share."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from fedortho.data.images import Dataset
from fedortho.data.request import ForgetRequest
from fedortho.devices import choose_device, using_threads
from fedortho.evaluation.case import Case
from fedortho.evaluation.metric_suite import PAPER_ATTACK
from fedortho.evaluation.model_outputs import EvaluationSets, ModelOutputs
from fedortho.experiments.relations import Membership
from fedortho.runs.run import Run, open_run
from fedortho.storage.records import read_record, write_record


@dataclass(frozen=True)
class OutcomeMeasures:
    """The file beside an outcome."""

    schema: ClassVar[int] = 1
    model: str  # digest of the measured model
    membership: Membership
    images: Mapping[str, int]  # that forget and retain accuracy are measured on


def measure_outcome(
    path: Path, outcome: Run | Path, of: Run, data: Dataset, request: ForgetRequest, forgotten: ForgetRequest | None
) -> OutcomeMeasures:
    """Attack the model of an outcome of the run `of`; what `path` tells of the same model is not repeated."""
    outcome = open_run(outcome)
    digest = outcome.record.model.digest
    if path.is_file() and (known := read_record(OutcomeMeasures, path)).model == digest:
        return known
    model, settings = outcome.load_model(), of.settings
    how: dict[str, Any] = {"clients": of.clients(data), "device": choose_device(settings.device), "seed": settings.seed}
    case = Case(model, model, (), data, request, forgotten, **how)
    with using_threads(settings.threads):
        found = ModelOutputs("the model", model, EvaluationSets(case)).attack(PAPER_ATTACK)
    rates = (found.member_rate, found.accuracy, found.false_positive_rate)
    images = {"forget": len(case.forget_eval), "retain": len(case.retain_test)}
    measures = OutcomeMeasures(digest, Membership(PAPER_ATTACK, *rates, found.forgotten), images)
    write_record(path, measures)
    return measures
