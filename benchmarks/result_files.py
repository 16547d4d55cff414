"""Result files of benchmarks: rows and their origin (command, versions and machine)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

from fedortho.storage.files import locked, read_json, write_json
from fedortho.storage.provenance import Environment, environment
from fedortho.storage.records import from_json, to_json

ResultRow = Mapping[str, Any]


@dataclass(frozen=True)
class Results:
    """A result file: the rows of a benchmark and their origin. `more` has the keys of single benchmarks."""

    schema: ClassVar[int] = 1

    what: str
    command: str
    environment: Environment
    rows: tuple[ResultRow, ...]
    more: Mapping[str, Any] = field(default_factory=dict)  # written beside the others, not below a key of its own


def write_results(path: Path, what: str, command: str, rows: Sequence[ResultRow], **more: Any) -> None:
    """Write the rows of a benchmark with their origin; rewritten after each row, so that no row is lost."""
    value = to_json(Results(what, command, environment(), tuple(rows)))
    del value["more"]
    write_json(path, value | more)


def read_results(path: Path) -> Results:
    """The result file at `path`; any other file is refused by name."""
    value = read_json(path)
    if isinstance(value, dict):
        known = {"schema", *(each.name for each in fields(Results))}
        more = {key: each for key, each in value.items() if key not in known}
        value = {key: each for key, each in value.items() if key in known} | {"more": more}
    return from_json(Results, value, path)


def add_row(
    path: Path, row: ResultRow, key: Sequence[str], order: Callable[[ResultRow], Any], what: str, command: str
) -> None:
    """Add a row to a result file, or replace the row with the same key; safe for several processes at once."""
    with locked(path.with_suffix(".writing"), timeout=60.0):
        rows = read_results(path).rows if path.exists() else ()
        others = [other for other in rows if any(other.get(name) != row[name] for name in key)]
        write_results(path, what, command, sorted([*others, row], key=order))
