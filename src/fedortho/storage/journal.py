"""An append-only journal of all requests, beside the runs: each entry contains the hash of the one before it.

journal.jsonl   one JSON line per entry
journal.head    number and hash of the last entry; during an append also the hash announced for the new entry
journal.torn    incomplete lines that crashes left behind

The chain shows any change, removal, insertion or reordering of entries; the head shows that the last entries were
removed. Every event of a request is in the journal of the directory that holds the run it was received for, wherever
the new run was written (`--out`); an undo is received for the run that it undoes.

This protects against accidents and against an edit of the journal alone. Whoever can rewrite both files can recompute
all hashes from any entry on, or remove the last entries and reset the head, and nothing here would show it. So note the
head's hash elsewhere from time to time (`fedortho journal check` prints it; mail it, print it, have it signed): a
journal that no longer contains a noted hash was rewritten.
"""

import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar

from filelock import FileLock, Timeout

from fedortho.errors import BadRecord, Busy, FedOrthoError, first_line, unknown
from fedortho.storage.files import canonical_json, sync_directory, write_text
from fedortho.storage.records import from_json, to_json

logger = logging.getLogger(__name__)
EVENTS = {
    "received": "the request arrived; details have the directory that the new run will take",
    "hidden": "a run that no longer predicts the forget set was written, for use until the request is executed",
    "executed": "a run that has forgotten was written",
    "judged": "the run was judged; details have the outcome of the audits",
    "verified": "the run was judged, and every audit was run against a reference model and passed",
    "refused": "nothing was done; details have the reason",
    "undone": "the forgotten weights were restored from an undo file",
}  # journals from before `judged` existed have `verified` for every outcome: only with `passes` it means this
START = "0" * 64  # `previous` of the first entry
PATIENCE = 30.0  # seconds that a writer waits for others
SCHEMA = 2  # of new lines; lines of schema 1 have no schema key and keep their form, since hashes cover the text


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
    previous: str  # SHA-256 of the line before
    hash: str = ""  # SHA-256 of this entry without its hash
    schema: int = SCHEMA

    @property
    def line(self) -> str:
        """The entry as it is written, whichever schema it has."""
        return canonical_json({key: value for key, value in to_json(self).items() if key != "schema" or value > 1})

    def sealed(self) -> "JournalEntry":
        """The entry with its hash."""
        return replace(self, hash=_hash(json.loads(self.line)))


