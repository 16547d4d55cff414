from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fedortho.data.request import ForgetRequest
from fedortho.engines.engine import EngineInfo
from fedortho.engines.query import Query, Selection, Statistic
from fedortho.models.patch import Patch
from fedortho.statistics.observe import Observation
from fedortho.unlearning.calibrate import SCRUBS, Refused, calibrate, first_place
from fedortho.unlearning.directions import SHARES
from fedortho.unlearning.task import Task
from fedortho.unlearning.trials import (
    Baseline,
    Candidate,
    Score,
    Trial,
    TrialRunner,
    is_at_most,
    is_within,
    strength_looks,
)

NOTHING = Patch("", "")


class FakeBench:
    """Accuracies that follow a formula: forgetting falls with ratio and scrub, retention pays for both."""

    classifier = "fc"

    def __init__(
        self,
        forget_rate: float,
        retain_cost: float,
        scrub_cost: float = 0.0,
        is_parallel: bool = False,
        scrub_rate: float = 1.0,
    ) -> None:
        self.forget_rate, self.retain_cost, self.scrub_cost = forget_rate, retain_cost, scrub_cost
        self.scrub_rate, self.is_parallel, self.asked = scrub_rate, is_parallel, []  # how many candidates each time

    def attempt(self, candidates: list[Candidate]) -> list[Trial]:
        self.asked.append(len(candidates))
        return [self._one(c.ratio, c.scrub, c.patch) for c in candidates]

    def _one(self, ratio: float, scrub: float, patch: Patch) -> Trial:
        forget = max(0.0, 0.8 - self.forget_rate * ratio - self.scrub_rate * scrub)
        return Trial(ratio, scrub, forget, 0.01, 0.9 - self.retain_cost * ratio - self.scrub_cost * scrub, patch)


def run(runner: FakeBench, *, may_scrub: bool = True) -> tuple[Trial, list[Trial]]:
    return calibrate(runner, lambda ratio: NOTHING, 0.89, may_scrub=may_scrub)  # type: ignore[arg-type]


def test_without_a_scrub_the_smallest_ratio_that_reaches_the_target_is_chosen_with_few_trials() -> None:
    runner = FakeBench(forget_rate=8.0, retain_cost=0.05)
    chosen, made = run(runner, may_scrub=False)
    assert (chosen.ratio, chosen.scrub) == (0.1, 0.0)
    assert len(made) == sum(runner.asked) <= 6


@pytest.mark.parametrize("is_parallel", [False, True])
def test_the_largest_ratio_within_the_budget_is_taken_where_more_is_better(is_parallel: bool) -> None:
    runner = FakeBench(forget_rate=80.0, retain_cost=0.05, is_parallel=is_parallel)
    plan = lambda ratio: NOTHING  # noqa: E731
    chosen, _ = calibrate(runner, plan, 0.89, may_scrub=True, ratios=SHARES, largest=True)  # type: ignore[arg-type]
    assert (chosen.ratio, chosen.scrub) == (0.2, 0.0)
    cheap = FakeBench(forget_rate=80.0, retain_cost=0.0, is_parallel=is_parallel)
    chosen, _ = calibrate(cheap, plan, 0.89, may_scrub=True, ratios=SHARES, largest=True)  # type: ignore[arg-type]
    assert chosen.ratio == SHARES[-1]
    weak = FakeBench(forget_rate=1.0, retain_cost=0.05, is_parallel=is_parallel)
    chosen, _ = calibrate(weak, plan, 0.88, may_scrub=True, ratios=SHARES, largest=True)  # type: ignore[arg-type]
    assert chosen.scrub > 0, "what directions do not reach, scrub finishes"


@pytest.mark.parametrize("is_parallel", [False, True])
def test_the_first_edit_that_does_is_taken_and_all_strengths_of_a_ratio_are_tried_at_once(is_parallel: bool) -> None:
    runner = FakeBench(forget_rate=20.0, retain_cost=0.05, is_parallel=is_parallel)
    chosen, _ = run(runner)
    assert (chosen.ratio, chosen.scrub, runner.asked) == (0.08, 0.0, [len(SCRUBS)]), "0.04 would do as well"
    runner = FakeBench(forget_rate=4.0, retain_cost=0.1, is_parallel=is_parallel)
    chosen, _ = run(runner)
    assert (chosen.ratio, chosen.scrub) == (0.08, 0.5), "the least strength that reaches the target"
    assert runner.asked == [len(SCRUBS)]


def test_the_ratio_is_halved_until_it_is_within_the_budget() -> None:
    runner = FakeBench(forget_rate=4.0, retain_cost=0.3)
    chosen, made = run(runner)
    assert (chosen.ratio, chosen.scrub) == (0.02, 0.75)
    assert sorted({trial.ratio for trial in made}) == [0.02, 0.04, 0.08]
    assert chosen.retain >= 0.89


def test_a_larger_ratio_is_taken_where_no_scrub_reaches_the_target() -> None:
    runner = FakeBench(forget_rate=4.0, retain_cost=0.05, scrub_rate=0.2)
    chosen, _ = run(runner)
    assert (chosen.ratio, chosen.scrub) == (0.15, 1.0)
    assert chosen.retain >= 0.89


def test_without_scrub_or_with_a_dear_one_the_request_is_refused_with_its_frontier() -> None:
    for runner, may_scrub in ((FakeBench(4.0, 0.1), False), (FakeBench(4.0, 0.1, 1.0), True)):
        with pytest.raises(Refused, match="nothing was changed") as refusal:
            run(runner, may_scrub=may_scrub)
        assert len(refusal.value.frontier) >= 4
        assert "1.0%" in str(refusal.value)


