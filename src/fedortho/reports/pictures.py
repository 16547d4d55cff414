"""Pictures of a page as values: figures, and examples of images that the model no longer or still recognises."""

import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fedortho.data.images import Images
from fedortho.evaluation.case import Case
from fedortho.models.predictions import logits_of
from fedortho.reports.figures.style import finding_of, png

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI, SHOWN_DPI = 150, 96  # drawn finer than shown, for print and high-resolution screens
EXAMPLES = 12  # on each side
SEARCHED = 400  # images of the retain set


@dataclass(frozen=True)
class Picture:
    """A figure as a PNG, with its finding and how to read it."""

    name: str
    finding: str
    about: str
    data: bytes
    shows_images: bool = False  # of the data

    @property
    def alt(self) -> str:
        return f"{self.finding}. {self.about}"

    @property
    def shown_size(self) -> tuple[int, int]:
        """Width and height on the page, so that nothing jumps while it loads."""
        from PIL import Image

        with Image.open(io.BytesIO(self.data)) as opened:
            width, height = opened.size
        return round(width * SHOWN_DPI / DPI), round(height * SHOWN_DPI / DPI)


@dataclass(frozen=True)
class Example:
    """A test image as a PNG, its class, and the predictions of the models before and after."""

    data: bytes
    truth: str
    before: str | None  # None: the original model is not known
    after: str

    @property
    def alt(self) -> str:
        before = "" if self.before is None else f" (before: {self.before})"
        return f"{self.truth}, now called {self.after}{before}"


@dataclass(frozen=True)
class Gallery:
    """The pictures of a report; remarks say what is missing and why."""

    pictures: tuple[Picture, ...] = ()
    lost: tuple[Example, ...] = ()  # recognised before, no longer
    kept: tuple[Example, ...] = ()  # recognised before and after
    remarks: tuple[str, ...] = ()
    has_images: bool = True  # False: images of the data are left out on purpose


def picture_of(name: str, figure: "Figure", about: str) -> Picture:
    """A figure for a page; its title becomes the finding, a heading outside the picture."""
    finding = finding_of(figure)
    figure.suptitle("")
    return Picture(name, finding, about, png(figure, DPI))


def thumbnail(pixels: Tensor, side: int = 64) -> bytes:
    """An image as a PNG of at most `side` pixels a side."""
    from PIL import Image

    picture = Image.fromarray(pixels.numpy())
    picture.thumbnail((side, side))
    out = io.BytesIO()
    picture.save(out, "PNG", optimize=True)
    return out.getvalue()


def as_pictures(images: Images) -> Tensor:
    """Images as matplotlib and Pillow draw them: (n, height, width) or (n, height, width, 3), uint8."""
    pixels = images.pixels[images.rows]
    if pixels.is_floating_point():  # as a model reads them: stretched to what can be seen
        low, high = pixels.amin((1, 2, 3), keepdim=True), pixels.amax((1, 2, 3), keepdim=True)
        pixels = ((pixels - low) / (high - low).clamp_min(1e-9) * 255).to(torch.uint8)
    return pixels.permute(0, 2, 3, 1) if pixels.shape[1] == 3 else pixels[:, 0]


def lost_examples(models: Mapping[str, nn.Module], case: Case) -> tuple[Example, ...]:
    """Test images of a forgotten class that the original recognises and the model after does not.

    Images of clients and samples are training images that must be forgotten: a page must not keep them.
    """
    is_class = case.request.kind == "class"
    return _examples(models, case.forget_eval, case.device, recognised=False) if is_class else ()


def kept_examples(models: Mapping[str, nn.Module], case: Case) -> tuple[Example, ...]:
    """Test images of the retain set, of many classes, that both models recognise."""
    searched = case.retain_test.subset(_interleaved(case.retain_test.labels)[:SEARCHED])
    return _examples(models, searched, case.device, recognised=True)


def _examples(
    models: Mapping[str, nn.Module], images: Images, device: torch.device | str, *, recognised: bool
) -> tuple[Example, ...]:
    if not len(images):
        return ()
    roles = [role for role in ("original", "unlearned") if role in models]
    *before, after = (logits_of(models[role], images, device=device).argmax(1) for role in roles)
    chosen = (after == images.labels) == recognised
    for predictions in before:
        chosen &= predictions == images.labels
    places = chosen.nonzero().flatten()
    places = places[_interleaved(images.labels[places])[:EXAMPLES]]
    examples, names = [], images.names
    for pixels, place in zip(as_pictures(images.subset(places)), places.tolist(), strict=True):
        old = names[int(before[0][place])] if before else None
        truth, new = names[int(images.labels[place])], names[int(after[place])]
        examples.append(Example(thumbnail(pixels), truth, old, new))
    return tuple(examples)


def _interleaved(labels: Tensor) -> Tensor:
    """Positions of the first image of each class, then of the second, and so on.

    >>> _interleaved(torch.tensor([5, 5, 5, 2, 2])).tolist()
    [0, 3, 1, 4, 2]
    """
    turn = torch.zeros(len(labels), dtype=torch.int64)
    for label in labels.unique().tolist():
        places = (labels == label).nonzero().flatten()
        turn[places] = torch.arange(len(places))
    return turn.argsort(stable=True)
