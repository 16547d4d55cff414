import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedortho.errors import BadSetting, UnknownName
from fedortho.models import graph
from fedortho.models.graph import Layer, architecture_of, select_layers, trace_layers
from fedortho.models.zoo import build_model
from fedortho.storage.files import tensors_digest


def names(layers: list[Layer]) -> list[str]:
    return [layer.name for layer in layers]


def trace(name: str) -> list[Layer]:
    return trace_layers(build_model(name, num_classes=10), (3, 32, 32))


def test_the_deep_part_of_each_paper_model_is_its_last_stage_without_the_shortcut() -> None:
    assert names(select_layers(trace("resnet18"), "deep")) == [f"layer4.{b}.conv{c}" for b in (0, 1) for c in (1, 2)]
    deep = [f"layer4.{b}.conv{c}" for b in (0, 1, 2) for c in (1, 2, 3)]
    assert names(select_layers(trace("resnet50"), "deep")) == deep
    assert [x.kernels for x in select_layers(trace("vgg16"), "deep")] == [512, 512, 512]
    assert [x.kernels for x in select_layers(trace("vgg-mini"), "deep")] == [128] * 4
    assert names(select_layers(trace("resnet-mini"), "deep")) == ["layer3.0.conv1", "layer3.0.conv2"]


def test_depths_cover_the_main_path_once() -> None:
    layers = trace("resnet18")
    parts = [set(names(select_layers(layers, depth))) for depth in ("shallow", "mid", "deep")]
    assert set.union(*parts) == set(names(select_layers(layers, "all")))
    assert sum(map(len, parts)) == 17
    assert [layer.name for layer in layers if layer.is_shortcut] == [f"layer{n}.0.downsample.0" for n in (2, 3, 4)]


def test_residual_writers_share_a_group_and_inner_convolutions_do_not() -> None:
    layers = {layer.name: layer for layer in trace("resnet18")}
    group = ("layer4.0.conv2", "layer4.0.downsample.0", "layer4.1.conv2")
    assert all(layers[name].writers == group for name in group)
    assert layers["layer4.0.conv1"].writers == ("layer4.0.conv1",)
    assert layers["layer4.0.conv2"].norm == "layer4.0.bn2"
    assert layers["layer4.0.downsample.0"].norm == "layer4.0.downsample.1"


