"""Results in figures: training, trials, accuracy and confidence before and after, and what audits recover."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from fedortho.data.images import Images
from fedortho.models.predictions import Evaluation, logits_of
from fedortho.reports.figures import style
from fedortho.training.loop import Epoch

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_CLASSES = 20  # shown one by one; of more, those that changed most


class Point(NamedTuple):
    """An edit of a share of the kernels, and its accuracies."""

    ratio: float
    forget: float
    retain: float


def frontier_figure(
    points: Sequence[Point], chosen: Point, *, target: float | None = None, least: float | None = None
) -> "Figure":
    """Forget and retain accuracy over the share of kernels edited, with the point that was chosen.

    `target` is the wanted forget accuracy, `least` the retain accuracy that the budget allows.
    """
    figure, ((ax,),) = style.new_figure(6.4, 3.7)
    line = sorted(points)
    ratios = [point.ratio for point in line]
    ax.plot(ratios, [p.retain for p in line], color=style.BEFORE, marker="o", label="retain accuracy")
    ax.plot(ratios, [p.forget for p in line], color=style.AFTER, marker="s", linestyle="--", label="forget accuracy")
    for bound, colour, name in ((target, style.AFTER, "target"), (least, style.BEFORE, "least retain accuracy")):
        if bound is not None:
            ax.axhline(bound, color=colour, linestyle=":", linewidth=1, label=f"{name} {style.percent(bound)}")
    ax.axvline(chosen.ratio, color=style.BLACK, linewidth=1)
    heights = [chosen.forget, chosen.retain]
    ax.plot([chosen.ratio] * 2, heights, "*", color=style.BLACK, markersize=13, linestyle="none", label="chosen")
    if len(ratios) > 1 and min(ratios) > 0 and max(ratios) / min(ratios) > 5:
        ax.set_xscale("log")
    style.percent_axis(ax, "x")
    style.percent_axis(ax)
    ax.set_ylim(-0.03, 1.03)
    style.name_axes(ax, "kernels edited in each layer", "accuracy", grid="both")
    ax.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    text = f"Editing {style.percent(chosen.ratio)} of the kernels leaves {style.percent(chosen.forget)} forget accuracy"
    style.entitle(figure, f"{text} and {style.percent(chosen.retain)} retain accuracy")
    return figure


def training_figure(histories: Mapping[str, Sequence[Epoch]]) -> "Figure":
    """Validation accuracy over the epochs of training, or the rounds of a federation."""
    figure, ((ax,),) = style.new_figure(6.2, 3.4)
    last, unit = [], "epoch"
    for number, (name, history) in enumerate(histories.items()):
        seen = [(entry.epoch + 1, entry.valid) for entry in history if entry.valid is not None]
        look: Any = {"color": style.SERIES[number], "linestyle": style.DASHES[number], "marker": style.MARKERS[number]}
        ax.plot([place for place, _ in seen], [value for _, value in seen], label=name, markersize=4, **look)
        last += [f"{name} {style.percent(value)}" for _, value in seen[-1:]]
        unit = "round" if any(entry.clients is not None for entry in history) else unit
    ax.xaxis.get_major_locator().set_params(integer=True)  # type: ignore[call-arg]  # of the automatic locator
    style.percent_axis(ax)
    style.name_axes(ax, f"{unit} of training", "validation accuracy")
    ax.legend(fontsize=8, frameon=False)
    style.entitle(figure, f"Validation accuracy after the last {unit}: {', '.join(last)}")
    return figure


def most_changed(before: Evaluation, after: Evaluation, forget: Sequence[int], most: int = MOST_CLASSES) -> list[int]:
    """The labels to show: forgotten classes and those whose accuracy changed most, in the order of labels."""
    known = [label for label, share in enumerate(before.per_class) if share is not None]
    change = {label: abs((after.per_class[label] or 0) - (before.per_class[label] or 0)) for label in known}
    retain = sorted((label for label in known if label not in forget), key=lambda label: -change[label])
    return sorted([*(label for label in forget if label in change), *retain[: max(most - len(forget), 1)]])


def class_accuracy_figure(
    before: Evaluation,
    after: Evaluation,
    names: Sequence[str],
    forget: Sequence[int],
    reference: Evaluation | None = None,
) -> "Figure":
    """Accuracy on each class before and after, and of a reference model."""
    labels = most_changed(before, after, forget)
    figure, ((ax,),) = style.new_figure(max(6.4, 0.42 * len(labels) + 2), 3.6)
    scores = [("before", before, style.BEFORE, None), ("after forgetting", after, style.AFTER, style.HATCH)]
    scores += [("retrained without it", reference, style.REFERENCE, "..")] if reference is not None else []
    series = [(name, [score.per_class[x] or 0.0 for x in labels], hue, hatch) for name, score, hue, hatch in scores]
    short = style.axis_names(names)
    style.grouped_bars(ax, series, [short[label] for label in labels], rotation=45, ha="right")
    for place, label in enumerate(labels):
        if label in forget:
            ax.axvspan(place - 0.5, place + 0.5, color="#eeeeee", zorder=-1)
            ax.get_xticklabels()[place].set_fontweight("bold")
    style.percent_axis(ax)
    ax.set_ylim(0, 1)
    ax.set_ylabel("accuracy on test images", fontsize=9)
    style.grid_lines(ax)
    style.entitle(figure, _classes_finding(before, after, names, forget))
    return figure


def _classes_finding(before: Evaluation, after: Evaluation, names: Sequence[str], forget: Sequence[int]) -> str:
    pairs = enumerate(zip(before.per_class, after.per_class, strict=True))
    known = {label: (old, new) for label, (old, new) in pairs if old is not None and new is not None}
    words = {label: tuple(map(style.percent, known[label])) for label in forget if label in known}
    parts = [f"{names[label]} falls from {old} to {new}" for label, (old, new) in words.items()]
    retain = {label: new - old for label, (old, new) in known.items() if label not in forget}
    if retain:
        worst = min(retain, key=lambda label: retain[label])
        verb = "loses most" if retain[worst] < 0 else "gains least"
        parts.append(f"of the retained classes {names[worst]} {verb}, {abs(100 * retain[worst]):.1f} points")
    return "; ".join(parts)


def confusion_change(before: Evaluation, after: Evaluation) -> Tensor:
    """Change of the share of each prediction (column) on the images of each label (row), (labels, labels).

    >>> old, new = (Evaluation(4, 0, 0, rows) for rows in (((2, 0), (0, 2)), ((1, 1), (0, 2))))
    >>> confusion_change(old, new).tolist()
    [[-0.5, 0.5], [0.0, 0.0]]
    """
    tables = [torch.tensor(score.confusion, dtype=torch.float64) for score in (before, after)]
    old, new = (table / table.sum(1, keepdim=True).clamp_min(1) for table in tables)
    return (new - old).float()


def confusion_figure(before: Evaluation, after: Evaluation, names: Sequence[str], forget: Sequence[int]) -> "Figure":
    """Change of predictions: shares of each true class, after minus before."""
    change = confusion_change(before, after)
    are_few = len(names) <= MOST_CLASSES
    figure, ((ax,),) = style.new_figure(6.2, 5.2)
    most = max(float(change.abs().max()), 0.01)
    shown = ax.imshow(100 * change.numpy(), cmap="PuOr", vmin=-100 * most, vmax=100 * most)
    for true, answer in ((t, a) for t in range(len(names)) for a in range(len(names)) if are_few):
        if abs(value := float(change[true, answer])) >= 0.005:
            colour = "white" if abs(value) > 0.6 * most else "black"
            ax.text(answer, true, f"{100 * value:+.0f}", ha="center", va="center", fontsize=7, color=colour)
    ticks = range(len(names)) if are_few else range(0, len(names), 10)
    short = style.axis_names(names)
    ax.set_xticks(ticks, [short[label] for label in ticks], rotation=60, ha="right")
    ax.set_yticks(ticks, [short[label] for label in ticks])
    for label in forget if are_few else ():
        ax.get_yticklabels()[label].set_fontweight("bold")
    ax.set_xlabel("prediction", fontsize=9)
    ax.set_ylabel("true class", fontsize=9)
    bar = figure.colorbar(shown, ax=ax, shrink=0.8)
    bar.set_label("change in percentage points", fontsize=8)
    bar.ax.tick_params(labelsize=8)
    style.entitle(figure, _confusion_finding(change, names, forget))
    return figure


def _confusion_finding(change: Tensor, names: Sequence[str], forget: Sequence[int]) -> str:
    parts = []
    for label in forget:
        moved = change[label].clone()
        moved[label] = 0
        new = int(moved.argmax())
        if moved[new] > 0:
            called = f"most often called {names[new]} ({100 * moved[new]:+.0f} points)"
            parts.append(f"images of {names[label]} are now {called}")
    retain = [label for label in range(len(names)) if label not in forget]
    changed = float(change[retain].clamp_min(0).sum(1).mean()) if retain else 0.0
    parts.append(f"the shares of predictions on the other images change by {style.percent(changed)}")
    return "; ".join(parts)


def own_confidence(model: nn.Module, images: Images, *, device: torch.device | str = "cpu") -> Tensor:
    """The probability that a model gives to each image's own class, (images,)."""
    shares = logits_of(model, images, device=device).softmax(1)
    return shares.gather(1, images.labels.unsqueeze(1)).squeeze(1).float()


