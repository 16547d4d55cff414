"""Undo the last request of a run, from the tensors that it changed."""

from dataclasses import replace
from pathlib import Path

from fedortho.models.patch import undo_patch
from fedortho.requests.transaction import tell_once
from fedortho.runs.derived import build_derived, building, tidy
from fedortho.runs.record import ResultRecord, RunRecord, read_run_record
from fedortho.runs.run import Run, last_request, open_run
from fedortho.storage.files import tensors_digest
from fedortho.storage.journal import append_entry


def undo_run(run: Run | Path | str, undo: Path | str, out: Path | str) -> Run:
    """Write to `out` a run as before its last request, bit for bit; `undo` is what `forget_run(undo=…)` wrote."""
    run, undo, out = open_run(run), Path(undo), Path(out)
    last_request(run)  # refuses a run that has none
    restored = undo_patch(undo, run.load_model())
    before, after = run.record.model.digest, tensors_digest(restored.state_dict())
    *earlier, last = run.record.requests
    undone = (*run.record.undone, last.request)
    changed = replace(run.record, requests=tuple(earlier), undone=undone, result=ResultRecord(last.before.test))
    done = read_run_record(out)
    if isinstance(done, RunRecord) and (done.parent, done.model.digest, done.undone) == (before, after, undone):
        tidy(out)
        tell_once(run, "undone", run.path.name, last.request, after)  # a killed call may not have told it
        return open_run(out)
    with building(out) as place:
        build_derived(place.run, run, restored, changed, patch=None, ledger=None)
        derived = place.place()
    append_entry(run.path.absolute().parent, "undone", run.path.name, last.request, before=before, after=after)
    return derived
