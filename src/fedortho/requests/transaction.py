"""A request as a transaction: received, built beside its place, put in place in one step, executed; or refused.

A kill at any point leaves the old state or the new one, and the same call again completes it: what a killed process
left is removed, and a run that is in place is told to the journal if it was not. A request with a ticket, an id, is
served once, however often it is asked for.
"""

import hashlib
import hmac
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedortho.data.request import ForgetRequest
from fedortho.errors import FedOrthoError, first_line
from fedortho.methods.method import ForgetResult, Method
from fedortho.runs.derived import Building, building, remove_leftovers
from fedortho.runs.record import RunRecord, ServedRecord, read_run_record
from fedortho.runs.rows import hash_key
from fedortho.runs.run import Run, open_run
from fedortho.storage.files import locked, read_tensors
from fedortho.storage.journal import append_entry, read_journal
from fedortho.storage.settings import as_mapping


class Unconfirmed(FedOrthoError):
    """A request whose run is written, and whose patch too few clients have confirmed."""

    event = "unconfirmed"  # in the journal


@dataclass(frozen=True)
class Step:
    """One step of serving a request, and how the journal tells of it."""

    event: str = "executed"  # or `hidden`: the run is for use until the request is executed
    is_first: bool = True  # the request is received with it
    details: Mapping[str, str] = field(default_factory=dict)  # a ticket's, or the `out` of the whole request
    accept: Callable[[ForgetResult], None] | None = None  # raises an error where the result is not good enough
    optional: tuple[type[Exception], ...] = ()  # errors without which the request goes on


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
        directory, details = self.run.path.absolute().parent, {**self.details, **(clients or {})}
        before, after = self.run.record.model.digest, done.record.model.digest
        about = (self.event, done.path.name, str(self.request))
        append_entry(directory, *about, before=before, after=after, details=details)
        return done


@contextmanager
def transaction(
    run: Run, request: ForgetRequest, out: Path | None, undo: Path | None, step: Step
) -> Iterator[Transaction | None]:
    """A transaction that writes a run to `out`; None where nothing is written."""
    if out is None:
        yield None
        return
    directory, about = run.path.absolute().parent, (run.path.name, str(request))
    before, details = run.record.model.digest, {"out": relative_out(run, out), **step.details}
    with building(out, undo) as place:
        if step.is_first:
            append_entry(directory, "received", *about, before=before, details=details)
        try:
            yield Transaction(run, request, place, step.event, details)
        except (Exception, KeyboardInterrupt) as error:  # a defect too: what was received has an end
            event = "interrupted" if isinstance(error, KeyboardInterrupt) else getattr(error, "event", "refused")
            is_placed = place.out.exists() and not place.run.exists()
            if not isinstance(error, step.optional) and is_placed == (event == "unconfirmed"):
                told = {**details, "reason": _reason(error)}
                with suppress(OSError):  # the disk may be full, and the error itself says so
                    append_entry(directory, event, *about, before=before, details=told)
            raise


@contextmanager
def journalled(run: Run, request: ForgetRequest, details: Mapping[str, str]) -> Iterator[None]:
    """Tell the journal that a request was received, and of an error in the block; killed, the request is repeated."""
    directory, about, before = run.path.absolute().parent, (run.path.name, str(request)), run.record.model.digest
    append_entry(directory, "received", *about, before=before, details=details)
    try:
        yield
    except Exception as error:
        with suppress(OSError):
            append_entry(directory, "refused", *about, before=before, details={**details, "reason": _reason(error)})
        raise


def _reason(error: BaseException) -> str:
    return str(error) if isinstance(error, FedOrthoError) else f"{type(error).__name__}: {first_line(error)}"


def relative_out(run: Run, out: Path) -> str:
    """`out` as seen from the directory of the run, whose journal names it."""
    return os.path.relpath(out.absolute(), run.path.absolute().parent)


