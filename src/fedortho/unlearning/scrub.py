"""The class's mean direction taken out of the classifier's input, in closed form; it finishes the hiding.

x' = x − t δ (w·(x − m)) / (w·δ) with δ = class mean − retain mean, w = δ / retain variance, m = retain
mean, of the classifier's inputs; linear in x, so it is absorbed into the classifier's weight and bias.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def scrubbed_rows(
    model: nn.Module,
    classifier: str,
    *,
    forget_means: Sequence[Tensor],
    retain_mean: Tensor,
    retain_variance: Tensor,
    strength: float,
) -> dict[str, Tensor]:
    """The classifier's new weight and bias after removing each part's mean direction, one after the other."""
    linear = model.get_submodule(classifier)
    assert isinstance(linear, nn.Linear)
    weight = linear.weight.detach().cpu().double()
    bias = torch.zeros(len(weight), dtype=torch.float64) if linear.bias is None else linear.bias.detach().cpu().double()
    for mean in forget_means:
        weight, bias = scrub(weight, bias, mean, retain_mean, retain_variance, strength=strength)
    rows = {f"{classifier}.weight": weight.to(linear.weight.dtype)}
    if linear.bias is not None:
        rows[f"{classifier}.bias"] = bias.to(linear.weight.dtype)
    return rows


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
        return weight, bias  # the class is no different from the rest: nothing to take out
    response = weight @ delta / length
    return weight - strength * torch.outer(response, direction), bias + strength * response * (direction @ retain_mean)
