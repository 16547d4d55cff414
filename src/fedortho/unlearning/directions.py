"""Removes from convolutions the directions in which a class has most energy, in closed form.

Let y be the responses of a layer after its norm and before its activation, m their mean at each position over
retained images, m̄ its mean over positions, Σ = S Sᵀ their covariance and F = E (y − m)(y − m)ᵀ the class's energy.
In the coordinates S⁻¹ y the directions that separate the means of retained classes are spared; of the others those of
most energy, V, are removed:

    y' = P y + (I − P) m̄,  P = S (I − V Vᵀ) S⁻¹.

The kernels absorb P (W' = P W), the bias or the norm absorbs the offset (I − P) m̄. Differences of retained means stay.

In a residual stream y is the sum that a block returns. Where a shortcut without weights of its own is part of it, P is
found on the sum and applied to the block's own part alone, around the mean of that part.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedortho.models.graph import Layer
from fedortho.models.patch import Patch
from fedortho.models.sites import Site
from fedortho.statistics.observe import Observation
from fedortho.unlearning.select import SPREADS, kernel_count

SHARES = (0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.125, 0.15, 0.2, 0.25, 0.3)  # of directions, to be tried
FLOOR = 1e-2  # of the mean variance, added to every variance: directions that nothing uses are no evidence


@dataclass(frozen=True)
class Moments:
    """First and second moments of the responses of one site over a set of images."""

    mean: Tensor  # (kernels, positions)
    second: Tensor  # E y yᵀ over images and positions, (kernels, kernels)

    def around(self, centre: Tensor) -> Tensor:
        """E (y − c)(y − c)ᵀ with a centre for each position, (kernels, positions)."""
        mixed = self.mean @ centre.T
        return self.second + (centre @ centre.T - mixed - mixed.T) / centre.shape[1]


def moments_of(group: Observation, name: str, kernels: int) -> Moments:
    """The moments of one site, from the sums of a query."""
    mean = group.mean(f"{name}:mean").view(kernels, -1)
    return Moments(mean, group.mean(f"{name}:second").view(kernels, kernels) / mean.shape[1])


def projection(forget: Sequence[Moments], retain: Moments, means: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """The projector that removes `number` directions, and the energy in each direction that may be removed, falling.

    `means` of retained classes are (kernels, classes); their differences are spared. Retained images have energy 1.
    """
    covariance = retain.around(retain.mean)
    unit = torch.eye(len(covariance), dtype=covariance.dtype)
    root = torch.linalg.cholesky(covariance + FLOOR * covariance.diagonal().mean() * unit)
    inverse = torch.linalg.inv(root)
    # centred on their own mean: that of all images also holds the class
    apart = inverse @ (means - means.mean(1, keepdim=True))
    basis, values, _ = torch.linalg.svd(apart, full_matrices=False)
    basis = basis[:, values > 1e-6 * values.max()]
    others = unit - basis @ basis.T
    energy = torch.stack([part.around(retain.mean) for part in forget]).mean(0)
    white = others @ inverse @ energy @ inverse.T @ others
    energies, directions = torch.linalg.eigh((white + white.T) / 2)
    free = len(unit) - basis.shape[1]
    removed = directions.flip(1)[:, : min(number, free)]
    return root @ (unit - removed @ removed.T) @ inverse, energies.flip(0)[:free]


def erasure_patch(
    model: nn.Module,
    sites: Sequence[Site],
    forget: Sequence[Observation],
    retain: Observation,
    *,
    labels: Sequence[int],
    share: float,
    spread: str = "rising",
) -> Patch:
    """The patch that removes this share of directions, on average, from each site; not yet bound to digests.

    `labels` are those of retained classes. Norms get the statistics that retained images would have behind the
    original prefix; sites that follow another need a repair.
    """
    replaced: dict[str, Tensor] = {}
    numbers = {}
    for site, part in zip(sites, SPREADS[spread](len(sites)), strict=True):
        number = kernel_count(min(share * part, 1.0), site.kernels)
        whole = moments_of(retain, site.name, site.kernels)
        # the mean pooled response of each retained class; the model's probability of the class weights the images
        means = retain.mean(f"{site.name}:answered").view(site.kernels, -1)[:, list(labels)]
        means = means / retain.mean("answers")[list(labels)].clamp_min(1e-12)
        projector, energies = projection([moments_of(o, site.name, site.kernels) for o in forget], whole, means, number)
        numbers[site.name] = min(number, len(energies))
        parts = {layer: moments_of(retain, layer.name, layer.kernels) for layer in site.layers}
        edited = next(iter(parts.values())) if site.beside else whole
        centre = edited.mean.mean(1)
        offset = (centre - projector @ centre) / len(parts)  # (I − P) m̄, shared by the layers of a sum
        for layer, own in parts.items():
            replaced |= _absorbed(model, layer, own, projector, offset)
    return Patch("", "", replaced=replaced, note={"edit": "directions", "sites": {}, "directions": numbers})


def _absorbed(model: nn.Module, layer: Layer, own: Moments, projector: Tensor, offset: Tensor) -> Mapping[str, Tensor]:
    """The layer's tensors with which it computes P y + offset instead of y."""
    conv = model.get_submodule(layer.name)
    weight = conv.get_parameter("weight").detach()
    bias = torch.zeros(len(weight)) if conv.bias is None else conv.get_parameter("bias").detach()
    rows, shift = weight.cpu().double().flatten(1), bias.cpu().double()
    changed: dict[str, Tensor] = {}
    if layer.norm:
        norm = model.get_submodule(layer.norm)
        assert isinstance(norm, nn.BatchNorm2d), "checked before"
        assert norm.running_mean is not None, "checked before"
        assert norm.running_var is not None, "checked before"
        scale = norm.weight.detach().cpu().double() / (norm.running_var.cpu().double() + norm.eps).sqrt()
        rows, shift = scale[:, None] * rows, scale * (shift - norm.running_mean.cpu().double())
        shift = shift + norm.bias.detach().cpu().double()
        mean = own.mean.mean(1)
        variance = (projector @ (own.second - torch.outer(mean, mean)) @ projector.T).diagonal().clamp_min(0)
        changed[f"{layer.norm}.weight"] = (variance + norm.eps).sqrt()
        changed[f"{layer.norm}.bias"] = projector @ mean + offset
        changed[f"{layer.norm}.running_mean"] = projector @ (mean - shift)
        changed[f"{layer.norm}.running_var"] = variance
        shift = torch.zeros_like(shift)
    else:
        shift = projector @ shift + offset
    changed[f"{layer.name}.weight"] = (projector @ rows).view_as(weight)
    if conv.bias is not None:
        changed[f"{layer.name}.bias"] = shift
    return {name: value.to(weight.dtype) for name, value in changed.items()}
