import pytest

from fedortho.training.recipe import Recipe, learning_rate


def rates(recipe: Recipe, *clocks: float) -> list[float]:
    return [round(learning_rate(recipe, clock), 6) for clock in clocks]


def test_cosine_falls_from_the_rate_to_nothing() -> None:
    assert rates(Recipe(epochs=150, lr=0.1), 0, 75, 150, 200) == [0.1, 0.05, 0.0, 0.0]


def test_steps_multiply_at_each_milestone() -> None:
    recipe = Recipe(epochs=200, lr=0.1, schedule="steps", milestones="30,60", gamma=0.1)
    assert rates(recipe, 0, 29.9, 30, 60, 199) == [0.1, 0.1, 0.01, 0.001, 0.001]


def test_geometric_is_the_papers_per_round_factor() -> None:
    recipe = Recipe(lr=0.1, schedule="geometric", gamma=0.998)
    assert learning_rate(recipe, 100.5) == pytest.approx(0.1 * 0.998**100)


def test_linear_falls_evenly_to_nothing_and_stays_there() -> None:
    assert rates(Recipe(epochs=4, lr=0.4, schedule="linear"), 0, 1, 2, 4, 5) == [0.4, 0.3, 0.2, 0.0, 0.0]


def test_warmup_rises_from_nothing_and_then_leaves_the_schedule_alone() -> None:
    recipe = Recipe(lr=0.4, schedule="constant", warmup=2)
    assert rates(recipe, 0, 1, 2, 5) == [0.0, 0.2, 0.4, 0.4]
