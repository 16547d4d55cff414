"""Images as uint8 tensors with labels, datasets of them, and batches for evaluation."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedortho.devices import to_device
from fedortho.errors import BadData, BadSetting


@dataclass(frozen=True)
class Images:
    """Some rows of a store of images; a subset shares the store, so a thousand clients cost no memory.

    `rows` are the positions in the store: the stable ids by which single samples are named.
    """

    pixels: Tensor  # (store, channels, height, width), uint8 and often memory-mapped; or floats as a model reads them
    store_labels: Tensor  # (store,), int64
    rows: Tensor  # (n,), int64, into the store
    names: tuple[str, ...]  # one per class
    mean: tuple[float, ...]  # per channel, of pixels / 255
    std: tuple[float, ...]

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def labels(self) -> Tensor:
        return self.store_labels[self.rows]

    @property
    def classes(self) -> int:
        return len(self.names)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height, width of one image."""
        _, channels, height, width = self.pixels.shape
        return channels, height, width

    def subset(self, positions: Tensor | Sequence[int]) -> "Images":
        """The images at these positions of this subset (not of the store), or where a mask over it is true."""
        chosen = torch.as_tensor(positions)
        if chosen.dtype == torch.bool:
            if chosen.shape != self.rows.shape:
                raise BadData(f"a mask of shape {tuple(chosen.shape)} cannot choose from {len(self)} images")
            chosen = chosen.nonzero().flatten()
        return replace(self, rows=self.rows[chosen.to(torch.int64)])

    def normalise(self, pixels: Tensor) -> Tensor:
        """uint8 pixels as floats of mean 0 and deviation 1 per channel; floats are returned unchanged."""
        if pixels.is_floating_point():
            return pixels
        mean = to_device(torch.tensor(self.mean).view(-1, 1, 1), pixels.device)
        std = to_device(torch.tensor(self.std).view(-1, 1, 1), pixels.device)
        return pixels.float().div_(255).sub_(mean).div_(std)


@dataclass(frozen=True)
class Dataset:
    """Training, validation and test images; the test set is for reporting only."""

    name: str
    train: Images
    valid: Images
    test: Images
    digest: str  # of the content of all files read


def images_from_tensors(
    pixels: Tensor, labels: Tensor, names: Sequence[str] | None = None, *, where: str = "the data"
) -> Images:
    """Wrap uint8 images (n, channels, height, width) and integer labels of your own.

    >>> toy = images_from_tensors(torch.zeros(4, 1, 8, 8, dtype=torch.uint8), torch.tensor([0, 1, 1, 0]))
    >>> len(toy), toy.classes, toy.shape
    (4, 2, (1, 8, 8))
    """
    if pixels.dtype != torch.uint8 or pixels.dim() != 4:
        raise BadData(
            f"{where}: images must be uint8 of shape (n, channels, height, width), "
            f"not {pixels.dtype} of shape {tuple(pixels.shape)}"
        )
    if len(labels) != len(pixels) or labels.dim() != 1:
        raise BadData(f"{where}: {len(pixels)} images but labels of shape {tuple(labels.shape)}")
    if not len(labels):
        raise BadData(f"{where}: there are no images")
    if labels.is_floating_point():
        raise BadData(f"{where}: labels must be whole numbers, not {labels.dtype}")
    if names is None and int(labels.max()) >= max(len(labels), 2):
        raise BadData(f"{where}: label {int(labels.max())} of only {len(labels)} images; number the classes from 0")
    names = tuple(names) if names is not None else tuple(str(c) for c in range(int(labels.max()) + 1))
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= len(names):
        bad = int(((labels < 0) | (labels >= len(names))).nonzero()[0])
        raise BadData(
            f"{where}: row {bad} has label {int(labels[bad])}; "
            f"{len(names)} classes are known, so labels run 0 to {len(names) - 1}"
        )
    mean, std = channel_statistics(pixels)
    return Images(pixels, labels.to(torch.int64), torch.arange(len(pixels)), names, mean, std)


def made_images(pixels: Tensor, labels: Tensor, names: Sequence[str]) -> Images:
    """Generated float images in the model's input space; they are not normalised."""
    channels = pixels.shape[1]
    return Images(pixels, labels, torch.arange(len(pixels)), tuple(names), (0.0,) * channels, (1.0,) * channels)


def collect_images(loader: "Batches", names: Sequence[str] | None = None) -> Images:
    """The batches of a re-iterable `DataLoader` of (images, labels) in memory, as the model reads them.

    A row is a position in the loader's order, so requests for single samples need a loader that does not shuffle.
    """
    parts = list(evaluation_batches(loader))
    if not parts:
        raise BadData("the loader gives no batch")
    pixels, labels = torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
    if not pixels.is_floating_point():
        return images_from_tensors(pixels, labels, names, where="the loader")
    shaped = images_from_tensors(
        torch.zeros(len(pixels), 1, 1, 1, dtype=torch.uint8), labels, names, where="the loader"
    )
    return replace(shaped, pixels=pixels, mean=(0.0,) * pixels.shape[1], std=(1.0,) * pixels.shape[1])


