"""The paper's networks for small images, two small networks, and networks of your own."""

import copy
import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fedortho.devices import seed_random
from fedortho.errors import BadSetting, cannot_read, unknown
from fedortho.models.predictions import answers_of, evaluating
from fedortho.models.prepare import prepare_model
from fedortho.storage.trusted_code import code_of_others, load_function

BUILD = "build=, a function from a seed to a network"

BASIC, BOTTLENECK = (3, 3), (1, 3, 1)  # sizes of a block's kernels: ResNet-18 and -34, ResNet-50


class Block(nn.Module):
    """Convolutions with batch norm, the first of 3x3 with the stride, and a shortcut."""

    def __init__(self, inputs: int, width: int, outputs: int, stride: int, sizes: Sequence[int]) -> None:
        super().__init__()
        self.depth = len(sizes)
        widths = [inputs] + [width] * (self.depth - 1) + [outputs]
        for number, size in enumerate(sizes, 1):
            step = stride if number == sizes.index(3) + 1 else 1
            conv = nn.Conv2d(widths[number - 1], widths[number], size, step, size // 2, bias=False)
            self.add_module(f"conv{number}", conv)
            self.add_module(f"bn{number}", nn.BatchNorm2d(widths[number]))
        self.relu = nn.ReLU()
        self.downsample: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        main = x
        for number in range(1, self.depth + 1):
            main = self.relu(main) if number > 1 else main
            main = self.get_submodule(f"bn{number}")(self.get_submodule(f"conv{number}")(main))
        return self.relu(main + self.downsample(x))  # type: ignore[no-any-return]  # modules return Any


class ResNet(nn.Module):
    """A residual network with a 3x3 stem and no early pooling, as used for 32x32 and 64x64 images.

    With `is_early` it has the stem for larger images, 7x7 with stride 2 and pooling: a sixteenth of the activations.
    """

    def __init__(
        self,
        sizes: Sequence[int],  # of a block's kernels
        stem: int,
        stages: Sequence[tuple[int, int, int]],  # width, number of blocks, stride of the first
        num_classes: int,
        channels: int,
        *,
        is_early: bool = False,
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, stem, *((7, 2, 3) if is_early else (3, 1, 1)), bias=False)
        self.bn1 = nn.BatchNorm2d(stem)
        self.relu = nn.ReLU()
        self.maxpool = nn.MaxPool2d(3, 2, 1) if is_early else nn.Identity()
        inputs = stem
        self.depth = len(stages)
        for number, (width, blocks, stride) in enumerate(stages, 1):
            outputs = width * (4 if sizes == BOTTLENECK else 1)
            first = Block(inputs, width, outputs, stride, sizes)
            others = [Block(outputs, width, outputs, 1, sizes) for _ in range(blocks - 1)]
            self.add_module(f"layer{number}", nn.Sequential(first, *others))
            inputs = outputs
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(inputs, num_classes)
        _initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        for number in range(1, self.depth + 1):
            x = self.get_submodule(f"layer{number}")(x)
        return self.fc(self.pool(x).flatten(1))  # type: ignore[no-any-return]  # modules return Any


class VGG(nn.Module):
    """Plain 3x3 convolutions with batch norm, pooling between blocks, and one linear layer."""

    def __init__(
        self, blocks: Sequence[Sequence[int]], num_classes: int, channels: int, *, bias: bool, last_pool: bool
    ):
        super().__init__()
        layers: list[nn.Module] = []
        inputs = channels
        for number, widths in enumerate(blocks):
            for width in widths:
                layers += [nn.Conv2d(inputs, width, 3, 1, 1, bias=bias), nn.BatchNorm2d(width), nn.ReLU()]
                inputs = width
            if last_pool or number < len(blocks) - 1:
                layers.append(nn.MaxPool2d(2, ceil_mode=True))  # so that 28x28 and 8x8 images pass too
        self.features = nn.Sequential(*layers)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(inputs, num_classes)
        _initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.pool(self.features(x)).flatten(1))  # type: ignore[no-any-return]  # modules return Any


