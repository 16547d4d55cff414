"""The class's mean direction taken out of the classifier's input, in closed form: moments in, tensors out.

x' = x − t δ (w·(x − m)) / (w·δ) with δ = class mean − retain mean, w = δ / retain variance, m = retain
mean, of the classifier's inputs; linear in x, so it is absorbed into the classifier's weight and bias.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fedortho.statistics.observe import Observation


def scrubbed(
    weight: Tensor,
    bias: Tensor | None,
    forget: Sequence[Observation],
    retain: Observation,
    number: int,
    strength: float,
    own: Sequence[Sequence[int]] | None = None,
) -> dict[str, Tensor]:
    """The classifier's weight and bias without the mean direction of each forget set, one after the other.

    The observations are sums of the inputs that the classifier of candidate `number` receives (`inputs`). With `own`
    only the rows of each forget set's own classes lose its direction.
    """
    mean, square = retain.mean(f"{number}:sum"), retain.mean(f"{number}:square")
    variance = (square - mean.square()).clamp_min(0) * retain.images / max(retain.images - 1, 1)
    rows = weight.detach().cpu().double()
    shift = torch.zeros(len(rows), dtype=torch.float64) if bias is None else bias.detach().cpu().double()
    for place, part in enumerate(forget):
        new = scrub(rows, shift, part.mean(f"{number}:sum"), mean, variance, strength=strength)
        which = torch.arange(len(rows)) if own is None else torch.tensor(own[place])
        rows, shift = rows.index_copy(0, which, new[0][which]), shift.index_copy(0, which, new[1][which])
    changed = {"weight": rows.to(weight.dtype)}
    return changed if bias is None else changed | {"bias": shift.to(weight.dtype)}


def scrub(
    weight: Tensor, bias: Tensor, forget_mean: Tensor, retain_mean: Tensor, retain_variance: Tensor, *, strength: float
) -> tuple[Tensor, Tensor]:
    """W' = W − t (W δ) wᵀ/(w·δ), b' = b + t (W δ)(w·m)/(w·δ).

    >>> zero, one = torch.zeros(2), torch.ones(2)
    >>> w, b = scrub(torch.eye(2), zero, torch.tensor([3.0, 0.0]), zero, one, strength=1.0)
    >>> w.tolist()
    [[0.0, 0.0], [0.0, 1.0]]
    """
    delta = forget_mean - retain_mean
    direction = delta / retain_variance.clamp_min(1e-6 * float(retain_variance.max()) + 1e-12)
    length = direction @ delta
    if float(length) <= 0:
        return weight, bias  # the means are equal: there is no direction to remove
    response = weight @ delta / length
    return weight - strength * torch.outer(response, direction), bias + strength * response * (direction @ retain_mean)
