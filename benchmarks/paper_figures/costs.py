"""Costs of methods as bars on a log axis, and who is cheaper than ours."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from fedortho.engines.cost import Cost
from fedortho.reports.figures.style import GREEN, SKY, caption, entitle, grid_lines, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SENT, COUNTED, KEPT = "bytes, all clients", "FLOPs, everything counted", "FLOPs, kept by everybody"


def quantities(costs: Mapping[str, Cost]) -> dict[str, dict[str, float]]:
    """What each method sends and computes, by both conventions; without what nobody sends and what nobody kept."""
    sent = {name: float(cost.bytes_up + cost.bytes_down) for name, cost in costs.items()}
    counted = {name: cost.flops for name, cost in costs.items()}
    kept = {name: cost.request_flops for name, cost in costs.items()}
    return ({SENT: sent} if any(sent.values()) else {}) | {COUNTED: counted} | ({KEPT: kept} if kept != counted else {})


def least(values: Mapping[str, float], ours: str = "hide") -> str:
    """The way to run ours that needs least: `hide`, or `hide, nothing kept`.

    >>> least({"hide": 2.0, "hide, nothing kept": 1.0, "ssd": 0.5})
    'hide, nothing kept'
    """
    return min((name for name in values if name.partition(",")[0] == ours), key=lambda name: values[name])


def cheaper(values: Mapping[str, float], ours: str = "hide") -> list[str]:
    """The methods that need less than ours, the cheapest first.

    >>> cheaper({"retrain": 9.0, "hide": 2.0, "ssd": 3.0, "paper": 1.0, "logit-mask": 0.0})
    ['logit-mask', 'paper']
    """
    limit = values[least(values, ours)]
    return sorted((name for name in values if values[name] < limit), key=lambda name: values[name])


def cost_figure(costs: Mapping[str, Cost], about: str, ours: str = "hide", standard: str = "retrain") -> "Figure":
    """Communication and computation of each method on log axes (paper, Fig. 5).

    `about` says what was measured: network, data, seeds and classes.
    """
    panels = quantities(costs)
    figure, (axes,) = new_figure(2.9 * len(panels) + 1.3, 0.26 * len(costs) + 1.7, 1, len(panels), share_y=True)
    for ax, (label, values) in zip(axes, panels.items(), strict=True):
        _log_bars(ax, values, ours)
        ax.set_xlabel(label, fontsize=9)
    axes[0].invert_yaxis()
    entitle(figure, cost_finding(panels, ours, standard))
    caption(figure, about)
    return figure


def _log_bars(ax: "Axes", values: Mapping[str, float], ours: str) -> None:
    from matplotlib.ticker import LogLocator

    known = [value for value in values.values() if value > 0]
    low, high = min(known, default=1.0), max(known, default=1.0)
    start = 10 ** (math.floor(math.log10(low)) - 1)
    for place, (name, value) in enumerate(values.items()):
        colour = GREEN if name.partition(",")[0] == ours else SKY
        ax.barh(place, max(value - start, 0), left=start, color=colour, edgecolor="#333333", linewidth=0.5)
        text = short_number(value) if value > 0 else "none"
        ax.text(max(value, start) * 1.15, place, text, va="center", fontsize=7.5)
    ax.set_xscale("log")
    ax.xaxis.set_major_locator(LogLocator(numticks=5))
    ax.xaxis.set_major_formatter(lambda value, _: short_number(value))  # names are no mathematics, so powers are not
    ax.set_xlim(start, high * 10 ** (0.25 * math.log10(high / start)))
    ax.set_yticks(range(len(values)), list(values))
    grid_lines(ax, "x")


def short_number(value: float) -> str:
    """
    >>> short_number(1234.0), short_number(5.6e10), short_number(12.0), short_number(0.0)
    ('1.2 k', '56 G', '12', '0')
    """
    for size, letter in ((1e15, " P"), (1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        if value >= size:
            return f"{value / size:.2g}{letter}" if value / size < 100 else f"{value / size:.0f}{letter}"
    return f"{value:.0f}"


def cost_finding(panels: Mapping[str, Mapping[str, float]], ours: str, standard: str) -> str:
    """How much less ours needs than the standard, and what needs less than ours."""
    parts, others = [], []
    for label, values in panels.items():
        if (needed := values[least(values, ours)]) > 0 and values.get(standard, 0) > 0:
            ratio = values[standard] / needed
            parts.append(f"{times(ratio)} fewer {label}" if ratio >= 1 else f"{times(1 / ratio)} more {label}")
        others.append(f"{label}: {', '.join(cheaper(values, ours)) or 'nothing'}")
    text = f"{ours} needs {'; '.join(parts)} than {standard}. " if parts else ""
    return f"{text}Cheaper than {ours} by {'; '.join(others)}"


def times(ratio: float) -> str:
    """A ratio for people.

    >>> times(152.3), times(3.27), times(1.0)
    ('152 times', '3.3 times', '1.0 times')
    """
    return f"{ratio:,.0f} times" if ratio >= 10 else f"{ratio:.1f} times"
