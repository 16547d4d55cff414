"""The runs of a directory side by side, read from run.json and verdict.json."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from fedortho.audits.verdict import read_verdict
from fedortho.errors import BadData, unknown
from fedortho.requests.references import finished_runs
from fedortho.runs.run import Run
from fedortho.runs.settings import FederateSettings

COLUMNS = ("run", "what", "forget", "retain", "test", "probe", "failed", "seconds")
SORTED_BY = ("run", "method", "forget", "retain", "test", "probe", "seconds")


@dataclass(frozen=True)
class RunRow:
    """A run: its training, or the last request that it has served."""

    run: str
    data: str
    model: str
    seed: int
    request: str  # empty: a training
    method: str
    forget: float | None = None
    retain: float | None = None
    test: float | None = None
    probe: float | None = None  # recall of a linear probe, from the verdict
    audits: str = ""  # label of the verdict; empty: not judged
    failed: str | None = None  # audits that failed, and retention; None: none has a result
    seconds: float | None = None

    def words(self) -> tuple[str, ...]:
        what = f"{self.method} {self.request}".strip() or "trained"
        numbers = (self.forget, self.retain, self.test, self.probe)
        shares = ("–" if share is None else f"{share:.1%}" for share in numbers)
        seconds = "–" if self.seconds is None else f"{self.seconds:.1f}"
        failed = "–" if self.failed is None else self.failed or "none"
        return (self.run, what, *shares, failed, seconds)


def list_runs(
    directory: Path | str, *, data: str = "", model: str = "", request: str = "", method: str = "", sort: str = ""
) -> list[RunRow]:
    """A row for each finished run below a directory, named by its path from there; a damaged run is an error.

    Filters keep the rows that contain the given text. `sort` names a column; rows without a value come last.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise BadData(f"{directory} is no directory; give one that holds runs")
    if (directory / "run.json").exists():
        raise BadData(f"{directory} is a run; give the directory that holds it, {directory.absolute().parent}")
    if sort and sort not in SORTED_BY:
        raise unknown("column", sort, SORTED_BY)
    rows = [_row(run, run.path.relative_to(directory).as_posix()) for run in _runs_below(directory)]
    if not rows:
        raise BadData(f"{directory} holds no finished run; make one with fedortho train --out {directory / 'first'}")
    filters = {"data": data, "model": model, "request": request, "method": method}
    rows = [row for row in rows if all(text.lower() in getattr(row, key).lower() for key, text in filters.items())]
    if not rows:
        given = ", ".join(f"{key} {text}" for key, text in filters.items() if text)
        raise BadData(f"no run in {directory} fits {given}; leave a filter out")
    return sorted(rows, key=lambda row: _sort_key(row, sort)) if sort else rows


def _sort_key(row: RunRow, column: str) -> tuple[bool, str | float]:
    value = getattr(row, column)
    return value is None, 0.0 if value is None else value


def _runs_below(directory: Path) -> Iterator[Run]:
    """The runs of a directory, then those of directories in it, such as of comparisons and references."""
    yield from finished_runs(directory, strict=True)
    for inner in sorted(directory.iterdir()):
        if inner.is_dir() and not inner.name.startswith(".") and not (inner / "run.json").exists():
            yield from _runs_below(inner)


def by_directory(rows: Sequence[RunRow]) -> dict[str, list[RunRow]]:
    """The rows by the directory of their run, with the run's name alone."""
    groups: dict[str, list[RunRow]] = {}
    for row in rows:
        directory, _, name = row.run.rpartition("/")
        groups.setdefault(directory, []).append(replace(row, run=name))
    return groups


def _row(run: Run, name: str) -> RunRow:
    settings, record = run.settings, run.record
    row = RunRow(name, record.data.name, settings.model, settings.seed, "", "", test=record.result.test_accuracy)
    if not record.requests:
        kind = "federated" if isinstance(settings, FederateSettings) else "imported" if record.imported_from else ""
        how = f"without {settings.without}" if settings.without else "" if record.imported_from else "trained"
        seconds = sum(epoch.seconds for epoch in run.history()) or None
        return replace(row, method=f"{kind} {how}".strip(), seconds=seconds)
    served = record.requests[-1]
    seconds = None if served.cost is None else served.cost.seconds
    row = replace(row, request=served.request, method=served.method, seconds=seconds)
    if not (isinstance(settings, FederateSettings) and settings.start):  # else trained since, and not measured
        row = replace(row, **asdict(served.after))
    verdict = read_verdict(run.path)
    if verdict is None or verdict.request != served.request:  # it is about another request
        return row
    probe = verdict.audit("C1")
    has_result = bool(verdict.failed) or any(audit.outcome == "PASS" for audit in verdict.audits)
    failed = " ".join(verdict.failed) if has_result else None
    return replace(row, probe=None if probe is None else probe.unlearned, audits=verdict.label, failed=failed)
