"""The paper's claims as relations between rows of a table, and whether they hold over seeds beyond the noise."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import Any

from fedortho.errors import FedOrthoError
from fedortho.runs.record import Accuracies
from fedortho.storage.files import canonical_json
from fedortho.storage.records import Scalar

METRICS = ("forget", "retain")  # in percent of test images, or of the forgotten training images
COLUMNS = (*METRICS, "mia", "seconds")
SIDE = rf"([a-z-]+)(?:\[([^\]]*)\])? ({'|'.join(COLUMNS)})"
RELATION = re.compile(rf"(?:(\d+) )?{SIDE} ([<>]) {SIDE}(?: - (\d+))?(?: at (\S+))?")
HOLDS, NOISE, EQUAL, FAILS = "holds", "within noise", "equal", "does not hold"


@dataclass(frozen=True)
class Membership:
    """A membership attack on the forget set; rates are shares."""

    attack: str
    member_rate: float  # share of the forgotten images called members: the paper's MIA
    accuracy: float  # on images of known membership
    false_positive_rate: float
    images: int  # attacked


@dataclass(frozen=True)
class SeedRow:
    """A row of a table for one seed; `refused` says why a method has no accuracies."""

    seed: int
    key: Mapping[str, Scalar]  # what tells rows apart: data, model, split, request, method, varied settings
    accuracies: Accuracies | None = None
    refused: str = ""
    forgotten: Mapping[str, float] = field(default_factory=dict)  # in a sequence: forget accuracy by request so far
    membership: Membership | None = None
    seconds: float | None = None  # of the method; None: not measured
    images: Mapping[str, int] = field(default_factory=dict)  # that forget and retain accuracy are measured on
    is_unchanged: bool = False  # the method ended with the model that it started from

    @property
    def values(self) -> dict[str, float]:
        """Its metrics, shares in percent, and the images behind each share."""
        if self.accuracies is None:
            return {}
        values = {metric: 100 * getattr(self.accuracies, metric) for metric in METRICS}
        values |= {f"{metric}-images": number for metric, number in self.images.items()}
        if self.membership is not None:
            values |= {"mia": 100 * self.membership.member_rate, "mia-images": self.membership.images}
        return values if self.seconds is None else values | {"seconds": self.seconds}


@dataclass(frozen=True)
class TableRow:
    """A row of a table over seeds, its metrics in percent."""

    key: Mapping[str, Any]
    values: dict[int, dict[str, float]]  # seed → metric → value

    def of(self, metric: str) -> list[float]:
        return [metrics[metric] for metrics in self.values.values() if metric in metrics]


def over_seeds(rows: Sequence[SeedRow]) -> list[TableRow]:
    """The rows of all seeds, one for each key; a refused one has no values."""
    table: dict[str, TableRow] = {}
    for row in rows:
        merged = table.setdefault(canonical_json(dict(row.key)), TableRow(row.key, {}))
        merged.values[row.seed] = row.values
    return list(table.values())


@dataclass(frozen=True)
class Side:
    """One side of a relation: which rows, which metric; `factor` times the metric, plus `shift`."""

    where: Mapping[str, str]
    metric: str
    factor: int = 1
    shift: int = 0

    def value(self, metrics: Mapping[str, float]) -> float:
        return self.factor * metrics[self.metric] + self.shift

    def variance(self, metrics: Mapping[str, float]) -> float:
        """Of a share, from the number of its images (binomial, one more of each kind as in Agresti and Caffo 2000)."""
        number = metrics.get(f"{self.metric}-images", 0)
        share = (metrics[self.metric] / 100 * number + 1) / (number + 2)
        return (100 * self.factor) ** 2 * share * (1 - share) / (number + 2) if number else 0.0


@dataclass(frozen=True)
class Relation:
    """`A[key=value] metric < B[key=value] metric at key=value`; other keys that both rows have must agree.

    `100 A seconds < B seconds` is about a hundred times A, and `A retain > B retain - 3` about B less three points.
    """

    text: str
    less: Side
    more: Side

    def pairs(self, rows: Sequence[TableRow]) -> list[tuple[TableRow, TableRow]]:
        named = self.less.where.keys() | self.more.where.keys()
        left, right = (_matching(side.where, rows) for side in (self.less, self.more))
        pairs = [(a, b, (a.key.keys() & b.key.keys()) - named) for a in left for b in right if a is not b]
        return [(a, b) for a, b, shared in pairs if all(a.key[key] == b.key[key] for key in shared)]


def parse_relation(text: str) -> Relation:
    """Read a relation; the smaller side comes first whichever way it is written.

    >>> parse_relation("ssd retain > salun[ratio=max] retain - 3 at request=class").less
    Side(where={'method': 'salun', 'ratio': 'max', 'request': 'class'}, metric='retain', factor=1, shift=-3)
    """
    match = RELATION.fullmatch(text)
    if match is None:
        raise FedOrthoError(f"{text!r} is no relation; write: METHOD[key=value] forget < METHOD retain at key=value")
    factor, left, left_keys, left_metric, sign, right, right_keys, right_metric, margin, common = match.groups()
    first = Side({"method": left} | read_pairs(left_keys) | read_pairs(common), left_metric, int(factor or 1))
    second = Side({"method": right} | read_pairs(right_keys) | read_pairs(common), right_metric, 1, -int(margin or 0))
    return Relation(text, *((first, second) if sign == "<" else (second, first)))


def parse_relations(text: str) -> list[Relation]:
    """A relation to each of several methods.

    >>> [one.text for one in parse_relations("paper forget < ssd|unsir forget")]
    ['paper forget < ssd forget', 'paper forget < unsir forget']
    """
    several = re.search(r"\S+\|\S+", text)
    texts = [text.replace(several[0], name) for name in several[0].split("|")] if several else [text]
    return [parse_relation(each) for each in texts]


def read_pairs(text: str | None) -> dict[str, str]:
    """`key=value` with commas between.

    >>> read_pairs("split=iid,ratio=0.1")
    {'split': 'iid', 'ratio': '0.1'}
    """
    words = [word.strip().partition("=") for word in (text or "").split(",") if word.strip()]
    if wrong := [key for key, sign, value in words if not (sign and value)]:
        raise FedOrthoError(f"{wrong[0]!r} is no key=value; write such as split=iid,request=class")
    pairs = {key: value for key, _, value in words}
    if len(pairs) < len(words):
        raise FedOrthoError(
            f"{text!r} names a key twice; a row has one value of each: run the table once for each value"
        )
    return pairs


def as_text(value: Any) -> str:
    """The value of a key as it is written: 0.2, not 0.20."""
    return f"{value:g}" if isinstance(value, float) else str(value)


def _matching(where: Mapping[str, str], rows: Sequence[TableRow]) -> list[TableRow]:
    """The rows with these values; `max` and `min` are the largest and smallest value of the method."""
    wanted = dict(where)
    for key, value in where.items():
        known = [row.key[key] for row in rows if row.key["method"] == where["method"] and key in row.key]
        if value in ("max", "min") and known:
            wanted[key] = as_text(max(known) if value == "max" else min(known))
    return [row for row in rows if all(as_text(row.key.get(key)) == value for key, value in wanted.items())]


def differences(relation: Relation, pair: tuple[TableRow, TableRow]) -> list[float]:
    """For each seed of both rows: the side that should be larger minus the other."""
    return [relation.more.value(high) - relation.less.value(low) for low, high in _by_seed(relation, pair)]


def noise_of_images(relation: Relation, pair: tuple[TableRow, TableRow]) -> float:
    """Standard error of the mean difference from the number of images behind the shares.

    Both rows are measured on the same images, which makes their difference more certain than this says.
    """
    seeds = _by_seed(relation, pair)
    variances = [relation.more.variance(high) + relation.less.variance(low) for low, high in seeds]
    return float(sum(variances) ** 0.5 / max(len(seeds), 1))


def _by_seed(relation: Relation, pair: tuple[TableRow, TableRow]) -> list[tuple[dict[str, float], dict[str, float]]]:
    """The metrics of both rows for each seed that has both sides."""
    found = [(metrics, pair[1].values.get(seed, {})) for seed, metrics in pair[0].values.items()]
    return [(low, high) for low, high in found if relation.less.metric in low and relation.more.metric in high]


def judge_differences(values: Sequence[float], error: float = 0.0) -> str:
    """Whether differences exceed 0 by more than their noise (95 %): that of seeds by Student's t, and their error.

    >>> judge_differences([3.0, 3.5, 4.0]), judge_differences([-1.0, 3.0, 4.0]), judge_differences([-3.0])
    ('holds', 'within noise', 'does not hold')
    >>> judge_differences([3.0], error=2.0), judge_differences([0.5, 0.5], error=2.0)
    ('within noise', 'within noise')
    """
    if not any(values):
        return EQUAL
    from scipy import stats

    mean, number = fmean(values), len(values)
    of_seeds = stats.t.ppf(0.975, number - 1) * stdev(values) / number**0.5 if number > 1 else 0.0
    bound = max(of_seeds, stats.norm.ppf(0.975) * error)
    if bound and abs(mean) <= bound:
        return NOISE
    return HOLDS if mean > 0 else FAILS


def mean_and_sd(values: Sequence[float], digits: int = 1) -> str:
    """Mean and standard deviation over seeds; one seed has no deviation.

    >>> mean_and_sd([50.0, 52.0]), mean_and_sd([50.0]), mean_and_sd([])
    ('51.0±1.4', '50.0', '–')
    """
    spread = f"±{stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{fmean(values):.{digits}f}{spread}" if values else "–"
