from dataclasses import replace

import pytest
import torch
from small import Odd, TinyNet, identity_net
from torch import Tensor, nn

from fedortho.errors import BadSetting, UnknownName
from fedortho.models.sites import DIRECTIONS, Finding, find_sites, structure_for, trace_structure
from fedortho.models.zoo import build_model


def findings(model: nn.Module, shape: tuple[int, int, int] = (1, 8, 8)) -> dict[str, Finding]:
    return {finding.layer.name: finding for finding in trace_structure(model, shape).findings}


def test_check_names_what_it_cannot_treat_and_why() -> None:
    found = findings(Odd())
    assert found["plain"].conv is found["plain"].channel is None
    assert "depthwise" in str(found["depthwise"].channel)
    assert found["grouped"].channel is None
    assert "runs 2 times" in str(found["twice"].conv)
    assert found["bare"].conv is None
    assert "no scale to edit" in str(found["bare"].channel)
    assert "shares its weights with" in str(found["left"].channel)
    assert "shares its weights with" in str(found["right"].conv)


@pytest.mark.parametrize("name", ["depthwise", "twice", "bare", "left"])
def test_what_check_refuses_cannot_be_edited(name: str) -> None:
    with pytest.raises(BadSetting, match=f"layer {name} cannot be edited"):
        find_sites(Odd(), (1, 8, 8), name, "channel", "bn")


@pytest.mark.parametrize(("model", "stream"), [("resnet-mini", "layer3.0"), ("resnet18", "layer4.1")])
def test_the_writers_of_a_residual_stream_are_one_site_at_the_end_of_their_stage(model: str, stream: str) -> None:
    net = build_model(model, num_classes=10)
    sites = find_sites(net, (3, 32, 32), "deep", "channel", "stream")
    group = [site for site in sites if site.is_stream]
    assert [site.name for site in group] == [stream]
    assert any(layer.is_shortcut for layer in group[0].layers)
    single = find_sites(net, (3, 32, 32), "deep", "conv", "conv")
    assert all(len(site.layers) == 1 and not site.is_stream for site in single)


def test_wrapped_convolutions_do_not_pass_for_the_stream() -> None:
    """The wrapper's output is 0 too when all writers are silent, but it is not where they meet."""

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Conv2d(1, 8, 3, padding=1)
            self.main = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8))
            self.side = nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8))

        def forward(self, x: Tensor) -> Tensor:
            x = torch.relu(self.stem(x))
            return torch.relu(self.main(x) + self.side(x))

    net = nn.Sequential(Wrapped(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    (site,) = find_sites(net, (1, 8, 8), "0.main.0", "channel", "stream")
    assert site.name == "0"
    assert {layer.name for layer in site.layers} == {"0.main.0", "0.side.0"}


def test_unknown_edits_and_taps_are_refused(tiny: TinyNet) -> None:
    with pytest.raises(UnknownName, match="no edit 'chanel'; did you mean 'channel'"):
        find_sites(tiny, (1, 8, 8), "deep", "chanel", "bn")
    with pytest.raises(UnknownName, match="no tap 'gelu'"):
        find_sites(tiny, (1, 8, 8), "deep", "conv", "gelu")


def test_a_structure_that_was_kept_without_its_sums_is_traced_again_for_directions_alone() -> None:
    net = identity_net()
    now = trace_structure(net, (1, 8, 8))
    kept = replace(now, joins=None)
    assert structure_for("channel", net, (1, 8, 8), kept) is kept
    assert structure_for(DIRECTIONS, net, (1, 8, 8), kept) == now
    assert now.joins
    assert structure_for(DIRECTIONS, net, (1, 8, 8), now) is now
