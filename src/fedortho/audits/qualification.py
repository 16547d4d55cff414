"""Qualification: a method tried on drawn classes of a model, against reference models, before anybody asks.

Audits compare with a retrained model, and with one at hand unlearning is pointless. So reference models are
trained once per model, for classes that a seed draws; later requests by the same method cite how many of them passed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any, ClassVar

from fedortho.audits.result import Outcome
from fedortho.data.request import ForgetRequest
from fedortho.errors import BadRecord
from fedortho.storage.records import Scalar, read_record

QUALIFICATION = "qualification.json"  # in the directory of the original run
CONFIDENCE = 0.95


@dataclass(frozen=True)
class ClassTrial:
    """A drawn class, forgotten by one method and audited: outcomes, and what both sides cost."""

    request: str
    split: str  # of the images on which it was audited: valid or test
    outcomes: Mapping[str, Outcome]  # of every audit and of retention
    model: str  # digest of the model that has forgotten
    references: tuple[str, ...]  # digests of the reference models
    forget: float  # accuracies
    retain: float
    reference_retain: float
    flops: float  # of forgetting
    reference_flops: float  # of training one reference model; 0: all were trained elsewhere
    counterfactuals: tuple[str, ...] = ()  # digests of what the method made of the reference models

    @property
    def passed(self) -> bool:
        """No audit failed, and the probe of every depth, which compares with reference models, decided."""
        return not {"FAIL", "ERROR"} & {*self.outcomes.values()} and self.outcomes.get("C1") == "PASS"

    @property
    def share_of_training(self) -> float | None:
        """The FLOPs of forgetting per FLOP of training a reference model; None: not known."""
        return self.flops / self.reference_flops if self.reference_flops else None


@dataclass(frozen=True)
class MethodTrial:
    """A method with its settings, and the classes that it was tried on."""

    method: str
    settings: Mapping[str, Scalar]
    classes: tuple[ClassTrial, ...] = ()

    @property
    def passed(self) -> bool:
        return all(trial.passed for trial in self.classes)


@dataclass(frozen=True)
class Qualification:
    """qualification.json: which classes were drawn, what was tried on them, and what was confirmed on others.

    It is bound to the model, the data, the method and its settings. It says nothing about a second request on the same
    model, nor about one for several classes: neither was drawn.
    """

    schema: ClassVar[int] = 1

    original: str  # digest of the model that forgets
    data: str  # digest of its data
    seed: int
    choosing: tuple[str, ...]  # drawn requests on whose validation images the method is chosen
    confirming: tuple[str, ...]  # drawn requests on whose test images it is confirmed, once
    tried: tuple[MethodTrial, ...] = ()
    confirmed: MethodTrial | None = None

    def __post_init__(self) -> None:
        drawn, confirmed = (*self.choosing, *self.confirming), self.confirmed.classes if self.confirmed else ()
        tried = [trial.request for trial in confirmed]
        if len({*drawn}) < len(drawn) or len({*tried}) < len(tried):
            raise BadRecord(f"a qualification has a class twice: {', '.join(drawn)[:80]}; expected each once")
        if not self.choosing or not self.confirming:
            raise BadRecord("a qualification has no class to choose on or none to confirm on; expected one of each")
        if {*tried} - {*self.confirming} or any(trial.split != "test" for trial in confirmed):
            raise BadRecord("a qualification was confirmed on other classes than those drawn, or not on test images")
        choices = [trial for method in self.tried for trial in method.classes]
        if any(trial.split != "valid" or trial.request not in self.choosing for trial in choices):
            raise BadRecord("a qualification chose on other classes than those drawn, or not on validation images")
        if self.confirmed is not None and not _is_same(self.chosen, self.confirmed):
            raise BadRecord(f"a qualification was confirmed by {self.confirmed.method}, which is not what it chose")

    @property
    def is_finished(self) -> bool:
        return self.confirmed is not None and len(self.confirmed.classes) == len(self.confirming)

    @property
    def chosen(self) -> MethodTrial | None:
        """The first method, cheapest first, that passed on every class of the choice; None: none did (yet)."""
        whole = (trial for trial in self.tried if len(trial.classes) == len(self.choosing))
        return next((trial for trial in whole if trial.passed), None)

    @property
    def passed(self) -> int:
        """How many of the confirming classes passed; one that the audits cannot decide did not."""
        return 0 if self.confirmed is None else sum(trial.passed for trial in self.confirmed.classes)

    @property
    def retrainings(self) -> float | None:
        """The cost of the qualification, in trainings of a reference model; None: what one costs is not known."""
        every = [*self.tried, *([self.confirmed] if self.confirmed else [])]
        trials = [trial for method in every for trial in method.classes]
        references = sum({trial.request: len(trial.references) for trial in trials}.values())
        shares = [(1 + len(trial.counterfactuals), trial.share_of_training) for trial in trials]
        if any(share is None for _, share in shares):
            return None
        return references + sum(number * (share or 0.0) for number, share in shares)

    @property
    def break_even(self) -> float | None:
        """How many requests pay for the qualification; with fewer, retraining is cheaper. None: never, or not known."""
        if self.confirmed is None or not self.confirmed.classes or (spent := self.retrainings) is None:
            return None
        each = mean(trial.share_of_training or 0.0 for trial in self.confirmed.classes)
        return spent / (1 - each) if each < 1 else None

    @property
    def sentence(self) -> str:
        """What the qualification claims, and no more."""
        if self.confirmed is None or not self.is_finished:
            return "the qualification is not finished"
        need = "never" if self.break_even is None else f"after about {self.break_even:.0f} requests"
        share, spent = least_share(self.passed, len(self.confirming)), self.retrainings
        cost = "What it cost is not known: reference models were trained elsewhere."
        if spent is not None:
            cost = f"It cost {spent:.1f} retrainings, which pay {need}."
        return (
            f"{self.confirmed.method} passed on {self.passed} of {len(self.confirming)} drawn classes: at least "
            f"{share:.0%} of classes at {CONFIDENCE:.0%} confidence. {cost}"
        )

    @property
    def is_qualified(self) -> bool:
        """Whether every confirming class passed."""
        return self.is_finished and self.passed == len(self.confirming)

    def covers(
        self, request: ForgetRequest, original: str, data: str, method: str, settings: Mapping[str, Any]
    ) -> bool:
        """Whether it speaks for a first request for one class on this model and data, by this method so set."""
        if self.confirmed is None or request.kind != "class" or len(request.classes) > 1:
            return False
        asked, told = MethodTrial(method, settings), self.confirmed
        return (original, data) == (self.original, self.data) and _is_same(asked, told)


def _is_same(one: MethodTrial | None, other: MethodTrial) -> bool:
    """Whether two trials are of the same method with the same settings."""
    return one is not None and (one.method, dict(one.settings)) == (other.method, dict(other.settings))


def least_share(passed: int, drawn: int) -> float:
    """The share of classes that pass, at least: the lower end of a one-sided Clopper-Pearson interval at CONFIDENCE.

    >>> [round(least_share(n, n), 2) for n in (3, 10)], least_share(0, 5)
    ([0.37, 0.74], 0.0)
    """
    from scipy.stats import beta

    return float(beta.ppf(1 - CONFIDENCE, passed, drawn - passed + 1)) if passed else 0.0


def read_qualification(directory: Path) -> Qualification | None:
    """The qualification of a run directory, finished or not; None if there is none."""
    path = directory / QUALIFICATION
    if not path.exists():
        return None
    try:
        return read_record(Qualification, path)
    except BadRecord as error:
        raise BadRecord(f"{error}; remove it to qualify again") from error
