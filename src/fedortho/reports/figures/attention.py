"""Where a network looks: Grad-CAM of one image per class, before and after forgetting."""

import copy
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fedortho.data.images import Images, evaluation_batches
from fedortho.errors import BadSetting
from fedortho.models.graph import select_layers, trace_layers
from fedortho.models.predictions import logits_of
from fedortho.reports.figures.style import AFTER, NoLibrary, axis_names, entitle, new_figure, percent
from fedortho.reports.pictures import as_pictures

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
    """The first image of each class that all models recognise; a class without one is refused."""
    right = torch.stack([logits_of(model, images).argmax(1) == images.labels for model in models]).all(0)
    chosen = []
    for label in images.labels.unique().tolist():
        found = (right & (images.labels == label)).nonzero().flatten()
        if not len(found):
            name = images.names[label]
            raise BadSetting(f"no image of {name} is recognised by every model; show fewer classes or other models")
        chosen.append(int(found[0]))
    return images.subset(chosen)


def attention_left(before: Tensor, after: Tensor) -> Tensor:
    """Sum of each map after, as a share of its sum before, (images,); NaN where there was none before.

    >>> attention_left(torch.tensor([[[1.0, 3.0]], [[0.0, 0.0]]]), torch.tensor([[[0.0, 1.0]], [[0.0, 1.0]]]))
    tensor([0.2500,    nan])
    """
    total = before.flatten(1).sum(1)
    return torch.where(total > 0, after.flatten(1).sum(1) / total, torch.nan)


def grad_cam_figure(images: Images, maps: Mapping[str, tuple[Tensor, Tensor]], forget: Sequence[int]) -> "Figure":
    """Images, one of each class, and over them where each model looks before and after forgetting (paper, Grad-CAM).

    Before and after share a scale, so that a weaker map looks weaker.
    """
    number = len(images)
    figure, axes = new_figure(0.82 * number + 0.9, 0.86 * (1 + 2 * len(maps)) + 0.8, 1 + 2 * len(maps), number)
    pictures, short = as_pictures(images), axis_names(images.names)
    grey = pictures.float().mean(3) if pictures.dim() == 4 else pictures
    for place, ax in enumerate(axes[0]):
        label = int(images.labels[place])
        ax.imshow(pictures[place].numpy(), cmap="gray", interpolation="nearest")
        weight = "bold" if label in forget else "normal"
        ax.set_title(short[label], fontsize=8, fontweight=weight, color=AFTER if label in forget else "black")
    axes[0][0].set_ylabel("image", fontsize=8)
    for index, (name, pair) in enumerate(maps.items()):
        for step, (word, heat) in enumerate(zip(("before", "after"), pair, strict=True)):
            row = axes[1 + 2 * index + step]
            row[0].set_ylabel(f"{name}\n{word}", fontsize=8)
            for place, ax in enumerate(row):
                scale = float(pair[0][place].max()) or 1.0
                ax.imshow(grey[place].numpy(), cmap="gray", interpolation="nearest")
                strength = (heat[place] / scale).clamp(0, 1).numpy()
                ax.imshow(strength, cmap="inferno", vmin=0, vmax=1, alpha=0.25 + 0.6 * strength)
    for row in axes:
        for ax in row:
            ax.set_xticks([])
            ax.set_yticks([])
            ax.spines[:].set_visible(False)
    entitle(figure, _cam_finding(images, maps, forget))
    return figure


def _cam_finding(images: Images, maps: Mapping[str, tuple[Tensor, Tensor]], forget: Sequence[int]) -> str:
    is_forget = torch.isin(images.labels, torch.tensor(list(forget)))
    subject, parts = " and ".join(images.names[label] for label in forget), []
    for name, (before, after) in maps.items():
        left = attention_left(before, after)
        forget_share, other_share = float(left[is_forget].nanmean()), float(left[~is_forget].nanmedian())
        found = "not defined, there was none before," if math.isnan(forget_share) else percent(forget_share)
        parts.append(f"{found} in {name} (others: {percent(other_share)})")
    return f"Grad-CAM after forgetting: attention to {subject} that is left: " + ", ".join(parts)
