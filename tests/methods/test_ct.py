"""CT: which kernels are transposed."""

import pytest
import torch
from torch import nn

from fedortho.data.request import ForgetRequest
from fedortho.engines.central import CentralEngine
from fedortho.errors import BadSetting
from fedortho.methods.ct import ConvolutionTranspose, transposed

REQUEST = ForgetRequest.parse("class:3")


def test_every_kernel_is_transposed_and_nothing_else_changes(small_net: nn.Module) -> None:
    before, after = small_net.state_dict(), transposed(small_net).state_dict()
    for name, value in before.items():
        same = value.swapaxes(2, 3) if value.dim() == 4 else value
        assert torch.equal(after[name], same), name
    assert any(not torch.equal(after[name], value) for name, value in before.items())


def test_kernels_that_are_not_square_stay_and_a_network_without_others_is_refused() -> None:
    network = nn.Sequential(nn.Conv2d(1, 2, (1, 3)), nn.Conv2d(2, 2, 3), nn.Conv2d(2, 2, 1))
    after = transposed(network).state_dict()
    assert torch.equal(after["0.weight"], network.state_dict()["0.weight"])
    assert torch.equal(after["1.weight"], network.state_dict()["1.weight"].swapaxes(2, 3))
    with pytest.raises(BadSetting, match="1x1"):
        transposed(nn.Sequential(nn.Conv2d(1, 2, (1, 3)), nn.Conv2d(2, 2, 1)))


def test_it_is_what_training_begins_with(small_net: nn.Module, engine: CentralEngine) -> None:
    started = ConvolutionTranspose(epochs=0)(small_net, engine, REQUEST).state_dict()
    expected = transposed(small_net).state_dict()
    assert all(torch.equal(started[name], value) for name, value in expected.items())
