"""A request as a transaction: received, built beside its place, put in place in one step, executed; or refused.

A kill at any point leaves the old state or the new one, and the same call again completes it: what a killed process
left is removed, and a run that is in place is told to the journal if it was not.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from fedortho.data.request import ForgetRequest
from fedortho.errors import FedOrthoError, first_line
from fedortho.methods.method import ForgetResult, Method
from fedortho.runs.derived import Building, building, remove_leftovers
from fedortho.runs.record import RunRecord, ServedRecord, read_run_record
from fedortho.runs.run import Run, open_run
from fedortho.storage.files import locked, read_tensors
from fedortho.storage.journal import append_entry, read_journal
from fedortho.storage.settings import as_mapping


class Unconfirmed(FedOrthoError):
    """A request whose run is written, and whose patch too few clients have confirmed."""


@dataclass(frozen=True)
class Step:
    """One step of serving a request, and how the journal tells of it."""

    event: str = "executed"  # or `hidden`: the run is for use until the request is executed
    is_first: bool = True  # the request is received with it
    details: Mapping[str, str] = field(default_factory=dict)  # a ticket's, or the `out` of the whole request
    accept: Callable[[ForgetResult], None] | None = None  # raises an error where the result is not good enough


@dataclass(frozen=True)
class Transaction:
    """The place in which the result of a request is built, and where it goes."""

    run: Run
    request: ForgetRequest
    place: Building
    event: str
    details: Mapping[str, str]

    def commit(self, clients: Mapping[str, str] | None = None) -> Run:
        """Put the run in place and tell the journal, of a federation with who took part."""
        return self.tell(self.place.place(), clients)

    def tell(self, done: Run, clients: Mapping[str, str] | None = None) -> Run:
        """Tell the journal of a run that is in place."""
        _tell(self.run, self.event, done, str(self.request), {**self.details, **(clients or {})})
        return done


@contextmanager
def transaction(
    run: Run, request: ForgetRequest, out: Path | None, undo: Path | None, step: Step
) -> Iterator[Transaction | None]:
    """A transaction that writes a run to `out`; None where nothing is written."""
    if out is None:
        yield None
        return
    directory, before = run.path.absolute().parent, run.record.model.digest
    details = {"out": relative_out(run, out), **step.details}
    with building(out, undo) as place:
        if step.is_first:
            append_entry(directory, "received", run.path.name, str(request), before=before, details=details)
        try:
            yield Transaction(run, request, place, step.event, details)
        except (Exception, KeyboardInterrupt) as error:  # a defect too: what was received has an end
            event = "unconfirmed" if isinstance(error, Unconfirmed) else "refused"
            if step.event == "executed" and _is_placed(place) == (event == "unconfirmed"):
                told = {**details, "reason": _reason(error)}
                with suppress(OSError):  # the disk may be full, and the error itself says so
                    append_entry(directory, event, run.path.name, str(request), before=before, details=told)
            raise


def _reason(error: BaseException) -> str:
    return str(error) if isinstance(error, FedOrthoError) else f"{type(error).__name__}: {first_line(error)}"


def _is_placed(place: Building) -> bool:
    return place.out.exists() and not place.run.exists()


def relative_out(run: Run, out: Path) -> str:
    """`out` as seen from the directory of the run, whose journal names it."""
    return os.path.relpath(out.absolute(), run.path.absolute().parent)


def find_served(
    run: Run, request: ForgetRequest, method: Method, out: Path | None, undo: Path | None, step: Step
) -> Run | None:
    """The run at `out` if it is what these would write; the journal is told of it if a crash came before that."""
    if out is None or not holds_result(run, request, method, out, undo, step.details.get("ticket")):
        return None
    with locked(out):
        remove_leftovers(out)
        done = open_run(out)
        settle(run, done, step)
        return done


def holds_result(
    run: Run, request: ForgetRequest, method: Method, out: Path, undo: Path | None = None, ticket: str | None = None
) -> bool:
    """Whether `out` is a run that has served this request on this run by this method, and `undo` undoes it."""
    record = read_run_record(out)
    if not isinstance(record, RunRecord) or not record.requests:
        return False
    last, asked = record.requests[-1], (str(request), method.name, as_mapping(method), run.record.model.digest, ticket)
    if (last.request, last.method, dict(last.settings), last.model_before, last.ticket) != asked:
        return False
    return undo is None or _undoes(undo, last)


def _undoes(undo: Path, served: ServedRecord) -> bool:
    if not undo.is_file():
        return False
    note = read_tensors(undo)[1]
    return (note.get("before"), note.get("after")) == (served.model_before, served.model_after)


def settle(run: Run, done: Run, step: Step) -> None:
    """Tell the journal of a run that is in place, unless it knows."""
    details = {"out": relative_out(run, done.path), **step.details}
    known = (step.event, done.path.name, done.record.model.digest, details["out"])
    for entry in read_journal(run.path.absolute().parent).entries:
        if (entry.event, entry.run, entry.after, entry.details.get("out", details["out"])) == known:
            return
    _tell(run, step.event, done, done.record.requests[-1].request, details)


def _tell(run: Run, event: str, done: Run, request: str, details: Mapping[str, str]) -> None:
    before, after = run.record.model.digest, done.record.model.digest
    append_entry(
        run.path.absolute().parent, event, done.path.name, request, before=before, after=after, details=details
    )
