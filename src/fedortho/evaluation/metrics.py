"""The metrics and what they mean: a value is shown with its range, direction, ideal and the reference model's value."""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from fedortho.errors import first_line, unknown

ROUNDING = 1e-9


@dataclass(frozen=True)
class MetricInfo:
    """How to read a metric."""

    title: str
    source: str
    low: float
    high: float
    direction: Literal["as retrain", "higher", "lower"]  # which values are better
    ideal: float | None = None  # None: the reference model's value

    def range_text(self) -> str:
        return f"{self.low:g} to {'unlimited' if math.isinf(self.high) else f'{self.high:g}'}"

    def ideal_text(self) -> str:
        return "Retrain's" if self.ideal is None else f"{self.ideal:g}"


def _rate(title: str, source: str) -> MetricInfo:
    return MetricInfo(title, source, 0.0, 1.0, "as retrain")


def _accuracy(title: str, source: str) -> MetricInfo:
    return MetricInfo(title, source, 0.0, 1.0, "higher", 1.0)


def _gap(title: str, source: str, high: float = 1.0) -> MetricInfo:
    return MetricInfo(title, source, 0.0, high, "lower", 0.0)


def _change(which: str) -> MetricInfo:
    title = f"change of accuracy on the images of a remaining client, {which}"
    return MetricInfo(title, "fairness between clients (arXiv:2510.07022)", -1.0, 1.0, "as retrain")


PAPER = "FedOrtho, section on metrics"
SONG = "Song et al., CCS 2019; "
SALUN_CODE = "SalUn's code, as 1 − its value (arXiv:2310.12508)"
KIT = "NeurIPS 2023 unlearning challenge, starting kit"
SONG_MITTAL = "Song and Mittal, USENIX Security 2021"
GOLATKAR = "Golatkar et al., CVPR 2020"
METRICS: Mapping[str, MetricInfo] = {
    "forget-accuracy": _rate("forget accuracy", PAPER),
    "retain-accuracy": _accuracy("retain accuracy", PAPER),
    "test-accuracy": _accuracy("accuracy on all test images", PAPER),
    "class-accuracy": _accuracy("test accuracy of the classes that the samples belong to", "fedortho"),
    "client-change-min": _change("least"),
    "client-change-q1": _change("first quartile"),
    "client-change-median": _change("median"),
    "client-change-q3": _change("third quartile"),
    "mia-correctness": _rate("forgotten images called members by correctness", SONG_MITTAL),
    "mia-confidence": _rate("forgotten images called members by confidence (the paper's MIA)", SONG + PAPER),
    "mia-entropy": _rate("forgotten images called members by entropy", SONG_MITTAL),
    "mia-modified-entropy": _rate("forgotten images called members by modified entropy", SONG_MITTAL),
    "mia-svc-confidence": _rate("forgotten images called members by an SVC on confidence", SALUN_CODE),
    "mia-loss": _rate("forgotten images called members by logistic regression on the loss", "Yeom et al., CSF 2018"),
    "loss-separation": _rate("accuracy of telling forgotten from unseen images with the same labels, by the loss", KIT),
    "average-gap": _gap("mean gap to Retrain of forget, retain, test accuracy and MIA", "SalUn (arXiv:2310.12508)"),
    "tug-of-war": _accuracy("product of 1 − gap to Retrain, forget × retain × test", "Zhao et al., NeurIPS 2024"),
    "tug-of-war-mia": _accuracy("the same with MIA in place of forget accuracy", "Zhao et al., NeurIPS 2024"),
    "output-l2-forget": _gap("mean distance to Retrain's probabilities, forgotten images", GOLATKAR, math.sqrt(2)),
    "output-l2-retain": _gap("mean distance to Retrain's probabilities, retained images", GOLATKAR, math.sqrt(2)),
    "output-js-forget": _gap("mean JS divergence (bits) to Retrain's probabilities, forgotten images", GOLATKAR),
    "output-js-retain": _gap("mean JS divergence (bits) to Retrain's probabilities, retained images", GOLATKAR),
    "activation-forget": _gap("distance to Retrain's features over their size, forgotten images", GOLATKAR, math.inf),
    "activation-retain": _gap("distance to Retrain's features over their size, retained images", GOLATKAR, math.inf),
    "mean-output-tv": _gap("total variation to Retrain's mean probabilities, forgotten images", "fedortho, audit C5"),
    "zrf": _rate("1 − JS divergence (bits) to an untrained network, forgotten images", "Bad Teacher, AAAI 2023"),
}


@dataclass(frozen=True, repr=False)
class Metric:
    """The value of a metric, or the `error` that prevented it."""

    name: str  # one of METRICS
    value: float | None  # None: an error, or a gap to a missing reference model
    reference: float | None = None  # the value of the reference model
    images: int = 0
    error: str | None = None
    details: Mapping[str, Any] = field(default_factory=dict)  # plain JSON values

    def __post_init__(self) -> None:
        if self.name not in METRICS:
            raise unknown("metric", self.name, METRICS)
        if self.error is not None and (self.value is not None or not self.error):
            raise ValueError(f"{self.name} has both the value {self.value} and the error {self.error!r}")
        for number in (self.value, self.reference):  # the comparison is also False for NaN
            if number is not None and not self.info.low - ROUNDING <= number <= self.info.high + ROUNDING:
                raise ValueError(f"{self.name} is {number}, outside {self.info.range_text()}")

    @property
    def info(self) -> MetricInfo:
        return METRICS[self.name]

    def __repr__(self) -> str:
        """The value in one line, with everything that is needed to read it.

        >>> Metric("test-accuracy", 0.9, 0.91, images=100)
        accuracy on all test images: 0.9000 (Retrain 0.9100; 0 to 1, better higher, ideal 1; 100 images; \
FedOrtho, section on metrics)
        """
        known, value = self.info, "not measured" if self.value is None else f"{self.value:.4f}"
        retrain = "no reference" if self.reference is None else f"Retrain {self.reference:.4f}"
        better = "best as Retrain" if known.direction == "as retrain" else f"better {known.direction}"
        how = f"{retrain}; {known.range_text()}, {better}, ideal {known.ideal_text()}; {self.images} images"
        return f"{known.title}: {f'ERROR, {self.error}' if self.error else value} ({how}; {known.source})"

    def to_json(self) -> dict[str, Any]:
        """The value and its description as one mapping for JSON; an unlimited range has `high` None."""
        described = asdict(self.info) | {"high": None if math.isinf(self.info.high) else self.info.high}
        return {"name": self.name, **described, **asdict(self)}


@dataclass(frozen=True)
class Measurement:
    """The value of a metric on one model."""

    value: float
    images: int
    details: Mapping[str, Any] = field(default_factory=dict)


def measure_metric(
    name: str, measure: Callable[[], Measurement], reference: Callable[[], Measurement] | None = None
) -> Metric:
    """The metric of a model and of the reference model, if there is one; an exception becomes the metric's error.

    >>> measure_metric("zrf", lambda: Measurement(1 / 0, 1)).error
    'ZeroDivisionError: division by zero'
    """
    try:
        mine, theirs = measure(), None if reference is None else reference().value
        return Metric(name, mine.value, theirs, mine.images, None, mine.details)
    except Exception as error:  # any: a failing metric is shown, not dropped; without one side nothing is compared
        return Metric(name, None, error=f"{type(error).__name__}: {first_line(error)}")
