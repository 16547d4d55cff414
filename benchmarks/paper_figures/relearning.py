"""Forget accuracy over the steps of relearning."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from fedortho.reports.figures.results import role_lines
from fedortho.reports.figures.style import BLACK, ROLE_NAMES, entitle, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Curve = Sequence[tuple[float, float]]  # step, accuracy


def reached(curve: Curve, target: float) -> float | None:
    """The first step at which a curve is at the target or above; None if never.

    >>> reached([(0, 0.1), (5, 0.6), (10, 0.5)], 0.55)
    5
    """
    return next((step for step, value in curve if value >= target), None)


def relearn_figure(curves: Mapping[str, Curve], target: float) -> "Figure":
    """Forget accuracy over the steps of relearning, by role, and the first step at `target` or above."""
    figure, ((ax,),) = new_figure(6.2, 3.4)
    role_lines(ax, {role: ([s for s, _ in c], [v for _, v in c]) for role, c in curves.items()})
    ax.set_xlabel("steps of training on a few of the forgotten images", fontsize=9)
    ax.set_ylabel("forget accuracy", fontsize=9)
    ax.axhline(target, color=BLACK, linestyle=":", linewidth=1)
    ax.text(ax.get_xlim()[1], target, "relearned ", fontsize=8, ha="right", va="bottom")
    parts = []
    for role, curve in curves.items():
        step = reached(curve, target)
        parts.append(f"{ROLE_NAMES[role]} {f'over {curve[-1][0]:g}' if step is None else f'{step:g}'}")
    entitle(figure, "Steps until the class is relearned: " + ", ".join(parts))
    return figure
