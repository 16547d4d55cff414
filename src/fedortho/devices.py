"""Devices, CPU threads, counted operations and measured time."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from fedortho.errors import BadSetting

DEVICES = ("auto", "cpu", "cuda", "mps")


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
        return torch.device(name)
    except RuntimeError as error:
        raise BadSetting(f"the device is {name!r}; expected cpu, mps, cuda or cuda:NUMBER") from error


def flops_of(work: Callable[[], object]) -> int:
    """Multiplications plus additions of a computation, by torch's counter.

    >>> flops_of(lambda: torch.ones(2, 3) @ torch.ones(3, 4))
    48
    """
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        work()
    return int(counter.get_total_flops())


class WorkClock:
    """Seconds since the start, without the time in which operations are counted: that is not part of the work."""

    def __init__(self) -> None:
        self._lock, self._counting = threading.Lock(), 0
        self._since = self._excluded = 0.0

    def __call__(self) -> float:
        with self._lock:
            return (self._since if self._counting else time.perf_counter()) - self._excluded

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Exclude the time inside the block; clients of one process may be inside at once."""
        with self._lock:
            self._since = self._since if self._counting else time.perf_counter()
            self._counting += 1
        try:
            yield
        finally:
            with self._lock:
                self._counting -= 1
                self._excluded += 0.0 if self._counting else time.perf_counter() - self._since


work_clock = WorkClock()  # one per process: its clients share the time
