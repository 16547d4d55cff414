"""Small networks that no method of ours can edit, each with a word of the reason."""

from collections.abc import Callable

import torch
from architectures import CLASSES, Head, conv, plain, unit
from torch import Tensor, nn
from torch.nn import functional


class ViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 4, 4)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=True)
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.block(self.patches(x).flatten(2).transpose(1, 2))
        return self.head(self.norm(tokens).mean(1))


class ChannelNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.depthwise = nn.Conv2d(3, 16, 4, 4), conv(16, 16, 7, groups=16)
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.head = Head(16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        inner = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        return self.head(x + self.down(functional.gelu(self.up(inner))).permute(0, 3, 1, 2))


class Sequence1d(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv1d(3, 8, 5), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.relu(self.conv(x.flatten(2))).mean(2))


def lazy() -> nn.Module:
    return nn.Sequential(conv(3, 8), nn.ReLU(), nn.Flatten(), nn.LazyLinear(CLASSES))


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "vit": (ViT, "LayerNorm"),
    "layer-norm": (lambda: plain(norm=ChannelNorm), "LayerNorm"),
    "convnext": (ConvNeXt, "LayerNorm"),
    "torchscript": (lambda: torch.jit.trace(plain().eval(), torch.zeros(1, 3, 16, 16)), "TorchScript"),
    "1d": (Sequence1d, "no 2d convolution"),
    "mlp": (lambda: nn.Sequential(nn.Flatten(), nn.Linear(768, CLASSES)), "no 2d convolution"),
    "no-classes": (lambda: nn.Sequential(unit(3, 8), nn.Flatten()), "4 classes"),
    "lazy": (lazy, "lazy"),
}
