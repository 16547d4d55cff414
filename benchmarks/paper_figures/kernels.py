"""Similarity of kernels: Gram heatmaps, similarity of features by depth, and its distribution."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedortho.data.images import Images, evaluation_batches
from fedortho.data.loaders import ImageSource
from fedortho.errors import unknown
from fedortho.models.capture import capture
from fedortho.models.graph import Layer, select_layers, trace_layers
from fedortho.models.predictions import evaluating
from fedortho.reports.figures.style import DASHES, MARKERS, SERIES, entitle, grid_lines, new_figure
from fedortho.training.orthogonality import kernel_matrix
from paper_figures.costs import times

if TYPE_CHECKING:
    from matplotlib.figure import Figure


DEPTHS = ("shallow", "mid", "deep")
Similarity = Mapping[str, Tensor]  # layer → (kernels, kernels), |cosine| of each pair


def kernel_similarity(model: nn.Module, layers: Sequence[str]) -> dict[str, Tensor]:
    """|cosine| between the weights of every two kernels of each layer, (kernels, kernels).

    Kernels of different groups read different channels, so they have nothing in common.

    >>> conv = nn.Conv2d(2, 2, 1, bias=False)
    >>> conv.weight.data = torch.tensor([[3.0, 4.0], [4.0, 3.0]]).view(2, 2, 1, 1)
    >>> round(float(kernel_similarity(nn.Sequential(conv), ["0"])["0"][0, 1]), 6)  # 24 / 25
    0.96
    """
    found = {}
    for name in layers:
        unit = functional.normalize(kernel_matrix(_conv(model, name)).detach().float().cpu(), dim=2)
        found[name] = torch.block_diag(*(unit @ unit.transpose(1, 2)).abs())
    return found


def feature_similarity(
    model: nn.Module, images: Images | ImageSource, layers: Sequence[str], *, device: torch.device | str = "cpu"
) -> dict[str, Tensor]:
    """|cosine| between the response maps of every two kernels, taken over all images and places together.

    Maps are what leaves the convolution, before norm and activation; the sums of products are exact over batches.
    """
    for name in layers:
        _conv(model, name)  # refuses a name that is none

    def products(out: Tensor) -> Tensor:
        maps = out.detach().transpose(0, 1).flatten(1)  # (kernels, images * places)
        return (maps @ maps.T).cpu().double()

    sums: dict[str, Tensor] = {}
    with evaluating(model):
        for inputs, _ in evaluation_batches(images, device=device):
            with capture(model, layers, products) as seen:
                model(inputs)
            for name, (*_, product) in seen.items():
                sums[name] = sums[name] + product if name in sums else product
    return {name: _cosines(sums[name]).abs().float() for name in layers}


def _cosines(gram: Tensor) -> Tensor:
    length = gram.diagonal().clamp_min(1e-30).sqrt()
    return gram / length.unsqueeze(0) / length.unsqueeze(1)


def _conv(model: nn.Module, name: str) -> nn.Conv2d:
    convs = {path: module for path, module in model.named_modules() if isinstance(module, nn.Conv2d)}
    if name not in convs:
        raise unknown("convolution", name, convs)
    return convs[name]


def pairs(similarity: Tensor) -> Tensor:
    """The similarity of every two different kernels, each pair once.

    >>> pairs(torch.tensor([[1.0, 0.5], [0.5, 1.0]]))
    tensor([0.5000])
    """
    rows, columns = torch.triu_indices(len(similarity), len(similarity), offset=1)
    return similarity[rows, columns]


def mean_similarity(similarity: Tensor) -> float:
    """Mean over the pairs; of a single kernel there is none, and it is 0."""
    values = pairs(similarity)
    return float(values.mean()) if len(values) else 0.0


def depths_of(model: nn.Module, shape: tuple[int, int, int]) -> dict[str, str]:
    """The main-path convolutions in forward order, each shallow, mid or deep."""
    layers: list[Layer] = trace_layers(model, shape)
    depth = {layer.name: word for word in DEPTHS for layer in select_layers(layers, word)}
    return {layer.name: depth[layer.name] for layer in layers if layer.name in depth}


def layers_by_depth(depths: Mapping[str, str], most: int = 3) -> dict[str, list[str]]:
    """Up to `most` layers of each depth: the first, the last and those between at equal distances.

    >>> layers_by_depth({"a": "shallow", **{f"m{n}": "mid" for n in range(5)}, "z": "deep"})
    {'shallow': ['a'], 'mid': ['m0', 'm2', 'm4'], 'deep': ['z']}
    """
    found = {}
    for depth in DEPTHS:
        layers = [layer for layer, word in depths.items() if word == depth]
        number = min(len(layers), most)
        found[depth] = [layers[round(n * (len(layers) - 1) / max(number - 1, 1))] for n in range(number)]
    return found


def gram_figure(models: Mapping[str, Similarity], measure: str = "kernels") -> "Figure":
    """Heatmaps of similarity, a row for each model and a column for each layer (paper, Fig. 1 a, b and appendix).

    The first model is what the others are compared with; `measure` says of what the similarity is.
    """
    layers = list(next(iter(models.values())))
    beside = len(layers) == 1  # a single layer: the models stand side by side
    rows, columns = (1, len(models)) if beside else (len(models), len(layers))
    side = 2.5 if columns <= 4 else 1.6
    figure, axes = new_figure(side * columns + 1.2, (side - 0.15) * rows + 1.0, rows, columns)
    every = torch.cat([pairs(similarity[layer]) for similarity in models.values() for layer in layers])
    most = max(float(torch.quantile(every[:: max(len(every) // 1_000_000, 1)], 0.995)), 1e-6)
    shown = None
    for number, (name, similarity) in enumerate(models.items()):
        for place, layer in enumerate(layers):
            ax = axes[0][number] if beside else axes[number][place]
            shown = ax.imshow(similarity[layer].numpy(), cmap="cividis", vmin=0, vmax=most, interpolation="nearest")
            ax.set_title(f"{name}, {layer}\nmean {mean_similarity(similarity[layer]):.2g}", fontsize=8)
            ends = [0, len(similarity[layer]) - 1], ["1", str(len(similarity[layer]))]
            ax.set_xticks(*ends)
            ax.set_yticks(*ends)
            ax.set_xlabel("kernel", fontsize=8, labelpad=-6)
    assert shown is not None, "there is at least one layer"
    bar = figure.colorbar(shown, ax=[ax for row in axes for ax in row], shrink=0.8, extend="max")
    bar.set_label(f"|cosine| of two {measure}", fontsize=8)
    bar.ax.tick_params(labelsize=8)
    entitle(figure, _gram_finding(models, layers, measure))
    return figure


def _gram_finding(models: Mapping[str, Similarity], layers: Sequence[str], measure: str) -> str:
    base, *others = models.items()
    if not others:
        return f"{base[0]}: mean |cosine| of two {measure} {mean_similarity(base[1][layers[-1]]):.2g} in {layers[-1]}"
    name, similarity = others[-1]
    change = {x: mean_similarity(base[1][x]) / max(mean_similarity(similarity[x]), 1e-12) for x in layers}
    most, least = max(change, key=lambda x: change[x]), min(change, key=lambda x: change[x])
    text = f"Trained {name}, {measure} of {most} are {less_similar(change[most])} than {base[0]}"
    return text + (f", those of {least} {less_similar(change[least])}" if most != least else "")


def less_similar(ratio: float) -> str:
    """A ratio of similarities in words; a difference below a tenth counts as none.

    >>> less_similar(150.0), less_similar(1.04), less_similar(0.5)
    ('150 times less similar', 'about as similar', '2.0 times more similar')
    """
    if 1 / 1.1 < ratio < 1.1:
        return "about as similar"
    return f"{times(ratio)} less similar" if ratio > 1 else f"{times(1 / ratio)} more similar"


def similarity_by_depth_figure(models: Mapping[str, Similarity]) -> "Figure":
    """Mean similarity of features from the first layer to the last, a line for each model (paper, Fig. 1 c)."""
    layers = list(next(iter(models.values())))
    figure, ((ax,),) = new_figure(6.6, 3.5)
    for number, (name, similarity) in enumerate(models.items()):
        values = [mean_similarity(similarity[layer]) for layer in layers]
        ax.plot(layers, values, color=SERIES[number], marker=MARKERS[number], linestyle=DASHES[number], label=name)
    ax.set_ylim(bottom=0)
    ax.set_ylabel("mean |cosine| of two maps", fontsize=9)
    ax.set_xlabel("convolution, first to last", fontsize=9)
    ax.tick_params(axis="x", labelrotation=30 if max(map(len, layers)) > 6 else 0)
    grid_lines(ax)
    ax.legend(fontsize=8, frameon=False)
    entitle(figure, _depth_finding(models, layers))
    return figure


def _depth_finding(models: Mapping[str, Similarity], layers: Sequence[str]) -> str:
    name, base = next(iter(models.items()))
    means = {layer: mean_similarity(base[layer]) for layer in layers}
    most, last = max(means, key=lambda layer: means[layer]), layers[-1]
    others = [
        f"{other} {mean_similarity(similarity[last]):.2f}" for other, similarity in models.items() if other != name
    ]
    text = f"{name}: features are most similar in {most} ({means[most]:.2f}), "
    text += "the last layer" if most == last else f"and in the last layer {means[last]:.2f}"
    return text + (f" (with {', '.join(others)})" if others else "")


def shares(values: Tensor, bins: int) -> tuple[list[float], list[float]]:
    """Middles of equal bins over 0 to 1 and the share of values in each.

    >>> shares(torch.tensor([0.1, 0.2, 0.9, 0.4]), bins=2)
    ([0.25, 0.75], [0.75, 0.25])
    """
    counts = torch.histc(values.float().clamp(0, 1), bins, 0, 1)
    return [(number + 0.5) / bins for number in range(bins)], (counts / len(values)).tolist()


def similarity_curves_figure(models: Mapping[str, Similarity], depths: Mapping[str, str], bins: int = 20) -> "Figure":
    """Distribution of similarities: a panel for each model, a curve for each layer (paper, appendix)."""
    figure, (axes,) = new_figure(2.6 * len(models) + 0.6, 3.3, 1, len(models), share_y=True)
    for ax, (name, similarity) in zip(axes, models.items(), strict=True):
        for layer, matrix in similarity.items():
            number = DEPTHS.index(depths[layer])
            middles, values = shares(pairs(matrix), bins)
            ax.plot(middles, values, color=SERIES[number], linestyle=DASHES[number], linewidth=1.3)
        ax.set_title(name, fontsize=9)
        ax.set_xlim(0, 1)
        ax.set_ylim(bottom=0)
        ax.set_xlabel("|cosine| of two response maps", fontsize=8)
        grid_lines(ax)
    axes[0].set_ylabel(f"share of kernel pairs per {1 / bins:g}", fontsize=9)
    for number, depth in enumerate(DEPTHS):
        axes[0].plot([], [], color=SERIES[number], linestyle=DASHES[number], label=f"{depth} layers")
    axes[0].legend(fontsize=8, frameon=False)
    entitle(figure, _curves_finding(models, depths))
    return figure


def _curves_finding(models: Mapping[str, Similarity], depths: Mapping[str, str]) -> str:
    deep = {
        name: torch.cat([pairs(matrix) for layer, matrix in similarity.items() if depths[layer] == "deep"])
        for name, similarity in models.items()
    }
    middle = {name: float(values.median()) for name, values in deep.items()}
    least = min(middle, key=lambda name: middle[name])
    rest = ", ".join(f"{name} {value:.2f}" for name, value in middle.items() if name != least)
    text = f"Two deep features are least similar with {least}: median |cosine| {middle[least]:.2f}"
    return text + (f" ({rest})" if rest else "")