def _initialise(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def _resnet(sizes: Sequence[int], *blocks: int, is_early: bool = False) -> Callable[[int, int], nn.Module]:
    widths = ((64, 1), (128, 2), (256, 2), (512, 2))
    stages = [(width, n, stride) for (width, stride), n in zip(widths, blocks, strict=True)]
    return partial(ResNet, sizes, 64, stages, is_early=is_early)


VGG16 = ([64] * 2, [128] * 2, [256] * 3, [512] * 3, [512] * 3)
MODELS: dict[str, Callable[[int, int], nn.Module]] = {  # from the number of classes and of channels
    "resnet18": _resnet(BASIC, 2, 2, 2, 2),
    "resnet34": _resnet(BASIC, 3, 4, 6, 3),
    "resnet50": _resnet(BOTTLENECK, 3, 4, 6, 3),
    "resnet18-early": _resnet(BASIC, 2, 2, 2, 2, is_early=True),
    "resnet34-early": _resnet(BASIC, 3, 4, 6, 3, is_early=True),
    "resnet50-early": _resnet(BOTTLENECK, 3, 4, 6, 3, is_early=True),
    "vgg16": partial(VGG, VGG16, bias=True, last_pool=True),
    "resnet-mini": partial(ResNet, BASIC, 32, [(48, 1, 2), (96, 1, 2), (128, 1, 2)]),
    "vgg-wide": partial(VGG, ([32], [64], [128], [256], [512] * 3), bias=False, last_pool=False),
    "vgg-mini": partial(VGG, ([32], [48, 48], [64], [128] * 4), bias=False, last_pool=False),
}


def build_model(name: str, *, num_classes: int, channels: int = 3, seed: int = 0, fold: bool = True) -> nn.Module:
    """A fresh model: one of ours, `timm:NAME`, or your own factory as `package.module:function`.

    The same seed gives the same weights; the caller's random state stays as it was. Your factory gets
    those of `classes`, `num_classes`, `channels`, `in_channels`, `in_chans` that it has parameters for. Unless `fold`
    is False, its weights that are computed from others become plain ones.

    >>> sum(p.numel() for p in build_model("resnet18", num_classes=10).parameters())
    11173962
    """
    if num_classes < 2:
        raise BadSetting(f"a classifier needs at least 2 classes, not {num_classes}")
    is_ours = name in MODELS  # and draws on the CPU; code of others may draw anywhere
    with torch.random.fork_rng([] if is_ours else None):
        seed_random(seed, "cpu" if is_ours else "auto")
        if is_ours:
            return MODELS[name](num_classes, channels)
        if ":" in name:
            return prepare_model(_own_model(name, num_classes, channels), num_classes, name, fold=fold)
    raise unknown("model", name, [*MODELS, "package.module:function", "timm:NAME"])


def _own_model(name: str, num_classes: int, channels: int) -> Any:
    place, _, function = name.partition(":")
    sizes = {"classes": num_classes, "num_classes": num_classes}
    sizes |= {"channels": channels, "in_channels": channels, "in_chans": channels}
    if place == "timm":
        create = load_function("timm:create_model", "model")
        with code_of_others(f"timm cannot build {function!r}"):
            return create(function, num_classes=num_classes, in_chans=channels)
    factory = load_function(name, "model")
    with code_of_others(f"the function {name} tells no parameters"):  # as some of those written in C
        known = inspect.signature(factory).parameters
    by_name = [p for p in known.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if missing := sorted({p.name for p in by_name if p.default is p.empty} - set(sizes)):
        raise BadSetting(f"{name} needs {', '.join(missing)}; a factory may require only {', '.join(sorted(sizes))}")
    with code_of_others(f"the function {name} fails"):
        return factory(**{key: value for key, value in sizes.items() if key in known})


def check_output(model: nn.Module, shape: tuple[int, int, int], num_classes: int) -> None:
    """Raise BadSetting for a model that cannot read images of this shape or lacks one output per class."""
    if (answers := count_answers(model, shape)) != num_classes:
        expected = f"the data has {num_classes} classes, so (1, {num_classes})"
        raise BadSetting(f"the model gives (1, {answers}) for one image; {expected}")


def count_answers(model: nn.Module, shape: tuple[int, int, int]) -> int:
    """The number of outputs of a classifier; raises BadSetting if it cannot read images of this shape."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    try:
        with evaluating(model):
            return answers_of(model, torch.zeros(1, *shape, device=device)).shape[1]
    except BadSetting:
        raise
    except Exception as error:  # code of others may raise anything
        raise cannot_read(shape, error) from error


def reinitialised(model: nn.Module, seed: int) -> nn.Module:
    """A copy of the network whose modules have drawn their initial weights again, by the seed."""
    fresh = copy.deepcopy(model).cpu()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # the CPU's alone: no GPU draws here
        for name, module in fresh.named_modules():
            reset = getattr(module, "reset_parameters", None)
            if callable(reset):
                reset()
            elif next(module.parameters(recurse=False), None) is not None:
                why = f"{name or type(module).__name__} has weights and no reset_parameters()"
                fix = f"write that method, which draws them anew, or give the engine {BUILD}"
                raise BadSetting(f"{why}, so no new network can be made of this one; {fix}")
    return fresh