class Backwards(nn.Module):
    """Defined in the opposite order of its use, with one conv used twice, one never, and a norm of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Conv2d(8, 8, 1)
        self.last = nn.Conv2d(8, 8, 3, padding=1)
        self.twice = nn.Conv2d(8, 8, 3, padding=1)
        self.group_norm = nn.GroupNorm(2, 8)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.first = nn.Conv2d(1, 8, 3, padding=1)
        self.bn = nn.BatchNorm2d(8)
        self.fc = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.bn(self.first(x)))
        x = torch.relu(self.group_norm(self.depthwise(x)))
        x = torch.relu(self.twice(torch.relu(self.twice(x))))
        return self.fc(self.last(x).mean((2, 3)))


def test_layers_come_in_forward_order_and_oddities_are_reported() -> None:
    model = Backwards()
    before = tensors_digest(model.state_dict())
    layers = trace_layers(model, (1, 8, 8))
    assert names(layers) == ["first", "depthwise", "twice", "last", "unused"]
    by_name = {layer.name: layer for layer in layers}
    assert by_name["first"].norm_kind == "BatchNorm2d"
    assert by_name["depthwise"].norm_kind == "GroupNorm"
    assert by_name["depthwise"].groups == 8
    assert by_name["twice"].problem == "runs 2 times in one pass"
    assert by_name["last"].norm is None
    assert by_name["unused"].problem == "no forward pass reaches it"
    assert tensors_digest(model.state_dict()) == before
    assert model.training


def test_layers_are_chosen_by_name_pattern_and_expression() -> None:
    layers = trace("resnet18")
    assert names(select_layers(layers, "layer4.1.conv2")) == ["layer4.1.conv2"]
    assert names(select_layers(layers, "layer4.*.conv1")) == ["layer4.0.conv1", "layer4.1.conv1"]
    assert names(select_layers(layers, r"re:^layer[12]\.0\.conv2$")) == ["layer1.0.conv2", "layer2.0.conv2"]
    assert names(select_layers(layers, "layer4.1.conv2, conv1")) == ["conv1", "layer4.1.conv2"]


@pytest.mark.parametrize("which", ["layer9.conv", "re:nothing", "deepest"])
def test_a_name_that_matches_nothing_is_refused_with_the_choices(which: str) -> None:
    with pytest.raises(UnknownName, match=r"choose from .*features\.0"):
        select_layers(trace("vgg-mini"), which)


def test_bad_expressions_are_refused() -> None:
    with pytest.raises(BadSetting, match="not a regular expression"):
        select_layers(trace("vgg-mini"), "re:(")


def test_a_model_without_convolutions_or_for_other_images_is_refused() -> None:
    with pytest.raises(BadSetting, match="no 2d convolution"):
        trace_layers(nn.Sequential(nn.Flatten(), nn.Linear(64, 4)), (1, 8, 8))
    with pytest.raises(BadSetting, match="cannot read images of 1x8x8"):
        trace_layers(nn.Conv2d(3, 4, 3), (1, 8, 8))


def test_a_structure_that_cannot_be_traced_is_reported_and_not_guessed() -> None:
    class Stubborn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(1, 4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(x).detach().mean((2, 3))  # no gradient: the tracer has nothing to follow

    (layer,) = trace_layers(Stubborn(), (1, 8, 8))
    assert layer.problem is not None
    assert "could not be traced" in layer.problem


class Gate(nn.Module):
    """Squeeze and excitation: two convolutions of one pixel that only scale the stream."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(width, 2, 1), nn.Conv2d(2, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.up(torch.relu(self.down(x.mean((2, 3), keepdim=True)))))


class Block(nn.Module):
    """A residual block whose shortcut reads a pooled (ResNet-D) or the raw (pre-activation) input."""

    def __init__(self, inputs: int, width: int, stride: int, *, pooled: bool = False, gated: bool = False) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, 1)
        self.depthwise = nn.Conv2d(width, width, 3, 1, 1, groups=width)
        self.gate = Gate(width) if gated else nn.Identity()
        self.conv2 = nn.Conv2d(width, width, 1)
        self.pool = nn.AvgPool2d(stride) if pooled else nn.Identity()
        self.shortcut = nn.Conv2d(inputs, width, 1, 1 if pooled else stride)

    def forward(self, x: Tensor) -> Tensor:
        main = self.conv2(self.gate(self.depthwise(self.conv1(torch.relu(self.norm(x))))))
        return main + self.shortcut(self.pool(x))


def odd_network(**kind: bool) -> nn.Module:
    blocks = [Block(8, 8, 1, **kind), Block(8, 12, 2, **kind), Block(12, 16, 2, **kind)]
    return nn.Sequential(nn.Conv2d(1, 8, 3, 1, 1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4))


@pytest.mark.parametrize("kind", [{}, {"pooled": True}, {"gated": True}])
def test_shortcuts_and_gates_are_no_part_of_a_depth_however_they_are_wired(kind: dict[str, bool]) -> None:
    layers = trace_layers(odd_network(**kind), (1, 16, 16))
    assert names(select_layers(layers, "deep")) == ["3.conv1", "3.depthwise", "3.conv2"]
    side = {f"{block}.shortcut" for block in (1, 2, 3)}
    side |= {f"{block}.gate.{conv}" for block in (1, 2, 3) for conv in ("down", "up")} if "gated" in kind else set()
    assert {layer.name for layer in layers if layer.is_shortcut} == side


