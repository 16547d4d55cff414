"""Lessons: what is taught, in which order, and against which teacher."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from small import TinyNet
from torch.nn import functional

from fedortho.data.images import Images, made_images
from fedortho.errors import BadData, BadSetting, UnknownName
from fedortho.models.predictions import accuracy
from fedortho.storage.files import tensors_digest
from fedortho.training.augmentation import Augment
from fedortho.training.batches import count_images, plan_steps, read_step
from fedortho.training.loop import fit
from fedortho.training.objectives import (
    OBJECTIVES,
    FitOptions,
    Target,
    TrainingSet,
)
from fedortho.training.recipe import Recipe

PLAIN = Recipe(epochs=1, batch_size=16, lr=0.05, crop=0, flip=0.0, ortho=0.0)


def two(toy: Images) -> list[TrainingSet]:
    return [TrainingSet(toy.subset(range(104))), TrainingSet(toy.subset(range(104, 134)), Target("other"))]


def test_one_plain_lesson_is_training_as_ever(toy: Images, tiny: TinyNet) -> None:
    states = [fit(tiny, what, PLAIN).state_dict() for what in (toy, [TrainingSet(toy)])]
    assert tensors_digest(states[0]) == tensors_digest(states[1])


def test_a_mixed_epoch_shows_every_image_once_and_turns_do_so_in_turn(toy: Images) -> None:
    training_sets = two(toy)
    for order in ("mixed", "turns"):
        steps = plan_steps(training_sets, 16, 0, 0, order)
        for number, training_set in enumerate(training_sets):
            assert torch.equal(torch.cat([rows[number] for rows in steps]).sort().values, training_set.images.rows)
    assert [bool(len(rows[0])) for rows in plan_steps(training_sets, 16, 0, 0, "turns")] == [True] * 7 + [False] * 2
    assert count_images(training_sets, 16, 3, FitOptions("mixed")) == (402, 0)


@pytest.mark.parametrize(
    ("number", "batch_size", "sizes"),
    [
        (130, 64, [64, 66]),
        (135, 64, [64, 71]),
        (136, 64, [64, 64, 8]),
        (5, 64, [5]),
        (9, 4, [4, 5]),
        (10, 4, [4, 4, 2]),
    ],
)
def test_a_handful_of_left_over_images_joins_the_step_before(
    toy: Images, number: int, batch_size: int, sizes: list[int]
) -> None:
    steps = plan_steps([TrainingSet(toy.subset([place % 100 for place in range(number)]))], batch_size, 0, 0, "mixed")
    assert [len(rows[0]) for rows in steps] == sizes


@pytest.mark.parametrize(
    ("numbers", "sizes"),
    [
        ((2, 100), [(2, 16), (0, 16), (0, 16), (0, 16), (0, 16), (0, 20)]),
        ((40, 1), [(16, 0), (16, 0), (8, 1)]),
        ((7, 8), [(7, 8)]),
        ((8, 8), [(8, 0), (0, 8)]),
        ((1, 1), [(1, 1)]),
        ((3, 0), [(3, 0)]),
        ((3, 2, 30, 4), [(3, 2, 16, 0), (0, 0, 14, 4)]),
    ],
)
def test_turns_let_a_lesson_of_a_handful_share_a_step_with_its_neighbour(
    toy: Images, numbers: tuple[int, ...], sizes: list[tuple[int, ...]]
) -> None:
    training_sets = [
        TrainingSet(toy.subset(range(50 * place, 50 * place + 50)).subset(torch.arange(number) % 50))
        for place, number in enumerate(numbers)
    ]
    steps = plan_steps(training_sets, 16, 0, 0, "turns")
    assert [tuple(map(len, rows)) for rows in steps] == sizes
    for number, training_set in enumerate(training_sets):
        assert torch.equal(
            torch.cat([rows[number] for rows in steps]).sort().values, training_set.images.rows.sort().values
        )


def test_single_images_still_come_one_by_one_where_that_is_asked_for(toy: Images) -> None:
    training_sets = [TrainingSet(toy.subset([place])) for place in range(3)]
    assert len(plan_steps(training_sets, 1, 0, 0, "turns")) == 3


@pytest.mark.parametrize("order", ["mixed", "turns"])
@pytest.mark.parametrize("first", [1, 2])
def test_a_lesson_of_one_or_two_images_does_no_harm(toy: Images, order: str, first: int) -> None:
    """In training mode a step on them alone would take the statistics of batch norm, and the answers, apart."""
    net = fit(TinyNet(), toy, replace(PLAIN, epochs=6))
    training_sets = [TrainingSet(toy.subset(range(first)), Target("other")), TrainingSet(toy.subset(range(first, 240)))]
    assert accuracy(net, toy) > 0.9
    assert accuracy(fit(net, training_sets, replace(PLAIN, batch_size=64), options=FitOptions(order)), toy) > 0.9


def test_one_image_in_all_is_refused_by_a_network_with_batch_norm(toy: Images, tiny: TinyNet) -> None:
    with pytest.raises(BadData, match="only one image to train on"):
        fit(tiny, [TrainingSet(toy.subset([0])), TrainingSet(toy.subset([]))], PLAIN, options=FitOptions("turns"))
    with pytest.raises(BadSetting, match="batch-size of at least 2"):
        fit(tiny, toy, replace(PLAIN, batch_size=1))


def test_pairs_last_one_pass_over_the_first_and_repeat_the_second(toy: Images) -> None:
    training_sets = two(toy)
    steps = plan_steps(training_sets, 16, 0, 0, "paired")
    assert len(steps) == 7
    assert torch.equal(torch.cat([rows[0] for rows in steps]).sort().values, training_sets[0].images.rows)
    assert all(len(rows[1]) for rows in steps)
    assert count_images(training_sets, 16, 1, FitOptions("paired")) == (104 + 4 * 16 + 3 * 14, 0)
    without = [training_sets[0], TrainingSet(toy.subset([]))]
    assert all(not len(rows[1]) for rows in plan_steps(without, 16, 0, 0, "paired")), "a client may lack a part"


def test_other_labels_are_never_true_and_those_drawn_once_stay(toy: Images) -> None:
    device, nothing = torch.device("cpu"), Augment(0, 0.0)
    rows = [toy.rows]
    for target, may_be_true in ((Target("other"), False), (Target("any"), True)):
        drawn = read_step([TrainingSet(toy, target)], rows, nothing, 5, device)[1]
        assert bool((drawn == toy.labels).any()) == may_be_true
        assert not torch.equal(drawn, read_step([TrainingSet(toy, target)], rows, nothing, 6, device)[1])
        assert drawn.unique().tolist() == [0, 1, 2, 3]
    fixed = [
        read_step([TrainingSet(toy, Target("other", once=True))], rows, nothing, seed, device)[1] for seed in (5, 6)
    ]
    assert torch.equal(*fixed)


def test_a_weight_below_zero_climbs(toy: Images, tiny: TinyNet) -> None:
    def loss(model: torch.nn.Module) -> float:
        with torch.no_grad():
            return float(functional.cross_entropy(model(toy.normalise(toy.pixels)), toy.labels))

    for sign in (1.0, -1.0):
        moved = fit(tiny, [TrainingSet(toy, Target(weight=sign))], PLAIN)
        assert sign * (loss(moved) - loss(copy.deepcopy(tiny).eval())) < 0


@pytest.mark.parametrize("temperature", [1.0, 2.0, 4.0])
def test_imitation_is_the_divergence_of_softened_answers(temperature: float) -> None:
    pupil, teacher = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    total = 0.0
    for own, target in zip(pupil.tolist(), teacher.tolist(), strict=True):
        p, t = ([math.exp(z / temperature) for z in row] for row in (own, target))
        total += sum(b / sum(t) * math.log((b / sum(t)) / (a / sum(p))) for a, b in zip(p, t, strict=True))
    labels = torch.zeros(5, dtype=torch.int64)
    assert float(OBJECTIVES["imitate"](pupil, labels, teacher, temperature)) == pytest.approx(total / 5)
    assert float(OBJECTIVES["imitate-elements"](pupil, labels, teacher, temperature)) == pytest.approx(total / 15)


def test_frozen_norms_keep_their_statistics_and_train_everything_else(toy: Images, tiny: TinyNet) -> None:
    trained = fit(tiny, toy, PLAIN, options=FitOptions(norms="frozen"))
    for name, buffer in tiny.named_buffers():
        assert torch.equal(trained.get_buffer(name), buffer), name
    assert not torch.equal(trained.get_parameter("fc.weight"), tiny.fc.weight)


def test_adam_leaves_denied_coordinates_bit_for_bit(toy: Images, tiny: TinyNet) -> None:
    mask = {"fc.weight": torch.arange(48).view(4, 12) % 2 == 0}
    trained = fit(tiny, toy, PLAIN, trainable=mask, options=FitOptions(optimiser="adam"))
    assert torch.equal(trained.get_parameter("fc.weight")[~mask["fc.weight"]], tiny.fc.weight[~mask["fc.weight"]])
    assert not torch.equal(trained.get_parameter("fc.weight"), tiny.fc.weight)


def test_made_images_are_not_augmented(toy: Images) -> None:
    made = made_images(torch.randn(6, 1, 8, 8), torch.zeros(6, dtype=torch.int64), toy.names)
    inputs, _ = read_step([TrainingSet(made, given=True)], [made.rows], Augment(2, 1.0, 1.0), 0, torch.device("cpu"))
    assert torch.equal(inputs, made.pixels)


def test_what_does_not_fit_together_is_refused(toy: Images, tiny: TinyNet, tmp_path: object) -> None:
    with pytest.raises(UnknownName, match="no labels 'wrong'; choose from any, other, true"):
        Target("wrong")
    with pytest.raises(UnknownName, match="no order 'mix'"):
        FitOptions("mix")
    with pytest.raises(BadSetting, match="temperature must be above 0"):
        FitOptions(temperature=0.0)
    with pytest.raises(UnknownName, match="no teacher 'good'; choose from none"):
        fit(tiny, [TrainingSet(toy, Target(teacher="good"))], PLAIN, options=FitOptions(objective="imitate"))
    with pytest.raises(BadSetting, match="a teacher needs the objective imitate"):
        fit(tiny, [TrainingSet(toy, Target(teacher="good"))], PLAIN, teachers={"good": tiny})
    with pytest.raises(BadSetting, match="checkpoint needs sgd"):
        fit(tiny, toy, PLAIN, options=FitOptions(optimiser="adam"), checkpoint=f"{tmp_path}/x.safetensors")
