"""Responses of kernels to each class, before and after forgetting."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fedortho.data.images import Images
from fedortho.errors import BadData
from fedortho.models.sites import find_sites
from fedortho.reports.figures.style import AFTER, BEFORE, HATCH, entitle, grid_lines, new_figure, percent
from fedortho.statistics.observe import key_of, observe

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class KernelResponses:
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


def prominence(peaks: Tensor, forget: Sequence[int]) -> float:
    """How many standard deviations of the other classes' responses the forgotten ones lie above their mean.

    >>> prominence(torch.tensor([9.0, 1.0, 3.0]), [0])   # the others: mean 2, deviation 1
    7.0
    """
    retain = [label for label in range(len(peaks)) if label not in forget]
    others = peaks[retain].double()
    spread = float(others.std(correction=0))
    return (float(peaks[list(forget)].double().mean()) - float(others.mean())) / max(spread, 1e-9)


def activation_figure(models: Sequence[KernelResponses], names: Sequence[str], forget: Sequence[int]) -> "Figure":
    """Responses of chosen kernels to each class: a column for each model, a row for each kernel (paper, Fig. 2)."""
    rows = len(models[0].kernels)
    figure, axes = new_figure(3.5 * len(models), 1.75 * rows + 1.2, rows, len(models))
    for column, model in enumerate(models):
        for row, kernel in enumerate(model.kernels):
            ax = axes[row][column]
            _response_bars(ax, model.before[:, kernel], model.after[:, kernel], forget)
            ax.set_title(f"{model.name}, kernel {kernel + 1}", fontsize=9)
            last = row == rows - 1
            ax.set_xticks(range(len(names)), names if last else [""] * len(names), rotation=60, ha="right")
            for label in forget if last else ():
                ax.get_xticklabels()[label].set_fontweight("bold")
        axes[0][0].legend(fontsize=7, frameon=False, ncols=2)
    for row_axes in axes:
        row_axes[0].set_ylabel("mean peak response", fontsize=8)
    entitle(figure, _responses_finding(models, names, forget))
    return figure


def _response_bars(ax: "Axes", before: Tensor, after: Tensor, forget: Sequence[int]) -> None:
    places = torch.arange(len(before))
    ax.bar((places - 0.2).tolist(), before.tolist(), 0.4, color=BEFORE, label="before")
    ax.bar((places + 0.2).tolist(), after.tolist(), 0.4, facecolor="white", edgecolor=AFTER, hatch=HATCH, label="after")
    for label in forget:
        ax.axvspan(label - 0.5, label + 0.5, color="#eeeeee", zorder=-1)
    ax.axhline(0, color="#444444", linewidth=0.8)
    grid_lines(ax)


def _responses_finding(models: Sequence[KernelResponses], names: Sequence[str], forget: Sequence[int]) -> str:
    subject, parts = " and ".join(names[label] for label in forget), []
    for model in models:
        top = max(model.kernels, key=lambda kernel: prominence(model.before[:, kernel], forget))
        before, after = (float(x[list(forget), top].mean()) for x in (model.before, model.after))
        left = percent(max(after / before, 0.0)) if before > 0 else "nothing above 0"
        by = prominence(model.before[:, top], forget)
        parts.append(f"{by:.1f} sd in the {model.name} model (kernel {top + 1}, which keeps {left} of its response)")
    return f"{subject} exceeds the other classes by at most " + " and ".join(parts)