def test_a_shortcut_belongs_to_the_stage_of_its_block_also_where_it_runs_first() -> None:
    class First(Block):
        def forward(self, x: Tensor) -> Tensor:
            side = self.shortcut(x)
            return side + self.conv2(self.depthwise(self.conv1(torch.relu(self.norm(x)))))

    model = nn.Sequential(nn.Conv2d(1, 8, 3, 1, 1), First(8, 12, 2), First(12, 16, 2))
    found = {layer.name: layer for layer in trace_layers(model, (1, 16, 16))}
    assert [found[f"{block}.shortcut"].stage for block in (1, 2)] == [1, 2]
    assert found["2.shortcut"].is_shortcut


def test_a_shortcut_in_a_stream_that_crosses_stages_belongs_to_the_stage_of_its_size() -> None:
    class Pooled(Block):
        def forward(self, x: Tensor) -> Tensor:
            side = self.shortcut(x) + functional.avg_pool2d(x, 2)
            return side + self.conv2(self.depthwise(self.conv1(torch.relu(self.norm(x)))))

    model = nn.Sequential(nn.Conv2d(1, 8, 3, 1, 1), Pooled(8, 8, 2), Pooled(8, 8, 2))
    found = {layer.name: layer for layer in trace_layers(model, (1, 16, 16))}
    assert len(found["2.shortcut"].writers) == 5, "all that write into one stream, the first convolution too"
    assert [found[f"{block}.shortcut"].stage for block in (1, 2)] == [1, 2]


def test_writers_agree_about_each_other_and_a_chain_is_no_stream() -> None:
    layers = {layer.name: layer for layer in trace_layers(odd_network(gated=True), (1, 16, 16))}
    assert layers["3.conv2"].writers == layers["3.shortcut"].writers == ("3.conv2", "3.shortcut")
    assert all(layers[f"3.{name}"].writers == (f"3.{name}",) for name in ("conv1", "depthwise", "gate.up"))


def test_branches_of_one_length_are_both_on_the_main_path() -> None:
    class Twin(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.large, self.small = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(1, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return (self.large(x) + self.small(x)).mean((2, 3))

    layers = trace_layers(Twin(), (1, 8, 8))
    assert names(select_layers(layers, "all")) == ["large", "small"]


def test_a_linear_layer_that_writes_into_the_stream_is_reported() -> None:
    class Mixer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.spread, self.fc = nn.Conv2d(1, 4, 3), nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            x = x + self.spread(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
            return self.fc(x.mean((2, 3)))

    (layer,) = trace_layers(Mixer(), (1, 8, 8))
    assert layer.problem == "spread (Linear) writes into the same residual stream"


def test_networks_that_differ_in_weights_only_are_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[nn.Module] = []
    record = graph._record_calls
    monkeypatch.setattr(graph, "_record_calls", lambda *given: traced.append(given[0]) or record(*given))

    def net(stride: int = 1) -> nn.Module:
        return nn.Sequential(nn.Conv2d(1, 5, 3, stride), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(5, 3))

    first, again = (trace_layers(net(), (1, 9, 9)) for _ in range(2))
    assert first == again
    assert first is not again
    assert len(traced) == 1
    assert trace_layers(net(2), (1, 9, 9))[0].size == (4, 4), "another stride is another architecture"
    assert len(traced) == 2


def test_a_network_that_cannot_be_told_from_others_is_traced_each_time() -> None:
    class Chosen(nn.Module):
        def __init__(self, order: dict[str, int]) -> None:
            super().__init__()
            self.convs, self.order = nn.ModuleList([nn.Conv2d(1, 3, 3), nn.Conv2d(1, 3, 1)]), order

        def forward(self, x: Tensor) -> Tensor:
            return self.convs[self.order["first"]](x).mean((2, 3))

    assert architecture_of(Chosen({"first": 0})) is None
    assert [trace_layers(Chosen({"first": n}), (1, 8, 8))[0].name for n in (0, 1)] == ["convs.0", "convs.1"]
