"""How images become a model's inputs: by channel statistics, a usual scale, or a function of the user's own."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedortho.errors import BadSetting, unknown
from fedortho.storage.trusted_code import code_of_others, load_function

Transform = Callable[[Tensor], Tensor]  # uint8 images (n, channels, height, width) to a model's inputs
Statistics = tuple[tuple[float, ...], tuple[float, ...]]  # mean and deviation per channel, of pixels / 255
SCALES: dict[str, Statistics | None] = {
    "data": None,  # statistics of the training split
    "0-1": ((0.0,), (1.0,)),
    "-1-1": ((0.5,), (0.5,)),
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "0-255": ((0.0,), (1 / 255,)),
}


@dataclass(frozen=True)
class Preprocessing:
    """(pixels / 255 − mean) / std per channel, or a function; without any, statistics of the training split.

    >>> Preprocessing(scale="-1-1").statistics(((0.1,) * 3, (0.2,) * 3))
    ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    """

    mean: Sequence[float] = ()
    std: Sequence[float] = ()
    scale: str = ""  # one of SCALES
    transform: Transform | str = ""  # a function, or its name as package.module:function

    def __post_init__(self) -> None:
        given = [word for word in ("mean", "scale", "transform") if getattr(self, word)]
        if len(given) > 1:
            raise BadSetting(f"--{' and --'.join(given)} contradict each other; give one preprocessing")
        if len(self.mean) != len(self.std):
            raise BadSetting(f"--mean has {len(self.mean)} values and --std {len(self.std)}; give both per channel")
        if not all(map(math.isfinite, self.mean)) or not all(0 < value < math.inf for value in self.std):
            raise BadSetting(f"--mean {self.mean} and --std {self.std} must be finite numbers, --std above 0")
        if self.scale and self.scale not in SCALES:
            raise unknown("scale", self.scale, SCALES)

    @classmethod
    def parse(cls, mean: str, std: str, scale: str, transform: str) -> "Preprocessing":
        try:
            means, stds = (tuple(float(word) for word in text.split(",") if word.strip()) for text in (mean, std))
        except ValueError as error:
            raise BadSetting(f"--mean {mean!r} --std {std!r} must be numbers with commas between: {error}") from error
        return cls(means, stds, scale, transform)

    @property
    def is_given(self) -> bool:
        return bool(self.mean or self.scale or self.transform)

    @property
    def _own(self) -> Statistics | None:
        return (tuple(self.mean), tuple(self.std)) if self.mean else SCALES[self.scale or "data"]

    @property
    def key(self) -> object:
        """Equal for preprocessings that are equal, however they are spelled."""
        return self.transform or (self._own and [each[:1] if len({*each}) == 1 else each for each in self._own])

    def statistics(self, of_data: Statistics) -> Statistics:
        """Mean and deviation per channel; those of the data unless others are given."""
        mean, std = self._own or of_data
        channels = len(of_data[0])
        if len(mean) not in (1, channels):
            raise BadSetting(f"{self.scale or '--mean'} is for {len(mean)} channels; the images have {channels}")
        return (mean, std) if len(mean) == channels else (mean * channels, std * channels)

    def function(self, example: Tensor) -> Transform | None:
        """The function, if one is given; one that fails on these uint8 images, or differs when repeated, is refused."""
        if not self.transform:
            return None
        found = load_function(self.transform, "transform") if isinstance(self.transform, str) else self.transform
        with code_of_others(f"the transform {self.transform} fails on uint8 images", BadSetting):
            first, second, single = (found(example[:size].clone()) for size in (len(example), len(example), 1))
        is_batch = isinstance(first, Tensor) and first.dim() == 4 and len(first) == len(example)
        if not is_batch or not first.is_floating_point():
            raise BadSetting(f"the transform {self.transform} must give float inputs (n, channels, height, width)")
        if not torch.equal(first, second):
            raise BadSetting(f"the transform {self.transform} is random; give one that is the same every time")
        if not torch.allclose(first[:1], single, rtol=1e-4, atol=1e-5):
            raise BadSetting(f"the transform {self.transform} depends on the other images of a batch; it may not")
        return found
