import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from fedortho.errors import BadSetting, UnknownName
from fedortho.models.zoo import MODELS, build_model, check_output
from fedortho.storage.files import tensors_digest

KNOWN_WEIGHTS = {
    "resnet18": 11_173_962, "resnet34": 21_282_122, "resnet50": 23_520_842, "vgg16": 14_728_266,
    "resnet18-early": 11_181_642, "resnet34-early": 21_289_802,
    "resnet50-early": 23_528_522,  # early ones as torchvision has them, with ten classes
}  # fmt: skip


@pytest.mark.parametrize(("name", "weights"), KNOWN_WEIGHTS.items())
def test_the_papers_models_have_the_known_number_of_weights(name: str, weights: int) -> None:
    assert sum(p.numel() for p in build_model(name, num_classes=10).parameters()) == weights


@pytest.mark.parametrize("name", ["resnet-mini", "vgg-mini"])
def test_the_small_models_stay_small(name: str) -> None:
    assert 300_000 <= sum(p.numel() for p in build_model(name, num_classes=10).parameters()) <= 600_000


# of each kind of network one: those of more layers differ in their numbers alone
SLOW = ("resnet34", "resnet34-early", "resnet50-early")


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in MODELS])
@pytest.mark.parametrize(("channels", "sizes"), [(3, [32]), (1, [28, 8])])
def test_every_model_reads_small_images_in_colour_and_in_grey(name: str, channels: int, sizes: list[int]) -> None:
    model = build_model(name, num_classes=7, channels=channels)
    for size in sizes:
        check_output(model, (channels, size, size), 7)


@pytest.mark.parametrize("name", ["resnet18", "vgg16"])
def test_the_papers_models_read_tiny_imagenet(name: str) -> None:
    check_output(build_model(name, num_classes=200), (3, 64, 64), 200)


def test_the_same_seed_gives_the_same_weights_and_leaves_the_callers_random_state() -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    first, second, third = (build_model("vgg-mini", num_classes=10, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(torch.rand(1), expected)
    digests = [tensors_digest(model.state_dict()) for model in (first, second, third)]
    assert digests[0] == digests[1] != digests[2]


def test_an_unknown_model_is_answered_with_the_nearest_and_the_choices() -> None:
    with pytest.raises(UnknownName, match=r"no model 'resnet-min'; did you mean 'resnet-mini'\? choose from .*vgg16"):
        build_model("resnet-min", num_classes=10)


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    text = """
from torch import nn
def plain(): return nn.Sequential(nn.Conv2d(1, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5))
def sized(num_classes, in_channels=3): return nn.Linear(in_channels, num_classes)
def greedy(width): return nn.Linear(width, 2)
def fails(): raise KeyError("width")
def exits(): raise SystemExit(4)
def wrong(): return 3
def lazy(): return nn.Sequential(nn.LazyConv2d(4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5))
class Picky(nn.Linear):
    def forward(self, x): assert x.shape[-1] == 224, "wrong image size"
def picky(): return Picky(2, 2)
def pair(): return type("Pair", (nn.Linear,), {"forward": lambda self, x: (x, x)})(2, 2)
"""
    (tmp_path / "own_models.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "own_models"
    sys.modules.pop("own_models", None)


def test_a_factory_of_ones_own_gets_the_sizes_that_it_asks_for(own_module: str) -> None:
    sized = build_model(f"{own_module}:sized", num_classes=9, channels=2)
    assert isinstance(sized, nn.Linear)
    assert (sized.in_features, sized.out_features) == (2, 9)
    check_output(build_model(f"{own_module}:plain", num_classes=5), (1, 8, 8), 5)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("own_models:nothing", "has no function 'nothing'"),
        ("small:TinyNett", "has no function 'TinyNett'; did you mean 'TinyNet'"),
        ("small.py:TinyNet", "'small.py' is a file; name its module: small:TinyNet"),
        ("own_models:greedy", "needs width"),
        ("own_models:wrong", "must be a torch.nn.Module, not int"),
        ("own_models:lazy", "has lazy layers"),
        (":f", r"package\.module:function"),
        (".own:f", "cannot import '.own'"),
        ("no_such_module:f", "cannot import 'no_such_module' for the model .* go to its directory, or install it"),
        ("own_models:fails", "own_models:fails fails: KeyError: 'width'"),
        ("own_models:exits", "own_models:exits fails: SystemExit: 4"),
        ("builtins:dict", "tells no parameters"),
    ],
)
def test_a_bad_factory_is_refused_by_name(own_module: str, name: str, message: str) -> None:
    with pytest.raises((UnknownName, BadSetting), match=message):
        build_model(name, num_classes=5)


def test_a_model_that_does_not_fit_the_data_is_refused() -> None:
    model = build_model("vgg-mini", num_classes=10, channels=3)
    with pytest.raises(BadSetting, match=r"the data has 7 classes"):
        check_output(model, (3, 32, 32), 7)
    with pytest.raises(BadSetting, match="cannot read images of 1x28x28"):
        check_output(model, (1, 28, 28), 10)


def test_a_model_that_fails_in_its_own_way_or_answers_with_a_pair_is_refused(own_module: str) -> None:
    with pytest.raises(BadSetting, match="cannot read images of 1x8x8: wrong image size"):
        check_output(build_model(f"{own_module}:picky", num_classes=2), (1, 8, 8), 2)
    with pytest.raises(BadSetting, match="answers 1 images with tuple"):
        check_output(build_model(f"{own_module}:pair", num_classes=2), (1, 8, 8), 2)


def test_one_class_is_too_few() -> None:
    with pytest.raises(BadSetting, match="at least 2 classes"):
        build_model("vgg-mini", num_classes=1)


def test_a_network_of_the_table_wakes_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = tensors_digest(build_model("vgg-mini", num_classes=4, seed=5).state_dict())
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)  # torch warns of these, too
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda *_: pytest.fail("a GPU was initialised"))
    before = torch.get_rng_state()
    assert tensors_digest(build_model("vgg-mini", num_classes=4, seed=5).state_dict()) == expected
    assert torch.equal(torch.get_rng_state(), before)
