"""An append-only journal of all requests, beside the runs: each entry contains the hash of the one before it.

journal.jsonl   one JSON line per entry
journal.head    number and hash of the last entry; during an append also the hash announced for the new entry
journal.torn    incomplete lines that crashes left behind

The chain shows any change, removal, insertion or reordering of entries; the head shows that the last were removed.
Every event of a request is in the journal of the directory that holds the run it was received for, wherever the new
run was written (`--out`); an undo is received for the run that it undoes.

Whoever can rewrite both files can recompute all hashes from any entry on, or cut the journal and reset the head. So
publish the head from time to time (`evidence/published_head.py`): a journal that no longer has it was rewritten or cut.

Lines of schema 3 chain two digests, that of the entry before and that of the entry's body. A bundle can so prove that
its lines belong to the chain and show of other entries only the digest of the body, which a salt makes unguessable.
"""

import hashlib
import json
import logging
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

from filelock import FileLock, Timeout

from fedortho.errors import BadCheckpoint, BadRecord, FedOrthoError, first_line, unknown
from fedortho.storage.files import canonical_json, read_json, read_limited, sync_directory, write_text
from fedortho.storage.records import from_json, to_json

logger = logging.getLogger(__name__)
EVENTS = {
    "received": "the request arrived; details have the directory that the new run will take",
    "hidden": "a run that no longer predicts the forget set was written, for use until the request is executed",
    "executed": "a run that has forgotten was written",
    "unconfirmed": "a run that has forgotten was written, but too few clients took it; details have the reason",
    "judged": "the run was judged; details have the outcome of the audits",
    "verified": "the run was judged, and every audit was run against a reference model and passed",
    "refused": "nothing was done; details have the reason",
    "interrupted": "the user stopped it (Ctrl-C); what was hidden before stays, and the same request goes on",
    "unmeasured": "nothing that only the forget set taught could be measured, so nothing was done; as details say",
    "undone": "the forgotten weights were restored from an undo file",
    "begun": "a journal begins although runs beside it have served requests; details name the runs",
}  # journals from before `judged` existed have `verified` for every outcome: only with `passes` it means this
START = "0" * 64  # `previous` of the first entry
NOTICE = 10.0  # seconds after which a writer that waits for others says so, and says so again
MOST_JOURNAL = 1 << 30  # bytes
SCHEMA = 3  # of new lines; older lines keep their form (those of schema 1 have no such key), since hashes cover it


class BadJournal(FedOrthoError):
    """A journal that was changed after it was written, or that cannot be read."""


@dataclass(frozen=True)
class JournalEntry:
    """One event of a request."""

    number: int  # from 1
    time: str  # UTC
    event: str
    run: str  # the name of its directory
    request: str
    before: str | None  # digests of the model, where known
    after: str | None
    details: Mapping[str, Any]
    previous: str  # hash of the entry before; up to schema 2 SHA-256 of the line before
    hash: str = ""  # SHA-256 of `previous` and of the body, which is all the rest; up to schema 2 of all the rest
    schema: int = SCHEMA
    salt: str = ""  # random, from schema 3 on

    @property
    def line(self) -> str:
        """The entry as it is written, whichever schema it has."""
        later = {key for key, since in (("schema", 2), ("salt", 3)) if self.schema < since}
        return canonical_json({key: value for key, value in to_json(self).items() if key not in later})

    @property
    def body(self) -> str:
        return _body(json.loads(self.line))

    def sealed(self) -> "JournalEntry":
        return replace(self, hash=_hash(json.loads(self.line)))


@dataclass(frozen=True)
class Head:
    """The last entry's number and hash; `announced` is the hash of an entry whose append has begun."""

    schema: ClassVar[int] = 2

    number: int = 0
    hash: str = START
    announced: str | None = None


@dataclass(frozen=True)
class Journal:
    """A journal whose chain and head were checked."""

    entries: tuple[JournalEntry, ...] = ()
    head: Head = field(default_factory=Head)
    torn: bytes = b""  # an incomplete line that a crash left after the last entry; the next append moves it away

    @property
    def last(self) -> Head:
        """The last entry's number and hash, to be noted elsewhere."""
        return Head(self.entries[-1].number, self.entries[-1].hash) if self.entries else Head()

    @property
    def backward(self) -> list[JournalEntry]:
        """The entries whose time is before that of the entry before them: a clock ran backwards."""
        return [entry for before, entry in pairwise(self.entries) if entry.time < before.time]