def make_dataset(
    train: "Images | Batches", test: "Images | Batches | None" = None, *, valid: float = 0.1, seed: int = 0
) -> Dataset:
    """A dataset of your own images or loaders; the validation set is a share `valid` of the training images."""
    whole = train if isinstance(train, Images) else collect_images(train)
    tested = (
        whole.subset([]) if test is None else test if isinstance(test, Images) else collect_images(test, whole.names)
    )
    train_rows, valid_rows = split_stratified(whole.labels, valid, seed)
    return Dataset("own images", whole.subset(train_rows), whole.subset(valid_rows), tested, "")


def channel_statistics(pixels: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation per channel of pixels / 255, over all images; exact integer sums."""
    value = torch.arange(256, dtype=torch.int64)
    shades = torch.stack([torch.bincount(channel.flatten(), minlength=256) for channel in pixels.unbind(1)])
    count = int(shades[0].sum())
    total, square = (shades * value).sum(1), (shades * value * value).sum(1)
    mean = total.double() / count
    variance = square.double() / count - mean**2
    std = variance.clamp_min(0).sqrt().clamp_min(1.0)  # a constant channel is only centred
    return tuple((mean / 255).tolist()), tuple((std / 255).tolist())


def split_stratified(labels: Tensor, share: float, seed: int) -> tuple[Tensor, Tensor]:
    """Positions kept and positions set aside, `share` of each label (rounded), both ascending.

    A label with at least two images gives at least one and keeps at least one.

    >>> kept, aside = split_stratified(torch.tensor([0] * 10 + [1] * 10), 0.1, seed=0)
    >>> len(kept), len(aside)
    (18, 2)
    """
    if not 0 <= share < 1:
        raise BadSetting(f"valid, the share to set aside, must be at least 0 and below 1, not {share}")
    generator = torch.Generator().manual_seed(seed)
    aside = torch.zeros(len(labels), dtype=torch.bool)
    for label in labels.unique().tolist():
        positions = (labels == label).nonzero().flatten()
        order = torch.randperm(len(positions), generator=generator)
        number = 0 if share == 0 else min(max(round(share * len(positions)), 1), len(positions) - 1)
        aside[positions[order[:number]]] = True
    return (~aside).nonzero().flatten(), aside.nonzero().flatten()


Batches = Iterable[tuple[Tensor, Tensor]]


def evaluation_batches(
    source: "Images | Batches", batch_size: int = 500, device: torch.device | str = "cpu"
) -> Iterator[tuple[Tensor, Tensor]]:
    """Normalised batches in order, no augmentation; a re-iterable `DataLoader` passes through as it is."""
    if isinstance(source, Images):
        for rows in source.rows.split(batch_size):
            pixels, labels = source.pixels[rows], source.store_labels[rows]
            yield source.normalise(to_device(pixels, device)), to_device(labels, device)
        return
    if isinstance(source, Iterator):
        raise BadData(
            f"{type(source).__name__} can be read only once; pass Images or a DataLoader, "
            "which can be read again (forgetting needs several passes)"
        )
    if not isinstance(source, Iterable):
        raise BadData(f"a {type(source).__name__} gives no batches; pass Images (such as data.test) or a DataLoader")
    for pair in source:
        if not (isinstance(pair, tuple | list) and len(pair) == 2 and all(isinstance(x, Tensor) for x in pair)):
            raise BadData(
                f"{type(source).__name__} must give batches (images, labels) of tensors, not {type(pair).__name__}"
            )
        images, labels = pair
        if images.dim() != 4 or labels.dim() != 1 or len(images) != len(labels):
            shapes = f"{tuple(images.shape)} and {tuple(labels.shape)}"
            raise BadData(f"a batch must be images (n, channels, height, width) and labels (n,), not {shapes}")
        if labels.is_floating_point():
            raise BadData(f"labels must be whole numbers, not {labels.dtype}")
        yield images.to(device), labels.to(device, torch.int64)


def check_labels(labels: Tensor, classes: int) -> None:
    """Raise BadData for labels outside the range of a model with this number of classes."""
    if len(labels) and int(labels.max()) >= classes:
        raise BadData(f"label {int(labels.max())} but the model has only {classes} classes")
    if len(labels) and int(labels.min()) < 0:
        raise BadData(f"label {int(labels.min())} is negative; labels run 0 to {classes - 1}")
