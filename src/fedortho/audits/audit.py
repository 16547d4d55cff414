"""What every audit takes and gives: a model that is said to have forgotten, read against one that never knew."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

OUTCOMES = ("PASS", "FAIL", "NOT RUN", "NO REFERENCE", "ERROR")


@dataclass(frozen=True)
class Audit:
    """What one attempt to undo forgetting, or to tell it from never having known, came to."""

    name: str
    outcome: str  # one of OUTCOMES
    says: str  # one sentence for a person, with the numbers
    value: float | None = None  # what is held against the limit
    limit: float | None = None  # PASS up to here
    forgot: float | None = None  # the same measurement on each model, as a share or in its own unit
    original: float | None = None
    reference: float | None = None
    seconds: float = 0.0
    details: Mapping[str, Any] = field(default_factory=dict)  # plain JSON values: per layer, per step, settings

    def __post_init__(self) -> None:
        assert self.outcome in OUTCOMES, self.outcome
