"""Small real things that tests share: toy images and a tiny network; every test has a cache of its own."""

from pathlib import Path

import pytest
import torch
from small import TinyNet
from torch import nn

from fedortho.data.images import Dataset, Images, images_from_tensors
from fedortho.data.sources import load_images
from fedortho.models.zoo import build_model
from fedortho.training.loop import fit
from fedortho.training.recipe import Recipe


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Decoded images never come from, or land in, the cache of whoever runs the tests."""
    place = tmp_path_factory.getbasetemp() / "cache"
    monkeypatch.setenv("FEDORTHO_CACHE", str(place))
    return place


torch.set_num_threads(1)  # the nets are tiny: a second thread only waits for the first


@pytest.fixture
def toy() -> Images:
    """240 images of 8x8 in 4 classes: a bright quarter, one per class, on noise."""
    generator = torch.Generator().manual_seed(7)
    labels = torch.arange(240) % 4
    pixels = torch.randint(0, 120, (240, 1, 8, 8), dtype=torch.uint8, generator=generator)
    for label in range(4):
        top, left = 4 * (label // 2), 4 * (label % 2)
        pixels[labels == label, :, top : top + 4, left : left + 4] += 100
    return images_from_tensors(pixels, labels)


@pytest.fixture(scope="session")
def digits() -> Dataset:
    return load_images("digits", valid=0.2)


@pytest.fixture(scope="session")
def digit_nets(digits: Dataset) -> dict[str, nn.Module]:
    """Both small networks, trained on digits with orthogonal kernels to over 95 %."""
    recipe = Recipe(epochs=8, batch_size=64, lr=0.05, flip=0.0, crop=1)
    names = ("vgg-mini", "resnet-mini")
    return {name: fit(build_model(name, num_classes=10, channels=1), digits.train, recipe) for name in names}


@pytest.fixture
def tiny() -> TinyNet:
    torch.manual_seed(3)
    return TinyNet()
