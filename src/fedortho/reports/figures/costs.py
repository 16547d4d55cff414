"""Costs of methods as bars on a log axis, and accuracy over training."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from fedortho.engines.cost import Cost
from fedortho.reports.figures.style import (
    DASHES,
    GREEN,
    MARKERS,
    SERIES,
    SKY,
    entitle,
    grid_lines,
    new_figure,
    percent,
    percent_axis,
    times,
)
from fedortho.training.loop import Epoch

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


def rounds_to(history: Sequence[Epoch], target: float) -> int | None:
    """Epochs, or rounds of a federation, until validation accuracy reaches the target; None: never."""
    return next((entry.epoch + 1 for entry in history if entry.valid is not None and entry.valid >= target), None)


def training_figure(histories: Mapping[str, Sequence[Epoch]], target: float | None = None) -> "Figure":
    """Validation accuracy over epochs or rounds, with the first at which the target is reached."""
    figure, ((ax,),) = new_figure(6.2, 3.4)
    unit = "round" if any(entry.clients is not None for h in histories.values() for entry in h) else "epoch"
    for number, (name, history) in enumerate(histories.items()):
        seen = [(entry.epoch + 1, entry.valid) for entry in history if entry.valid is not None]
        style = {"color": SERIES[number], "linestyle": DASHES[number], "marker": MARKERS[number], "markersize": 4}
        ax.plot([place for place, _ in seen], [value for _, value in seen], label=name, **style)  # type: ignore[arg-type]  # of several types
    if target is not None:
        ax.axhline(target, color="#444444", linestyle=":", linewidth=1)
    ax.xaxis.get_major_locator().set_params(integer=True)  # type: ignore[call-arg]  # of the automatic locator
    percent_axis(ax)
    ax.set_xlabel(f"{unit} of training", fontsize=9)
    ax.set_ylabel("validation accuracy", fontsize=9)
    grid_lines(ax)
    ax.legend(fontsize=8, frameon=False)
    entitle(figure, _training_finding(histories, target, unit))
    return figure


def _training_finding(histories: Mapping[str, Sequence[Epoch]], target: float | None, unit: str) -> str:
    if target is None:
        last = {name: [e.valid for e in h if e.valid is not None][-1:] for name, h in histories.items()}
        parts = [f"{name} {percent(value[0])}" for name, value in last.items() if value]
        return f"Validation accuracy after the last {unit}: " + ", ".join(parts)
    parts = []
    for name, history in histories.items():
        count = rounds_to(history, target)
        parts.append(f"{name}: {'never' if count is None else count}")
    return f"{unit}s until {percent(target)} validation accuracy; " + "; ".join(parts)
