"""Up to which value an audit is passed: what was proposed, raised to what retrained models show among themselves."""

from collections.abc import Mapping

PROPOSED: Mapping[str, float] = {
    "probe": 0.05,  # recall of a linear probe, above the reference's
    "norms": 0.02,  # forget accuracy after the batch-norm and kernel-norm attacks, above the reference's
    "prototype": 0.05,  # forget accuracy with a prototype as the class's row, above the reference's
    "speed-up": 2.0,  # steps of the reference to relearn, per step of the forgotten model
    "distance": 0.5,  # 1 − ρ: 0 as near as two references are to each other, 1 still the original
    "copies": 0.01,  # rise of forget accuracy in a deployed copy
}
CALIBRATED: Mapping[str, float] = {
    "probe": 0.082,
    "prototype": 0.06,
}  # from benchmarks/results/calibration.json, where above the proposal
LIMITS: Mapping[str, float] = {**PROPOSED, **CALIBRATED}
MEMBERSHIP = 0.1  # |AUC − 0.5| of the attack by shadows
RETENTION = 0.05  # retain accuracy that a forgotten model may have lost


def calibrated_limits(values: Mapping[str, list[float]]) -> dict[str, float]:
    """The limits that follow from what retrained models measured: the largest value, if it is above the proposal.

    Rounded up to a thousandth, so that the pair which gave the limit passes.

    >>> calibrated_limits({"probe": [0.01, 0.0712], "copies": [0.002]})["probe"]
    0.072
    """
    shown = {
        name: max((-(-value * 1000 // 1) / 1000 for value in found), default=0.0) for name, found in values.items()
    }
    return {name: max(proposed, shown.get(name, 0.0)) for name, proposed in PROPOSED.items()}