def append_entry(
    directory: Path,
    event: str,
    run: str,
    request: str,
    *,
    before: str | None = None,
    after: str | None = None,
    details: Mapping[str, Any] | None = None,
) -> JournalEntry:
    """Add an entry to the journal of a directory of runs; it is on disk when this returns.

    Waits for other writers as long as it takes. A broken chain is not extended. Where runs of the directory have served
    requests and there is no journal, the new one begins with an entry that says so.
    """
    if event not in EVENTS:
        raise unknown("event", event, EVENTS)
    with _locked(directory):
        journal = _recover(directory, read_journal(directory))
        if not journal.entries and (served := served_beside(directory)):
            logger.warning("a journal begins in %s although runs there have served requests: %s", directory, served)
            begun = JournalEntry(0, "", "begun", "", "", None, None, {"runs": served}, "")
            journal = Journal((_add(directory, journal, begun),))
        entry = JournalEntry(0, "", event, run, request, before, after, dict(details or {}), "")
        return _add(directory, journal, entry)


def _add(directory: Path, journal: Journal, entry: JournalEntry) -> JournalEntry:
    """Write an entry behind the last one, with its number, time and hashes.

    The head first announces the entry's hash, then the line is written, then the head names the new entry: after a
    crash at any point the next append can tell which of them happened.
    """
    now, last = datetime.now(UTC).isoformat(timespec="milliseconds"), journal.last
    if journal.entries and now < (latest := journal.entries[-1].time):
        logger.warning("the clock ran backwards: entry %d in %s is of %s", last.number, directory, latest)
    told = replace(entry, number=last.number + 1, time=now, previous=last.hash, salt=secrets.token_hex(16))
    entry = told.sealed()
    _write_head(directory, replace(last, announced=entry.hash))
    _append(directory / "journal.jsonl", f"{entry.line}\n".encode())
    _write_head(directory, Head(entry.number, entry.hash))
    return entry


def check_journal(directory: Path, noted: Head | str = "") -> Journal:
    """The journal of a directory; a broken chain is an error that names the entry.

    `noted` is a head that was published earlier, or its hash: the entry must still be there.
    """
    number, known = (noted.number, noted.hash) if isinstance(noted, Head) else (0, noted)
    path = directory / "journal.jsonl"
    if not path.exists() and not (directory / "journal.head").exists():
        why = "; give the directory that holds the runs"
        if number:
            why = f", but its entry {number} was published: it was removed"
        elif served := served_beside(directory):
            some = f", but runs there have served requests ({', '.join(served[:5])})"
            why = f"{some}: it was removed, or it is in the directory of the run that they were derived from"
        raise BadJournal(f"there is no journal in {directory}{why}")
    journal = read_journal(directory)
    entries = f"{len(journal.entries)} entries"
    if number > len(journal.entries):
        raise BadJournal(f"{path} has {entries}, but entry {number} was published: the last were removed")
    if number and journal.entries[number - 1].hash != known:
        raise BadJournal(f"{path}: entry {number} is not the published one: it or one before it was rewritten")
    if known and not number and known not in {entry.hash for entry in journal.entries}:
        why = "the journal was rewritten or cut, or the hash is of another one"
        raise BadJournal(f"{path}: none of its {entries} has the noted hash {known[:16]}: {why}")
    return journal


def served_beside(directory: Path) -> list[str]:
    """The names of the runs in a directory that have served requests."""
    found = []
    for file in sorted(directory.glob("*/run.json")):
        with suppress(BadCheckpoint):  # what is no record is no evidence of a journal
            value = read_json(file)
            found += [file.parent.name] if isinstance(value, dict) and value.get("requests") else []
    return found


def read_journal(directory: Path) -> Journal:
    """The journal of a directory, empty if there is none; one that was changed is refused.

    Needs no lock: if the head changes while the lines are read, the journal is as it was at the head's first reading.
    """
    path, head_path = directory / "journal.jsonl", directory / "journal.head"
    first, text = _read(head_path), _read(path)
    if (last := _read(head_path)) is not None and first is None:
        return Journal()  # it began just now
    head = _parse_head(head_path, first, text is not None)
    if last != first:
        head, text = _as_it_was(head, text or b"")
    return _examine(path, text or b"", head)


def _as_it_was(head: Head, text: bytes) -> tuple[Head, bytes]:
    """A head that was replaced meanwhile, and the lines up to it; with the one that it announced, if that is whole."""
    lines = text.splitlines(keepends=True)
    following = lines[head.number] if len(lines) > head.number else b""
    if head.announced and following.endswith(b"\n") and head.announced.encode() in following:
        return head, b"".join(lines[: head.number + 1])
    return replace(head, announced=None), b"".join(lines[: head.number])


def parse_entry(line: bytes) -> JournalEntry:
    """The entry on a line; ValueError if its text was changed, BadJournal if this version cannot read it."""
    value = json.loads(line)
    if not isinstance(value, dict):
        raise ValueError("it is not an entry")
    if canonical_json(value).encode() != line or value.get("hash") != _hash(value):
        raise ValueError("its hash does not match its text")
    schema = value.setdefault("schema", 1)
    if type(schema) is not int or not 1 <= schema <= SCHEMA:
        expected = f"expected 1 to {SCHEMA}; read it with a newer fedortho"
        raise BadJournal(f"a journal entry has schema {schema!r}; {expected}")
    try:
        return from_json(JournalEntry, value, "it")
    except BadRecord as error:
        raise ValueError(str(error)) from error


