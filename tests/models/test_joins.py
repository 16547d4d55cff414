"""The sums of residual streams, found by trying."""

import pytest
import torch
from torch import Tensor, nn

from fedortho.models.graph import trace_layers
from fedortho.models.joins import Join, find_joins
from fedortho.models.zoo import BASIC, BOTTLENECK, ResNet


class Block(nn.Module):
    """A block whose sum is formed in a way of its own."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.conv1, self.bn1 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.halved = nn.AvgPool2d(1)

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "named":
            x = self.halved(input=x)
        y = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))
        if self.way == "scaled":
            return (x + 0.5 * y).relu()
        if self.way == "shifted":
            return (x.roll(1, 2) + y).relu()
        if self.way == "pooled":
            return (self.halved(x.flip(2)) + y).relu()
        return x + y if self.way == "open" else (x + y).relu()


def joins_of(*ways: str, zero: bool = False) -> dict[str, Join]:
    model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), *(Block(way) for way in ways), nn.Flatten(), nn.Linear(512, 3))
    for block in list(model)[1:-2]:
        nn.init.zeros_(block.bn2.weight if zero else torch.zeros(1))
    return find_joins(model.eval(), (1, 8, 8), trace_layers(model, (1, 8, 8)))


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("way", ["plain", "open"])
def test_an_identity_is_what_the_block_receives_though_its_own_part_is_0(way: str, zero: bool) -> None:
    assert joins_of(way, "plain", zero=zero) == {
        "1.conv2": Join("1", ("1.conv2",), "1"),
        "2.conv2": Join("2", ("2.conv2",), "2"),
    }


def test_a_shortcut_without_weights_is_what_its_module_returns() -> None:
    assert joins_of("pooled")["1.conv2"] == Join("1", ("1.conv2",), "1.halved")


@pytest.mark.parametrize("way", ["scaled", "shifted"])
def test_a_sum_that_does_not_fit_is_not_made_up(way: str) -> None:
    assert "1.conv2" not in joins_of(way, "plain")


@pytest.mark.parametrize(("kind", "last"), [(BASIC, "conv2"), (BOTTLENECK, "conv3")])
def test_layers_of_a_block_and_of_its_shortcut_are_added(kind: str, last: str) -> None:
    model = ResNet(kind, 8, [(8, 1, 1), (16, 2, 2)], 10, 1).eval()
    found = find_joins(model, (1, 8, 8), trace_layers(model, (1, 8, 8)))
    first = Join("layer2.0", (f"layer2.0.{last}", "layer2.0.downsample.0"))
    assert found[f"layer2.0.{last}"] == found["layer2.0.downsample.0"] == first
    assert found[f"layer2.1.{last}"] == Join("layer2.1", (f"layer2.1.{last}",), "layer2.1")


def test_calls_that_name_their_arguments_are_no_obstacle() -> None:
    assert joins_of("named")["1.conv2"] == Join("1", ("1.conv2",), "1")


def test_a_network_without_streams_has_none() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
    assert find_joins(model, (1, 8, 8), trace_layers(model, (1, 8, 8))) == {}
