"""What kernels answer to and where a network looks: per-class answers and Grad-CAM, before and after forgetting."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fedortho.data.images import Images, evaluation_batches
from fedortho.errors import BadData, BadSetting
from fedortho.models.graph import select_layers, trace_layers
from fedortho.models.predictions import answers_of
from fedortho.models.sites import find_sites
from fedortho.reports.figures.style import AFTER, BEFORE, HATCH, NoLibrary, entitle, grid_lines, new_figure, percent
from fedortho.statistics.observe import key_of, observe

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class KernelAnswers:
    """Mean peaks of one layer's kernels for each label, before and after forgetting, and the kernels to show."""

    name: str  # of the model
    before: Tensor  # (labels, kernels)
    after: Tensor
    kernels: tuple[int, ...]  # counted from 0


def class_peaks(
    model: nn.Module, images: Images, layer: str, tap: str = "conv", *, device: torch.device | str = "cpu"
) -> Tensor:
    """Mean over the images of each label of a kernel's largest response, (labels, kernels)."""
    (site,) = find_sites(model, images.shape, layer, "conv", tap)
    seen = observe(model, images, [(site, tap)], classes=images.classes, device=device)
    if not bool(seen.counts.all()):
        raise BadData("some classes have no image; a mean for each class needs at least one")
    return (seen.sums[key_of(site, tap)] / seen.counts.unsqueeze(1)).float()


def standing_out(peaks: Tensor, gone: Sequence[int]) -> float:
    """By how many standard deviations of the others a kernel's answer to the classes `gone` lies above their mean.

    >>> standing_out(torch.tensor([9.0, 1.0, 3.0]), [0])   # the others: mean 2, deviation 1
    7.0
    """
    kept = [label for label in range(len(peaks)) if label not in gone]
    others = peaks[kept].double()
    spread = float(others.std(correction=0))
    return (float(peaks[list(gone)].double().mean()) - float(others.mean())) / max(spread, 1e-9)


def activation_figure(models: Sequence[KernelAnswers], names: Sequence[str], gone: Sequence[int]) -> "Figure":
    """Answers of chosen kernels to each class, a column for each model and a row for each kernel (paper, Fig. 2)."""
    rows = len(models[0].kernels)
    figure, axes = new_figure(3.5 * len(models), 1.75 * rows + 1.2, rows, len(models))
    for column, model in enumerate(models):
        for row, kernel in enumerate(model.kernels):
            ax = axes[row][column]
            _answer_bars(ax, model.before[:, kernel], model.after[:, kernel], gone)
            ax.set_title(f"{model.name}, kernel {kernel + 1}", fontsize=9)
            last = row == rows - 1
            ax.set_xticks(range(len(names)), names if last else [""] * len(names), rotation=60, ha="right")
            for label in gone if last else ():
                ax.get_xticklabels()[label].set_fontweight("bold")
        axes[0][0].legend(fontsize=7, frameon=False, ncols=2)
    for row_axes in axes:
        row_axes[0].set_ylabel("mean peak response", fontsize=8)
    entitle(figure, _answers_finding(models, names, gone))
    return figure


def _answer_bars(ax: "Axes", before: Tensor, after: Tensor, gone: Sequence[int]) -> None:
    places = torch.arange(len(before))
    ax.bar((places - 0.2).tolist(), before.tolist(), 0.4, color=BEFORE, label="before")
    ax.bar((places + 0.2).tolist(), after.tolist(), 0.4, facecolor="white", edgecolor=AFTER, hatch=HATCH, label="after")
    for label in gone:
        ax.axvspan(label - 0.5, label + 0.5, color="#eeeeee", zorder=-1)
    ax.axhline(0, color="#444444", linewidth=0.8)
    grid_lines(ax)


def _answers_finding(models: Sequence[KernelAnswers], names: Sequence[str], gone: Sequence[int]) -> str:
    what = " and ".join(names[label] for label in gone)
    told = []
    for model in models:
        most = max(model.kernels, key=lambda kernel: standing_out(model.before[:, kernel], gone))
        before, after = (float(x[list(gone), most].mean()) for x in (model.before, model.after))
        left = percent(max(after / before, 0.0)) if before > 0 else "nothing above 0"
        by = standing_out(model.before[:, most], gone)
        told.append(f"{by:.1f} sd in the {model.name} model (kernel {most + 1}; of its answer {left} is left)")
    return f"Among the classes, {what} stands out by at most " + " and ".join(told)


def last_layer(model: nn.Module, shape: tuple[int, int, int]) -> str:
    """The last convolution of the main path, where Grad-CAM looks."""
    return select_layers(trace_layers(model, shape), "all")[-1].name