def confidence_figure(confidence: Mapping[str, Tensor], what: str, bins: int = 20) -> "Figure":
    """Histograms of `own_confidence` on the forget set, by role: original, unlearned, reference."""
    figure, ((ax,),) = style.new_figure(6.2, 3.3)
    for role, values in confidence.items():
        counts = torch.histc(values.clamp(0, 1), bins, 0, 1) / len(values)
        edges = [number / bins for number in range(bins + 1)]
        ax.stairs(counts.tolist(), edges, **style.line_look(role))
    style.percent_axis(ax)
    ax.set_ylim(bottom=0)
    style.name_axes(ax, "probability given to the image's own class", "share of these images")
    ax.legend(fontsize=8, frameon=False)
    means = [f"{style.ROLE_NAMES[role]} {style.percent(float(values.mean()))}" for role, values in confidence.items()]
    style.entitle(figure, f"Mean confidence in {what}: " + ", ".join(means))
    return figure


def relearn_steps_figure(steps: Mapping[str, Mapping[str, float | None]], most: int) -> "Figure":
    """Steps until the forget set is relearned, by number of its images and by role; None: not within `most`."""
    figure, ((ax,),) = style.new_figure(6.2, 3.4)
    roles = [role for role in style.ROLES if any(role in found for found in steps.values())]
    taken = {role: [found.get(role) for found in steps.values()] for role in roles}
    heights = {role: [float(most if one is None else one) for one in taken[role]] for role in roles}
    series = [(style.ROLE_NAMES[role], heights[role], style.ROLES[role][0], style.HATCHES[role]) for role in roles]
    places = style.grouped_bars(ax, series, [f"{key} forgotten images" for key in steps])
    for role, across in zip(roles, places, strict=True):
        for place, height, one in zip(across, heights[role], taken[role], strict=True):
            text = f"> {most}" if one is None else f"{one:g}"
            ax.text(place, height, text, ha="center", va="bottom", fontsize=8)
    ax.set_ylabel("steps of training", fontsize=9)
    ax.margins(y=0.1)
    style.grid_lines(ax)
    key, found = list(steps.items())[-1]
    words = {role: f"over {most}" if found[role] is None else f"{found[role]:g}" for role in roles if role in found}
    parts = [f"{style.ROLE_NAMES[role]} {text}" for role, text in words.items()]
    style.entitle(figure, f"Steps until the forget set is relearned from {key} images: {', '.join(parts)}")
    return figure


