"""Activations are captured as they were at that moment, and hooks do not stay."""

import pytest
import torch
from torch import Tensor, nn

from fedortho.models.capture import capture


def net() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(1, 2, 1), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(8, 3))


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_outputs_are_kept_before_an_in_place_activation_changes_them() -> None:
    torch.manual_seed(0)
    model, images = net(), torch.randn(4, 1, 2, 2)
    with torch.no_grad(), capture(model, ["0"], Tensor.clone) as seen:
        model(images)
    with torch.no_grad():
        assert torch.equal(seen["0"][0], model[0](images))
    assert bool((seen["0"][0] < 0).any())


def test_every_call_is_kept_and_modules_stand_in_the_order_of_calls() -> None:
    model = net()
    with torch.no_grad(), capture(model, ["3", "0"], len, inputs=True) as seen:
        for number in (2, 5):
            model(torch.randn(number, 1, 2, 2))
    assert list(seen) == ["0", "3"]
    assert seen["3"] == [2, 5]


def test_a_pass_that_may_stop_ends_behind_the_last_module_that_is_wanted() -> None:
    model, reached = net(), []
    model[3].register_forward_hook(lambda *_: reached.append(True))
    with capture(model, ["0", "1"], lambda out: None, stop=True) as seen:
        model(torch.randn(1, 1, 2, 2))
    assert len(seen) == 2
    assert not reached


def test_no_hook_stays_even_after_an_error() -> None:
    model = net()
    with pytest.raises(RuntimeError), capture(model, ["0", "3"], Tensor.clone, inputs=True):
        model(torch.randn(1, 3, 2, 2))
    assert hooks(model) == 0
