"""Limits of the audits: a proposal, raised where models retrained without the forget set differ by more.

Calibrated values come from benchmarks/results/calibration.json, which benchmarks/calibration.py writes: every pair of
reference models, one audited against the other. A limit is calibrated where the largest of these values exceeds the
proposal, so that every pair of reference models passes.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Limit:
    """The largest value with which an audit passes."""

    name: str
    proposed: float
    calibrated: float | None = None  # None: the proposal holds

    @property
    def value(self) -> float:
        return self.proposed if self.calibrated is None else self.calibrated


def calibrated_limits(values: Mapping[str, list[float]], proposed: Mapping[str, float]) -> dict[str, float]:
    """Each proposal, or the largest value between reference models if that is larger.

    Rounded up to a thousandth, so that the pair with the largest value passes.

    >>> calibrated_limits({"probe": [0.01, 0.0712], "copies": [0.002]}, {"probe": 0.05, "copies": 0.01})
    {'probe': 0.072, 'copies': 0.01}
    """
    largest = {
        name: max((-(-value * 1000 // 1) / 1000 for value in measured), default=0.0)
        for name, measured in values.items()
    }
    return {name: max(limit, largest.get(name, 0.0)) for name, limit in proposed.items()}
