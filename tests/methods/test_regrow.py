"""Regrow: which stages are reset, and what of the rest is trained."""

import pytest
import torch
from torch import nn

from fedortho.data.images import Dataset
from fedortho.data.request import ForgetRequest
from fedortho.engines.central import CentralEngine
from fedortho.errors import BadSetting
from fedortho.methods.regrow import Regrow, last_stages
from fedortho.models.graph import stage_entries, weighted_order
from fedortho.models.zoo import build_model

REQUEST = ForgetRequest.parse("class:3")
SHAPE = (1, 8, 8)
LAST = ["features.11", "features.12", "fc"]  # convolution, its norm, classifier


@pytest.fixture(scope="module")
def pooled_net() -> nn.Module:
    """Three stages, the last of one convolution."""
    return build_model("small:PooledNet", num_classes=10, channels=1, seed=1)


@pytest.fixture
def engine(digits: Dataset) -> CentralEngine:
    return CentralEngine(digits, build=lambda s: build_model("small:PooledNet", num_classes=10, channels=1, seed=s))


def test_stages_are_counted_from_the_output_and_bring_their_norms_and_the_classifier(pooled_net: nn.Module) -> None:
    assert stage_entries(pooled_net, SHAPE) == ["features.7", "features.11"]
    assert last_stages(pooled_net, 1, SHAPE) == LAST
    assert last_stages(pooled_net, 2, SHAPE) == ["features.7", "features.8", *LAST]
    assert last_stages(pooled_net, 3, SHAPE) == last_stages(pooled_net, 9, SHAPE) == weighted_order(pooled_net, SHAPE)
    with pytest.raises(BadSetting, match="at least 1"):
        Regrow(stages=0)


def test_a_residual_network_regrows_shortcuts_of_its_stages_too() -> None:
    model = build_model("resnet-mini", num_classes=10, channels=1)
    last = last_stages(model, 1, (1, 16, 16))
    assert set(last) >= {"layer3.0.conv1", "layer3.0.conv2", "layer3.0.downsample.0", "layer3.0.downsample.1", "fc"}
    assert not any(name.startswith(("conv1", "layer1", "layer2")) for name in last)


def test_before_training_only_the_last_stage_has_new_weights(pooled_net: nn.Module, engine: CentralEngine) -> None:
    started = Regrow(stages=1, epochs=0, seed=7)(pooled_net, engine, REQUEST).state_dict()
    fresh = build_model("small:PooledNet", num_classes=10, channels=1, seed=7).state_dict()
    reset = last_stages(pooled_net, 1, SHAPE)
    for name, value in pooled_net.state_dict().items():
        is_reset = name.rpartition(".")[0] in reset
        assert torch.equal(started[name], fresh[name] if is_reset else value), name


@pytest.mark.parametrize("frozen", [False, True])
def test_what_comes_before_is_trained_along_unless_it_is_frozen(
    pooled_net: nn.Module, engine: CentralEngine, frozen: bool
) -> None:
    method = Regrow(stages=1, epochs=1, frozen=frozen, crop=0, flip=0.0)
    forgot = method(pooled_net, engine, REQUEST)
    reset, before = last_stages(pooled_net, 1, SHAPE), pooled_net.state_dict()
    kept = [name for name in before if name.rpartition(".")[0] not in reset]
    assert kept
    assert all(torch.equal(forgot.state_dict()[name], before[name]) is frozen for name in kept)
    assert all(weight.requires_grad for weight in forgot.parameters())
