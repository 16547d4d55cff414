"""Devices, CPU threads and counted operations."""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils.flop_counter import flop_registry

from fedortho.errors import BadSetting

DEVICES = ("auto", "cpu", "cuda", "mps")
MOST_THREADS = 1024
CPUINFO = Path("/proc/cpuinfo")
AMX_TILES = 0x1D  # leaf of CPUID that says how large the tiles of AMX are


@contextmanager
def using_threads(number: int) -> Iterator[None]:
    """Set the number of CPU threads inside the block; 0 keeps torch's own choice."""
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def choose_device(name: str) -> torch.device:
    """The device of a name; `auto` is the fastest one available."""
    available = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if name == "auto":
        name = next(kind for kind in ("cuda", "mps", "cpu") if available[kind])
    if not available.get(name.partition(":")[0]):
        choices = ", ".join(kind for kind, is_available in available.items() if is_available)
        raise BadSetting(f"the device {name} is not available; choose from {choices}")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise BadSetting(f"the device is {name!r}; expected cpu, mps, cuda or cuda:NUMBER") from error
    if device.type == "cuda" and (device.index or 0) >= (number := torch.cuda.device_count()):
        choices = ", ".join(f"cuda:{index}" for index in range(number))
        raise BadSetting(f"the device {name} is not available; choose from cpu, {choices}")
    return device


def check_bfloat16(device: torch.device | str) -> None:
    """Refuse bfloat16 on a CPU that has AMX and, as in some virtual machines, no leaf about its tiles.

    oneDNN then uses tiles that it has not configured, and the process ends with an illegal instruction.
    """
    limit = (os.environ.get("ONEDNN_MAX_CPU_ISA") or "ALL").upper()
    if torch.device(device).type != "cpu" or (limit not in ("ALL", "DEFAULT") and "AMX" not in limit):
        return
    about = CPUINFO.read_text(encoding="utf-8") if CPUINFO.is_file() else ""
    level = re.search(r"^cpuid level\s*: (\d+)", about, re.MULTILINE)
    if level and int(level[1]) < AMX_TILES and re.search(r"^flags\s*:.* amx_tile\b", about, re.MULTILINE):
        why = "this machine announces AMX and hides its tiles, on which oneDNN would end the process"
        raise BadSetting(f"{why}; give float32, or begin with ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 in the environment")


def to_device(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """The tensor on the device; CUDA copies it without waiting for earlier work (from here, never back)."""
    return tensor.to(device, non_blocking=torch.device(device).type == "cuda")


def seed_random(seed: int, device: torch.device | str = "auto") -> None:
    """Seed what draws on this device, by default on any; `torch.manual_seed` notes stack traces without a GPU."""
    device = choose_device("auto") if device == "auto" else torch.device(device)
    if device.type == "cpu":
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)


def sum_dtype(device: torch.device | str) -> torch.dtype:
    """What long sums are formed in: float64, which MPS lacks."""
    return torch.float32 if torch.device(device).type == "mps" else torch.float64


class _Counting(TorchDispatchMode):
    """Adds up the FLOPs of every operation by torch's formulas; about 5 µs an operation."""

    flops = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here; torch would import its compiler, for seconds, to skip it."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if (formula := flop_registry.get(func._overloadpacket)) is not None:
            self.flops += formula(*args, **(kwargs or {}), out_val=result)
        return result


_COUNTING: ContextVar[_Counting | None] = ContextVar("counting", default=None)  # one per thread, shared by its counters


class FlopCounter:
    """Counts the FLOPs that this thread computes inside the block.

    Counters nest, and the outer one counts what the inner one does, unless the inner one counts `apart`.
    """

    def __init__(self, *, apart: bool = False) -> None:
        self._flops, self._begin, self._apart, self._is_outermost = 0, 0, apart, False
        self._counting: _Counting | None = None

    @property
    def flops(self) -> int:
        return self._flops + (0 if self._counting is None else self._counting.flops - self._begin)

    def __enter__(self) -> "FlopCounter":
        counting = _COUNTING.get()
        self._is_outermost = counting is None
        if counting is None:
            counting = _Counting()  # type: ignore[no-untyped-call]  # torch's modes lack types
            counting.__enter__()  # type: ignore[no-untyped-call]
            _COUNTING.set(counting)
        self._counting, self._begin = counting, counting.flops
        return self

    def __exit__(self, *error: Any) -> None:
        counting = self._counting
        assert counting is not None, "the block was entered"
        self._flops, self._counting = self.flops, None
        if self._apart:
            counting.flops = self._begin
        if self._is_outermost:
            counting.__exit__(*error)  # type: ignore[no-untyped-call]
            _COUNTING.set(None)


@contextmanager
def counted_once(known: dict[object, int], key: object) -> Iterator[None]:
    """Count the block's operations if the key is new; else add the number that is known, which takes no time."""
    counting = _COUNTING.get()
    if counting is None or (key in known and _get_current_dispatch_mode() is not counting):  # a mode within ours stays
        yield
    elif key in known:
        counting.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            counting.__enter__()  # type: ignore[no-untyped-call]
        counting.flops += known[key]
    else:
        before = counting.flops
        yield
        known[key] = counting.flops - before


def flops_of(work: Callable[[], object]) -> int:
    """Multiplications plus additions of a computation that is done only to count them.

    >>> flops_of(lambda: torch.ones(2, 3) @ torch.ones(3, 4))
    48
    """
    with FlopCounter(apart=True) as counter:
        work()
    return counter.flops
