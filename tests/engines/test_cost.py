"""Costs are those of what ran."""

import time
from collections.abc import Callable

import pytest
import torch
from small import TinyNet
from torch import nn

from fedortho.data.images import Dataset
from fedortho.data.request import ForgetRequest
from fedortho.devices import WorkClock, flops_of
from fedortho.engines import answer as statistic
from fedortho.engines import cost
from fedortho.engines.central import CentralEngine
from fedortho.engines.cost import Meter, flops_per_image
from fedortho.engines.query import Query, Selection, Statistic
from fedortho.engines.training_plan import PlanPart, TrainingPlan
from fedortho.methods.unsir import UNSIR
from fedortho.models.patch import NOTHING
from fedortho.training.adapters import Adapters, attach
from fedortho.training.objectives import FitOptions, Target
from fedortho.training.recipe import Recipe

RECIPE = Recipe(epochs=2, batch_size=50, ortho=0.0)
SHAPE = (1, 8, 8)


def test_a_linear_layer_costs_two_operations_a_weight_and_twice_that_again_to_train() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32, bias=False), nn.Linear(32, 10, bias=False))
    forward = 2 * (64 * 32 + 32 * 10)
    step = forward + forward + 2 * 32 * 10  # by each weight, and back to the input of the second layer
    assert flops_per_image(model, SHAPE) == (forward, step)


def test_training_is_counted_by_the_steps_that_ran_and_teachers_by_their_reading(digits: Dataset) -> None:
    model = TinyNet(classes=10)
    forward, step = flops_per_image(model, SHAPE)
    meter = Meter(CentralEngine(digits), model)
    meter.fit(model, Selection(), RECIPE)
    assert meter.cost().images_trained == 2 * len(digits.train)
    assert meter.cost().flops == step * 2 * len(digits.train)
    forget = Selection("train", ForgetRequest.parse("class:3"))
    taught = TrainingPlan((PlanPart(forget, Target(teacher="one")),), FitOptions(objective="imitate"), {"one": model})
    again = Meter(CentralEngine(digits), model)
    again.fit(model, taught, RECIPE)
    number = 2 * int((digits.train.labels == 3).sum())
    cost = again.cost()
    assert (cost.images_read, cost.images_trained) == (number, number)
    assert cost.flops == (forward + step) * number
    assert cost.seconds > 0


def test_probes_are_counted_as_passes_of_their_kind(digits: Dataset) -> None:
    model = TinyNet(classes=10)
    meter = Meter(CentralEngine(digits), model)
    meter.measure(model, [Query((Selection(),), Statistic("fisher"))])
    assert (meter.cost().images_read, meter.cost().images_trained) == (0, len(digits.train))
    meter.measure(model, [Query((Selection(),), Statistic("peaks"))])
    assert (meter.cost().images_read, meter.cost().images_trained) == (len(digits.train), len(digits.train))


def test_candidates_cost_a_pass_through_the_tail_each(digits: Dataset) -> None:
    model = TinyNet(classes=10)
    meter, number = Meter(CentralEngine(digits), model), len(digits.valid)
    meter.measure(model, [Query((Selection("valid"),), Statistic("right", patches=(NOTHING,) * 3))])
    side = SHAPE[1] * SHAPE[2]
    tail = 2 * 12 * 8 * 9 * side + 2 * 12 * 10  # the last convolution and the classifier
    assert meter.cost().flops == number * (flops_per_image(model, SHAPE)[0] + 3 * tail)
    meter.measure(model, [Query((Selection("valid"),), Statistic("right", patches=(NOTHING,) * 2))])
    assert meter.cost().images_read == number, "what the tail receives is remembered"
    assert meter.cost().flops == number * (flops_per_image(model, SHAPE)[0] + 5 * tail)


def test_noise_that_a_method_makes_by_itself_is_counted_too(digits: Dataset) -> None:
    model = TinyNet(classes=10)
    meter = Meter(CentralEngine(digits), model)
    UNSIR(noise_images=8, noise_steps=5, epochs=0)(model, meter, ForgetRequest.parse("class:3"))
    assert meter.cost().images_trained == 40


def test_frozen_weights_make_a_step_cheaper() -> None:
    torch.manual_seed(0)
    model = TinyNet(classes=10)
    whole, adapted = (flops_per_image(m, SHAPE)[1] for m in (model, attach(model, Adapters(("fc",)))))
    assert adapted == pytest.approx(flops_per_image(model, SHAPE)[0], rel=0.01)
    assert adapted < 0.5 * whole


def test_a_clock_of_work_stands_still_while_anybody_counts() -> None:
    clock = WorkClock()
    began = clock()
    with clock.stopped():
        time.sleep(0.02)
        with clock.stopped():
            time.sleep(0.02)
        assert clock() == clock()
    assert clock() - began < 0.02
    time.sleep(0.02)
    assert clock() - began >= 0.02


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], object]]:
    """What is counted from now on, half a second each."""
    found: list[Callable[[], object]] = []

    def slowly(work: Callable[[], object]) -> int:
        found.append(work)
        time.sleep(0.5)
        return flops_of(work)

    monkeypatch.setattr(cost, "flops_of", slowly)
    monkeypatch.setattr(statistic, "flops_of", slowly)
    return found


def test_seconds_are_those_of_the_work_without_the_counting(
    digits: Dataset, counted: list[Callable[[], object]]
) -> None:
    model = TinyNet(classes=10)
    meter, few = Meter(CentralEngine(digits), model), Selection("valid", limit=20)
    for group in (few, Selection("valid", limit=30)):
        meter.measure(model, [Query((group,), Statistic("right", patches=(NOTHING,) * 2))])
    meter.fit(model, few, RECIPE)
    assert len(counted) == 3, "forward and backward once for this build, and once behind the cut"
    assert 0 < meter.cost().seconds < 0.5
    meter.measure(attach(model, Adapters(("fc",))), [Query((few,), Statistic("peaks"))])
    assert len(counted) == 5, "another build"


def test_networks_that_differ_in_a_stride_only_are_counted_apart(digits: Dataset) -> None:
    meter, found = Meter(CentralEngine(digits), TinyNet(classes=10)), []
    for stride in (1, 2):
        head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 10))
        model = nn.Sequential(nn.Conv2d(1, 4, 3, stride=stride), *head)
        meter.measure(model, [Query((Selection("valid"),), Statistic("fisher"))])
        found.append(meter.flops)
    assert 0 < found[1] - found[0] < found[0]