@pytest.mark.parametrize("is_parallel", [False, True])
def test_where_every_ratio_costs_too_much_the_classifier_is_edited_alone(is_parallel: bool) -> None:
    runner = FakeBench(forget_rate=4.0, retain_cost=3.0, is_parallel=is_parallel)
    chosen, made = run(runner)
    assert chosen.ratio == 0, "nothing is pruned"
    assert chosen.scrub >= 0.79
    assert chosen.patch.note == {"edit": "classifier", "sites": {}}
    assert chosen.retain >= 0.89
    assert made[0].ratio, "pruning was tried first"
    with pytest.raises(Refused):
        run(FakeBench(forget_rate=4.0, retain_cost=3.0, is_parallel=is_parallel), may_scrub=False)


@given(st.integers(0, 20), st.integers(0, 20), st.integers(0, 21))
def test_the_first_place_that_holds_is_found_from_any_start(number: int, start: int, first: int) -> None:
    asked: list[int] = []

    def holds(place: int) -> bool:
        asked.append(place)
        return place >= first

    assert first_place(number, start, holds) == min(first, number)
    assert len(asked) == len(set(asked)), "no place is tried twice"


def test_early_decisions_are_wrong_as_seldom_as_they_say() -> None:
    generator = torch.Generator().manual_seed(0)
    draws = torch.rand(4000, 128, generator=generator)
    for limit in (0.01, 0.1):
        at_the_limit = [is_at_most(limit, int(right), 128) for right in (draws < limit).sum(1)]
        assert at_the_limit.count(True) <= 0.06 * 4000
        assert at_the_limit.count(False) <= 0.06 * 4000
    assert is_at_most(0.01, 13, 128) is False
    assert is_at_most(0.1, 0, 128) is True
    changed = torch.where(draws < 0.03, 1, torch.where(draws < 0.05, -1, 0))  # 3 % lost, 2 % gained: a loss of 1 point
    paired = [is_within(0.01, int(row.sum()), int(row.abs().sum()), 128) for row in changed]
    assert paired.count(True) + paired.count(False) <= 0.15 * 4000


def test_a_score_wants_one_right_answer_to_spare() -> None:
    def reaches(right: int, images: int) -> bool:
        score = Score((0.01,), 0.01, [(right, images)])
        return Trial(0.1, 0.0, *score.worst, 0.9, NOTHING, score.spare).reaches

    assert [reaches(right, 256) for right in (0, 1, 2)] == [True, True, False]
    assert reaches(0, 40), "few images: half the limit at most"


def test_an_edit_that_just_meets_both_is_taken_before_refusing() -> None:
    class Noisy(FakeBench):
        def _one(self, ratio: float, scrub: float, patch: Patch) -> Trial:
            return replace(super()._one(ratio, scrub, patch), spare=0.009, doubt=0.005)

    chosen, _ = run(Noisy(forget_rate=7.93, retain_cost=0.09, scrub_cost=1.0), may_scrub=False)
    assert chosen.forget <= chosen.limit
    assert chosen.retain >= 0.89
    assert not (chosen.reaches and chosen.keeps(0.89)), "by its estimates alone"


class CountingEngine:
    """Nothing is right of the forget set; of 128 validation images so many answers are lost and changed."""

    info = EngineInfo(tuple("abcd"), (1, 8, 8), "")

    def __init__(self, lost: int, changed: int) -> None:
        self.lost, self.changed = lost, changed
        self.asked: list[tuple[str, int, int]] = []  # split, limit and skip of each selection

    def measure(self, model: object, queries: Sequence[Query]) -> list[list[Observation]]:
        return [[self._counted(each, query.statistic) for each in query.selections] for query in queries]

    def _counted(self, selection: Selection, statistic: Statistic) -> Observation:
        self.asked.append((selection.split, selection.limit, selection.skip))
        images, number = selection.limit - selection.skip, len(statistic.patches)
        lost, changed = (torch.full((1, number), each * images / 128) for each in (self.lost, self.changed))
        right = torch.zeros(1, number) if selection.split == "train" else images - lost
        if selection.split == "valid":
            right[:, 0], changed[:, 0] = images, 0  # the original
        return Observation({"right": right, "changed": changed}, torch.tensor([images]))


@pytest.mark.parametrize(
    ("lost", "changed", "looks", "keeps"),
    [(-6, 10, 1, True), (0, 4, 2, True), (1, 5, 2, False), (12, 12, 1, False)],
    ids=["surely kept", "kept", "missed", "surely missed"],
)
def test_the_other_validation_images_are_looked_at_where_the_first_decide_nothing(
    lost: int, changed: int, looks: int, keeps: bool
) -> None:
    engine = CountingEngine(lost, changed)
    request = ForgetRequest.parse("class:3")
    task = Task(nn.Identity(), engine, request, None, (), Statistic("peaks"), 0, {})  # type: ignore[arg-type]
    runner = TrialRunner(task, strength_looks(task, 512), [], Baseline(0.8, (0.01,), 0.9), 0.01, Selection())
    trials = runner.attempt([Candidate(NOTHING, 0.04), Candidate(NOTHING, 0.04)])
    assert engine.asked == [("train", 256, 0), ("valid", 128, 0), ("valid", 512, 128)][: looks + 1]
    assert [trial.keeps(0.79) for trial in trials] == [keeps, keeps]
    assert all(trial.reaches for trial in trials)
    assert trials[0].retain == pytest.approx(0.8 - lost / 128)
