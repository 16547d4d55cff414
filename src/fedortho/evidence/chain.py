"""The journal's lines in a bundle: entries about the request in full, and of the others only digests.

With the digests of the entries between and behind them, the lines can be followed to the end of the journal: they are
proved to belong to it, and nothing is shown of other requests.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fedortho.errors import FedOrthoError
from fedortho.storage.files import canonical_json
from fedortho.storage.journal import JournalEntry, chained, parse_entry
from fedortho.storage.records import is_digest


@dataclass(frozen=True)
class Chain:
    """The lines of a journal that a bundle has."""

    entries: tuple[JournalEntry, ...] = ()  # in full
    last: int = 0  # number of the last line
    hashes: Mapping[int, str] = field(default_factory=dict)  # of the last lines that follow from each other, by number


def chain_lines(entries: Sequence[JournalEntry], about: Sequence[JournalEntry]) -> bytes:
    """The lines of some entries of a journal, and digests of all others behind the first of them.

    Others that an earlier version wrote are left out: no digest of their content is part of the chain.
    """
    shown, lines = {entry.number for entry in about}, []
    for entry in entries[about[0].number - 1 :] if about else ():
        if entry.number in shown:
            lines.append(entry.line)
        elif entry.schema > 2:
            lines.append(canonical_json({"body": entry.body, "number": entry.number}))
    return "".join(f"{line}\n" for line in lines).encode()


def read_chain(text: bytes) -> Chain:
    """The lines as they were written; ValueError if one was changed or does not follow from the one before."""
    entries: list[JournalEntry] = []
    hashes: dict[int, str] = {}
    last = 0
    for place, line in enumerate(text.splitlines(), start=1):
        try:
            number, entry, digest = _parse(line)
        except (ValueError, RecursionError, FedOrthoError) as error:
            raise ValueError(f"line {place} of journal.jsonl was changed: {error}") from error
        if number <= last:
            raise ValueError(f"line {place} of journal.jsonl is entry {number}, and the line before is entry {last}")
        if number != last + 1 or (entry is not None and entry.schema < 3):
            hashes.clear()  # entries between them are not here, or are chained by their text
        before = hashes.get(last)
        if entry is not None:
            if before is not None and entry.previous != before:
                raise ValueError(f"line {place} of journal.jsonl, entry {number}, does not follow from the line before")
            entries.append(entry)
            hashes[number] = entry.hash
        elif before is not None:
            hashes[number] = chained(before, digest)
        last = number
    return Chain(tuple(entries), last, hashes)


def _parse(line: bytes) -> tuple[int, JournalEntry | None, str]:
    """The number on a line, and its entry or the digest of one."""
    value = json.loads(line)
    if not isinstance(value, dict) or value.keys() != {"body", "number"}:
        entry = parse_entry(line)
        return entry.number, entry, ""
    number, digest = value["number"], value["body"]
    if type(number) is not int or not is_digest(digest):
        raise ValueError(f"it has the number {number!r:.40} and the digest {digest!r:.80}")
    if canonical_json(value).encode() != line:
        raise ValueError("it is not in the form that is written")
    return number, None, digest
