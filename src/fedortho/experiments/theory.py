"""The paper's theory of decoupled features, measured on a network: its assumptions, its lemma and its bounds.

For the kernels W of a layer, as rows, and the patches x that the layer reads:

- ε = ‖W Wᵀ − I‖_F. Lemma: distinct kernels have |wᵢ·wⱼ| ≤ ε, and |‖wⱼ‖² − 1| ≤ ε.
- η = ‖Cov(x) − I‖₂. Theorem: |Cov(wᵢ·x, wⱼ·x)| ≤ ε + (1 + ε) η.
- "Role separation": the largest of a kernel's responses in an image is bounded by a constant times σ √(log m / m), with
  m patches. The expected maximum of m independent responses *grows* with m, like σ √(2 log m), so no constant makes
  this true for all m.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fedortho.data.images import Images, evaluation_batches
from fedortho.errors import BadSetting
from fedortho.models.capture import capture
from fedortho.models.graph import select_layers, trace_layers
from fedortho.reports.figures.style import MARKERS, SERIES, caption, entitle, name_axes, new_figure
from fedortho.statistics.gram import layer_columns

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BATCH = 50  # images; the patches of a 3x3 convolution take nine times the memory of its inputs
HEADER = ("layer", "ε", "max |wᵢ·wⱼ|", "max |‖w‖²−1|", "η", "bound ε+(1+ε)η", "max |Cov|", "mean |Cov|", "max/σ: m")


@dataclass(frozen=True)
class LayerTheory:
    """What the theory says of one layer, and what holds there."""

    layer: str
    kernels: int
    epsilon: float  # ‖W Wᵀ − I‖_F
    largest_product: float  # |wᵢ·wⱼ| of distinct kernels
    largest_norm_error: float  # |‖w‖² − 1|
    eta: float  # ‖Cov(x) − I‖₂ of the patches
    largest_covariance: float  # |Cov(wᵢ·x, wⱼ·x)| of distinct kernels
    mean_covariance: float
    maxima: Mapping[str, float]  # mean over images and kernels of the largest of m responses, centred, in units of σ

    @property
    def bound(self) -> float:
        """The paper's bound of the covariance."""
        return self.epsilon + (1 + self.epsilon) * self.eta

    @property
    def lemma_holds(self) -> bool:
        return max(self.largest_product, self.largest_norm_error) <= self.epsilon * (1 + 1e-6)

    @property
    def growth(self) -> list[tuple[int, float]]:
        """`maxima` by rising number of patches."""
        return sorted((int(number), value) for number, value in self.maxima.items())

    @property
    def cells(self) -> tuple[str, ...]:
        """The line of a table, in the order of HEADER."""
        kernels = (self.epsilon, self.largest_product, self.largest_norm_error)
        numbers = (*kernels, self.eta, self.bound, self.largest_covariance, self.mean_covariance)
        maxima = ", ".join(f"{value:z.1f}: {number}" for number, value in self.growth)
        return (self.layer, *(f"{value:.3g}" for value in numbers), maxima)


def measure_theory(
    model: nn.Module, images: Images, layers: str = "deep", *, device: torch.device | str = "cpu"
) -> list[LayerTheory]:
    """The theory's quantities in the named layers (as in `--layers`), over the patches of these images.

    Two passes over the images: means and covariances of the patches first, then the largest responses. Grouped
    convolutions are left out, whose kernels read different patches, and those with one kernel.
    """
    model = model.to(device).eval()
    named = [layer.name for layer in select_layers(trace_layers(model, images.shape), layers)]
    modules = {name: _convolution(model, name) for name in named}
    chosen = {name: module for name, module in modules.items() if module.groups == 1 and module.out_channels > 1}
    if not chosen:
        raise BadSetting(f"all of {', '.join(named)} are grouped or have one kernel; name others (--layers)")
    moments = _moments(model, images, chosen, device)
    found = []
    for name, module in chosen.items():
        kernels, (mean, covariance) = module.weight.detach().flatten(1).cpu().double(), moments[name]
        responses = kernels @ covariance @ kernels.T
        apart = ~torch.eye(len(kernels), dtype=torch.bool)
        off, gram = responses[apart].abs(), kernels @ kernels.T - torch.eye(len(kernels))
        centre, spread = kernels @ mean, responses.diagonal().clamp_min(1e-30).sqrt()
        maxima = _maxima(model, images, name, (centre, spread), device)
        found.append(
            LayerTheory(
                name,
                len(kernels),
                float(gram.norm()),
                float(gram[apart].abs().max()),
                float(gram.diagonal().abs().max()),
                float(torch.linalg.matrix_norm(covariance - torch.eye(len(covariance)), 2)),
                float(off.max()),
                float(off.mean()),
                maxima,
            )
        )
    return found


def _convolution(model: nn.Module, name: str) -> nn.Conv2d:
    module = model.get_submodule(name)
    assert isinstance(module, nn.Conv2d), "trace_layers finds no other"
    return module


def _seen(
    model: nn.Module, images: Images, names: Sequence[str], device: torch.device | str, *, inputs: bool
) -> Iterator[dict[str, Tensor]]:
    """Inputs or outputs of these layers, a batch of images at a time."""
    with torch.no_grad():
        for batch, _ in evaluation_batches(images, BATCH, device):
            with capture(model, names, Tensor.clone, inputs=inputs) as captured:
                model(batch)
            yield {name: torch.cat(parts) for name, parts in captured.items()}


