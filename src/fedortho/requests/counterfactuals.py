"""Counterfactuals: what a method makes of reference models, which never saw the forget set.

A method that trains leaves marks of its own recipe, whatever it forgets, and an audit against models of another recipe
holds them against it. Sekhari et al. (2103.03279) define unlearning by the same treatment of both: U(A(D), S) is
compared with U(A(D without S), nothing). These models are the latter. Only a method that reads no image of the forget
set has them: any other would show it to a model that never saw it.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fedortho.data.request import ForgetRequest
from fedortho.methods import unlearn
from fedortho.methods.method import Method
from fedortho.requests.references import is_treated_by
from fedortho.requests.run_context import RunContext
from fedortho.runs.derived import build_derived, building
from fedortho.runs.record import ResultRecord, ServedRecord
from fedortho.runs.run import Run, open_run
from fedortho.storage.settings import as_mapping


def counterfactuals(
    context: RunContext,
    method: Method,
    request: ForgetRequest,
    references: Sequence[Run],
    directory: Path,
    *,
    make: bool = True,
) -> list[Run]:
    """What the method makes of each reference model, as runs in a directory; those that are missing there are made.

    `context` is the run that forgets: its data, or its clients, train the reference models as they trained its model.
    Empty if the method has none, or if one is missing and `make` is False.
    """
    if not getattr(method, "has_counterfactual", False):
        return []
    key = json.dumps([str(request), as_mapping(method)], sort_keys=True)  # another directory for each of these
    found, digest = [], hashlib.sha256(key.encode()).hexdigest()[:8]
    for reference in references:
        place = directory / f"{reference.path.name}-{method.name}-{digest}"
        known = open_run(place) if (place / "run.json").is_file() else None
        if known is None or known.record.parent != reference.record.model.digest:
            if not make:
                return []
            known = _made(context, method, request, reference, place)
        found.append(known)
    return found


def _made(context: RunContext, method: Method, request: ForgetRequest, reference: Run, place: Path) -> Run:
    model = reference.load_model()
    with context.engine() as engine:
        result = unlearn(model, engine, request, method)
    before, after = (context.accuracies(each, request) for each in (model, result.model))
    digests = (reference.record.model.digest, result.patch.after)
    outcome = (before, after, before.retain - after.retain, result.cost)
    served = ServedRecord(str(request), method.name, as_mapping(method), *outcome, *digests)
    record = replace(reference.record, requests=(served,), result=ResultRecord(after.test))
    with building(place, may_replace=True) as built:
        build_derived(built.run, reference, result.model, record, patch=None, ledger=None)
        run = built.place()
    assert is_treated_by(served, run), "its record says so"
    return run
