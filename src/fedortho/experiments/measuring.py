"""What a table shows of a model besides its accuracies: a membership attack, and the images behind each share."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from fedortho.data.images import Dataset
from fedortho.data.request import ForgetRequest
from fedortho.devices import choose_device, using_threads
from fedortho.errors import BadRecord
from fedortho.evaluation.case import Case
from fedortho.evaluation.metric_suite import PAPER_ATTACK
from fedortho.evaluation.model_outputs import EvaluationSets, ModelOutputs
from fedortho.experiments.relations import Membership
from fedortho.runs.run import Run, open_run
from fedortho.storage.files import canonical_json
from fedortho.storage.records import read_record, to_json, write_record


@dataclass(frozen=True)
class OutcomeMeasures:
    """The file beside an outcome."""

    schema: ClassVar[int] = 1
    model: str  # digest of the measured model
    membership: Membership
    images: Mapping[str, int]  # that forget and retain accuracy are measured on
    digest: str = ""  # of these, and of the accuracies in the outcome's record; empty: of an earlier version

    def sealed(self, outcome: Run) -> "OutcomeMeasures":
        """These with their digest, which finds a number that was edited in this file or in the run of the outcome."""
        served = outcome.record.requests[-1:]  # none if it is the network before
        told = [[to_json(each.after), dict(each.all_forgotten)] for each in served]
        values = canonical_json([to_json(replace(self, digest="")), told])
        return replace(self, digest=hashlib.sha256(values.encode()).hexdigest())


def measure_outcome(
    path: Path, outcome: Run | Path, of: Run, data: Dataset, request: ForgetRequest, forgotten: ForgetRequest | None
) -> OutcomeMeasures:
    """Attack the model of an outcome of the run `of`; what `path` tells of the same model is not repeated.

    Numbers that were edited since then are refused.
    """
    outcome = open_run(outcome)
    digest = outcome.record.model.digest
    if path.is_file() and (known := read_record(OutcomeMeasures, path)).model == digest and known.digest:
        if known != known.sealed(outcome):
            raise BadRecord(f"{path} or {outcome.path} has other numbers than were measured; remove both")
        return known
    model, settings = outcome.load_model(), of.settings
    how: dict[str, Any] = {"clients": of.clients(data), "device": choose_device(settings.device), "seed": settings.seed}
    case = Case(model, model, (), data, request, forgotten, **how)
    with using_threads(settings.threads):
        found = ModelOutputs("the model", model, EvaluationSets(case)).attack(PAPER_ATTACK)
    rates = (found.member_rate, found.accuracy, found.false_positive_rate)
    images = {"forget": len(case.forget_eval), "retain": len(case.retain_test)}
    measures = OutcomeMeasures(digest, Membership(PAPER_ATTACK, *rates, found.forgotten), images).sealed(outcome)
    write_record(path, measures)
    return measures
