"""Images as uint8 tensors with labels, datasets of them, and batches for evaluation."""

import hmac
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from unicodedata import normalize

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from fedortho.data.loaders import ImageSource, class_names, read_batches
from fedortho.data.preprocessing import Preprocessing, Transform
from fedortho.devices import to_device
from fedortho.errors import BadData, BadSetting, first_line
from fedortho.storage.files import tensors_digest

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RowIds:
    """The digest of each row's encoded image (of its pixels if it has no file) and its file name, by row of a store."""

    digests: Tensor  # (store, 32), uint8: SHA-256
    files: tuple[str, ...] = ()  # relative to `root`; empty: the images have no file names
    root: str = ""  # the data directory
    key: bytes = field(default=b"", repr=False)  # of hashed ids; empty: it is not known

    def hashed(self, row: int | str) -> str:
        """The keyed hash of a row, by which requests name it where row numbers are not to be told."""
        return f"hmac:{hmac.digest(self.key, str(row).encode(), 'sha256').hex()[:32]}"

    @cached_property
    def by_hash(self) -> dict[str, int]:
        """The row of each keyed hash."""
        return {self.hashed(row): row for row in range(len(self.digests))}

    def subset(self, rows: Tensor) -> "RowIds":
        """The ids of these rows, in this order."""
        files = tuple(self.files[row] for row in rows.tolist()) if self.files else ()
        return replace(self, digests=self.digests[rows], files=files)

    @cached_property
    def by_file(self) -> dict[str, list[int]]:
        """The rows of each file name, which is in the form NFC."""
        rows: dict[str, list[int]] = {}
        for row, file in enumerate(self.files):
            rows.setdefault(normalize("NFC", file), []).append(row)
        return rows

    @cached_property
    def by_digest(self) -> list[tuple[str, int]]:
        """The digest of each row as hex, sorted."""
        return sorted((bytes(digest).hex(), row) for row, digest in enumerate(self.digests.numpy()))


@dataclass(frozen=True)
class Images:
    """Some rows of a store of images; a subset shares the store, so a thousand clients cost no memory."""

    pixels: Tensor  # (store, channels, height, width), uint8 and often memory-mapped; or floats as a model reads them
    store_labels: Tensor  # (store,), int64
    rows: Tensor  # (n,), int64: positions in the store, the stable ids by which single samples are named
    names: tuple[str, ...]  # one per class
    mean: tuple[float, ...]  # per channel, of pixels / 255
    std: tuple[float, ...]
    ids: RowIds | None = None  # of the store; None: rows have numbers only
    transform: Transform | None = None  # makes inputs in place of mean and std

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def labels(self) -> Tensor:
        """The label of every row."""
        return self.store_labels[self.rows]

    @property
    def classes(self) -> int:
        """The number of classes."""
        return len(self.names)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height, width of one image as a model reads it."""
        _, channels, height, width = self.normalise(self.pixels[:1]).shape if self.transform else self.pixels.shape
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
        """uint8 pixels as a model's inputs; floats are returned unchanged."""
        if pixels.is_floating_point():
            return pixels
        if self.transform is not None:
            return self.transform(pixels)
        mean = to_device(torch.tensor(self.mean).view(-1, 1, 1), pixels.device)
        std = to_device(torch.tensor(self.std).view(-1, 1, 1), pixels.device)
        return pixels.float().div_(255).sub_(mean).div_(std)

    @property
    def input_digest(self) -> str:
        """Of the inputs that the first images become: what is stored for one preprocessing is not used for another."""
        return tensors_digest({"inputs": self.normalise(self.pixels[self.rows[:8]])})

    def apart_from(self, train: "Images") -> "Images":
        """Validation images; those of another store get negative rows, counted from its end, which no others have."""
        is_same = self.pixels.data_ptr() == train.pixels.data_ptr()
        return self if is_same else replace(self, rows=self.rows - len(self.pixels))

    def preprocessed(self, how: Preprocessing) -> "Images":
        """The same images, made inputs in another way; `data` means the statistics that they have."""
        mean, std = how.statistics((self.mean, self.std))
        return replace(self, mean=mean, std=std, transform=how.function(self.pixels[:2]))


