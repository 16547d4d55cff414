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
    model: nn.Module,
    names: Iterable[str],
    keep: Callable[[Tensor], T],
    *,
    inputs: bool = False,
    stop: bool = False,
) -> Iterator[dict[str, list[T]]]:
    """Collect the outputs (or first inputs) of the named modules: one entry per call, modules in the order of calls.

    `keep` is applied at once, because an in-place activation may change the tensor a moment later. With `stop` the
    forward pass ends, and with it the block, when each module was called.

    >>> model = nn.Sequential(nn.ReLU(), nn.Flatten())
    >>> with capture(model, ["0", "1"], lambda out: tuple(out.shape)) as seen:
    ...     _ = model(Tensor(2, 3, 4))
    >>> seen
    {'0': [(2, 3, 4)], '1': [(2, 12)]}
    """
    names = list(names)
    seen: dict[str, list[T]] = {}

    def note(name: str, value: Any) -> None:
        seen.setdefault(name, []).append(keep(value))
        if stop and len(seen) == len(names):
            raise _AllSeen

    def hook(name: str) -> Any:
        module = model.get_submodule(name)
        if inputs:
            return module.register_forward_pre_hook(lambda _, given: note(name, given[0]))
        return module.register_forward_hook(lambda _, __, out: note(name, out))

    handles = [hook(name) for name in names]
    try:
        yield seen
    except _AllSeen:
        pass
    finally:
        for handle in handles:
            handle.remove()
