"""Batch norms: which ones keep statistics, which ones an edit reaches, and estimating their statistics again."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fedortho.models.capture import capture
from fedortho.models.sites import Site, silent
from fedortho.models.split import BATCH, Split, run_tail

LEAST = 8  # images in a last, smaller batch; fewer are left out


def norms_behind(model: nn.Module, sites: Sequence[Site], example: Tensor) -> list[str]:
    """Batch norms whose input an edit of these sites can change, found by silencing them all."""

    def inputs() -> dict[str, Tensor]:
        with torch.no_grad(), capture(model, batch_norms(model), Tensor.clone, inputs=True) as seen:
            model(example)
        return {name: given[-1] for name, given in seen.items()}

    before = inputs()
    with silent(model, (layer for site in sites for layer in site.layers)):
        after = inputs()
    return [name for name, given in before.items() if not torch.equal(given, after[name])]


def batch_norms(model: nn.Module) -> list[str]:
    """The batch norms of a network that keep statistics, by name; others take those of each batch anyway."""
    norms = ((name, module) for name, module in model.named_modules() if isinstance(module, nn.BatchNorm2d))
    return [name for name, norm in norms if norm.running_mean is not None]


def frozen_norms(model: nn.Module, mode: str) -> list[str]:
    """Batch norms that use and keep their running statistics in training, by the mode of `FitOptions.norms`."""
    norms = {name: m for name, m in model.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)}
    fixed = [name for name, norm in norms.items() if not any(weight.requires_grad for weight in norm.parameters())]
    return {"train": [], "frozen": list(norms)}.get(mode, fixed)


def estimate_norms(
    twin: nn.Module, split: Split, names: Sequence[str], cached: Tensor
) -> tuple[dict[str, Tensor], int]:
    """Re-estimate the named batch norms on cached activations, in place; the new buffers and the number of images."""
    used = usable(len(cached))
    last = used % BATCH if used > BATCH else 0  # images of a smaller batch
    whole, rest = cached[:used].split([used - last, last])
    norms: list[Any] = [twin.eval().get_submodule(name) for name in names]
    before = [(norm.momentum, norm.num_batches_tracked.clone()) for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # the plain mean over batches, which are equal
        norm.train()
    with torch.no_grad():
        run_tail(twin, split, whole)
        if last:
            for norm in norms:
                norm.momentum = last / used  # its share of all
            run_tail(twin, split, rest)
    for norm, (momentum, batches) in zip(norms, before, strict=True):
        norm.eval().momentum = momentum
        norm.num_batches_tracked.copy_(batches)  # it counts training batches only
    buffers = [f"{name}.{kind}" for name in names for kind in ("running_mean", "running_var")]
    return {name: twin.get_buffer(name).clone() for name in buffers}, used


def usable(images: int) -> int:
    """How many of the images an estimate uses.

    >>> [usable(number) for number in (5, 300, 512, 517)]
    [5, 300, 512, 512]
    """
    rest = images % BATCH
    return images - rest if images > BATCH and rest < LEAST else images


def norm_sums(twin: nn.Module, split: Split, cached: Tensor, name: str) -> tuple[Tensor, int]:
    """Sum and sum of squares of a norm's inputs in eval mode, (2, channels), float64, and the number of values."""

    def moments(given: Tensor) -> tuple[Tensor, int]:
        values = given.cpu().double()
        sums = torch.stack([values.sum((0, 2, 3)), values.square().sum((0, 2, 3))])
        return sums, values.numel() // values.shape[1]

    with torch.no_grad(), capture(twin, [name], moments, inputs=True) as seen:
        run_tail(twin, split, cached)
    sums, counts = zip(*seen[name], strict=True)
    return torch.stack(sums).sum(0), sum(counts)