@dataclass(frozen=True)
class Dataset:
    """Training, validation and test images; the test set is for reporting only."""

    name: str
    train: Images
    valid: Images
    test: Images
    digest: str  # of the content of all files read, those of `valid_digest` aside
    gone: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))  # rows whose images were deleted
    valid_digest: str = ""  # of validation images with a directory of their own

    @property
    def is_one_store(self) -> bool:
        """Whether validation images are rows of the training images' store."""
        return self.valid.pixels.data_ptr() == self.train.pixels.data_ptr()

    @property
    def known_rows(self) -> Tensor:
        """All rows of training and validation images in the training store, those that are gone too, ascending."""
        rows = torch.cat([self.train.rows, *([self.valid.rows] if self.is_one_store else []), self.gone])
        return rows.sort().values

    def with_gone(self) -> Images:
        """The training images and rows whose images were deleted: what requests may name, without all pixels."""
        return replace(self.train, rows=torch.cat([self.train.rows, self.gone]).sort().values)

    def with_key(self, key: bytes) -> "Dataset":
        """The dataset with the key of hashed ids, by which requests may name its training images."""
        ids = None if self.train.ids is None else replace(self.train.ids, key=key)
        valid = replace(self.valid, ids=ids) if self.is_one_store else self.valid
        return replace(self, train=replace(self.train, ids=ids), valid=valid) if key else self

    def without_rows(self, rows: Tensor) -> "Dataset":
        """The dataset without these rows of the training store; `gone` has those that it had."""
        train = self.train.subset(~torch.isin(self.train.rows, rows))
        valid = self.valid.subset(~torch.isin(self.valid.rows, rows)) if self.is_one_store else self.valid
        gone = self.known_rows[torch.isin(self.known_rows, torch.cat([self.gone, rows]))]
        return replace(self, train=train, valid=valid, gone=gone)


def images_from_tensors(
    pixels: ArrayLike,
    labels: ArrayLike,
    names: Sequence[str] | None = None,
    *,
    mean: Sequence[float] = (),
    std: Sequence[float] = (),
    scale: str = "",
    transform: Transform | str = "",
    where: str = "the data",
) -> Images:
    """Wrap uint8 images (n, channels, height, width) and integer labels of your own: tensors, arrays or lists.

    A model gets (pixels / 255 − mean) / std, or a usual `scale` (0-1, -1-1, imagenet, 0-255), or what the function
    `transform` makes of uint8 images; without any, mean and deviation are those of these images.

    >>> toy = images_from_tensors(torch.zeros(4, 1, 8, 8, dtype=torch.uint8), torch.tensor([0, 1, 1, 0]))
    >>> len(toy), toy.classes, toy.shape
    (4, 2, (1, 8, 8))
    """
    pixels, labels = _as_tensor(pixels, f"{where}: images"), _as_tensor(labels, f"{where}: labels")
    if pixels.dtype != torch.uint8 or pixels.dim() != 4:
        expected = "images must be uint8 of shape (n, channels, height, width)"
        floats = "; a DataLoader of (images, labels) may give floats" if pixels.is_floating_point() else ""
        raise BadData(f"{where}: {expected}, not {pixels.dtype} of shape {tuple(pixels.shape)}{floats}")
    if labels.dim() != 1 or len(labels) != len(pixels):
        raise BadData(f"{where}: {len(pixels)} images but labels of shape {tuple(labels.shape)}")
    if not len(labels):
        raise BadData(f"{where}: there are no images")
    if labels.is_floating_point() or labels.is_complex():
        raise BadData(f"{where}: labels must be whole numbers, not {labels.dtype}")
    labels = labels.to(torch.int64)  # torch compares no unsigned numbers of more bits
    high = int(labels.max())
    if names is None and high >= max(len(labels), 2):
        raise BadData(f"{where}: label {high} of only {len(labels)} images; number the classes from 0")
    names = tuple(map(str, range(high + 1)) if names is None else names)
    if bad := ((labels < 0) | (labels >= len(names))).nonzero().flatten().tolist():
        known = f"{len(names)} classes are known, so labels run 0 to {len(names) - 1}"
        raise BadData(f"{where}: row {bad[0]} has label {int(labels[bad[0]])}; {known}")
    how = Preprocessing(mean, std, scale, transform)
    whole = Images(pixels, labels, torch.arange(len(pixels)), names, *channel_statistics(pixels))
    return whole.preprocessed(how)