def chained(previous: str, body: str) -> str:
    """The hash of an entry, from that of the entry before and the digest of its body."""
    return _digest(canonical_json([previous, body]))


def _hash(value: Mapping[str, Any]) -> str:
    if type(schema := value.get("schema")) is int and schema > 2:
        return chained(str(value.get("previous")), _body(value))
    return _digest(canonical_json({key: each for key, each in value.items() if key != "hash"}))


def _body(value: Mapping[str, Any]) -> str:
    return _digest(canonical_json({key: each for key, each in value.items() if key not in ("hash", "previous")}))


def _examine(path: Path, text: bytes, head: Head) -> Journal:
    *lines, rest = text.split(b"\n")
    entries: list[JournalEntry] = []
    hashed = line_digest = START  # of the entry before, and of its line
    for number, line in enumerate(lines, start=1):
        try:
            entry = parse_entry(line)
        except (ValueError, RecursionError) as error:
            if number == len(lines) and not rest and head.announced and head.number == number - 1:
                rest = line + b"\n"  # a crash may leave other bytes that end in a newline
                break
            raise BadJournal(f"{path}: entry {number} was changed: {first_line(error)}") from error
        if entry.number > number:
            raise BadJournal(f"{path}: entry {number} is missing: entry {entry.number} stands in its place")
        if entry.number < number:
            raise BadJournal(f"{path}: line {number} repeats entry {entry.number}: inserted, or out of order")
        if entry.previous != (hashed if entry.schema > 2 else line_digest):
            raise BadJournal(f"{path}: entry {number} does not follow from entry {number - 1}: one was changed")
        hashed, line_digest = entry.hash, _digest(line.decode())
        entries.append(entry)
    if len(entries) < head.number:
        raise BadJournal(f"{path}: entry {len(entries) + 1} is missing: the head names {head.number} entries")
    if head.number and entries[head.number - 1].hash != head.hash:
        raise BadJournal(f"{path}: entry {head.number} was changed: the head has another hash of it")
    for entry in entries[head.number :]:  # the head's entry is the last, or one further that was announced
        if entry.number > head.number + 1 or entry.hash != head.announced:
            raise BadJournal(f"{path}: entry {entry.number} was inserted: the head ends at entry {head.number}")
    if rest and not (head.announced and len(entries) == head.number):
        raise BadJournal(f"{path}: entry {len(entries) + 1} is an incomplete line, and no append was under way")
    return Journal(tuple(entries), head, rest)


def _recover(directory: Path, journal: Journal) -> Journal:
    """Move an incomplete last line to journal.torn, so that the next entry begins a new line."""
    path, number = directory / "journal.jsonl", journal.last.number
    if journal.torn:
        _append(directory / "journal.torn", journal.torn.rstrip(b"\n") + b"\n")
        os.truncate(path, path.stat().st_size - len(journal.torn))
        logger.warning("%s ended in an incomplete line after entry %d; moved to journal.torn", path, number)
    elif number > journal.head.number:
        logger.info("entry %d was written just before a crash; the head is updated", number)
    return replace(journal, torn=b"")


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Exclude other writers, however long they take; the lock is beside the journal, whatever FEDORTHO_STATE is."""
    started, lock = time.monotonic(), FileLock(directory / ".journal.lock")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        while not lock.is_locked:
            try:
                lock.acquire(timeout=NOTICE)
            except Timeout:
                seconds = time.monotonic() - started
                logger.warning("waiting for the journal in %s, which others write: %.0f s so far", directory, seconds)
        try:
            yield
        finally:
            lock.release()
    except OSError as error:
        raise BadJournal(f"the journal in {directory} cannot be written: {error.strerror or error}") from error


def _append(path: Path, text: bytes) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        while text:
            text = text[os.write(handle, text) :]
        os.fsync(handle)
    finally:
        os.close(handle)


def _write_head(directory: Path, head: Head) -> None:
    write_text(directory / "journal.head", canonical_json(to_json(head)) + "\n")
    sync_directory(directory)  # otherwise a power loss could keep the line and lose its announcement


def _parse_head(path: Path, text: bytes | None, has_journal: bool) -> Head:
    if text is None:
        if has_journal:
            raise BadJournal(f"{path} is missing: without it removed last entries cannot be found")
        return Head()
    try:
        value = json.loads(text)
        if canonical_json(value).encode() + b"\n" != text:
            raise ValueError("its text is not in the form that is written")
        return from_json(Head, {"schema": Head.schema} | value, "it")  # heads of schema 1 have no schema key
    except (BadRecord, TypeError, ValueError, RecursionError) as error:
        raise BadJournal(f"{path} was changed: {first_line(error)}") from error


def _read(path: Path) -> bytes | None:
    return read_limited(path, MOST_JOURNAL, BadJournal) if os.path.lexists(path) else None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