@dataclass(frozen=True)
class Head:
    """The last entry's number and hash; `announced` is the hash of an entry whose append has begun."""

    schema: ClassVar[int] = SCHEMA

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

    A broken chain is not extended. The head first announces the entry's hash, then the line is written, then the head
    names the new entry: after a crash at any point the next append can tell which of them happened.
    """
    if event not in EVENTS:
        raise unknown("event", event, EVENTS)
    with _locked(directory):
        journal = _recover(directory, read_journal(directory))
        previous = _digest(journal.entries[-1].line) if journal.entries else START
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        number = len(journal.entries) + 1
        entry = JournalEntry(number, now, event, run, request, before, after, dict(details or {}), previous).sealed()
        _write_head(directory, replace(journal.last, announced=entry.hash))
        _append(directory / "journal.jsonl", f"{entry.line}\n".encode())
        _write_head(directory, Head(entry.number, entry.hash))
    return entry


def check_journal(directory: Path, expected_head: str = "") -> Journal:
    """The journal of a directory; a broken chain is an error that names the entry.

    `expected_head` is a hash that was noted earlier: an entry must still have it.
    """
    if not (directory / "journal.jsonl").exists() and not (directory / "journal.head").exists():
        raise BadJournal(f"there is no journal in {directory}; give the directory that holds the runs")
    journal = read_journal(directory)
    if expected_head and expected_head not in {entry.hash for entry in journal.entries}:
        raise BadJournal(
            f"{directory / 'journal.jsonl'}: none of its {len(journal.entries)} entries has the noted hash "
            f"{expected_head[:16]}: the journal was rewritten or cut, or the hash is of another one"
        )
    return journal


def read_journal(directory: Path) -> Journal:
    """The journal of a directory, empty if there is none; one that was changed is refused.

    Needs no lock: the head is read before and after the lines, until both readings are equal.
    """
    path = directory / "journal.jsonl"
    for _ in range(1000):
        head = _read(directory / "journal.head")
        text = _read(path)
        if _read(directory / "journal.head") == head:
            return _examine(path, text or b"", _parse_head(directory / "journal.head", head, text is not None))
    raise Busy(f"{path} is being written without a pause; check again later, or check a copy")


def parse_entry(line: bytes) -> JournalEntry:
    """The entry on a line; ValueError if its text was changed, BadJournal if this version cannot read it."""
    value = json.loads(line)
    if not isinstance(value, dict):
        raise ValueError("it is not an entry")
    if canonical_json(value).encode() != line or value.get("hash") != _hash(value):
        raise ValueError("its hash does not match its text")
    schema = value.setdefault("schema", 1)
    if type(schema) is not int or schema > SCHEMA:
        raise BadJournal(
            f"a journal entry has schema {schema!r}; expected 1 to {SCHEMA}; read it with a newer fedortho"
        )
    try:
        return from_json(JournalEntry, value, "it")
    except BadRecord as error:
        raise ValueError(str(error)) from error


def _hash(value: Mapping[str, Any]) -> str:
    return _digest(canonical_json({key: each for key, each in value.items() if key != "hash"}))


def _examine(path: Path, text: bytes, head: Head) -> Journal:
    *lines, rest = text.split(b"\n")
    entries: list[JournalEntry] = []
    previous = START
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
        if entry.previous != previous:
            raise BadJournal(f"{path}: entry {number} does not follow from entry {number - 1}: one was changed")
        previous = _digest(line.decode())
        entries.append(entry)
    _compare(path, entries, head)
    if rest and not (head.announced and len(entries) == head.number):
        raise BadJournal(f"{path}: entry {len(entries) + 1} is an incomplete line, and no append was under way")
    return Journal(tuple(entries), head, rest)


def _compare(path: Path, entries: list[JournalEntry], head: Head) -> None:
    """Refuse a chain that does not end at the head's entry, or one further if that one was announced."""
    if len(entries) < head.number:
        raise BadJournal(f"{path}: entry {len(entries) + 1} is missing: the head names {head.number} entries")
    if head.number and entries[head.number - 1].hash != head.hash:
        raise BadJournal(f"{path}: entry {head.number} was changed: the head has another hash of it")
    for entry in entries[head.number :]:
        if entry.number > head.number + 1 or entry.hash != head.announced:
            raise BadJournal(f"{path}: entry {entry.number} was inserted: the head ends at entry {head.number}")


def _recover(directory: Path, journal: Journal) -> Journal:
    """Move an incomplete last line to journal.torn, so that the next entry begins a new line."""
    if journal.torn:
        path = directory / "journal.jsonl"
        _append(directory / "journal.torn", journal.torn.rstrip(b"\n") + b"\n")
        os.truncate(path, path.stat().st_size - len(journal.torn))
        logger.warning(
            "%s ended in an incomplete line after entry %d; moved to journal.torn", path, len(journal.entries)
        )
    elif journal.last.number > journal.head.number:
        logger.info("entry %d was written just before a crash; the head is updated", journal.last.number)
    return replace(journal, torn=b"")


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Exclude other writers; the lock file is beside the journal, so it works for any temporary directory."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with FileLock(directory / ".journal.lock", timeout=PATIENCE):
            yield
    except Timeout as error:
        raise Busy(f"the journal in {directory} is locked by others for {PATIENCE:g} s; try again") from error
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
        return from_json(Head, {"schema": SCHEMA} | value, "it")  # heads of schema 1 have no schema key
    except (BadRecord, TypeError, ValueError, RecursionError) as error:
        raise BadJournal(f"{path} was changed: {first_line(error)}") from error


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BadJournal(f"{path} cannot be read: {error.strerror}") from error


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
