"""New running statistics of batch norms behind an edit, from moments of the retain set: moments in, tensors out."""

from collections.abc import Sequence

from torch import Tensor

from fedortho.statistics.observe import Observation


def norm_buffers(pooled: Observation, number: int, norms: Sequence[str]) -> dict[str, Tensor]:
    """The running statistics of batch norms that pooled moments (`moments`, `layer`) of a candidate give."""
    buffers = {}
    for norm in norms:
        mean, square = (pooled.mean(f"{number}:{norm}:{kind}") for kind in ("mean", "square"))
        buffers[f"{norm}.running_mean"] = mean.float()
        buffers[f"{norm}.running_var"] = (square - mean.square()).clamp_min(0).float()
    return buffers
