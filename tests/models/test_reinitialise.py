"""A network of the same architecture with new weights."""

import pytest
import torch
from torch import nn

from fedortho.errors import BadSetting
from fedortho.models.zoo import reinitialised
from fedortho.storage.files import tensors_digest


def net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU())


def test_weights_are_new_the_seed_decides_and_nothing_else_is_touched() -> None:
    model = net()
    before, state = tensors_digest(model.state_dict()), torch.random.get_rng_state()
    first, again, other = (tensors_digest(reinitialised(model, seed).state_dict()) for seed in (0, 0, 1))
    assert first == again
    assert len({before, first, other}) == 3
    assert tensors_digest(model.state_dict()) == before
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_module_that_cannot_draw_its_weights_again_is_refused_by_name() -> None:
    model = net()
    model.append(nn.Module())
    model[3].register_parameter("scale", nn.Parameter(torch.ones(4)))
    with pytest.raises(BadSetting, match=r"3 has weights and no reset_parameters.*write that method"):
        reinitialised(model, 0)
