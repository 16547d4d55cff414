"""Random crops, flips and erased rectangles, drawn for each image of a batch."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from fedortho.devices import to_device


@dataclass(frozen=True)
class Augment:
    """Random crop, flip and erasing, drawn separately for each image."""

    crop: int = 4  # zero padding on each side before a random crop; 0: none
    flip: float = 0.5  # probability of a left-right flip
    erase: float = 0.0  # probability of erasing a rectangle of 2 to 33 % of the area

    def __call__(self, batch: Tensor, generator: torch.Generator) -> Tensor:
        """Augment a normalised batch (n, channels, height, width); random numbers come from the CPU."""
        if self.crop:
            batch = _crop(batch, self.crop, generator)
        if self.flip:
            chosen = torch.rand(len(batch), generator=generator) < self.flip
            batch = torch.where(to_device(chosen, batch.device).view(-1, 1, 1, 1), batch.flip(3), batch)
        if self.erase:
            batch = _erase(batch, self.erase, generator)
        return batch


def _crop(batch: Tensor, padding: int, generator: torch.Generator) -> Tensor:
    number, channels, height, width = batch.shape
    padded = functional.pad(batch, (padding,) * 4)
    top, left = to_device(torch.randint(0, 2 * padding + 1, (2, number), generator=generator), batch.device)
    rows = top.view(-1, 1) + torch.arange(height, device=batch.device)  # (n, height)
    columns = left.view(-1, 1) + torch.arange(width, device=batch.device)  # (n, width)
    flat = (rows * (width + 2 * padding)).unsqueeze(2) + columns.unsqueeze(1)  # (n, height, width)
    flat = flat.view(number, 1, -1).expand(-1, channels, -1)
    return padded.flatten(2).gather(2, flat).view(batch.shape)


def _erase(batch: Tensor, probability: float, generator: torch.Generator) -> Tensor:
    number, _, height, width = batch.shape
    draw = torch.rand(5, number, generator=generator)
    area = (0.02 + 0.31 * draw[0]) * height * width
    aspect = torch.exp((2 * draw[1] - 1) * math.log(3.3))  # 0.3 to 3.3
    high = (area * aspect).sqrt().round().clamp(1, height)
    wide = (area / aspect).sqrt().round().clamp(1, width)
    top = (draw[2] * (height - high + 1)).floor()
    left = (draw[3] * (width - wide + 1)).floor()
    rows, columns = torch.arange(height).view(-1, 1), torch.arange(width)
    high, wide, top, left, chosen = (each.view(-1, 1, 1) for each in (high, wide, top, left, draw[4] < probability))
    inside = (rows >= top) & (rows < top + high) & (columns >= left) & (columns < left + wide)  # (n, height, width)
    return batch.masked_fill(to_device((chosen & inside).unsqueeze(1), batch.device), 0.0)
