"""What kernels answer to and where a network looks: per-class answers and Grad-CAM, before and after forgetting."""

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
