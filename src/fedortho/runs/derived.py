"""A run with other weights than the run that it is derived from: built beside its place, put there in one step."""

import glob
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from torch import nn

from fedortho.data.request import ForgetRequest
from fedortho.errors import Busy, FedOrthoError
from fedortho.models.patch import Patch
from fedortho.runs.record import RunRecord
from fedortho.runs.rows import read_rows
from fedortho.runs.run import Run, open_run
from fedortho.statistics.observe import Observation
from fedortho.storage import files
from fedortho.storage.records import write_record

UNDO, UNDO_PATH = "undo.safetensors", "undo-path"  # in a building directory: the undo file, and where it belongs
TAKEN = "{} exists already; an undo file is never overwritten: choose another"


def check_output_paths(out: Path | None, undo: Path | None) -> None:
    """Refuse paths that exist or cannot be written, before any work is done."""
    if out is not None and out.exists():
        raise FedOrthoError(f"{out} exists already; choose a new directory for --out")
    if undo is not None:
        if undo.exists():
            raise FedOrthoError(TAKEN.format(undo))
        files.check_writable(next(parent for parent in undo.absolute().parents if parent.exists()))


@dataclass(frozen=True)
class Building:
    """A directory beside `out` in which a run and its undo file are made; nobody sees them before both are complete."""

    path: Path
    out: Path
    undo: Path | None = None
    may_replace: bool = False  # a run at `out` is removed when the new one is complete

    @property
    def run(self) -> Path:
        """The directory that becomes `out`."""
        return self.path / "run"

    @property
    def undo_file(self) -> Path:
        """The file that becomes `undo`."""
        return self.path / UNDO

    def place(self) -> Run:
        """Put the undo file and the run in their places; the run comes last and in one step.

        An undo file whose run did not follow is removed with the building directory, now or by the next process.
        """
        if self.undo is not None:
            files.write_text(self.path / UNDO_PATH, str(self.undo.absolute()))
            _place_file(self.undo_file, self.undo)
        files.sync_directory(self.run)
        if self.may_replace and self.out.exists():
            self.out.rename(self.path / "replaced")
        check_output_paths(self.out, None)  # a rename would replace an empty directory
        self.run.rename(self.out)
        files.sync_directory(self.out.parent)
        return open_run(self.out)

    def take_back(self) -> None:
        """Undo `place`: nobody uses the run, and it goes with the building directory."""
        self.out.rename(self.run)
        files.sync_directory(self.out.parent)


@contextmanager
def building(out: Path, undo: Path | None = None, *, may_replace: bool = False) -> Iterator[Building]:
    """A building directory for a run at `out`, locked for this process; left-overs are removed first, it at the end."""
    with files.locked(out):
        path = None
        try:
            with suppress(FileExistsError):  # a file there is refused below, as no directory
                out.parent.mkdir(parents=True, exist_ok=True)
            remove_leftovers(out)
            check_output_paths(None if may_replace else out, undo)
            path = Path(tempfile.mkdtemp(prefix=f".{out.name}.building-", dir=out.parent))
            yield Building(path, out, undo, may_replace)
        except OSError as error:
            raise FedOrthoError(f"{out} cannot be written: {error.strerror or error}; choose another --out") from error
        finally:
            if path is not None:
                _discard(path)


def tidy(out: Path) -> None:
    """Remove what killed processes left behind when they wrote to `out`, unless another one is writing there now."""
    with suppress(Busy), files.locked(out):
        remove_leftovers(out)


def remove_leftovers(out: Path) -> None:
    """Remove what killed processes left behind when they wrote to `out`, which the caller has files.locked."""
    for left in out.parent.glob(f".{glob.escape(out.name)}.building-*"):
        _discard(left)


def _place_file(source: Path, to: Path) -> None:
    """Give a file another name; one that is taken is refused, also if it was taken just now."""
    to.parent.mkdir(parents=True, exist_ok=True)
    beside = to.with_name(f".{to.name}.{os.getpid()}")
    try:
        if not _link(source, to):
            files.copy_file(source, beside)
            if not _link(beside, to):  # no links here: nobody's file is overwritten, but a crash can leave a part
                with open(to, "xb", opener=partial(os.open, mode=files.PRIVATE)) as stream, beside.open("rb") as copied:
                    shutil.copyfileobj(copied, stream)
                    stream.flush()
                    os.fsync(stream)
    except FileExistsError as error:
        raise FedOrthoError(TAKEN.format(to)) from error
    finally:
        beside.unlink(missing_ok=True)
    files.sync_directory(to.parent)


def _link(source: Path, to: Path) -> bool:
    """Whether a file has another name now, whole and in one step; False: not from here, or not on this file system."""
    try:
        os.link(source, to)
    except FileExistsError:
        raise
    except OSError:
        return False
    return True


def _discard(path: Path) -> None:
    """Remove a building directory, and before it the undo file that it has put in place if the run did not follow."""
    told = path / UNDO_PATH
    if (path / "run").exists() and told.exists():
        undo = Path(told.read_text(encoding="utf-8"))
        if undo.exists() and (undo.samefile(path / UNDO) or files.file_digest(undo) == files.file_digest(path / UNDO)):
            undo.unlink()
        told.unlink()
    shutil.rmtree(path, ignore_errors=True)


def build_derived(
    to: Path, run: Run, model: nn.Module, record: RunRecord, *, patch: Patch | None, ledger: Observation | None
) -> None:
    """Write the files of a run with other weights to a new directory; digest and parent of the record are set here."""
    to.mkdir()
    state = model.cpu().state_dict()
    files.write_tensors(to / "model.safetensors", state)
    for name in ("split.json", "history.json"):
        files.copy_file(run.path / name, to / name)
    number = len(record.requests) - (patch is not None)
    if (rows := read_rows(run.path, run.settings)) is not None:
        last = ForgetRequest.parse(record.requests[-1].request) if record.requests else ForgetRequest()
        rows.without_names(last, record.data.class_names).save(to)
    copy_patches(run, to, number)
    if patch is not None:
        patch.save(to / "patches" / f"{number:04}.safetensors")
    elif (run.path / "clients").is_dir():
        (to / "clients").mkdir()  # simulated clients begin again with the restored model
    if ledger is not None:
        ledger.save(to / "ledger.safetensors")
    edited = replace(record.model, digest=files.tensors_digest(state))
    write_record(to / "run.json", replace(record, model=edited, parent=run.record.model.digest))


def copy_patches(run: Run, to: Path, number: int) -> None:
    """Copy the patches of the first `number` requests of a run."""
    for file in sorted((run.path / "patches").glob("*.safetensors"))[:number]:
        files.copy_file(file, to / "patches" / file.name)
