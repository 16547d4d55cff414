"""Where numbers are computed, with how many threads, and how many operations that takes."""

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
