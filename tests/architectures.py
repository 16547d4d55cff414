"""Small networks as people write them: the shapes that published image classifiers have, for images of 3x16x16."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, weight_norm

CLASSES = 4


def conv(inputs: int, outputs: int, size: int = 3, stride: int = 1, groups: int = 1, bias: bool = False) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, stride, size // 2, groups=groups, bias=bias)


def unit(inputs: int, outputs: int, size: int = 3, stride: int = 1, groups: int = 1, act: Any = nn.ReLU) -> nn.Module:
    return nn.Sequential(conv(inputs, outputs, size, stride, groups), nn.BatchNorm2d(outputs), act())


class Head(nn.Module):
    """Average pooling and a linear layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.mean((2, 3)))


class Padded(nn.Module):
    """The block of CIFAR ResNets: every second pixel and zero channels on both sides instead of a convolution."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = conv(inputs, width, stride=stride), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = conv(width, width), nn.BatchNorm2d(width)
        self.pad = (width - inputs) // 2

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(functional.relu(self.bn1(self.conv1(x)))))
        if self.pad:
            x = functional.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.pad, self.pad))
        return functional.relu(out + x)


class Residual(nn.Module):
    """A block with a projected or an identical shortcut: basic, bottleneck, pre-activated, pooled or grouped."""

    def __init__(self, inputs: int, width: int, stride: int, kind: str = "basic", norm: Any = nn.BatchNorm2d) -> None:
        super().__init__()
        self.kind = kind
        if kind in ("bottleneck", "grouped"):
            inner, groups = max(width // 2, 4), 2 if kind == "grouped" else 1
            shapes = [(inputs, inner, 1, 1, 1), (inner, inner, 3, stride, groups), (inner, width, 1, 1, 1)]
        else:
            shapes = [(inputs, width, 3, stride, 1), (width, width, 3, 1, 1)]
        self.convs = nn.ModuleList(conv(*shape) for shape in shapes)
        self.norms = nn.ModuleList(norm(shape[0] if kind == "pre" else shape[1]) for shape in shapes)
        self.down: nn.Module | None = None
        if stride != 1 or inputs != width:
            self.down = nn.Sequential(conv(inputs, width, 1, stride), norm(width))
            if kind == "pre":
                self.down = conv(inputs, width, 1, stride)
            if kind == "pooled":
                self.down = nn.Sequential(nn.AvgPool2d(2), conv(inputs, width, 1), norm(width))

    def forward(self, x: Tensor) -> Tensor:
        out = x
        for place, (layer, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            if self.kind == "pre":
                out = layer(functional.relu(norm(out)))
            else:
                out = norm(layer(out))
                out = functional.relu(out) if place < len(self.convs) - 1 else out
        out = out + (x if self.down is None else self.down(x))
        return out if self.kind == "pre" else functional.relu(out)


def stages(block: Callable[[int, int, int], nn.Module]) -> nn.Module:
    """Three stages, the last of two blocks."""
    return nn.Sequential(unit(3, 8), block(8, 8, 1), block(8, 16, 2), block(16, 32, 2), block(32, 32, 1), Head(32))


class PreActivated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = conv(3, 8)
        self.blocks = nn.Sequential(Residual(8, 8, 1, "pre"), Residual(8, 16, 2, "pre"), Residual(16, 16, 1, "pre"))
        self.bn = nn.BatchNorm2d(16)
        self.head = Head(16)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.bn(self.blocks(self.stem(x)))))


def vgg_two_linear() -> nn.Module:
    features = [unit(3, 8), nn.MaxPool2d(2), unit(8, 16), nn.MaxPool2d(2), unit(16, 16), nn.AdaptiveAvgPool2d(2)]
    head = [nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, CLASSES)]
    return nn.Sequential(*features, *head)


class Viewed(nn.Module):
    """`.view` behind a convolution, which refuses channels-last."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2, self.fc = conv(3, 8, stride=2), conv(8, 8, stride=2), nn.Linear(128, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.conv2(torch.relu(self.conv1(x))))
        return self.fc(x.view(-1, 128))


class LeNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 6, 5, padding=2), nn.Conv2d(6, 12, 3)
        self.fc1, self.fc2, self.fc3 = nn.Linear(108, 40), nn.Linear(40, 24), nn.Linear(24, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.max_pool2d(functional.relu(self.conv1(x)), 2)
        x = functional.max_pool2d(functional.relu(self.conv2(x)), 2)
        x = functional.relu(self.fc2(functional.relu(self.fc1(torch.flatten(x, 1)))))
        return self.fc3(x)


class Dense(nn.Module):
    """Concatenation, norms before convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = conv(3, 8)
        self.norms = nn.ModuleList(nn.BatchNorm2d(8 + 8 * place) for place in range(3))
        self.convs = nn.ModuleList(conv(8 + 8 * place, 8) for place in range(3))
        self.transition = nn.Sequential(nn.BatchNorm2d(32), nn.ReLU(), conv(32, 16, 1), nn.AvgPool2d(2))
        self.last = nn.Sequential(nn.BatchNorm2d(16), nn.ReLU(), conv(16, 16))
        self.bn = nn.BatchNorm2d(32)
        self.head = Head(32)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for norm, layer in zip(self.norms, self.convs, strict=True):
            x = torch.cat([x, layer(torch.relu(norm(x)))], 1)
        x = self.transition(x)
        return self.head(torch.relu(self.bn(torch.cat([x, self.last(x)], 1))))


class Branched(nn.Module):
    """Parallel branches, concatenated."""

    def __init__(self, inputs: int = 8) -> None:
        super().__init__()
        self.one, self.three = unit(inputs, 4, 1), nn.Sequential(unit(inputs, 4, 1), unit(4, 6))
        self.pooled = nn.Sequential(nn.MaxPool2d(3, 1, 1), unit(inputs, 6, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.one(x), self.three(x), self.pooled(x)], 1)


def inception() -> nn.Module:
    return nn.Sequential(unit(3, 8), nn.MaxPool2d(2), Branched(8), nn.MaxPool2d(2), Branched(16), Head(16))


class Gate(nn.Module):
    """Squeeze and excite."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.reduce, self.expand = nn.Conv2d(width, 4, 1), nn.Conv2d(4, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.expand(functional.silu(self.reduce(x.mean((2, 3), keepdim=True)))))


class Inverted(nn.Module):
    """Expand, filter each channel, project; with or without squeeze and excite."""

    def __init__(self, inputs: int, width: int, stride: int, act: Any = nn.ReLU6, gated: bool = False) -> None:
        super().__init__()
        inner = 2 * inputs
        layers: list[nn.Module] = [unit(inputs, inner, 1, act=act), unit(inner, inner, 3, stride, inner, act)]
        layers += [Gate(inner)] if gated else []
        self.layers = nn.Sequential(*layers, conv(inner, width, 1), nn.BatchNorm2d(width))
        self.has_identity = stride == 1 and inputs == width

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x) if self.has_identity else self.layers(x)


def mobilenet(act: Any = nn.ReLU6, gated: bool = False) -> nn.Module:
    blocks = [Inverted(i, o, s, act, gated) for i, o, s in ((8, 8, 1), (8, 16, 2), (16, 16, 1), (16, 24, 2))]
    return nn.Sequential(unit(3, 8, act=act), *blocks, unit(24, 32, 1, act=act), Head(32))


class Shuffled(nn.Module):
    """Half of the channels pass, the others are grouped; then all are shuffled."""

    def __init__(self, width: int) -> None:
        super().__init__()
        half = width // 2
        self.layers = nn.Sequential(unit(half, half, 1), unit(half, half, 3, 1, half), unit(half, half, 1, groups=2))

    def forward(self, x: Tensor) -> Tensor:
        kept, changed = x.chunk(2, 1)
        x = torch.cat([kept, self.layers(changed)], 1)
        n, channels, height, width = x.shape
        return x.view(n, 2, channels // 2, height, width).transpose(1, 2).reshape(n, channels, height, width)


def shufflenet() -> nn.Module:
    return nn.Sequential(unit(3, 16), Shuffled(16), unit(16, 24, stride=2), Shuffled(24), unit(24, 24, 1), Head(24))


def plain(wrap: Callable[[nn.Module], nn.Module] = lambda layer: layer, norm: Any = nn.BatchNorm2d) -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 8), (8, 16), (16, 16)):
        layers += [wrap(conv(inputs, outputs, bias=True)), norm(outputs), nn.ReLU(), nn.AvgPool2d(2)]
    return nn.Sequential(*layers, Head(16))


