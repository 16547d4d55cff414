"""A search of a method's hyper-parameters over a grid, widened where the best value lies at its edge.

First every candidate of the grid is tried on some of the training images. Then the two best are tried at the size that
a comparison reports (all training images, as many passes), and after them the neighbours of the best one, in the grid
or a step beyond its edge, until it has been compared with all of them or the budget is spent. If the best then lies at
an edge of what was tried and could be better, some further trials go beyond that edge. If it leaves the model as it
was, trials that are left go between it and settings that change the model.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from fedortho.errors import BadSetting, FedOrthoError
from fedortho.methods import find_method, known_methods, make_method
from fedortho.storage.records import Scalar
from fedortho.storage.settings import as_mapping, field_range, field_types

Grid = Mapping[str, tuple[Any, ...]]  # values to try of each setting, in ascending order
GRIDS: Mapping[str, Grid] = {
    "paper": {"ratio": (0.01, 0.03, 0.1, 0.2, 0.4)},  # α stays at the 0.5 of the paper
    "finetune": {"lr": (0.001, 0.003, 0.01, 0.03, 0.1)},
    "not": {"lr": (0.001, 0.003, 0.01, 0.03, 0.1)},
    "fused": {"lr": (0.005, 0.05, 0.15, 0.5, 1.5)},
    "ssd": {"alpha": (1.0, 3.0, 10.0, 30.0, 50.0, 100.0), "lam": (0.3, 1.0)},
    "salun": {"lr": (0.0039, 0.013, 0.039, 0.13), "ratio": (0.3, 0.5, 0.8)},
    "unsir": {"lr": (0.0006, 0.002, 0.006, 0.02), "repair_lr": (0.0003, 0.001, 0.003)},
    "bad-teacher": {"lr": (0.00003, 0.0001, 0.0003, 0.001, 0.003)},
    "class-pruning": {"ratio": (0.02, 0.05, 0.1), "lr": (0.0015, 0.005, 0.015)},
    "neggrad": {"lr": (0.0003, 0.001, 0.003, 0.01), "beta": (0.9, 0.95, 0.98)},
    "scrub": {"lr": (0.0005, 0.0015, 0.005, 0.015), "alpha": (0.001, 0.03, 1.0)},
    "eu-k": {"lr": (0.01, 0.03, 0.1), "k": (1, 2, 3, 5)},
    "cf-k": {"lr": (0.003, 0.01, 0.03, 0.1), "k": (1, 3, 5)},
    "ct": {"lr": (0.001, 0.003, 0.01, 0.03, 0.1)},
    "federaser": {"lr": (0.005, 0.015, 0.05, 0.15), "ratio": (0.25, 0.5, 1.0)},
    "msg": {"lr": (0.001, 0.003, 0.01, 0.03), "ratio": (0.1, 0.3, 0.5)},
    "subspace": {"alpha_retain": (10.0, 100.0, 1000.0), "alpha_forget": (1.0, 3.0, 10.0, 30.0)},
}
FACTORS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0)  # methods without a grid: of their own learning rate
# references, methods that search by themselves or were chosen on other classes (regrow), r2d by C4, a control
FIXED = ("retrain", "hide", "directions", "regrow", "r2d", "logit-mask")
STARTS = 2  # candidates that are tried at the reported size before any neighbour


@dataclass(frozen=True)
class Budget:
    """What every method may spend."""

    candidates: int = 12  # of the first stage, at most
    images: int = 10_000  # training images of a candidate in the first stage; a federation uses all
    trials: int = 6  # at the reported size, at most
    widening: int = 4  # further ones at most, beyond the edge at which the best of these lies, unless its score is 0
    epochs: int = 1  # passes of a trial, at most
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.candidates, self.images, self.trials, self.epochs) < 1 or self.widening < 0:
            raise BadSetting(f"candidates, images, trials and epochs must be 1 or more, widening 0 or more, not {self}")


@dataclass(frozen=True)
class Attempt:
    """Settings and their outcome on validation images."""

    settings: Mapping[str, Any]
    images: int  # of the training set
    forget: float
    retain: float
    score: float  # mean of |forget − wanted| and max(0, retain before − retain); less is better
    error: str = ""  # why it failed; its numbers are then the worst possible ones
    unchanged: bool = False  # the model is the one that it started from; old records do not tell it


@dataclass(frozen=True)
class Choice:
    """A chosen value and the range in which it was searched."""

    value: Scalar
    lowest: Scalar  # of the values that were tried
    highest: Scalar
    inside: bool  # it changes the model, and lower and higher values were tried or are out of the setting's range


@dataclass(frozen=True)
class Search:
    """The attempts of one method in their order; the best is chosen among those at the reported size."""

    attempts: tuple[Attempt, ...]
    best: Attempt | None = None  # None: it goes on
    settled: bool = False  # the best was compared with all its neighbours at the reported size
    choices: Mapping[str, Choice] = field(default_factory=dict)


def is_tunable(name: str) -> bool:
    """Whether a method has something to tune: a grid of its own, or a learning rate."""
    return name not in FIXED and (name in GRIDS or "lr" in field_types(find_method(name)))


def grid_of(name: str) -> Grid:
    """The values to try of each setting of a method."""
    if not is_tunable(name):
        raise FedOrthoError(f"{name} has nothing to tune; choose from {', '.join(filter(is_tunable, known_methods()))}")
    if name in GRIDS:
        return GRIDS[name]
    published: float = as_mapping(find_method(name)())["lr"]
    return {"lr": tuple(_rounded(published * factor) for factor in FACTORS)}


class GridSearch:
    """The search of one method: `made` has its attempts, `following` says what to try next."""

    def __init__(self, name: str, budget: Budget, images: int, reported: int) -> None:
        """The first stage has `images` training images, the second `reported`."""
        self.name, self.budget, self.images, self.reported = name, budget, images, reported
        self.grid, self.made = grid_of(name), list[Attempt]()
        self.candidates = list(product(*self.grid.values()))[: budget.candidates]

    def following(self) -> tuple[dict[str, Any], int] | None:
        """The settings to try next and the number of images; None: the search has ended."""
        if len(self.made) < len(self.candidates):
            return self._settings(self.candidates[len(self.made)]), self.images
        spent = len(self.made) - len(self.candidates)
        left = self._left() if spent < self.budget.trials + self.budget.widening else []
        if spent >= self.budget.trials:
            left = [place for place in left if self._best().score and self._is_beyond(place)]
        elif not left:
            left = self._between()
        return (self._settings(left[0]), self.reported) if left else None

    def result(self) -> Search:
        """The search with its best attempt; none is best if all have failed."""
        if all(attempt.error for attempt in self.made):
            raise FedOrthoError(f"no settings of {self.name} worked, so none is best: {self.made[0].error}")
        best, choices = self._best(), {}
        scores = {attempt.score for attempt in self.made if attempt.images == self.reported}
        for key in self.grid:
            tried, value = self._tried(key), best.settings[key]
            ends = [values for values in (tried, tried[::-1]) if values[-1] == value]
            is_open = any(self._is_allowed(best.settings, key, self._after(key, values)) for values in ends)
            is_found = len(scores) > 1 and not best.unchanged
            choices[key] = Choice(value, tried[0], tried[-1], is_found and not is_open)
        return Search(tuple(self.made), best, not self._left(), choices)

    def place(self, settings: Mapping[str, Any]) -> tuple[Any, ...]:
        """The values of the settings that are searched."""
        return tuple(settings[key] for key in self.grid)

    def _settings(self, place: tuple[Any, ...]) -> dict[str, Any]:
        return dict(zip(self.grid, place, strict=True))

    def _left(self) -> list[tuple[Any, ...]]:
        """What is worth a trial at the reported size: the best candidates, then the neighbours of the best.

        Those beyond the edge of what was tried come first, the others by their rank on fewer images.
        """
        done = {self.place(attempt.settings) for attempt in self.made if attempt.images == self.reported}
        screened = {self.place(one.settings): _rank(one) for one in self.made if one.images != self.reported}
        places = [place for place in screened if place not in done]
        if len(done) >= STARTS or not places:
            places = [place for place in self._neighbours() if place not in done]
        return sorted(places, key=lambda place: screened.get(place, (False, 0.0, 0.0)))

    def _best(self) -> Attempt:
        """The best at the reported size; of several with the same score the one that was best on fewer images.

        Only then counts what is retained: alone it would choose the weakest that still forgets, at the edge.
        """
        fewer = {self.place(one.settings): one.score for one in self.made if one.images != self.reported}

        def rank(attempt: Attempt) -> tuple[bool, float, float, float]:
            is_bad, score, lost = _rank(attempt)
            return is_bad, score, fewer.get(self.place(attempt.settings), math.inf), lost

        return min((attempt for attempt in self.made if attempt.images == self.reported), key=rank)

    def _neighbours(self) -> list[tuple[Any, ...]]:
        """The next lower and the next higher value of each setting of the best, as far as the method allows them."""
        best, found = self._best().settings, []
        for key in self.grid:
            for values in (self._tried(key), self._tried(key)[::-1]):
                at = values.index(best[key]) + 1
                value = values[at] if at < len(values) else self._after(key, values)
                if self._is_allowed(best, key, value):
                    found.append(self.place({**best, key: value}))
        return found

    def _between(self) -> list[tuple[Any, ...]]:
        """Between a best that leaves the model as it was and neighbours that change it."""
        best = self._best()
        changing = {self.place(each.settings) for each in self.made if each.images == self.reported}
        changing -= {self.place(each.settings) for each in self.made if each.unchanged}
        found = []
        for key in self.grid if best.unchanged else ():
            for values in (self._tried(key), self._tried(key)[::-1]):
                after = values[values.index(best.settings[key]) + 1 :]
                if after and isinstance(after[0], float) and self.place({**best.settings, key: after[0]}) in changing:
                    middle = _rounded(math.sqrt(after[0] * best.settings[key]))
                    found += [self.place({**best.settings, key: middle})] if middle not in values else []
        return found

    def _after(self, key: str, values: Sequence[Any]) -> Any:
        """The value a step after the last, or the end of what the setting may be if that is nearer."""
        if (value := _beyond(key, values)) is None:
            return None
        allowed = field_range(find_method(self.name), key)
        value = type(value)(min(max(value, allowed.low), allowed.high))
        return None if value == values[-1] else value

    def _is_beyond(self, place: tuple[Any, ...]) -> bool:
        """Whether a value is outside of what was tried."""
        return any(value not in self._tried(key) for key, value in self._settings(place).items())

    def _tried(self, key: str) -> list[Any]:
        return sorted({*(attempt.settings[key] for attempt in self.made), *self.grid[key]})

    def _is_allowed(self, settings: Mapping[str, Any], key: str, value: Any) -> bool:
        try:
            make_method(self.name, self._settings(self.place({**settings, key: value})))
        except BadSetting:
            return False
        return value is not None


def _rank(attempt: Attempt) -> tuple[bool, float, float]:
    """Of two attempts with the same score the one that retains more is better."""
    return bool(attempt.error), attempt.score, -attempt.retain


def _beyond(key: str, values: Sequence[Any]) -> Any:
    """The value after the last, at the distance of the last two: a factor, for whole numbers a difference."""
    if len(values) < 2:
        return None
    last, before = values[-1], values[-2]
    if isinstance(last, int):
        return 2 * last - before
    if key == "beta":  # a weight near 1: what counts is its distance to 1
        return _rounded(1 - (1 - last) ** 2 / (1 - before))
    return _rounded(last**2 / before)


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")
