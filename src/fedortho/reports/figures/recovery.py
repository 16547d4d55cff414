"""What audits recover: steps of relearning, and what linear probes find layer by layer."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fedortho.reports.figures.style import (
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
    role_lines(ax, {role: (list(layers), list(layers.values())) for role, layers in recall.items()})
    ax.set_xlabel("layer, first to last", fontsize=9)
    ax.set_ylabel("recall on the forget set", fontsize=9)
    ax.tick_params(axis="x", labelrotation=30)
    last = [f"{ROLE_NAMES[role]} {percent(list(layers.values())[-1])}" for role, layers in recall.items()]
    entitle(figure, "A linear probe on the last layer still finds: " + ", ".join(last))
    return figure


def role_lines(ax: "Axes", lines: Mapping[str, tuple[Sequence[float] | Sequence[str], Sequence[float]]]) -> None:
    for role, (places, values) in lines.items():
        colour, marker, dash = ROLES[role]
        ax.plot(places, values, color=colour, marker=marker, linestyle=dash, label=ROLE_NAMES[role])
    percent_axis(ax)
    ax.set_ylim(-0.03, 1.03)
    grid_lines(ax)
    ax.legend(fontsize=8, frameon=False)
