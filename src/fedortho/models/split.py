"""The part of a network behind a layer, so that trials run only what an edit can change."""

import copy
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fedortho.models.sites import Site

logger = logging.getLogger(__name__)
BATCH = 256


@dataclass(frozen=True)
class Split:
    """Where a network is cut: `entry` receives what was remembered, modules before it are passed by."""

    entry: str | None  # None: it could not be cut, the whole network runs
    before: tuple[str, ...] = ()


def find_split(model: nn.Module, sites: Sequence[Site], example: Tensor) -> Split:
    """The outermost module that holds the first edited layer and has something before it.

    Verified on the example: the tail must give the same answers, else there is no cut (a skip around it).
    """
    order = _leaf_order(model, example)
    edited = {layer.name for site in sites for layer in site.layers}
    first = next(name for name in order if name in edited)
    parts = first.split(".")
    for depth in range(1, len(parts) + 1):
        entry = ".".join(parts[:depth])
        before = order[: next(i for i, name in enumerate(order) if name == entry or name.startswith(f"{entry}."))]
        if before:
            split = Split(entry, tuple(before))
            if _agrees(model, split, example):
                return split
            break
    logger.info("the network cannot be cut before %s; trials run all of it", first)
    return Split(None)


def _leaf_order(model: nn.Module, example: Tensor) -> list[str]:
    order: list[str] = []
    leaves = [(name, module) for name, module in model.named_modules() if name and not list(module.children())]
    _pass_once(model, example, [m.register_forward_hook(lambda *_, n=n: order.append(n)) for n, m in leaves])
    return list(dict.fromkeys(order))


def _pass_once(model: nn.Module, example: Tensor, handles: Sequence[RemovableHandle]) -> None:
    """One forward pass for the sake of its hooks, which are then removed."""
    try:
        with torch.no_grad():
            model(example)
    finally:
        for handle in handles:
            handle.remove()


def _agrees(model: nn.Module, split: Split, example: Tensor) -> bool:
    with torch.no_grad():
        whole = model(example)
        try:
            short = run_tail(tail_model(model, split), split, entry_inputs(model, split, example))
        except (RuntimeError, ValueError, TypeError):
            return False
    return whole.shape == short.shape and torch.allclose(whole, short, rtol=1e-4, atol=1e-5)


class _Enough(Exception):
    def __init__(self, value: Tensor) -> None:
        self.value = value


def entry_inputs(model: nn.Module, split: Split, inputs: Tensor) -> Tensor:
    """What the entry receives for these images, computed once; the images themselves if there is no cut."""
    if split.entry is None:
        return inputs
    parts = []

    def stop(_: nn.Module, given: tuple[Tensor, ...]) -> None:
        raise _Enough(given[0])

    handle = model.get_submodule(split.entry).register_forward_pre_hook(stop)
    try:
        with torch.no_grad():
            for batch in inputs.split(BATCH):
                try:
                    model(batch)
                except _Enough as reached:
                    parts.append(reached.value.clone())
    finally:
        handle.remove()
    return torch.cat(parts)


def tail_model(model: nn.Module, split: Split) -> nn.Module:
    """A copy in which everything before the entry lets its input pass; what is passed by is not even copied."""
    memo: dict[int, Any] = {id(model.get_submodule(name)): nn.Identity() for name in split.before}
    return copy.deepcopy(model, memo)


def run_tail(twin: nn.Module, split: Split, cached: Tensor) -> Tensor:
    """The answers of a cut model to remembered entry inputs."""
    if split.entry is None:
        return torch.cat([twin(batch) for batch in cached.split(BATCH)])
    answers = []
    for batch in cached.split(BATCH):
        handle = twin.get_submodule(split.entry).register_forward_pre_hook(lambda _, __, batch=batch: (batch,))
        try:
            answers.append(twin(batch))
        finally:
            handle.remove()
    return torch.cat(answers)


def received(
    model: nn.Module, names: Sequence[str], inputs: Tensor, keep: Callable[[Tensor], Tensor] = Tensor.clone
) -> dict[str, Tensor]:
    """What each of these modules receives in one forward pass, or what `keep` makes of it at that moment."""
    found: dict[str, Tensor] = {}
    handles = [
        model.get_submodule(name).register_forward_pre_hook(
            lambda _, given, name=name: found.update({name: keep(given[0])})
        )
        for name in names
    ]
    _pass_once(model, inputs, handles)
    return found
