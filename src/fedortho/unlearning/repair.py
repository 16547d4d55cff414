"""Re-estimate the running statistics of batch norms behind the first edit on retained images, forward only."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fedortho.models.sites import Site
from fedortho.models.split import BATCH, Split, received, run_tail
from fedortho.statistics.observe import Observation

LEAST = 8  # images behind the last whole batch; fewer are no statistics and are left out


def norms_behind(model: nn.Module, sites: Sequence[Site], example: Tensor) -> list[str]:
    """Batch norms whose input an edit of these sites can change, found by silencing them all."""
    silent = copy.deepcopy(model)
    for layer in (layer for site in sites for layer in site.layers):
        for parameter in silent.get_submodule(layer.norm or layer.name).parameters(recurse=False):
            nn.init.zeros_(parameter)
    norms = batch_norms(model)
    before, after = received(model, norms, example), received(silent, norms, example)
    return [name for name, given in before.items() if not torch.equal(given, after[name])]


def batch_norms(model: nn.Module) -> list[str]:
    """The batch norms of a network that keep statistics, by name; others take those of each batch anyway."""
    norms = ((name, module) for name, module in model.named_modules() if isinstance(module, nn.BatchNorm2d))
    return [name for name, norm in norms if norm.running_mean is not None]


@contextmanager
def _estimating(model: nn.Module, names: Sequence[str]) -> Iterator[None]:
    model.eval()
    norms = [model.get_submodule(name) for name in names]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        assert isinstance(norm, nn.BatchNorm2d)
        norm.reset_running_stats()
        norm.momentum = None  # the plain mean over batches
        norm.train()
    try:
        yield
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            assert isinstance(norm, nn.BatchNorm2d)
            norm.momentum = momentum  # type: ignore[assignment]  # it came from there
            norm.eval()


def repair(twin: nn.Module, split: Split, names: Sequence[str], cached: Tensor) -> tuple[dict[str, Tensor], int]:
    """Re-estimate the named batch norms on remembered retain inputs, in place; the new buffers, and from how many."""
    used = usable(len(cached))
    last = used % BATCH if used > BATCH else 0  # images of a smaller batch
    whole, rest = cached[:used].split([used - last, last])
    counters = {f"{n}.num_batches_tracked": twin.get_buffer(f"{n}.num_batches_tracked").clone() for n in names}
    with torch.no_grad(), _estimating(twin, names):
        run_tail(twin, split, whole)  # equal batches: a plain mean is right
        if last:
            for name in names:
                twin.get_submodule(name).momentum = last / used  # type: ignore[assignment]  # its share of all
            run_tail(twin, split, rest)
    for name, value in counters.items():
        twin.get_buffer(name).copy_(value)  # how often it was trained is no business of a repair
    buffers = [f"{name}.{kind}" for name in names for kind in ("running_mean", "running_var")]
    return {name: twin.get_buffer(name).clone() for name in buffers}, used


def usable(images: int) -> int:
    """How many of so many images a repair takes.

    >>> [usable(number) for number in (5, 300, 512, 517)]
    [5, 300, 512, 512]
    """
    rest = images % BATCH
    return images - rest if images > BATCH and rest < LEAST else images


def norm_sums(twin: nn.Module, split: Split, name: str, cached: Tensor) -> tuple[Tensor, int]:
    """Sum and sum of squares of what a norm receives in eval mode, (2, channels), float64, and of how many values."""
    found: list[Tensor] = []
    count = 0

    def add(_: nn.Module, given: tuple[Tensor, ...]) -> None:
        nonlocal count
        values = given[0].cpu().double()
        count += values.numel() // values.shape[1]
        found.append(torch.stack([values.sum((0, 2, 3)), values.square().sum((0, 2, 3))]))

    handle = twin.get_submodule(name).register_forward_pre_hook(add)
    try:
        with torch.no_grad():
            run_tail(twin, split, cached)
    finally:
        handle.remove()
    return torch.stack(found).sum(0), count


def norm_buffers(pooled: Observation, number: int, norms: Sequence[str]) -> dict[str, Tensor]:
    """The running statistics of batch norms that pooled moments (`moments`, `layer`) of a candidate give."""
    buffers = {}
    for norm in norms:
        mean, square = (pooled.mean(f"{number}:{norm}:{kind}") for kind in ("mean", "square"))
        buffers[f"{norm}.running_mean"] = mean.float()
        buffers[f"{norm}.running_var"] = (square - mean.square()).clamp_min(0).float()
    return buffers