def _moments(
    model: nn.Module, images: Images, layers: Mapping[str, nn.Conv2d], device: torch.device | str
) -> dict[str, tuple[Tensor, Tensor]]:
    """Mean and covariance of the patches that each layer reads, float64 on the CPU."""
    sums: dict[str, list[Tensor]] = {}
    for batch in _seen(model, images, list(layers), device, inputs=True):
        for name, inputs in batch.items():
            patches = layer_columns(layers[name], inputs)[0].cpu().double()  # (D, images times positions)
            parts = [torch.tensor(float(patches.shape[1])), patches.sum(1), patches @ patches.T]
            sums[name] = [a + b for a, b in zip(sums[name], parts, strict=True)] if name in sums else parts
    means = {name: (first / number, second / number) for name, (number, first, second) in sums.items()}
    return {name: (mean, second - torch.outer(mean, mean)) for name, (mean, second) in means.items()}


def _maxima(
    model: nn.Module, images: Images, name: str, standard: tuple[Tensor, Tensor], device: torch.device | str
) -> dict[str, float]:
    """By m: the largest of m responses at random positions of an image, less the mean response and over σ, on average.

    `standard` are mean and σ of each kernel's response over all patches. A bias is part of the output and of the mean.
    """
    centre, spread = (each.view(1, -1, 1) for each in standard)
    bias = _convolution(model, name).bias
    centre = centre if bias is None else centre + bias.detach().cpu().double().view(1, -1, 1)
    random, sums = torch.Generator().manual_seed(0), dict[int, float]()
    for batch in _seen(model, images, [name], device, inputs=False):
        responses = (batch[name].flatten(2).cpu().double() - centre) / spread
        order = torch.randperm(responses.shape[2], generator=random)
        for number in numbers_of_patches(responses.shape[2]):
            largest = responses[:, :, order[:number]].amax(2).mean(1).sum()
            sums[number] = sums.get(number, 0.0) + float(largest)
    return {str(number): total / len(images) for number, total in sums.items()}


def numbers_of_patches(positions: int) -> list[int]:
    """Powers of four up to the positions of an image, and these.

    >>> numbers_of_patches(64), numbers_of_patches(9)
    ([1, 4, 16, 64], [1, 4, 9])
    """
    powers = [4**power for power in range(12) if 4**power < positions]
    return [*powers, positions]


def theory_figure(networks: Mapping[str, Sequence[LayerTheory]], about: str) -> "Figure":
    """Covariances against their bound, and maxima against the printed bound, one colour for each network.

    `about` says what was measured: network, data, seed and images. The right legend names the networks, in one column,
    because names of runs are long.
    """
    figure, ((left, right),) = new_figure(9.6, 3.8, columns=2)
    for (name, layers), colour, marker in zip(networks.items(), SERIES, MARKERS, strict=False):
        across = range(1, len(layers) + 1)
        how: dict[str, Any] = {"color": colour, "marker": marker, "linewidth": 1.2, "markersize": 4}
        left.plot(across, [layer.bound for layer in layers], linestyle="--", **how)
        left.plot(across, [layer.largest_covariance for layer in layers], **how)
        left.plot(across, [layer.mean_covariance for layer in layers], linestyle=":", **how)
        widest = max(layers, key=lambda layer: layer.growth[-1])
        right.plot(*zip(*widest.growth, strict=True), label=f"{name}, {widest.layer}", **how)
    for word, dashes in {"bound": "--", "largest": "-", "mean": ":"}.items():
        left.plot([], [], color="#444444", linestyle=dashes, label=word)
    counts = numbers_of_patches(max(layer.growth[-1][0] for layers in networks.values() for layer in layers))
    printed, grown = [math.sqrt(math.log(m) / m) for m in counts], [math.sqrt(2 * math.log(m)) for m in counts]
    right.plot(counts, printed, color="#999999", linestyle="--", label="printed bound √(log m / m)")
    right.plot(counts, grown, color="#999999", linestyle=":", label="independent responses √(2 log m)")
    left.set_yscale("log")
    left.set_ylim(top=10 * max(layer.bound for layers in networks.values() for layer in layers))  # the legend's room
    left.yaxis.set_major_formatter("{x:g}")
    right.set_xscale("log", base=4)
    right.set_xticks(counts, map(str, counts))
    right.set_ylim(top=1.5 * grown[-1])
    left.set_xticks(range(1, max(len(layers) for layers in networks.values()) + 1))
    name_axes(left, "layer, in forward order", "|covariance| of two kernels' responses")
    name_axes(right, "patches m", "largest of m responses, in units of σ")
    left.legend(fontsize=7, frameon=False, ncols=3, loc="upper right")
    right.legend(fontsize=7, frameon=False, loc="upper left")
    entitle(figure, " ".join(theory_sentences(networks)))
    caption(figure, f"{about}; layers: {', '.join(layer.layer for layer in max(networks.values(), key=len))}")
    return figure


def theory_sentences(networks: Mapping[str, Sequence[LayerTheory]]) -> list[str]:
    """What holds and what does not, in words."""
    layers = [layer for found in networks.values() for layer in found]
    lemma = sum(layer.lemma_holds for layer in layers)
    bounded = sum(layer.largest_covariance <= layer.bound for layer in layers)
    factor = min(layer.bound / max(layer.largest_covariance, 1e-30) for layer in layers)
    grows = sum(layer.growth[-1][1] > layer.growth[0][1] for layer in layers)
    return [
        f"The lemma holds in {lemma} of {len(layers)} layers and the covariance bound in {bounded}, at least "
        f"{factor:.3g} times what it bounds.",
        f"The largest response grows with the number of patches in {grows} of {len(layers)}; the printed bound falls.",
    ]
