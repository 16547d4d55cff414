from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small import TinyNet
from torch import Tensor, nn

from fedortho.data.images import Images, images_from_tensors
from fedortho.errors import BadCheckpoint, BadData
from fedortho.models.sites import Site, find_sites
from fedortho.models.zoo import build_model
from fedortho.statistics.ledger import load_ledger
from fedortho.statistics.observe import Observation, key_of, observe

SHAPE = (1, 8, 8)


def taps_of(model: nn.Module, tap: str, layers: str = "all") -> list[tuple[Site, str]]:
    return [(site, tap) for site in find_sites(model, SHAPE, layers, "channel", tap)]


def warm(model: nn.Module, images: Images) -> nn.Module:
    """Batch norms with statistics of their own, some scales negative."""
    model.train()
    model(images.normalise(images.pixels))
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, -1, 1)
            nn.init.uniform_(module.bias, -1, 1)
    return model.eval()


def slow_sums(model: TinyNet, images: Images, number: int, tap: str) -> Tensor:
    """Layer after layer, image after image, in float64, without hooks."""
    model = TinyNet().double().eval() if model is None else model.double()
    conv, norm = model.features[3 * number], model.features[3 * number + 1]
    sums = torch.zeros(4, conv.out_channels, dtype=torch.float64)
    pixels = images.normalise(images.pixels).double()
    with torch.no_grad():
        for image, label in zip(pixels, images.labels.tolist(), strict=True):
            x = model.features[: 3 * number](image.unsqueeze(0))
            out = conv(x)
            if tap in ("bn", "relu"):
                out = norm(out)
            if tap == "relu":
                out = torch.relu(out)
            for kernel in range(conv.out_channels):
                sums[label, kernel] += max(out[0, kernel].flatten().tolist())
    model.float()
    return sums


@pytest.mark.parametrize("tap", ["conv", "bn", "relu"])
def test_sums_of_peaks_equal_a_plain_loop(tiny: TinyNet, toy: Images, tap: str) -> None:
    few = toy.subset(range(30))
    few = images_from_tensors(few.pixels[few.rows], few.labels)
    warm(tiny, few)
    seen = observe(tiny, few, taps_of(tiny, tap), classes=4)
    for number, (site, _) in enumerate(taps_of(tiny, tap)):
        assert torch.allclose(seen.sums[key_of(site, tap)], slow_sums(tiny, few, number, tap), rtol=1e-4, atol=1e-4)
    assert seen.counts.tolist() == [8, 8, 7, 7]


def test_the_stream_is_read_where_the_block_ends(toy: Images) -> None:
    model = build_model("resnet-mini", num_classes=4, channels=1).eval()
    ((site, _),) = [pair for pair in taps_of(model, "stream", "deep") if pair[0].is_stream]
    seen = observe(model, toy, [(site, "stream")], classes=4)
    with torch.no_grad():
        x = torch.relu(model.bn1(model.conv1(toy.normalise(toy.pixels))))
        out = model.layer3(model.layer2(model.layer1(x)))
    expected = out.amax((2, 3)).double().sum(0)
    assert torch.allclose(seen.sums["stream:layer3.0"].sum(0), expected, rtol=1e-5)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=240, max_size=240))
def test_observations_of_disjoint_images_add_up(owners: list[int]) -> None:
    images, model = _toy(), TinyNet().eval()
    taps = taps_of(model, "bn", "deep")
    whole = observe(model, images, taps, classes=4)
    owner = torch.tensor(owners)
    parts = [observe(model, images.subset((owner == n).nonzero().flatten()), taps, classes=4) for n in range(3)]
    total = parts[0] + parts[1] + parts[2]
    for key in whole.sums:
        assert torch.allclose(total.sums[key], whole.sums[key], rtol=1e-6)
        assert torch.allclose((whole - parts[0]).sums[key], (parts[1] + parts[2]).sums[key], rtol=1e-5, atol=1e-5)
    assert torch.equal(total.counts, whole.counts)


def _toy() -> Images:
    pixels = torch.randint(0, 256, (240, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return images_from_tensors(pixels, torch.arange(240) % 4)


def test_the_pass_ends_behind_the_last_tapped_layer(tiny: TinyNet, toy: Images) -> None:
    reached: list[bool] = []
    taps = taps_of(tiny, "bn", "features.3")
    tiny.fc.register_forward_hook(lambda *_: reached.append(True))
    observe(tiny, toy, taps, classes=4)
    assert not reached


def test_peaks_are_taken_before_an_activation_in_place_can_change_them(toy: Images) -> None:
    torch.manual_seed(0)
    inplace = nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    inplace[0].bias.data.fill_(-50.0)  # every response is negative
    seen = observe(inplace, toy, taps_of(inplace, "conv"), classes=4)
    assert float(seen.sums["conv:0"].max()) < 0


def test_a_ledger_answers_for_its_model_only_and_as_the_data_would(tiny: TinyNet, toy: Images, tmp_path: Path) -> None:
    taps = taps_of(tiny, "relu")
    observe(tiny, toy, taps, classes=4).save(tmp_path / "ledger.safetensors")
    ledger = load_ledger(tmp_path / "ledger.safetensors", tiny)
    direct = observe(tiny, toy.subset((toy.labels == 2).nonzero().flatten()), taps, classes=4)
    for key in ledger.sums:
        assert torch.allclose(ledger.only([2]).mean(key), direct.mean(key), rtol=1e-6)
    with pytest.raises(BadCheckpoint, match="ledger of another model"):
        load_ledger(tmp_path / "ledger.safetensors", TinyNet())


def test_what_does_not_fit_is_refused(tiny: TinyNet, toy: Images) -> None:
    one = Observation({"conv:a": torch.zeros(4, 2)}, torch.zeros(4, dtype=torch.int64))
    with pytest.raises(BadData, match="do not add up"):
        one + Observation({"conv:b": torch.zeros(4, 2)}, one.counts)
    with pytest.raises(BadData, match="observations of two models"):
        Observation(one.sums, one.counts, "a" * 64) + Observation(one.sums, one.counts, "b" * 64)
    with pytest.raises(BadData, match="no image was observed"):
        one.mean("conv:a")
    with pytest.raises(BadData, match="label 3 but the model has only 2 classes"):
        observe(tiny, toy, taps_of(tiny, "conv"), classes=2)
