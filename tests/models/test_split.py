import copy

import pytest
import torch
from small import TinyNet
from torch import Tensor, nn

from fedortho.data.images import Dataset
from fedortho.data.request import ForgetRequest
from fedortho.engines.central import CentralEngine
from fedortho.methods.hide import Hide
from fedortho.models.norms import estimate_norms, norms_behind
from fedortho.models.sites import find_sites
from fedortho.models.split import Split, entry_inputs, find_split, run_tail, tail_model
from fedortho.training.loop import fit
from fedortho.training.recipe import Recipe


def inputs_of(digits: Dataset, number: int) -> Tensor:
    part = digits.valid.subset(range(number))
    return part.normalise(part.pixels[part.rows])


@pytest.mark.parametrize(("name", "entry"), [("vgg-mini", "features.15"), ("resnet-mini", "layer3")])
def test_the_tail_answers_as_the_whole_network_does(
    digits: Dataset, digit_nets: dict[str, nn.Module], name: str, entry: str
) -> None:
    model, inputs = digit_nets[name], inputs_of(digits, 60)
    sites = find_sites(model, (1, 8, 8), "deep", "channel", "stream")
    split = find_split(model, sites, inputs[:2])
    assert split.entry == entry
    cached = entry_inputs(model, split, inputs)
    with torch.no_grad():
        assert torch.allclose(run_tail(tail_model(model, split), split, cached), model(inputs), atol=1e-5)


def test_a_network_with_a_skip_around_the_cut_is_run_whole() -> None:
    class Skipping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
            self.fc = nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            first = self.a(x)
            return self.fc(torch.cat([first, torch.relu(self.b(torch.relu(first)))], 1).mean((2, 3)))

    model, inputs = Skipping().eval(), torch.rand(5, 1, 8, 8)
    sites = find_sites(model, (1, 8, 8), "b", "channel", "relu")
    split = find_split(model, sites, inputs)
    assert split == Split(None)
    with torch.no_grad():
        assert torch.equal(run_tail(model, split, entry_inputs(model, split, inputs)), model(inputs))


def test_only_norms_whose_input_can_change_are_repaired(digit_nets: dict[str, nn.Module]) -> None:
    example = torch.rand(2, 1, 8, 8)
    vgg = digit_nets["vgg-mini"]
    sites = find_sites(vgg, (1, 8, 8), "features.18,features.24", "channel", "relu")
    assert norms_behind(vgg, sites, example) == ["features.22", "features.25"]
    resnet = digit_nets["resnet-mini"]
    group = find_sites(resnet, (1, 8, 8), "layer2.0.conv2", "channel", "stream")
    behind = norms_behind(resnet, group, example)
    assert behind == ["layer3.0.bn1", "layer3.0.bn2", "layer3.0.downsample.1"]


@pytest.mark.parametrize("by", ["batches", "layers"])
def test_norms_without_statistics_need_no_repair(digits: Dataset, by: str) -> None:
    torch.manual_seed(0)
    model = TinyNet(classes=10)
    model.features[4] = nn.BatchNorm2d(8, track_running_stats=False)
    model = fit(model, digits.train, Recipe(epochs=1, ortho=0.0))
    sites = find_sites(model, (1, 8, 8), "all", "channel", "relu")
    assert norms_behind(model, sites, torch.rand(2, 1, 8, 8)) == ["features.7"]
    settings = Hide(layers="all", ratio=0.2, repair_by=by)
    patch = settings.plan(model, CentralEngine(digits), ForgetRequest.parse("class:3")).patch
    assert set(patch.replaced) >= {"features.7.running_mean", "features.7.running_var"}


def test_repair_estimates_the_moments_of_what_the_norm_receives(
    digits: Dataset, digit_nets: dict[str, nn.Module]
) -> None:
    model, inputs = digit_nets["vgg-mini"], inputs_of(digits, 256)
    sites = find_sites(model, (1, 8, 8), "features.21", "channel", "relu")
    split = find_split(model, sites, inputs[:2])
    twin = tail_model(model, split)
    tracked = int(twin.get_buffer("features.25.num_batches_tracked"))
    buffers, _ = estimate_norms(twin, split, norms_behind(model, sites, inputs[:2]), entry_inputs(model, split, inputs))
    with torch.no_grad():
        received = model.features[:25](inputs)
    assert set(buffers) == {"features.25.running_mean", "features.25.running_var"}
    assert torch.allclose(buffers["features.25.running_mean"], received.mean((0, 2, 3)), atol=1e-4)
    assert torch.allclose(buffers["features.25.running_var"], received.var((0, 2, 3)), rtol=1e-3, atol=1e-5)
    assert int(twin.get_buffer("features.25.num_batches_tracked")) == tracked
    assert not any(module.training for module in twin.modules())


@pytest.mark.parametrize(("number", "used"), [(100, 100), (256, 256), (500, 500), (517, 512), (600, 600)])
def test_repair_weighs_every_image_the_same_and_tells_how_many_it_took(
    digits: Dataset, tiny: TinyNet, number: int, used: int
) -> None:
    part = digits.train.subset(range(number))
    inputs = part.normalise(part.pixels[part.rows])
    buffers, count = estimate_norms(tiny.eval(), Split(None), ["features.1"], inputs)
    with torch.no_grad():
        received = tiny.features[0](inputs[:used])
    assert count == used
    assert torch.allclose(buffers["features.1.running_mean"], received.mean((0, 2, 3)), atol=1e-6)
    variances = torch.stack([batch.var((0, 2, 3)) * len(batch) for batch in received.split(256)]).sum(0) / used
    assert torch.allclose(buffers["features.1.running_var"], variances, rtol=1e-4)
    assert tiny.features[1].momentum == 0.1
    assert not any(module.training for module in tiny.modules())


def test_whole_batches_alone_are_repaired_by_their_plain_mean(digits: Dataset, tiny: TinyNet) -> None:
    part = digits.train.subset(range(768))
    inputs, plain = part.normalise(part.pixels[part.rows]), copy.deepcopy(tiny).eval()
    norm = plain.features[1]
    norm.reset_running_stats()
    norm.momentum = None
    norm.train()
    with torch.no_grad():
        for batch in inputs.split(256):
            plain(batch)
    buffers, _ = estimate_norms(tiny, Split(None), ["features.1"], inputs)
    assert buffers["features.1.running_mean"].equal(norm.running_mean), "to the last bit, as before"
    assert buffers["features.1.running_var"].equal(norm.running_var)