class Fire(nn.Module):
    def __init__(self, inputs: int, squeeze: int, expand: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(inputs, squeeze, 1)
        self.one, self.three = nn.Conv2d(squeeze, expand, 1), nn.Conv2d(squeeze, expand, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.squeeze(x))
        return torch.cat([torch.relu(self.one(x)), torch.relu(self.three(x))], 1)


def squeezenet() -> nn.Module:
    """The classifier is a convolution."""
    head = [nn.Dropout(0.2), nn.Conv2d(16, CLASSES, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(conv(3, 8, bias=True), nn.ReLU(), nn.MaxPool2d(2), Fire(8, 4, 8), Fire(16, 4, 8), *head)


def nin() -> nn.Module:
    """No flattening: (n, classes, 1, 1) comes out."""
    return nn.Sequential(unit(3, 8), unit(8, 8, 1), unit(8, 16), nn.Conv2d(16, CLASSES, 1), nn.AdaptiveAvgPool2d(1))


class Functional(nn.Module):
    """Weights as bare parameters, norms and activations as functions."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = conv(3, 8), conv(8, 16)
        self.scale, self.shift = nn.Parameter(torch.ones(8)), nn.Parameter(torch.zeros(8))
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("var", torch.ones(8))
        self.fc = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.batch_norm(self.conv1(x), self.mean, self.var, self.scale, self.shift, self.training)
        x = functional.relu(self.conv2(functional.relu(x)))
        return self.fc(functional.adaptive_avg_pool2d(x, 1).flatten(1))


class Reused(nn.Module):
    """One convolution, used twice, between others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again, self.last, self.head = unit(3, 16), unit(16, 16), unit(16, 16), Head(16)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.last(self.again(self.again(self.first(x)))))


class OnlyReused(nn.Module):
    """No convolution can be edited; the classifier can."""

    def __init__(self) -> None:
        super().__init__()
        self.again, self.head = unit(3, 3), nn.Linear(48, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(functional.avg_pool2d(self.again(self.again(x)), 4).flatten(1))


class Answers(nn.Module):
    """A network whose answer is not a tensor: a tuple, a dictionary, an object, or so in training only."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.body, self.main, self.aux = nn.Sequential(unit(3, 8), unit(8, 16)), Head(16), nn.Linear(8, CLASSES)
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        early = self.body[0](x)
        late = self.body[1](early)
        logits, features = self.main(late), late.mean((2, 3))
        if self.kind == "aux":
            return (logits, self.aux(early.mean((2, 3)))) if self.training else logits
        kinds: dict[str, Callable[[], Any]] = {
            "tuple": lambda: (features, logits),
            "list": lambda: [logits, features],
            "dict": lambda: {"features": features, "logits": logits},
            "object": lambda: SimpleNamespace(loss=None, logits=logits),
        }
        return kinds[self.kind]()


class HeadNormed(nn.Module):
    """LayerNorm where it does no harm: on pooled features."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.fc = nn.Sequential(unit(3, 8), unit(8, 16)), nn.LayerNorm(16), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.norm(self.body(x).mean((2, 3))))


def group_norm(width: int) -> nn.Module:
    return nn.GroupNorm(2, width)


def instance_norm(width: int) -> nn.Module:
    return nn.InstanceNorm2d(width, affine=True)


def bf16() -> nn.Module:
    return plain().to(torch.bfloat16)


SERVED: dict[str, Callable[[], nn.Module]] = {
    "padded-shortcuts": lambda: stages(Padded),
    "resnet-basic": lambda: stages(Residual),
    "resnet-bottleneck": lambda: stages(lambda i, w, s: Residual(i, w, s, "bottleneck")),
    "resnext": lambda: stages(lambda i, w, s: Residual(i, w, s, "grouped")),
    "resnet-pooled-shortcut": lambda: stages(lambda i, w, s: Residual(i, w, s, "pooled")),
    "resnet-group-norm": lambda: stages(lambda i, w, s: Residual(i, w, s, "basic", group_norm)),
    "pre-activation": PreActivated,
    "vgg-two-linear": vgg_two_linear,
    "view-after-conv": Viewed,
    "lenet": LeNet,
    "densenet": Dense,
    "inception": inception,
    "mobilenet": mobilenet,
    "efficientnet": lambda: mobilenet(nn.SiLU, gated=True),
    "shufflenet": shufflenet,
    "instance-norm": lambda: plain(norm=instance_norm),
    "weight-norm": lambda: plain(parametrizations.weight_norm, nn.Identity),
    "old-weight-norm": lambda: plain(weight_norm, nn.Identity),
    "orthogonal": lambda: plain(parametrizations.orthogonal),
    "squeezenet": squeezenet,
    "nin": nin,
    "functional": Functional,
    "reused": Reused,
    "only-reused": OnlyReused,
    "tuple": lambda: Answers("tuple"),
    "dict": lambda: Answers("dict"),
    "object": lambda: Answers("object"),
    "aux": lambda: Answers("aux"),
    "layer-norm-head": HeadNormed,
    "data-parallel": lambda: nn.DataParallel(plain()),
    "compiled": lambda: torch.compile(plain(), backend="eager"),  # type: ignore[dict-item]  # torch's stub: a callable
    "bf16": bf16,
}
