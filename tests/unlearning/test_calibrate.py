import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedortho.models.patch import Patch
from fedortho.unlearning.calibrate import Refused, calibrate, smallest, thinned
from fedortho.unlearning.directions import SHARES
from fedortho.unlearning.trials import Candidate, Trial

NOTHING = Patch("", "")


class FakeBench:
    """Accuracies that follow a formula: forgetting falls with ratio and scrub, retention pays for both."""

    classifier = "fc"

    def __init__(
        self, forget_rate: float, retain_cost: float, scrub_cost: float = 0.0, parallel_trials: int = 1
    ) -> None:
        self.forget_rate, self.retain_cost, self.scrub_cost = forget_rate, retain_cost, scrub_cost
        self.parallel_trials, self.asked = parallel_trials, []  # how many candidates each time

    def attempt(self, candidates: list[Candidate]) -> list[Trial]:
        self.asked.append(len(candidates))
        return [self._one(c.ratio, c.scrub, c.patch) for c in candidates]

    def _one(self, ratio: float, scrub: float, patch: Patch) -> Trial:
        forget = max(0.0, 0.8 - self.forget_rate * ratio - 1.0 * scrub)
        return Trial(ratio, scrub, forget, 0.01, 0.9 - self.retain_cost * ratio - self.scrub_cost * scrub, patch)


def run(runner: FakeBench, *, may_scrub: bool = True) -> tuple[Trial, list[Trial]]:
    return calibrate(runner, lambda ratio: NOTHING, 0.89, may_scrub=may_scrub)  # type: ignore[arg-type]


def test_the_smallest_ratio_that_reaches_the_target_is_chosen_with_few_trials() -> None:
    runner = FakeBench(forget_rate=8.0, retain_cost=0.05)
    chosen, made = run(runner)
    assert (chosen.ratio, chosen.scrub) == (0.1, 0.0)
    assert len(made) == sum(runner.asked) <= 6


@pytest.mark.parametrize("parallel_trials", [1, 12])
def test_the_largest_ratio_within_the_budget_is_taken_where_more_is_better(parallel_trials: int) -> None:
    runner = FakeBench(forget_rate=80.0, retain_cost=0.05, parallel_trials=parallel_trials)
    plan = lambda ratio: NOTHING  # noqa: E731
    chosen, _ = calibrate(runner, plan, 0.89, may_scrub=True, ratios=SHARES, largest=True)  # type: ignore[arg-type]
    assert (chosen.ratio, chosen.scrub) == (0.2, 0.0)
    cheap = FakeBench(forget_rate=80.0, retain_cost=0.0, parallel_trials=parallel_trials)
    chosen, _ = calibrate(cheap, plan, 0.89, may_scrub=True, ratios=SHARES, largest=True)  # type: ignore[arg-type]
    assert chosen.ratio == SHARES[-1]
    weak = FakeBench(forget_rate=1.0, retain_cost=0.05, parallel_trials=parallel_trials)
    chosen, _ = calibrate(weak, plan, 0.88, may_scrub=True, ratios=SHARES, largest=True)  # type: ignore[arg-type]
    assert chosen.scrub > 0, "what directions do not reach, scrub finishes"


def test_a_federation_finds_its_ratio_in_one_exchange_and_its_scrub_in_one_more() -> None:
    runner = FakeBench(forget_rate=8.0, retain_cost=0.05, parallel_trials=12)
    chosen, _ = run(runner)
    assert chosen.reaches
    assert chosen.retain >= 0.89
    assert runner.asked == [12]
    runner = FakeBench(forget_rate=4.0, retain_cost=0.1, parallel_trials=12)
    chosen, _ = run(runner)
    assert chosen.scrub == 0.5
    assert runner.asked == [12, 12]


def test_scrub_finishes_what_the_budget_does_not_allow_to_prune() -> None:
    chosen, _ = run(FakeBench(forget_rate=4.0, retain_cost=0.1))
    assert chosen.ratio == 0.1, "the largest ratio within the budget"
    assert chosen.scrub == 0.4375, "the least strength that reaches the target"
    assert chosen.retain >= 0.89


def test_a_smaller_ratio_is_taken_when_scrub_itself_costs_retention() -> None:
    chosen, _ = run(FakeBench(forget_rate=4.0, retain_cost=0.06, scrub_cost=0.01))
    assert 0 < chosen.ratio < 0.15, "0.15 alone is within the budget"
    assert chosen.reaches
    assert chosen.retain >= 0.89


def test_without_scrub_or_with_a_dear_one_the_request_is_refused_with_its_frontier() -> None:
    for runner, may_scrub in ((FakeBench(4.0, 0.1), False), (FakeBench(4.0, 0.1, 1.0), True)):
        with pytest.raises(Refused, match="nothing was changed") as refusal:
            run(runner, may_scrub=may_scrub)
        assert len(refusal.value.frontier) >= 4
        assert "1.0%" in str(refusal.value)


@pytest.mark.parametrize("parallel_trials", [1, 12])
def test_where_every_ratio_costs_too_much_the_classifier_is_edited_alone(parallel_trials: int) -> None:
    runner = FakeBench(forget_rate=4.0, retain_cost=3.0, parallel_trials=parallel_trials)
    chosen, made = run(runner)
    assert chosen.ratio == 0, "nothing is pruned"
    assert chosen.scrub >= 0.79
    assert chosen.patch.note == {"edit": "classifier", "sites": {}}
    assert chosen.retain >= 0.89
    assert all(trial.ratio for trial in made if not trial.scrub), "pruning was tried first"
    with pytest.raises(Refused):
        run(FakeBench(forget_rate=4.0, retain_cost=3.0, parallel_trials=parallel_trials), may_scrub=False)


@given(st.lists(st.integers(0, 100), unique=True, max_size=20), st.integers(0, 101))
def test_bisection_finds_the_first_value_that_holds(values: list[int], limit: int) -> None:
    ascending = sorted(values)
    expected = next((value for value in ascending if value >= limit), None)
    for parallel_trials in (1, 2, 5, 20):
        assert smallest(ascending, lambda tried: [value >= limit for value in tried], parallel_trials) == expected


@given(st.lists(st.integers(0, 100), min_size=2, unique=True), st.integers(2, 12))
def test_thinning_keeps_the_order_and_both_ends(values: list[int], most: int) -> None:
    ascending = sorted(values)
    few = thinned(ascending, most)
    assert (few[0], few[-1]) == (ascending[0], ascending[-1])
    assert len(few) == len(set(few)) == min(most, len(values))
    assert few == sorted(few)
