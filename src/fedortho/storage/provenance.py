"""The environment of a process: versions, machine and threads."""

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch

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
