"""Responses of edited layers: their sums by position, and of products with each other and with the predictions."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from fedortho.data.images import Images, evaluation_batches
from fedortho.models.capture import capture
from fedortho.models.graph import Layer
from fedortho.models.sites import Site
from fedortho.statistics.observe import Observation


def responses(
    model: nn.Module, sites: Sequence[Site], inputs: Tensor
) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
    """Of one forward pass: responses of sites (with their shortcut), responses of single layers, and the logits."""
    layers = {layer.norm or layer.name: layer.name for site in sites for layer in site.layers}
    received = [site.name for site in sites if site.beside == site.name]
    returned = [site.beside for site in sites if site.beside not in ("", site.name)]
    with (
        torch.no_grad(),
        capture(model, {*layers, *returned}, Tensor.clone) as made,
        capture(model, received, Tensor.clone, inputs=True) as given,
    ):
        logits: Tensor = model(inputs)
    single = {name: made[module][-1] for module, name in layers.items()}
    whole = {}
    for site in sites:
        parts = [single[layer.name] for layer in site.layers]
        if site.beside:
            parts.append((given if site.beside == site.name else made)[site.beside][-1])
        whole[site.name] = torch.stack(parts).sum(0)
    return whole, single, logits


def _taps(sites: Sequence[Site]) -> Iterator[tuple[str, Layer]]:
    """Where responses are summed: each site, and the single layers of a sum."""
    for site in sites:
        yield site.name, site.layers[0]
        if site.is_stream:
            yield from ((layer.name, layer) for layer in site.layers)


def response_sums(
    model: nn.Module, images: Images, sites: Sequence[Site], device: torch.device | str = "cpu"
) -> Observation:
    """Sums over images: responses by position, their products, and pooled responses times the model's own answers."""
    sums: dict[str, Tensor] = {"answers": torch.zeros(1, images.classes, dtype=torch.float64)}
    for name, layer in _taps(sites):
        places = layer.size[0] * layer.size[1]
        for what, number in (("mean", places), ("second", layer.kernels), ("answered", images.classes)):
            sums[f"{name}:{what}"] = torch.zeros(1, layer.kernels * number, dtype=torch.float64)
    for inputs, _ in evaluation_batches(images, device=device):
        whole, single, logits = responses(model, sites, inputs)
        shares = logits.softmax(1)
        sums["answers"] += shares.cpu().double().sum(0)
        for name, _ in _taps(sites):
            flat = (whole[name] if name in whole else single[name]).flatten(2)  # (n, kernels, positions)
            rows = flat.transpose(0, 1).flatten(1)
            found_sums = {"mean": flat.sum(0), "second": rows @ rows.T, "answered": flat.mean(2).T @ shares}
            for what, value in found_sums.items():
                sums[f"{name}:{what}"] += value.cpu().double().flatten()
    return Observation(sums, torch.tensor([len(images)]))
