"""Measurements with their origin: what ran, with which versions, on what machine."""

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from fedortho.errors import BadCheckpoint
from fedortho.storage.files import locked, read_json, write_json
from fedortho.storage.records import to_json

SCHEMA = 1  # of verdict.json, rows of comparisons and benchmarks
LIBRARIES = ("fedortho", "torch", "numpy", "safetensors", "torch-pruning")


@dataclass(frozen=True)
class Environment:
    """Versions, hardware and threads: float sums depend on all of them."""

    versions: Mapping[str, str | None]  # None: not installed
    system: str
    processor: str
    cores: int | None
    threads: int
    device: str


def environment(device: torch.device | str = "cpu") -> Environment:
    """The environment of this process."""
    return Environment(
        versions={"python": platform.python_version()} | {name: _version(name) for name in LIBRARIES},
        system=f"{platform.system()} {platform.machine()}",
        processor=_processor(),
        cores=os.cpu_count(),
        threads=torch.get_num_threads(),
        device=str(device),
    )


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def write_results(path: Path, what: str, command: str, rows: Sequence[Mapping[str, Any]], **more: Any) -> None:
    """Write rows of a benchmark with where they come from; rewritten after each row, so nothing is lost."""
    here = to_json(environment())
    value = {"schema": SCHEMA, "what": what, "command": command, "environment": here, "rows": list(rows)}
    write_json(path, value | more)


def add_row(
    path: Path,
    row: Mapping[str, Any],
    key: Sequence[str],
    order: Callable[[Mapping[str, Any]], Any],
    what: str,
    command: str,
) -> None:
    """Add a row, or take the place of the one with the same key; two processes may do so at once."""
    with locked(path.with_suffix(".writing")):
        old = read_json(path)["rows"] if path.exists() else []
        kept = [other for other in old if any(other[name] != row[name] for name in key)]
        write_results(path, what, command, sorted([*kept, row], key=order))


def read_verdict(directory: Path) -> dict[str, Any] | None:
    """The verdict.json of a run; None if none was written."""
    path = directory / "verdict.json"
    if not path.exists():
        return None
    verdict = read_json(path)
    if not isinstance(verdict, dict) or verdict.get("schema") != SCHEMA or "request" not in verdict:
        raise BadCheckpoint(f"{path} is not a verdict of schema {SCHEMA}; judge again: fedortho judge {directory}")
    return verdict


def judgements(verdict: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """The audits, and retention beside them where it was measured: a ruined model has forgotten, and is not good."""
    told = verdict or {}
    return [*told.get("audits", []), *([told["retention"]] if told.get("retention") else [])]
