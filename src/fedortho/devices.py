"""Where numbers are computed, with how many threads, how many operations that takes, and how long."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from fedortho.errors import BadSetting

DEVICES = ("auto", "cpu", "cuda", "mps")


@contextmanager
def using_threads(number: int) -> Iterator[None]:
    """Compute with so many CPU threads meanwhile; 0 leaves torch's own choice."""
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def choose_device(name: str) -> torch.device:
    """`auto` is the fastest there is; a device that is not there is refused."""
    there = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if name == "auto":
        name = next(kind for kind in ("cuda", "mps", "cpu") if there[kind])
    if not there.get(name.partition(":")[0]):
        raise BadSetting(
            f"there is no {name} device here; choose from {', '.join(k for k, yes in there.items() if yes)}"
        )
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise BadSetting(f"{name!r} names no device; write cpu, cuda or cuda:NUMBER") from error


def flops_of(work: Callable[[], object]) -> int:
    """Multiplications and additions, both counted, by torch's own counter.

    >>> flops_of(lambda: torch.ones(2, 3) @ torch.ones(3, 4))
    48
    """
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        work()
    return int(counter.get_total_flops())


class WorkClock:
    """Tells seconds, and stands still while somebody counts operations: that is no part of the work it measures."""

    def __init__(self) -> None:
        self._lock, self._counting = threading.Lock(), 0
        self._since = self._away = 0.0

    def __call__(self) -> float:
        with self._lock:
            return (self._since if self._counting else time.perf_counter()) - self._away

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Nothing that happens meanwhile takes time; clients of one process may count at once."""
        with self._lock:
            self._since = self._since if self._counting else time.perf_counter()
            self._counting += 1
        try:
            yield
        finally:
            with self._lock:
                self._counting -= 1
                self._away += 0.0 if self._counting else time.perf_counter() - self._since


work_clock = WorkClock()  # one for the process, as there is one time
