"""What audits recover: steps of relearning, and what linear probes find layer by layer."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from fedortho.reports.figures import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


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
    parts = [
        f"{style.ROLE_NAMES[r]} {f'over {most}' if found.get(r) is None else f'{found[r]:g}'}"
        for r in roles
        if r in found
    ]
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
