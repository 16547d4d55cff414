"""A run with other weights than the run that it is derived from."""

import shutil
from dataclasses import replace
from pathlib import Path

from torch import nn

from fedortho.data.request import ForgetRequest
from fedortho.errors import FedOrthoError
from fedortho.models.patch import Patch
from fedortho.runs.record import RunRecord
from fedortho.runs.rows import read_rows
from fedortho.runs.run import Run, open_run
from fedortho.statistics.observe import Observation
from fedortho.storage.files import check_writable, tensors_digest, write_tensors
from fedortho.storage.records import write_record


def check_output_paths(out: Path | None, undo: Path | None) -> None:
    """Refuse paths that exist or cannot be written, before any work is done."""
    if out is not None and out.exists():
        raise FedOrthoError(f"{out} exists already; choose a new directory for --out")
    if undo is not None:
        if undo.exists():
            raise FedOrthoError(f"{undo} exists already; an undo file is never overwritten: choose another")
        check_writable(next(parent for parent in undo.absolute().parents if parent.exists()))


def write_derived(
    out: Path, run: Run, model: nn.Module, record: RunRecord, *, patch: Patch | None, ledger: Observation | None
) -> Run:
    """Write a run with other weights than `run`, beside the place that it will take; then move it there.

    `record` is that of `run` with the changed requests and result; digest and parent are set here.
    """
    building = out.parent / f".{out.name}.building"
    shutil.rmtree(building, ignore_errors=True)
    try:
        building.mkdir(parents=True)
    except OSError as error:
        raise FedOrthoError(f"{out} cannot be written: {error.strerror}; choose another --out") from error
    state = model.cpu().state_dict()
    write_tensors(building / "model.safetensors", state)
    for name in ("split.json", "history.json"):
        shutil.copyfile(run.path / name, building / name)
    number = len(record.requests) - (patch is not None)
    if (rows := read_rows(run.path, run.settings)) is not None:
        last = ForgetRequest.parse(record.requests[-1].request) if record.requests else ForgetRequest()
        rows.without_names(last, record.data.class_names).save(building)
    copy_patches(run, building, number)
    if patch is not None:
        patch.save(building / "patches" / f"{number:04}.safetensors")
    elif (run.path / "clients").is_dir():
        (building / "clients").mkdir()  # simulated clients begin again with the restored model
    if ledger is not None:
        ledger.save(building / "ledger.safetensors")
    edited = replace(record.model, digest=tensors_digest(state))
    write_record(building / "run.json", replace(record, model=edited, parent=run.record.model.digest))
    building.replace(out)
    return open_run(out)


def copy_patches(run: Run, to: Path, number: int) -> None:
    """Copy the patches of the first `number` requests of a run."""
    for file in sorted((run.path / "patches").glob("*.safetensors"))[:number]:
        (to / "patches").mkdir(exist_ok=True)
        shutil.copyfile(file, to / "patches" / file.name)
