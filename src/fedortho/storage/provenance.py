"""The environment of a process: versions, machine and threads."""

import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch

LIBRARIES = ("fedortho", "torch", "numpy", "safetensors", "torch-pruning")


@dataclass(frozen=True)
class Environment:
    """Versions, hardware and threads: float sums depend on all of them."""

    versions: Mapping[str, str | None]  # None, in old records: not installed
    system: str
    processor: str
    cores: int | None
    threads: int
    device: str
    instructions: str = ""  # vector instructions that sums are formed by; empty: not recorded

    def may_differ_from(self, other: "Environment") -> bool:
        """Whether the same training may end in other bytes there: versions, processor or instructions differ."""
        known = not self.instructions or not other.instructions or self.instructions == other.instructions
        return (self.versions, self.processor) != (other.versions, other.processor) or not known


def environment(device: torch.device | str = "cpu") -> Environment:
    """The environment of this process."""
    return Environment(
        versions={"python": platform.python_version()} | {name: metadata.version(name) for name in LIBRARIES},
        system=f"{platform.system()} {platform.machine()}",
        processor=_processor(),
        cores=os.cpu_count(),
        threads=torch.get_num_threads(),
        device=str(device),
        instructions=_instructions(),
    )


def _instructions() -> str:
    """Those of PyTorch's own kernels, and the limit that oneDNN was given; without one it follows the processor."""
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", "")
    return torch.backends.cpu.get_cpu_capability() + (f", oneDNN at most {limit}" if limit else "")


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    named = re.search(r"^model name\s*:(.*)", cpuinfo.read_text(encoding="utf-8"), re.M) if cpuinfo.is_file() else None
    return named[1].strip() if named else platform.processor() or platform.machine()
