"""What modules receive or return while a network runs."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import Tensor, nn

T = TypeVar("T")


class _AllSeen(Exception):
    """Every module was reached: the rest of the forward pass would be wasted."""


@contextmanager
def capture(
    model: nn.Module, names: Iterable[str], keep: Callable[[Tensor], T], *, inputs: bool = False, stop: bool = False
) -> Iterator[dict[str, list[T]]]:
    """Collect the outputs (or first inputs) of the named modules: one entry per call, modules in the order of calls.

    `keep` is applied at once, because an in-place activation may change the tensor a moment later; for a call that
    names all its arguments it is given None as the input. With `stop` the forward pass ends, and with it the block,
    when each module was called.
    """
    names, seen = list(names), dict[str, list[T]]()

    def note(name: str, value: Any) -> None:
        seen.setdefault(name, []).append(keep(value))
        if stop and len(seen) == len(names):
            raise _AllSeen

    handles = []
    for name in names:
        module = model.get_submodule(name)
        if inputs:
            handles.append(
                module.register_forward_pre_hook(lambda _, given, name=name: note(name, given[0] if given else None))
            )
        else:
            handles.append(module.register_forward_hook(lambda _, __, out, name=name: note(name, out)))
    try:
        yield seen
    except _AllSeen:
        pass
    finally:
        for handle in handles:
            handle.remove()
