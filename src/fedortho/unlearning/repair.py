"""New running statistics of batch norms behind an edit, from moments of the retain set: moments in, tensors out."""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from fedortho.models.patch import Patch
from fedortho.statistics.observe import Observation


def norm_buffers(pooled: Observation, number: int, norms: Sequence[str]) -> dict[str, Tensor]:
    """Running mean and variance of each norm, from the pooled moments of candidate `number`."""
    buffers = {}
    for norm in norms:
        mean, square = (pooled.mean(f"{number}:{norm}:{kind}") for kind in ("mean", "square"))
        buffers[f"{norm}.running_mean"] = mean.float()
        buffers[f"{norm}.running_var"] = (square - mean.square()).clamp_min(0).float()
    return buffers


def repaired(patch: Patch, pooled: Observation, number: int, norms: Sequence[str]) -> Patch:
    """The patch with these statistics; a silenced kernel keeps mean 0 and variance 1."""
    buffers = {**patch.replaced, **norm_buffers(pooled, number, norms)}
    for name, (channels, values) in patch.put.items():
        if name in buffers:
            buffers[name][channels] = values
    return replace(patch, replaced=buffers)
