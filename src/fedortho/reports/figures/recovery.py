"""What audits recover: steps of relearning, and what linear probes find layer by layer."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fedortho.reports.figures.style import (
    BLACK,
    HATCHES,
    ROLE_NAMES,
    ROLES,
    entitle,
    grid_lines,
    new_figure,
    percent,
    percent_axis,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ABOVE: Mapping[str, Any] = {"ha": "center", "va": "bottom", "fontsize": 8}  # a number over its bar
Curve = Sequence[tuple[float, float]]  # step, accuracy


def reached(curve: Curve, target: float) -> float | None:
    """The first step at which a curve is at the target or above; None if never.

    >>> reached([(0, 0.1), (5, 0.6), (10, 0.5)], 0.55)
    5
    """
    return next((step for step, value in curve if value >= target), None)


def relearn_figure(curves: Mapping[str, Curve], target: float | None = None) -> "Figure":
    """Forget accuracy over the steps of relearning, by role: original, unlearned, reference."""
    figure, ((ax,),) = new_figure(6.2, 3.4)
    _role_lines(ax, {role: ([s for s, _ in c], [v for _, v in c]) for role, c in curves.items()})
    ax.set_xlabel("steps of training on a few of the forgotten images", fontsize=9)
    ax.set_ylabel("forget accuracy", fontsize=9)
    if target is None:
        ends = [f"{ROLE_NAMES[role]} {percent(curve[-1][1])}" for role, curve in curves.items()]
        entitle(figure, "Forget accuracy at the end of relearning: " + ", ".join(ends))
        return figure
    ax.axhline(target, color=BLACK, linestyle=":", linewidth=1)
    ax.text(ax.get_xlim()[1], target, "relearned ", fontsize=8, ha="right", va="bottom")
    parts = []
    for role, curve in curves.items():
        step = reached(curve, target)
        parts.append(f"{ROLE_NAMES[role]} {f'over {curve[-1][0]:g}' if step is None else f'{step:g}'}")
    entitle(figure, "Steps until the class is relearned: " + ", ".join(parts))
    return figure


def relearn_steps_figure(steps: Mapping[str, Mapping[str, float | None]], most: int) -> "Figure":
    """Steps until the forget set is relearned, by number of its images and by role; None: not within `most`."""
    figure, ((ax,),) = new_figure(6.2, 3.4)
    roles = [role for role in ROLES if any(role in found for found in steps.values())]
    wide = 0.8 / max(len(roles), 1)
    for number, role in enumerate(roles):
        colour, hatch = ROLES[role][0], HATCHES[role]
        for place, found in enumerate(steps.values()):
            taken = found.get(role)
            at = place + (number - (len(roles) - 1) / 2) * wide
            face = colour if hatch is None else "white"
            label = ROLE_NAMES[role] if place == 0 else None
            ax.bar(
                at, most if taken is None else taken, wide, facecolor=face, edgecolor=colour, hatch=hatch, label=label
            )
            ax.text(at, most if taken is None else taken, f"> {most}" if taken is None else f"{taken:g}", **ABOVE)
    ax.set_xticks(range(len(steps)), [f"{key} forgotten images" for key in steps])
    ax.set_ylabel("steps of training", fontsize=9)
    ax.margins(y=0.1)
    grid_lines(ax)
    ax.legend(fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, 1.14), ncols=len(roles))
    key, found = list(steps.items())[-1]
    parts = [
        f"{ROLE_NAMES[r]} {f'over {most}' if found.get(r) is None else f'{found[r]:g}'}" for r in roles if r in found
    ]
    entitle(figure, f"Steps until the forget set is relearned from {key} images: {', '.join(parts)}")
    return figure


def probe_figure(recall: Mapping[str, Mapping[str, float]]) -> "Figure":
    """Recall of a linear probe for the forgotten class on the features of each layer, by role."""
    figure, ((ax,),) = new_figure(6.2, 3.4)
    _role_lines(ax, {role: (list(layers), list(layers.values())) for role, layers in recall.items()})
    ax.set_xlabel("layer, first to last", fontsize=9)
    ax.set_ylabel("recall on the forget set", fontsize=9)
    ax.tick_params(axis="x", labelrotation=30)
    last = [f"{ROLE_NAMES[role]} {percent(list(layers.values())[-1])}" for role, layers in recall.items()]
    entitle(figure, "A linear probe on the last layer still finds: " + ", ".join(last))
    return figure


def _role_lines(ax: "Axes", lines: Mapping[str, tuple[Sequence[float] | Sequence[str], Sequence[float]]]) -> None:
    for role, (places, values) in lines.items():
        colour, marker, dash = ROLES[role]
        ax.plot(places, values, color=colour, marker=marker, linestyle=dash, label=ROLE_NAMES[role])
    percent_axis(ax)
    ax.set_ylim(-0.03, 1.03)
    grid_lines(ax)
    ax.legend(fontsize=8, frameon=False)
