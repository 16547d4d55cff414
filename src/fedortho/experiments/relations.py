"""What the paper claims, as relations between rows, and whether they hold over seeds; noise is said to be noise."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from fedortho.errors import FedOrthoError
from fedortho.storage.files import canonical_json

Row = dict[str, Any]  # one seed's: seed, the keys that tell rows apart, what was measured
METRICS = ("forget", "retain")
MEASURED = (*METRICS, "test", "refused", "forgotten")
SIDE = r"([a-z-]+)(?:\[([^\]]*)\])? (forget|retain)"
RELATION = re.compile(rf"{SIDE} ([<>]) {SIDE}(?: at (\S+))?")
T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)  # two-sided 95 %, 1 degree of freedom and up
HOLDS, NOISE, EQUAL, FAILS = "holds", "within noise", "equal", "does not hold"


@dataclass(frozen=True)
class ResultRow:
    """One row of a table: what was done, and what came of it in percent, seed by seed."""

    key: Mapping[str, Any]
    values: dict[int, dict[str, float]]

    def of(self, metric: str) -> list[float]:
        return [found[metric] for found in self.values.values() if metric in found]


def as_lines(rows: Sequence[Row]) -> list[ResultRow]:
    """Rows of all seeds as one line each, in percent; what was refused has no values."""
    lines: dict[str, ResultRow] = {}
    for row in rows:
        key = {name: value for name, value in row.items() if name not in (*MEASURED, "seed")}
        line = lines.setdefault(canonical_json(key), ResultRow(key, {}))
        line.values[row["seed"]] = {metric: 100 * row[metric] for metric in METRICS if metric in row}
    return list(lines.values())


@dataclass(frozen=True)
class Relation:
    """`A[key=value] metric < B[key=value] metric at key=value`; other keys that both rows have must agree."""

    text: str
    less: tuple[Mapping[str, str], str]  # which rows, which metric
    more: tuple[Mapping[str, str], str]

    def pairs(self, lines: Sequence[ResultRow]) -> list[tuple[ResultRow, ResultRow]]:
        named = self.less[0].keys() | self.more[0].keys()
        left, right = (_fitting(where, lines) for where, _ in (self.less, self.more))
        return [(a, b) for a in left for b in right if a is not b and _agree(a, b, named)]


def parse_relation(text: str) -> Relation:
    """Read a relation; the smaller side comes first whichever way it is written.

    >>> parse_relation("ssd retain > salun[ratio=max] retain at request=class").less
    ({'method': 'salun', 'ratio': 'max', 'request': 'class'}, 'retain')
    """
    found = RELATION.fullmatch(text)
    if found is None:
        raise FedOrthoError(f"{text!r} is no relation; write: METHOD[key=value] forget < METHOD retain at key=value")
    method, own, metric, sign, other, others, its, common = found.groups()
    first = ({"method": method} | read_pairs(own) | read_pairs(common), metric)
    second = ({"method": other} | read_pairs(others) | read_pairs(common), its)
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


def word(value: Any) -> str:
    """A value of a key as it is written: 0.2, not 0.20."""
    return f"{value:g}" if isinstance(value, float) else str(value)


def _fitting(where: Mapping[str, str], lines: Sequence[ResultRow]) -> list[ResultRow]:
    """The rows that have these values; `max` and `min` stand for the largest and smallest of a method."""
    wanted = dict(where)
    for key, value in where.items():
        known = [line.key[key] for line in lines if line.key["method"] == where["method"] and key in line.key]
        if value in ("max", "min") and known:
            wanted[key] = word(max(known) if value == "max" else min(known))
    return [line for line in lines if all(word(line.key.get(key)) == value for key, value in wanted.items())]


def _agree(a: ResultRow, b: ResultRow, named: set[str]) -> bool:
    return all(a.key[key] == b.key[key] for key in (a.key.keys() & b.key.keys()) - named)


def differences(relation: Relation, pair: tuple[ResultRow, ResultRow]) -> list[float]:
    """By how much the side that should be larger is larger, seed by seed."""
    less, more = pair
    low, high = relation.less[1], relation.more[1]
    both = [seed for seed in less.values if low in less.values[seed] and high in more.values.get(seed, {})]
    return [more.values[seed][high] - less.values[seed][low] for seed in both]


def judged(found: Sequence[float]) -> str:
    """Whether differences are above 0 by more than their noise (95 %, Student's t); of one seed noise is not known.

    >>> judged([3.0, 3.5, 4.0]), judged([-1.0, 3.0, 4.0]), judged([-3.0, -3.5, -4.0]), judged([3.0])
    ('holds', 'within noise', 'does not hold', 'holds')
    """
    if not any(found):
        return EQUAL
    mean, number = fmean(found), len(found)
    noise = T95[min(number - 2, len(T95) - 1)] * stdev(found) / number**0.5 if number > 1 else 0.0
    if number > 1 and abs(mean) <= noise:
        return NOISE
    return HOLDS if mean > 0 else FAILS


def mean_and_sd(values: Sequence[float]) -> str:
    """Mean and spread over seeds; of one seed there is no spread.

    >>> mean_and_sd([50.0, 52.0]), mean_and_sd([50.0]), mean_and_sd([])
    ('51.0±1.4', '50.0', '–')
    """
    spread = f"±{stdev(values):.1f}" if len(values) > 1 else ""
    return f"{fmean(values):.1f}{spread}" if values else "–"
