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

METRICS = ("forget", "retain")
SIDE = r"([a-z-]+)(?:\[([^\]]*)\])? (forget|retain)"
RELATION = re.compile(rf"{SIDE} ([<>]) {SIDE}(?: at (\S+))?")
HOLDS, NOISE, EQUAL, FAILS = "holds", "within noise", "equal", "does not hold"


@dataclass(frozen=True)
class SeedRow:
    """A row of a table for one seed; `refused` says why a method has no accuracies."""

    seed: int
    key: Mapping[str, Scalar]  # what tells rows apart: data, model, split, request, method, varied settings
    accuracies: Accuracies | None = None
    refused: str = ""
    forgotten: Mapping[str, float] = field(default_factory=dict)  # in a sequence: forget accuracy by request so far


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
        found = row.accuracies
        merged.values[row.seed] = {metric: 100 * getattr(found, metric) for metric in METRICS} if found else {}
    return list(table.values())


@dataclass(frozen=True)
class Relation:
    """`A[key=value] metric < B[key=value] metric at key=value`; other keys that both rows have must agree."""

    text: str
    less: tuple[Mapping[str, str], str]  # which rows, which metric
    more: tuple[Mapping[str, str], str]

    def pairs(self, rows: Sequence[TableRow]) -> list[tuple[TableRow, TableRow]]:
        named = self.less[0].keys() | self.more[0].keys()
        left, right = (_matching(where, rows) for where, _ in (self.less, self.more))
        pairs = [(a, b, (a.key.keys() & b.key.keys()) - named) for a in left for b in right if a is not b]
        return [(a, b) for a, b, shared in pairs if all(a.key[key] == b.key[key] for key in shared)]


def parse_relation(text: str) -> Relation:
    """Read a relation; the smaller side comes first whichever way it is written.

    >>> parse_relation("ssd retain > salun[ratio=max] retain at request=class").less
    ({'method': 'salun', 'ratio': 'max', 'request': 'class'}, 'retain')
    """
    match = RELATION.fullmatch(text)
    if match is None:
        raise FedOrthoError(f"{text!r} is no relation; write: METHOD[key=value] forget < METHOD retain at key=value")
    left, left_keys, left_metric, sign, right, right_keys, right_metric, common = match.groups()
    first = ({"method": left} | read_pairs(left_keys) | read_pairs(common), left_metric)
    second = ({"method": right} | read_pairs(right_keys) | read_pairs(common), right_metric)
    return Relation(text, *((first, second) if sign == "<" else (second, first)))


def read_pairs(text: str | None) -> dict[str, str]:
    """`key=value` with commas between.

    >>> read_pairs("split=iid,ratio=0.1")
    {'split': 'iid', 'ratio': '0.1'}
    """
    words = [word.strip().partition("=") for word in (text or "").split(",") if word.strip()]
    if wrong := [key for key, sign, value in words if not (sign and value)]:
        raise FedOrthoError(f"{wrong[0]!r} is no key=value; write such as split=iid,request=class")
    return {key: value for key, _, value in words}


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
    less, more = pair
    low, high = relation.less[1], relation.more[1]
    seeds = [seed for seed in less.values if low in less.values[seed] and high in more.values.get(seed, {})]
    return [more.values[seed][high] - less.values[seed][low] for seed in seeds]


def judge_differences(values: Sequence[float]) -> str:
    """Whether differences exceed 0 by more than their noise (95 %, Student's t); one seed has no noise.

    >>> judge_differences([3.0, 3.5, 4.0]), judge_differences([-1.0, 3.0, 4.0]), judge_differences([-3.0])
    ('holds', 'within noise', 'does not hold')
    """
    if not any(values):
        return EQUAL
    from scipy import stats

    mean, number = fmean(values), len(values)
    if number > 1 and abs(mean) <= stats.t.ppf(0.975, number - 1) * stdev(values) / number**0.5:
        return NOISE
    return HOLDS if mean > 0 else FAILS


def mean_and_sd(values: Sequence[float]) -> str:
    """Mean and standard deviation over seeds; one seed has no deviation.

    >>> mean_and_sd([50.0, 52.0]), mean_and_sd([50.0]), mean_and_sd([])
    ('51.0±1.4', '50.0', '–')
    """
    spread = f"±{stdev(values):.1f}" if len(values) > 1 else ""
    return f"{fmean(values):.1f}{spread}" if values else "–"