def _as_tensor(values: ArrayLike, what: str) -> Tensor:
    """A tensor of real numbers, of whatever has them."""
    if isinstance(values, Tensor):
        return values
    expected = f"{what} must be a tensor, an array or a list of numbers"
    try:
        array = np.array(values)
    except ValueError as error:
        raise BadData(f"{expected} of one shape: {first_line(error)}") from error
    if array.dtype.kind not in "uifb":
        raise BadData(f"{expected}, not {type(values).__name__} of {array.dtype.name}")
    return torch.from_numpy(array)


def made_images(pixels: Tensor, labels: Tensor, names: Sequence[str]) -> Images:
    """Generated float images in the model's input space; they are not normalised."""
    channels = pixels.shape[1]
    return Images(pixels, labels, torch.arange(len(pixels)), tuple(names), (0.0,) * channels, (1.0,) * channels)


def collect_images(source: ImageSource, names: Sequence[str] | None = None) -> Images:
    """The images of a `DataLoader`, of a dataset of PyTorch or Hugging Face, or of any re-iterable, in memory.

    Floats are what the model reads. Bytes are normalised by their own mean and deviation, as in `images_from_tensors`.
    A row is a position in the dataset, also if the loader shuffles.
    """
    where = type(source).__name__
    parts = list(read_batches(source))
    if not parts:
        raise BadData(f"{where} gives no images")
    pixels, labels = torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
    names = names or class_names(source)
    if not pixels.is_floating_point():
        advice = "a model that was trained on other values needs the transform that it was trained with"
        logger.warning("%s gives bytes: they are normalised by their own mean and deviation; %s", where, advice)
        return images_from_tensors(pixels, labels, names, where=where)
    shaped = images_from_tensors(torch.zeros(len(pixels), 1, 1, 1, dtype=torch.uint8), labels, names, where=where)
    return replace(shaped, pixels=pixels, mean=(0.0,) * pixels.shape[1], std=(1.0,) * pixels.shape[1])


def make_dataset(
    train: Images | ImageSource,
    test: Images | ImageSource | None = None,
    *,
    valid: Images | ImageSource | float = 0.1,
    seed: int = 0,
) -> Dataset:
    """A dataset of your own images, loaders or datasets; validation images are given, or a share `valid` of `train`.

    Bytes of all three are normalised as those of `train`.
    """
    whole = train if isinstance(train, Images) else collect_images(train)

    def beside(source: Images | ImageSource) -> Images:
        images = source if isinstance(source, Images) else collect_images(source, whole.names)
        if images.pixels.is_floating_point() != whole.pixels.is_floating_point():
            raise BadData("some images are bytes and some are floats; give the training and the test set one transform")
        return replace(images, mean=whole.mean, std=whole.std, transform=whole.transform)

    tested = whole.subset([]) if test is None else beside(test)
    if not isinstance(valid, int | float):
        return Dataset("own images", whole, beside(valid).apart_from(whole), tested, "")
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


def evaluation_batches(
    source: Images | ImageSource, batch_size: int = 500, device: torch.device | str = "cpu"
) -> Iterator[tuple[Tensor, Tensor]]:
    """Normalised batches in order, no augmentation; a `DataLoader` or a dataset gives its images as they are."""
    if not isinstance(source, Images):
        for pixels, labels in read_batches(source, batch_size):
            yield pixels.to(device), labels.to(device)
        return
    for rows in source.rows.split(batch_size):
        pixels, labels = source.pixels[rows], source.store_labels[rows]
        yield source.normalise(to_device(pixels, device)), to_device(labels, device)


def check_labels(labels: Tensor, classes: int) -> None:
    """Raise BadData for labels outside the range of a model with this number of classes."""
    if len(labels) and int(labels.max()) >= classes:
        raise BadData(f"label {int(labels.max())} but the model has only {classes} classes")
    if len(labels) and int(labels.min()) < 0:
        raise BadData(f"label {int(labels.min())} is negative; labels run 0 to {classes - 1}")
