"""A tiny network and a small federation, importable by name."""

from pathlib import Path

import torch
from PIL import Image
from torch import Tensor, nn

from fedortho.models.zoo import BASIC, ResNet
from fedortho.runs.settings import FederateSettings


class TinyNet(nn.Module):
    """Three convolutions with batch norm, the smallest thing that has a deep layer."""

    widths = (6, 8, 12)
    stride = 1  # of the first convolution

    def __init__(self, classes: int = 4, channels: int = 1, dropout: float = 0.0) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inputs, outputs in zip((channels, *self.widths), self.widths, strict=False):
            stride = 1 if layers else self.stride
            layers += [nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
        self.features = nn.Sequential(*layers)
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(self.widths[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.dropout(self.features(x).mean((2, 3))))


class SmallNet(TinyNet):
    """The same, wide enough that some kernels can go without the others noticing."""

    widths = (16, 24, 64)


class QuickNet(SmallNet):
    """The same on a quarter of the positions, in half of the time; in a federation less of it is forgotten."""

    stride = 2


SETTINGS = FederateSettings(
    data="digits",
    model="small:TinyNet",
    clients=4,
    rounds=2,
    fraction=1.0,
    split="dirichlet:0.5",
    valid=0.2,
    threads=1,
    device="cpu",
    crop=0,
    flip=0.0,
    batch_size=32,
    timeout=5.0,
    least_group=1,
)


def write_images(folder: Path, classes: dict[str, int]) -> Path:
    """A folder of random images, so many of each class."""
    generator = torch.Generator().manual_seed(0)
    for name, number in classes.items():
        (folder / "train" / name).mkdir(parents=True)
        for place in range(number):
            pixels = torch.randint(0, 256, (8, 8), dtype=torch.uint8, generator=generator)
            Image.fromarray(pixels.numpy()).save(folder / "train" / name / f"{place:03}.png")
    return folder


class PooledNet(nn.Module):
    """Four convolutions with batch norm and pooling between them: the smallest network that learns real images."""

    widths = ((16, 32), (32, 32), (32, 64))
    stride = 1  # of the first convolution

    def __init__(self, classes: int = 10, channels: int = 1) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inputs, outputs in ((channels, 16), *self.widths):
            stride = 1 if layers else self.stride
            layers += [nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
            layers += [nn.MaxPool2d(2)] if outputs == 32 else []
        self.features = nn.Sequential(*layers)
        self.fc = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.features(x).mean((2, 3)))


class StridedNet(PooledNet):
    """The same on a quarter of the positions, for images of 14x14 and more."""

    stride = 2


class DeepNet(PooledNet):
    """The same with two convolutions of equal width at the end, so that an edit has a layer behind it to repair."""

    widths = (*PooledNet.widths, (64, 64))


def identity_net(num_classes: int = 10, channels: int = 1) -> nn.Module:
    """A network whose second block of the last stage has an identity shortcut."""
    return ResNet(BASIC, 8, [(8, 1, 1), (48, 2, 2)], num_classes, channels)


class Odd(nn.Module):
    """One convolution for each reason to refuse."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Conv2d(1, 8, 3, padding=1)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.grouped = nn.Conv2d(8, 8, 3, padding=1, groups=2)
        self.group_norm = nn.GroupNorm(2, 8)
        self.twice = nn.Conv2d(8, 8, 3, padding=1)
        self.bare = nn.Conv2d(8, 8, 3, padding=1)
        self.bare_norm = nn.BatchNorm2d(8, affine=False)
        self.left = nn.Conv2d(8, 8, 3, padding=1)
        self.right = nn.Conv2d(8, 8, 3, padding=1)
        self.right.weight = self.left.weight
        self.fc = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.depthwise(torch.relu(self.plain(x))))
        x = torch.relu(self.group_norm(self.grouped(x)))
        x = self.twice(torch.relu(self.twice(x)))
        x = torch.relu(self.bare_norm(self.bare(x)))
        return self.fc(self.right(torch.relu(self.left(x))).mean((2, 3)))
