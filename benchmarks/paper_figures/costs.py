"""Costs of methods as bars on a log axis."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from fedortho.engines.cost import Cost
from fedortho.reports.figures.style import GREEN, SKY, entitle, grid_lines, new_figure, times

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def cost_figure(costs: Mapping[str, Cost], ours: str = "hide", standard: str = "retrain") -> "Figure":
    """Communication and computation of each method on log axes (paper, Fig. 5); if nothing travels, the latter only."""
    computed = {name: cost.flops for name, cost in costs.items()}
    sent = {name: float(cost.bytes_up + cost.bytes_down) for name, cost in costs.items()}
    panels = [("computation (FLOPs)", computed)]
    panels = [("communication (bytes, all clients)", sent), *panels] if any(sent.values()) else panels
    figure, (axes,) = new_figure(3.5 * len(panels) + 1.3, 0.3 * len(costs) + 1.5, 1, len(panels), share_y=True)
    for ax, (label, values) in zip(axes, panels, strict=True):
        _log_bars(ax, values, ours)
        ax.set_xlabel(label, fontsize=9)
    axes[0].invert_yaxis()
    entitle(figure, _cost_finding(dict(panels), ours, standard))
    return figure


def _log_bars(ax: "Axes", values: Mapping[str, float], ours: str) -> None:
    known = [value for value in values.values() if value > 0]
    low, high = min(known, default=1.0), max(known, default=1.0)
    start = 10 ** (math.floor(math.log10(low)) - 1)
    for place, (name, value) in enumerate(values.items()):
        colour = GREEN if name == ours else SKY
        ax.barh(place, max(value - start, 0), left=start, color=colour, edgecolor="#333333", linewidth=0.5)
        text = _short_number(value) if value > 0 else "none"
        ax.text(max(value, start) * 1.15, place, text, va="center", fontsize=7.5)
    ax.set_xscale("log")
    ax.set_xlim(start, high * 10 ** (0.25 * math.log10(high / start)))
    ax.set_yticks(range(len(values)), list(values))
    grid_lines(ax, "x")


def _short_number(value: float) -> str:
    """
    >>> _short_number(1234.0), _short_number(5.6e10), _short_number(12.0)
    ('1.2 k', '56 G', '12')
    """
    for size, letter in ((1e15, " P"), (1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        if value >= size:
            return f"{value / size:.2g}{letter}" if value / size < 100 else f"{value / size:.0f}{letter}"
    return f"{value:.0f}"


def _cost_finding(panels: Mapping[str, Mapping[str, float]], ours: str, standard: str) -> str:
    parts = []
    for label, values in panels.items():
        if values.get(ours, 0) > 0 and values.get(standard, 0) > 0:
            ratio = values[standard] / values[ours]
            verb = "sends" if label.startswith("comm") else "computes"
            parts.append(f"{verb} {times(ratio)} less" if ratio >= 1 else f"{verb} {times(1 / ratio)} more")
    if parts:
        return f"{ours} {' and '.join(parts)} than {standard}"
    label, values = next(iter(panels.items()))
    least = min(values, key=lambda name: values[name])
    return f"{least} needs least {label.partition(' ')[0]}"
