"""Measurements with their origin: what ran, with which versions, on what machine."""

import os
import platform
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from fedortho.files import write_json

SCHEMA = 1
LIBRARIES = ("fedortho", "torch", "numpy", "safetensors", "torch-pruning")


def environment(device: torch.device | str = "cpu") -> dict[str, Any]:
    """Versions, hardware and threads: float sums depend on all of them."""
    return {
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in LIBRARIES},
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": str(device),
    }


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
    value = {"schema": SCHEMA, "what": what, "command": command, "environment": environment(), "rows": list(rows)}
    write_json(path, value | more)
