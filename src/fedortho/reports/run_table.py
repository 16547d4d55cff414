"""The runs of a directory side by side, from what each has left: where a number comes from is a file that is there."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedortho.errors import BadData, unknown
from fedortho.requests.references import finished_runs
from fedortho.runs.run import Run
from fedortho.runs.settings import FederateSettings
from fedortho.storage.provenance import judgements, read_verdict

COLUMNS = ("run", "what", "forget", "retain", "test", "probe", "failed", "seconds")
SORTED_BY = ("run", "method", "forget", "retain", "test", "probe", "seconds")


@dataclass(frozen=True)
class RunRow:
    """One run, or one request that a run has served."""

    run: str
    data: str
    model: str
    seed: int
    request: str  # empty: a training
    method: str
    forget: float | None
    retain: float | None
    test: float | None
    probe: float | None  # recall of a linear probe, from the verdict
    audits: str  # in one line, from the verdict; empty: not judged
    failed: str | None  # audits that were not passed, and retention; None: none came to a result
    seconds: float | None

    def fits(self, wanted: Mapping[str, str]) -> bool:
        """Whether each given word occurs where it should."""
        return all(word.lower() in str(getattr(self, key)).lower() for key, word in wanted.items() if word)

    def words(self) -> tuple[str, ...]:
        what = f"{self.method} {self.request}".strip() or "trained"
        shares = (_percent(value) for value in (self.forget, self.retain, self.test, self.probe))
        seconds = "–" if self.seconds is None else f"{self.seconds:.1f}"
        failed = "–" if self.failed is None else self.failed or "none"
        return (self.run, what, *shares, failed, seconds)


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def list_runs(place: Path) -> list[RunRow]:
    """A line for each finished run below a directory, named by its path from there; damaged ones are an error."""
    if not place.is_dir():
        raise BadData(f"{place} is no directory; give one that holds runs")
    if (place / "run.json").exists():
        raise BadData(f"{place} is a run; give the directory that holds it, {place.absolute().parent}")
    lines = [_line(run, run.path.relative_to(place).as_posix()) for run in _runs_below(place)]
    if not lines:
        raise BadData(f"{place} holds no finished run; make one with fedortho train --out {place / 'first'}")
    return lines


def _runs_below(place: Path) -> Iterator[Run]:
    """The runs of a directory, then those of directories in it, such as of comparisons and references."""
    yield from finished_runs(place, strict=True)
    for inner in sorted(place.iterdir()):
        if inner.is_dir() and not inner.name.startswith(".") and not (inner / "run.json").exists():
            yield from _runs_below(inner)


def ordered(lines: Sequence[RunRow], by: str) -> list[RunRow]:
    """The lines by one of their columns, small values first and what was not measured last; by nothing, as they are."""
    if not by:
        return list(lines)
    if by not in SORTED_BY:
        raise unknown("column", by, SORTED_BY)
    known = [line for line in lines if getattr(line, by) is not None]
    return sorted(known, key=lambda line: getattr(line, by)) + [line for line in lines if getattr(line, by) is None]


def by_directory(lines: Sequence[RunRow]) -> dict[str, list[RunRow]]:
    """The lines by the directory that holds the run, in which its name alone tells which it is."""
    found: dict[str, list[RunRow]] = {}
    for line in lines:
        directory, _, name = line.run.rpartition("/")
        found.setdefault(directory, []).append(replace(line, run=name))
    return found


def _line(run: Run, name: str) -> RunRow:
    about = (name, run.record["data"]["name"], run.settings.model, run.settings.seed)
    requests: Sequence[Mapping[str, Any]] = run.record.get("requests", [])
    if not requests:
        kind = "federated " if isinstance(run.settings, FederateSettings) else ""
        what = f"{kind}without {run.settings.without}" if run.settings.without else f"{kind}trained".strip()
        seconds = sum(entry.seconds for entry in run.history()) or None
        test = run.record["result"].get("test-accuracy")
        return RunRow(*about, "", what, None, None, test, None, "", None, seconds)
    entry = requests[-1]
    told = read_verdict(run.path) or {}
    verdict = told if told.get("request") == entry["request"] else {}  # one on another request is none on this
    probe = next((audit["forgot"] for audit in verdict.get("audits", []) if audit["name"] == "C1"), None)
    after, took = entry["after"], entry.get("cost") or {"seconds": sum(entry.get("seconds", {}).values())}
    accuracies = (after["forget"], after["retain"], after["test"])
    if isinstance(run.settings, FederateSettings) and run.settings.start:  # it was trained on since, and not measured
        accuracies = (None, None, run.record["result"].get("test-accuracy"))
    method = entry.get("method", "hide")
    bad = [audit["name"] for audit in judgements(verdict) if audit["outcome"] in ("FAIL", "ERROR")]
    is_tested = any(audit["outcome"] in ("PASS", "FAIL", "ERROR") for audit in verdict.get("audits", []))
    label, failed = verdict.get("label", ""), " ".join(bad) if is_tested or bad else None
    return RunRow(*about, entry["request"], method, *accuracies, probe, label, failed, took["seconds"])
