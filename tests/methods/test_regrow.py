"""Regrow: which stages are reset, and what of the rest is trained."""

import copy

import pytest
import torch
from small import TinyNet
from torch import Tensor, nn

from fedortho import methods
from fedortho.data.images import Dataset, Images, make_dataset
from fedortho.data.request import ForgetRequest
from fedortho.engines.central import CentralEngine
from fedortho.errors import BadSetting
from fedortho.methods import forget
from fedortho.methods.regrow import Regrow, first_layers
from fedortho.models.graph import stage_entries, weighted_order
from fedortho.models.zoo import build_model
from fedortho.training.loop import fit
from fedortho.training.recipe import Recipe

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
    order = weighted_order(pooled_net, SHAPE)
    assert [*first_layers(pooled_net, 1, SHAPE), *LAST] == order
    assert [*first_layers(pooled_net, 2, SHAPE), "features.7", "features.8", *LAST] == order
    assert first_layers(pooled_net, 3, SHAPE) == first_layers(pooled_net, 9, SHAPE) == []
    with pytest.raises(BadSetting, match="at least 0"):
        Regrow(stages=-1)


def test_by_default_all_stages_but_the_first_are_reset_and_two_at_the_least(pooled_net: nn.Module) -> None:
    for model, shape in ((pooled_net, SHAPE), (build_model("vgg-mini", num_classes=10, channels=3), (3, 32, 32))):
        first = stage_entries(model, shape)[0]
        order = weighted_order(model, shape)
        assert first_layers(model, Regrow().stages, shape) == order[: order.index(first)]
    assert first_layers(TinyNet(), Regrow().stages, (1, 8, 8)) == [], "it has fewer than three stages"


def test_a_residual_network_regrows_shortcuts_of_its_stages_too() -> None:
    model = build_model("resnet-mini", num_classes=10, channels=1)
    kept = first_layers(model, 1, (1, 16, 16))
    assert {name.partition(".")[0] for name in kept} == {"conv1", "bn1", "layer1", "layer2"}
    assert {"layer2.0.downsample.0", "layer2.0.downsample.1", "layer2.0.bn2"} <= set(kept)


class ShortcutFirst(nn.Module):
    """A residual block as many write it: the shortcut is computed before the block's own layers."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.shortcut = nn.Sequential(nn.Conv2d(inputs, width, 1, 2, bias=False), nn.BatchNorm2d(width))
        self.conv1, self.norm1 = nn.Conv2d(inputs, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        identity = self.shortcut(x)
        return torch.relu(self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x))))) + identity)


def test_a_shortcut_that_runs_before_its_block_is_regrown_with_it() -> None:
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    model = nn.Sequential(nn.Conv2d(1, 4, 3, 1, 1), ShortcutFirst(4, 6), ShortcutFirst(6, 8), *head)
    assert first_layers(model, Regrow().stages, SHAPE) == ["0"]
    assert not [name for name in first_layers(model, 1, SHAPE) if name.startswith("2.")]
    assert {"1.shortcut.0", "1.shortcut.1", "1.norm2"} <= set(first_layers(model, 1, SHAPE))


def test_the_norm_of_such_a_shortcut_is_regrown_also_where_it_does_not_follow_directly() -> None:
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    model = nn.Sequential(nn.Conv2d(1, 4, 3, 1, 1), ShortcutFirst(4, 6), ShortcutFirst(6, 8), *head)
    for block in (model[1], model[2]):
        block.shortcut.insert(1, nn.ReLU())
    assert first_layers(model, Regrow().stages, SHAPE) == ["0"]


def test_before_training_only_the_last_stage_has_new_weights(pooled_net: nn.Module, engine: CentralEngine) -> None:
    started = Regrow(stages=1, epochs=0, seed=7)(pooled_net, engine, REQUEST).state_dict()
    fresh = build_model("small:PooledNet", num_classes=10, channels=1, seed=7).state_dict()
    kept = first_layers(pooled_net, 1, SHAPE)
    for name, value in pooled_net.state_dict().items():
        is_kept = name.rpartition(".")[0] in kept
        assert torch.equal(started[name], value if is_kept else fresh[name]), name


class Scaled(nn.Module):
    """Weights that belong to no convolution, linear layer or norm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(1, 4, 3, stride=2), nn.Linear(4, 10)
        self.act, self.scale = nn.PReLU(4), nn.Parameter(torch.ones(4))

    def forward(self, images: Tensor) -> Tensor:
        return self.fc(self.scale * self.act(self.conv(images)).mean((2, 3)))


def test_with_every_stage_reset_nothing_of_the_original_is_left(digits: Dataset) -> None:
    model, fresh = Scaled(), Scaled()
    for weight in model.parameters():
        nn.init.constant_(weight, 7.0)
    engine = CentralEngine(digits, build=lambda seed: copy.deepcopy(fresh))
    forgot = Regrow(stages=99, epochs=0)(model, engine, REQUEST).state_dict()
    assert all(torch.equal(forgot[name], value) for name, value in fresh.state_dict().items())


@pytest.mark.parametrize("frozen", [False, True])
def test_what_comes_before_is_trained_along_unless_it_is_frozen(
    pooled_net: nn.Module, engine: CentralEngine, frozen: bool
) -> None:
    method = Regrow(stages=1, epochs=1, frozen=frozen, crop=0, flip=0.0)
    forgot = method(pooled_net, engine, REQUEST)
    first, before = first_layers(pooled_net, 1, SHAPE), pooled_net.state_dict()
    kept = [name for name in before if name.rpartition(".")[0] in first]
    assert kept
    assert all(torch.equal(forgot.state_dict()[name], before[name]) is frozen for name in kept)
    assert all(weight.requires_grad for weight in forgot.parameters())


def test_two_passes_move_every_direction_of_a_layer_before_the_reset_stages(
    pooled_net: nn.Module, engine: CentralEngine
) -> None:
    """What a layer knew of the class can be in any direction; SGD moves some of them much less than others."""
    forgot = Regrow(stages=1, batch_size=32, crop=0, flip=0.0)(pooled_net, engine, REQUEST)
    before, after = (model.get_parameter("features.7.weight").flatten(1) for model in (pooled_net, forgot))
    moved = torch.linalg.svdvals((after - before).detach())
    assert float(moved.min() / moved.max()) > 0.35, "SGD: 0.24"
    assert float(moved.min()) > 0.4 * float(torch.linalg.svdvals(before.detach()).mean()), "SGD: 0.2"


def test_a_model_in_memory_is_erased_in_ten_passes_and_a_loss_is_told(
    toy: Images, tiny: TinyNet, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    learnt, data = fit(tiny, toy, Recipe(epochs=4, batch_size=32, crop=0, flip=0.0)), make_dataset(toy, valid=0.3)
    assert forget(learnt, data, "class:1").settings["epochs"] == 10
    assert "erasing lost" in caplog.text, "ten passes over so few images are twenty steps"
    caplog.clear()
    monkeypatch.setattr(methods, "MUCH_LOST", 1.0)
    assert forget(learnt, data, "class:1", trained_epochs=4).settings["epochs"] == 2
    assert not caplog.messages