def tell_once(
    run: Run, event: str, name: str, request: str, after: str, details: Mapping[str, Any] | None = None
) -> None:
    """Tell the journal beside a run of a request on it, unless a call that was killed later has told the same."""
    directory, before, out = run.path.absolute().parent, run.record.model.digest, (details or {}).get("out")
    entries = read_journal(directory).entries
    known = {(e.event, e.run, e.request, e.before, e.after, e.details.get("out", out)) for e in entries}
    if (event, name, request, before, after, out) not in known:
        append_entry(directory, event, name, request, before=before, after=after, details=details)


def find_served(
    run: Run, request: ForgetRequest, method: Method, out: Path | None, undo: Path | None, step: Step
) -> Run | None:
    """The run at `out` if it is what these would write; the journal is told of it if a crash came before that."""
    if out is None or not holds_result(run, request, method, out, undo, step.details.get("ticket")):
        return None
    with locked(out):
        remove_leftovers(out)
        done = open_run(out)
        _settle(run, done, step)
        return done


def holds_result(
    run: Run, request: ForgetRequest, method: Method, out: Path, undo: Path | None = None, ticket: str | None = None
) -> bool:
    """Whether `out` is a run that has served this request on this run by this method, and `undo` undoes it."""
    if (last := _last_served(out)) is None:
        return False
    asked = (method.name, as_mapping(method), run.record.model.digest, ticket)
    if (last.method, dict(last.settings), last.model_before, last.ticket) != asked:
        return False
    names = run.record.data.class_names
    if ForgetRequest.parse(last.request).settled(names) != request.settled(names):
        return False
    note = {} if undo is None or not undo.is_file() else read_tensors(undo)[1]
    return undo is None or (note.get("before"), note.get("after")) == (last.model_before, last.model_after)


def _last_served(out: Path) -> ServedRecord | None:
    record = read_run_record(out)
    return record.requests[-1] if isinstance(record, RunRecord) and record.requests else None


def _settle(run: Run, done: Run, step: Step) -> None:
    """Tell the journal of a run that is in place, unless it knows."""
    details = {"out": relative_out(run, done.path), **step.details}
    tell_once(run, step.event, done.path.name, done.record.requests[-1].request, done.record.model.digest, details)


def ticket_details(
    ticket: str, run: Run, request: ForgetRequest, out: Path | None, key: bytes | None = None
) -> dict[str, str]:
    """What the journal notes of a ticket: `out`, and the digest of the request as it is asked.

    Files that a request names may be deleted after it was served, so their rows cannot be compared. With a key of
    hashed ids beside the run the digest is keyed: nobody without it can try out which rows were asked for.
    """
    if out is None:
        raise FedOrthoError(f"the ticket {ticket} needs a directory to write to; give out, and no dry run")
    key = hash_key(run.path) if key is None else key
    asked = str(request.settled(run.record.data.class_names)).encode()
    digest = hmac.digest(key, asked, "sha256") if key else hashlib.sha256(asked).digest()
    return {"ticket": ticket, "out": relative_out(run, out), "asked": digest.hex()}


def find_ticket(ticket: str, run: Run, request: ForgetRequest, out: Path | None) -> Run | None:
    """The run that a ticket led to; None if it was not served, or its run is gone.

    A ticket that was served for another run, request or `out` is refused.
    """
    details, before = ticket_details(ticket, run, request, out), run.record.model.digest
    known = (details, ticket_details(ticket, run, request, out, b""))  # the key may be younger than the entry
    entries = read_journal(run.path.absolute().parent).entries
    entries = tuple(entry for entry in entries if entry.details.get("ticket") == ticket)
    executed = [entry for entry in entries if entry.event == "executed"]
    for entry in executed:
        if {name: entry.details.get(name) for name in details} not in known or entry.before != before:
            what = f"{entry.request} on model {(entry.before or '')[:8]}, written to {entry.details['out']}"
            raise FedOrthoError(f"the ticket {ticket} was served for {what}; give this request another id")
    assert out is not None, "ticket_details has looked"
    last, received = _last_served(out), [entry for entry in entries if entry.details in known]
    if last is None or last.ticket != ticket:
        return None
    if not executed and (not received or last.model_before != before):
        return None
    done = open_run(out)
    if not executed:  # a crash came between the run and the journal
        _settle(run, done, Step(details=received[-1].details))
    return done
