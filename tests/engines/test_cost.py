"""Costs are those of what ran."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from small import TinyNet
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from fedortho.data.images import Dataset
from fedortho.data.request import ForgetRequest
from fedortho.devices import FlopCounter, flops_of
from fedortho.engines.central import CentralEngine
from fedortho.engines.cost import Cost, Meter, flops_per_image, training_cost
from fedortho.engines.engine import PlanPart, Tally, TrainingPlan
from fedortho.engines.query import Query, Selection, Statistic
from fedortho.methods.unsir import UNSIR
from fedortho.models.patch import NOTHING
from fedortho.statistics.ledger import ledger_taps
from fedortho.statistics.observe import observe
from fedortho.storage.records import from_json
from fedortho.training.adapters import Adapters, attach
from fedortho.training.loop import fit
from fedortho.training.objectives import FitOptions, Target
from fedortho.training.recipe import Recipe

RECIPE = Recipe(epochs=2, batch_size=50, ortho=0.0)
SHAPE = (1, 8, 8)


def test_a_linear_layer_costs_two_operations_a_weight_and_twice_that_again_to_train() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32, bias=False), nn.Linear(32, 10, bias=False))
    forward = 2 * (64 * 32 + 32 * 10)
    step = forward + forward + 2 * 32 * 10  # by each weight, and back to the input of the second layer
    assert flops_per_image(model, SHAPE) == (forward, step)


def test_a_counter_counts_as_torch_does_and_leaves_out_what_is_counted_apart() -> None:
    layer, inputs = nn.Conv2d(1, 4, 3), torch.rand(2, 1, 8, 8)
    with FlopCounterMode(display=False) as torchs, FlopCounter() as outer:
        with FlopCounter() as inner:
            layer(inputs).sum().backward()
        with FlopCounter(apart=True) as apart:
            layer(inputs)
    assert inner.flops == outer.flops
    assert apart.flops > 0
    assert inner.flops + apart.flops == torchs.get_total_flops()


def test_another_thread_counts_for_itself() -> None:
    with FlopCounter() as mine, ThreadPoolExecutor(1) as pool:
        assert pool.submit(flops_of, lambda: torch.ones(2, 3) @ torch.ones(3, 4)).result() == 48
    assert mine.flops == 0


def test_training_is_counted_by_the_steps_that_ran_and_teachers_by_their_reading(digits: Dataset) -> None:
    model = TinyNet(classes=10)
    forward, step = flops_per_image(model, SHAPE)
    with Meter(CentralEngine(digits)) as meter:
        meter.fit(model, Selection(), RECIPE)
    assert meter.cost().images_trained == 2 * len(digits.train)
    assert meter.cost().flops == pytest.approx(step * 2 * len(digits.train), rel=0.01)
    forget = Selection("train", ForgetRequest.parse("class:3"))
    taught = TrainingPlan((PlanPart(forget, Target(teacher="one")),), FitOptions(objective="imitate"), {"one": model})
    with Meter(CentralEngine(digits)) as again:
        again.fit(model, taught, RECIPE)
    number = 2 * int((digits.train.labels == 3).sum())
    cost = again.cost()
    assert (cost.images_read, cost.images_trained) == (number, number)
    assert cost.flops == pytest.approx((forward + step) * number, rel=0.01)
    assert cost.seconds > 0


def test_probes_are_counted_as_passes_of_their_kind(digits: Dataset) -> None:
    model = TinyNet(classes=10)
    meter = Meter(CentralEngine(digits))
    meter.measure(model, [Query((Selection(),), Statistic("fisher"))])
    assert (meter.cost().images_read, meter.cost().images_trained) == (0, len(digits.train))
    meter.measure(model, [Query((Selection(),), Statistic("peaks"))])
    assert (meter.cost().images_read, meter.cost().images_trained) == (len(digits.train), len(digits.train))


def test_candidates_cost_a_pass_through_the_tail_each(digits: Dataset) -> None:
    model = TinyNet(classes=10)
    number, side = len(digits.valid), SHAPE[1] * SHAPE[2]
    tail = 2 * 12 * 8 * 9 * side + 2 * 12 * 10  # the last convolution and the classifier
    with Meter(CentralEngine(digits)) as meter:
        found = []
        for candidates in (1, 3, 2):
            meter.measure(model, [Query((Selection("valid"),), Statistic("right", patches=(NOTHING,) * candidates))])
            found.append(meter.cost().flops)
    assert meter.cost().images_read == number, "what the tail receives is cached"
    assert found[1] - found[0] == number * 3 * tail
    assert found[2] - found[1] == number * 2 * tail


def test_noise_that_a_method_makes_by_itself_is_counted_as_what_it_computes(digits: Dataset) -> None:
    model = TinyNet(classes=10)
    forward, step = flops_per_image(model, SHAPE)
    with Meter(CentralEngine(digits)) as meter:
        UNSIR(noise_images=8, noise_steps=5, epochs=0)(model, meter, ForgetRequest.parse("class:3"))
    assert meter.cost().images_trained == 40
    assert 1.9 * forward < meter.cost().flops / 40 < 0.8 * step, "no gradient of frozen weights"


def test_frozen_weights_make_a_step_cheaper() -> None:
    torch.manual_seed(0)
    model = TinyNet(classes=10)
    whole, adapted = (flops_per_image(m, SHAPE)[1] for m in (model, attach(model, Adapters(("fc",)))))
    assert adapted == pytest.approx(flops_per_image(model, SHAPE)[0], rel=0.01)
    assert adapted < 0.5 * whole


def test_a_training_on_record_costs_what_torch_counted_while_it_ran(digits: Dataset) -> None:
    model, seen = TinyNet(classes=10), []
    recipe = Recipe(epochs=2, batch_size=4, ortho_layers="all", ortho_every=1)
    with FlopCounterMode(display=False) as torchs:
        trained = fit(model, digits.train.subset(range(80)), recipe, watch=seen.append)
    cost, without = (
        training_cost(seen[-1].history, trained, SHAPE, each, Tally()) for each in (recipe, replace(recipe, ortho=0.0))
    )
    assert cost.flops == pytest.approx(torchs.get_total_flops(), rel=0.05)
    assert cost.flops > 1.01 * without.flops, "the penalty has products of its own"
    assert cost.request_flops == cost.flops


@pytest.mark.parametrize("with_ledger", [True, False])
def test_sums_of_whole_labels_are_kept_by_everybody_whether_there_is_a_ledger_or_not(
    digits: Dataset, with_ledger: bool
) -> None:
    model = TinyNet(classes=10).eval()
    taps = ledger_taps(model, SHAPE)
    ledger = observe(model, digits.train, taps, classes=10) if with_ledger else None
    forward = 2 * 64 * 9 * (6 + 6 * 8 + 8 * 12)  # a pass ends behind the last convolution
    few = ForgetRequest(samples=tuple(str(row) for row in digits.train.rows[:40].tolist()))
    for request, looked_at in ((ForgetRequest.parse("class:3"), 0), (few, 40)):
        sets = (Selection("train", request), Selection("train", None, request))
        with Meter(CentralEngine(digits, ledger)) as meter:
            meter.measure(model, [Query(sets, Statistic("peaks"))])
        cost = meter.cost()
        assert cost.kept_flops == pytest.approx(
            forward * (len(digits.train) - (0 if with_ledger else looked_at)), rel=0.01
        )
        assert cost.request_flops == pytest.approx(forward * looked_at, rel=0.01, abs=15 * forward), "and tracing"
        assert cost.images_read == (looked_at if with_ledger else len(digits.train))


def test_gradients_over_all_images_are_kept_and_those_of_the_forget_set_are_not(digits: Dataset) -> None:
    model, forget = TinyNet(classes=10), Selection("train", ForgetRequest.parse("class:3"))
    step, number = flops_per_image(model, SHAPE)[1], int((digits.train.labels == 3).sum())
    with Meter(CentralEngine(digits)) as meter:
        meter.measure(model, [Query((forget, Selection()), Statistic("fisher"))])
    assert meter.cost().kept_flops == step * len(digits.train)
    assert meter.cost().request_flops == step * number


def test_a_cost_of_an_earlier_version_is_read() -> None:
    old = {"seconds": 1.0, "images-read": 2, "images-trained": 3, "flops": 4.0}
    cost = from_json(Cost, {**old, "exchanges": 0, "bytes-up": 0, "bytes-down": 0}, "run.json")
    assert (cost.kept_flops, cost.request_flops) == (0.0, 4.0)
