"""An append-only record of every request, beside the runs: each entry is chained to the one before it by hashes.

journal.jsonl   one JSON line per entry
journal.head    number and hash of the last entry, and while one is being appended the hash announced for it
journal.torn    half lines that crashes left behind

The chain shows any change, removal, insertion or reordering of entries; the head shows a tail that was cut off.
All that becomes of a request stands in the journal of the directory that holds the run it was asked of, wherever the
new run was written (`--out`); an undo is asked of the run that it undoes.

It holds against accidents and against whoever edits the journal alone. Whoever can rewrite both files can recompute
all hashes from any entry on, or cut the tail and set the head back, and nothing here would show it. So note the
head's hash elsewhere from time to time (`fedortho journal check` prints it; mail it, print it, have it signed): a
journal that no longer contains a noted hash is not the one it was noted from.
"""

import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from fedortho.errors import Busy, FedOrthoError, first_line, unknown
from fedortho.storage.files import canonical_json, write_text

logger = logging.getLogger(__name__)
EVENTS = {
    "received": "somebody asked",
    "executed": "a run was written that has forgotten",
    "judged": "it was measured; details tell what the audits came to",
    "verified": "it was judged, and every audit was run against a retrained model and passed",
    "refused": "nothing was done; details tell why",
    "undone": "what was forgotten was restored from an undo file",
}  # before there was judged, verified was written whatever the audits came to: only with `passes` it means this
START = "0" * 64  # what the first entry follows
PATIENCE = 30.0  # seconds that a writer waits for others


class BadJournal(FedOrthoError):
    """A journal that is not as it was written, or that cannot be read."""


@dataclass(frozen=True)
class JournalEntry:
    """What happened to a request, and when."""

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

    @property
    def line(self) -> str:
        return canonical_json(asdict(self))

    def sealed(self) -> "JournalEntry":
        body = {name: value for name, value in asdict(self).items() if name != "hash"}
        return replace(self, hash=_digest(canonical_json(body)))


@dataclass(frozen=True)
class Head:
    """Where the journal ends; `announced` is the hash of an entry whose append has begun."""

    number: int = 0
    hash: str = START
    announced: str | None = None


@dataclass(frozen=True)
class Journal:
    """A journal that was read and found whole."""

    entries: tuple[JournalEntry, ...] = ()
    head: Head = field(default_factory=Head)
    torn: bytes = b""  # what a crash left after the last entry; the next append moves it away

    @property
    def last(self) -> Head:
        """The last entry's number and hash: what to note elsewhere."""
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
    """Add an entry to the journal of a directory of runs; on disk when this returns. A broken chain is not extended.

    The head first announces the entry's hash, then the line is written, then the head moves on: after a crash at any
    point the next append finds out which of them happened.
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
    """The journal, or an error that names the entry where the chain breaks.

    `expected_head` is a hash noted earlier: the entry that has it must still be there.
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
    """The journal of a directory, empty if there is none; one that was tampered with is refused.

    Writers need not be kept out: the head is read before and after, until both are the same.
    """
    path = directory / "journal.jsonl"
    for _ in range(1000):
        head = _read(directory / "journal.head")
        text = _read(path)
        if _read(directory / "journal.head") == head:
            return _examine(path, text or b"", _parse_head(directory / "journal.head", head, text is not None))
    raise Busy(f"{path} is being written without a pause; check again later, or check a copy")


def parse_entry(line: bytes) -> JournalEntry:
    """The entry on a line; ValueError if it is not exactly as it was written."""
    value = json.loads(line)
    if not isinstance(value, dict) or value.keys() != {each.name for each in fields(JournalEntry)}:
        raise ValueError("it is no entry")
    if type(value["number"]) is not int:
        raise ValueError("its number is none")
    entry = JournalEntry(**value)
    if entry.line.encode() != line or entry.sealed() != entry:
        raise ValueError("its hash is not that of what it says")
    return entry


def _examine(path: Path, text: bytes, head: Head) -> Journal:
    *lines, rest = text.split(b"\n")
    entries: list[JournalEntry] = []
    previous = START
    for number, line in enumerate(lines, start=1):
        try:
            entry = parse_entry(line)
        except (ValueError, RecursionError) as error:
            if number == len(lines) and not rest and head.announced and head.number == number - 1:
                rest = line + b"\n"  # a crash may leave a whole line of something else
                break
            raise BadJournal(f"{path}: entry {number} was changed: {first_line(error)}") from error
        if entry.number != number:
            raise BadJournal(_misplaced(path, number, entry.number))
        if entry.previous != previous:
            raise BadJournal(f"{path}: entry {number} does not follow from entry {number - 1}: one was changed")
        previous = _digest(line.decode())
        entries.append(entry)
    _compare(path, entries, head)
    if rest and not (head.announced and len(entries) == head.number):
        raise BadJournal(f"{path}: entry {len(entries) + 1} is half a line, and no append was under way")
    return Journal(tuple(entries), head, rest)


def _misplaced(path: Path, number: int, found: int) -> str:
    if found > number:
        return f"{path}: entry {number} is missing: entry {found} stands in its place"
    return f"{path}: line {number} repeats entry {found}: inserted, or out of order"


def _compare(path: Path, entries: list[JournalEntry], head: Head) -> None:
    """Whether the chain ends where the head says, or one further if that one was announced."""
    if len(entries) < head.number:
        raise BadJournal(f"{path}: entry {len(entries) + 1} is missing: the head tells of {head.number} entries")
    if head.number and entries[head.number - 1].hash != head.hash:
        raise BadJournal(f"{path}: entry {head.number} was changed: the head knows it by another hash")
    for entry in entries[head.number :]:
        if entry.number > head.number + 1 or entry.hash != head.announced:
            raise BadJournal(f"{path}: entry {entry.number} was inserted: the head ends at entry {head.number}")


def _recover(directory: Path, journal: Journal) -> Journal:
    """Move away what a crash left, so that the next line begins on a line of its own."""
    if journal.torn:
        path = directory / "journal.jsonl"
        _append(directory / "journal.torn", journal.torn.rstrip(b"\n") + b"\n")
        os.truncate(path, path.stat().st_size - len(journal.torn))
        logger.warning("%s ended in half a line after entry %d; moved to journal.torn", path, len(journal.entries))
    elif journal.last.number > journal.head.number:
        logger.info("entry %d was written just before a crash; the head now knows it", journal.last.number)
    return replace(journal, torn=b"")


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Keep other writers out, also those with another temporary directory: the lock lies beside the journal."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with FileLock(directory / ".journal.lock", timeout=PATIENCE):
            yield
    except Timeout as error:
        raise Busy(f"others have been writing to the journal in {directory} for {PATIENCE:g} s; try again") from error
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
    write_text(directory / "journal.head", canonical_json(asdict(head)) + "\n")
    with suppress(OSError):  # not every system can open a directory
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)  # or the line could outlive a loss of power that its announcement did not
        finally:
            os.close(handle)


def _parse_head(path: Path, text: bytes | None, has_journal: bool) -> Head:
    if text is None:
        if has_journal:
            raise BadJournal(f"{path} is missing: without it a removed tail cannot be seen")
        return Head()
    try:
        head = Head(**json.loads(text))
        if canonical_json(asdict(head)).encode() + b"\n" != text or type(head.number) is not int or head.number < 0:
            raise ValueError("it is not as it was written")
    except (TypeError, ValueError, RecursionError) as error:
        raise BadJournal(f"{path} was changed: {first_line(error)}") from error
    return head


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BadJournal(f"{path} cannot be read: {error.strerror}") from error


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