def grad_cam(model: nn.Module, images: Images, layer: str) -> Tensor:
    """Where the model finds each image's own class, (images, height, width); captum's LayerGradCam, positive part."""
    try:
        from captum.attr import LayerAttribution, LayerGradCam
    except ImportError as error:
        raise NoLibrary("Grad-CAM needs captum; install it: pip install 'fedortho[figures]'") from error
    twin = copy.deepcopy(model).cpu().eval().requires_grad_(True)
    maps = []
    for inputs, labels in evaluation_batches(images):
        found = LayerGradCam(twin, twin.get_submodule(layer)).attribute(inputs, labels, relu_attributions=True)
        assert isinstance(found, Tensor), "one layer, one tensor"
        maps.append(LayerAttribution.interpolate(found, images.shape[1:], "bilinear").detach().squeeze(1))
    return torch.cat(maps)


def recognised_examples(models: Sequence[nn.Module], images: Images) -> Images:
    """Of each class that has images the first that all models name rightly; a class without such a one is refused."""
    right = torch.ones(len(images), dtype=torch.bool)
    for model in models:
        right &= torch.cat(
            [answers_of(model, inputs).argmax(1) == labels for inputs, labels in evaluation_batches(images)]
        )
    chosen = []
    for label in images.labels.unique().tolist():
        found = (right & (images.labels == label)).nonzero().flatten()
        if not len(found):
            name = images.names[label]
            raise BadSetting(f"no image of {name} is named rightly by every model; show fewer classes or other models")
        chosen.append(int(found[0]))
    return images.subset(chosen)


def looked_at(before: Tensor, after: Tensor) -> Tensor:
    """Of what a map held before, the share that it holds after, (images,).

    >>> looked_at(torch.tensor([[[1.0, 3.0]]]), torch.tensor([[[0.0, 1.0]]]))
    tensor([0.2500])
    """
    return after.flatten(1).sum(1) / before.flatten(1).sum(1).clamp_min(1e-12)


def grad_cam_figure(images: Images, maps: Mapping[str, tuple[Tensor, Tensor]], gone: Sequence[int]) -> "Figure":
    """Images, one of each class, and over them where each model looks before and after forgetting (paper, Grad-CAM).

    Before and after share a scale, so that a weaker map looks weaker.
    """
    number = len(images)
    figure, axes = new_figure(0.82 * number + 0.9, 0.86 * (1 + 2 * len(maps)) + 0.8, 1 + 2 * len(maps), number)
    pictures = as_pictures(images)
    for place, ax in enumerate(axes[0]):
        label = int(images.labels[place])
        ax.imshow(pictures[place].numpy(), cmap="gray", interpolation="nearest")
        weight = "bold" if label in gone else "normal"
        ax.set_title(images.names[label], fontsize=8, fontweight=weight, color=AFTER if label in gone else "black")
    axes[0][0].set_ylabel("image", fontsize=8)
    for index, (name, pair) in enumerate(maps.items()):
        for step, (word, heat) in enumerate(zip(("before", "after"), pair, strict=True)):
            row = axes[1 + 2 * index + step]
            row[0].set_ylabel(f"{name}\n{word}", fontsize=8)
            for place, ax in enumerate(row):
                scale = float(pair[0][place].max()) or 1.0
                ax.imshow(_grey(pictures[place]).numpy(), cmap="gray", interpolation="nearest")
                strength = (heat[place] / scale).clamp(0, 1).numpy()
                ax.imshow(strength, cmap="inferno", vmin=0, vmax=1, alpha=0.25 + 0.6 * strength)
    for row in axes:
        for ax in row:
            ax.set_xticks([])
            ax.set_yticks([])
            ax.spines[:].set_visible(False)
    entitle(figure, _cam_finding(images, maps, gone))
    return figure


def as_pictures(images: Images) -> Tensor:
    """Images as matplotlib and Pillow draw them: (n, height, width) or (n, height, width, 3), uint8."""
    pixels = images.pixels[images.rows]
    if pixels.is_floating_point():  # as a model reads them: stretched to what can be seen
        low, high = pixels.amin((1, 2, 3), keepdim=True), pixels.amax((1, 2, 3), keepdim=True)
        pixels = ((pixels - low) / (high - low).clamp_min(1e-9) * 255).to(torch.uint8)
    return pixels.permute(0, 2, 3, 1) if pixels.shape[1] == 3 else pixels[:, 0]


def _grey(picture: Tensor) -> Tensor:
    return picture.float().mean(2) if picture.dim() == 3 else picture


def _cam_finding(images: Images, maps: Mapping[str, tuple[Tensor, Tensor]], gone: Sequence[int]) -> str:
    is_gone = torch.isin(images.labels, torch.tensor(list(gone)))
    what = " and ".join(images.names[label] for label in gone)
    told = []
    for name, (before, after) in maps.items():
        left = looked_at(before, after)
        told.append(
            f"{percent(float(left[is_gone].mean()))} in {name} (others: {percent(float(left[~is_gone].median()))})"
        )
    return f"Grad-CAM: after forgetting, what is left of the attention to {what} is " + " and ".join(told)