def probe_figure(recall: Mapping[str, Mapping[str, float]]) -> "Figure":
    """Recall of a linear probe for the forgotten class on the features of each layer, by role."""
    figure, ((ax,),) = style.new_figure(6.2, 3.4)
    role_lines(ax, {role: (list(layers), list(layers.values())) for role, layers in recall.items()})
    ax.set_xlabel("layer, first to last", fontsize=9)
    ax.set_ylabel("recall on the forget set", fontsize=9)
    ax.tick_params(axis="x", labelrotation=30)
    last = [f"{style.percent(list(layers.values())[-1])} {style.ROLE_NAMES[role]}" for role, layers in recall.items()]
    name = list(next(iter(recall.values())))[-1]
    style.entitle(figure, f"At {name} a linear probe finds the forget set in {', '.join(last)}")
    return figure


def role_lines(ax: "Axes", lines: Mapping[str, tuple[Sequence[float] | Sequence[str], Sequence[float]]]) -> None:
    for role, (places, values) in lines.items():
        look = style.line_look(role) | {"marker": style.ROLES[role][1], "markersize": 3 + 2 * style.WIDTHS[role]}
        ax.plot(places, values, **look)
    style.percent_axis(ax)
    ax.set_ylim(-0.03, 1.03)
    style.grid_lines(ax)
    ax.legend(fontsize=8, frameon=False)
