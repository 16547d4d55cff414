"""Images and labels from a `DataLoader`, a dataset of PyTorch or of Hugging Face, or any re-iterable of them."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Subset, WeightedRandomSampler
from torch.utils.data import default_collate as stack_samples

from fedortho.errors import BadData

IMAGE_COLUMNS = ("image", "img", "pixel_values", "images")  # of mappings and tables; the first that exists
LABEL_COLUMNS = ("label", "fine_label", "labels", "target")
READ_TWICE = 32  # first samples, read again to find transforms that are random


class Rows(Protocol):
    """A dataset whose samples are read by position, of PyTorch or of Hugging Face."""

    def __len__(self) -> int: ...
    def __getitem__(self, position: int, /) -> Any: ...


ImageSource = Iterable[Any] | Rows  # of samples (image, label) or batches of them, as pairs or mappings


def read_batches(source: ImageSource, batch_size: int = 500) -> Iterator[tuple[Tensor, Tensor]]:
    """Images, (n, channels, height, width) in uint8 or floats, and labels, (n,); in the order of the source's rows.

    A `DataLoader` is read in the order of its dataset, whole, whether it shuffles and drops the last batch or not.
    What reads differently the second time is refused: augmentation, or an iterator.
    """
    name = type(source).__name__
    read, read_first = _openers(source, name)
    if not isinstance(source, list | tuple):  # which cannot change
        once, again = (next(_batches(read_first(), READ_TWICE, name), None) for _ in range(2))
        if once is not None and again is None:
            raise BadData(f"{name} can be read only once; forgetting needs several passes: pass a DataLoader")
        if once is not None and again is not None and not all(map(torch.equal, once, again)):
            fix = "pass the data with its evaluation transform (no augmentation, no shuffling)"
            raise BadData(f"{name} gives other images or another order when read again; {fix}")
    yield from _batches(read(), getattr(source, "batch_size", None) or batch_size, name)


def class_names(source: ImageSource) -> tuple[str, ...] | None:
    """The class names that a dataset knows: the `ClassLabel` of its features, or its `classes`; None if it has none."""
    dataset: Any = source
    while dataset is not None:
        names, features = getattr(dataset, "classes", None), getattr(dataset, "features", None)
        if isinstance(features, Mapping):
            names = getattr(next((features[key] for key in LABEL_COLUMNS if key in features), None), "names", None)
        if isinstance(names, list | tuple) and names and all(isinstance(name, str) for name in names):
            return tuple(names)
        dataset = getattr(dataset, "dataset", None)  # of a loader or a subset
    return None


def _openers(source: ImageSource, name: str) -> tuple[Callable[[], Iterator[Any]], Callable[[], Iterator[Any]]]:
    """What opens an iterator over all items of a source, and one that gives at least its first items."""
    if isinstance(source, Iterator):
        raise BadData(f"{name} can be read only once; pass Images or a DataLoader: forgetting needs several passes")
    if isinstance(source, Mapping):
        raise BadData(f"a {name} has several splits ({', '.join(map(str, source))}); choose one, such as data['train']")
    if isinstance(source, DataLoader) and not isinstance(source.dataset, IterableDataset):
        rows, loader = _rows_of_loader(source), source
        return lambda: _in_order(loader, rows, loader.num_workers), lambda: _in_order(loader, rows[:READ_TWICE], 0)
    if isinstance(source, Iterable):
        return source.__iter__, source.__iter__
    if not hasattr(source, "__len__") or not hasattr(source, "__getitem__"):
        known = "Images (such as data.test), a DataLoader or a Dataset with a length"
        raise BadData(f"{name} gives no images; pass {known}")
    return (lambda: (source[place] for place in range(len(source))),) * 2


def _rows_of_loader(loader: DataLoader[Any]) -> list[int]:
    """The rows of the dataset that a loader reads, ascending; all if it draws at random."""
    if isinstance(loader.sampler, RandomSampler | WeightedRandomSampler):
        return list(range(len(loader.dataset)))  # type: ignore[arg-type]  # samplers need its length too
    batches: Any = loader.batch_sampler
    return sorted(set(loader.sampler if type(batches) in (BatchSampler, type(None)) else chain.from_iterable(batches)))


def _in_order(loader: DataLoader[Any], rows: list[int], workers: int) -> Iterator[Any]:
    """Items of these rows as a loader makes them, by its workers; samples that it would only stack come one by one."""
    size = None if loader.batch_sampler is None else loader.batch_size or len(rows)
    is_plain = loader.collate_fn is stack_samples and size is not None
    ordered: DataLoader[Any] = DataLoader(
        Subset(loader.dataset, rows),
        size,
        num_workers=workers,
        collate_fn=list if is_plain else loader.collate_fn,
        worker_init_fn=loader.worker_init_fn,
        generator=torch.Generator().manual_seed(0),  # the global one is left alone
    )
    return chain.from_iterable(ordered) if is_plain else iter(ordered)


def _batches(items: Iterator[Any], size: int, name: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches as they are, and samples stacked; all images have the shape of the first."""
    samples: list[tuple[Tensor, Tensor]] = []
    shape, row = None, 0
    for item in items:
        image, label = _pair(item, name)
        is_batch = isinstance(image, Tensor) and image.dim() == 4
        pixels, labels = _as_pixels(image, is_batch, f"{name}: image {row}"), _as_labels(label, is_batch, name)
        if is_batch and len(pixels) != len(labels):
            raise BadData(f"a batch of {name} has {len(pixels)} images and {len(labels)} labels")
        shape = shape or pixels.shape[-3:]
        if pixels.shape[-3:] != shape:
            found = f"image {row} is {tuple(pixels.shape[-3:])}, the first {tuple(shape)}"
            raise BadData(f"{name} has images of unequal size: {found}; resize them in its transform")
        row += len(pixels) if is_batch else 1
        if is_batch:
            yield pixels, labels
            continue
        samples.append((pixels, labels))
        if len(samples) == size:
            yield stack_samples(samples)
            samples = []
    if samples:
        yield stack_samples(samples)


def _pair(item: Any, name: str) -> tuple[Any, Any]:
    if isinstance(item, Mapping):
        image, label = (next((key for key in keys if key in item), None) for keys in (IMAGE_COLUMNS, LABEL_COLUMNS))
        if image is None or label is None:
            expected = f"expected one of {', '.join(IMAGE_COLUMNS)} and one of {', '.join(LABEL_COLUMNS)}"
            raise BadData(f"{name} has the columns {', '.join(map(str, item))}; {expected}: rename_column does it")
        return item[image], item[label]
    if not isinstance(item, tuple | list) or len(item) != 2:
        got = f"{len(item)} values" if isinstance(item, tuple | list) else type(item).__name__
        raise BadData(f"{name} must give batches (images, labels) or samples (image, label), not {got}")
    return item[0], item[1]


def _as_pixels(image: Any, is_batch: bool, where: str) -> Tensor:
    """A batch, or one image as (channels, height, width): uint8, or floats as the model reads them."""
    if hasattr(image, "getbands"):  # of PIL
        image = plain_picture(image, where)
    if not isinstance(image, Tensor):
        array = np.array(image)  # a copy: torch warns of arrays that cannot be written
        if array.dtype.kind not in "uif":
            raise BadData(f"{where} is a {type(image).__name__}; expected a tensor, an array or a PIL image")
        image = torch.from_numpy(array)
    pixels: Tensor = image[None] if not is_batch and image.dim() == 2 else image
    if not is_batch and pixels.dim() != 3:
        raise BadData(f"{where} is {tuple(pixels.shape)}; expected (channels, height, width)")
    if not is_batch and pixels.shape[2] in (1, 3, 4) and pixels.shape[0] > 4:
        pixels = pixels.permute(2, 0, 1)
    if pixels.is_floating_point():
        return pixels.float()
    if pixels.dtype == torch.uint8:
        return pixels
    whole = pixels.long()  # torch compares no unsigned numbers of more bits
    if int(whole.min()) < 0 or int(whole.max()) > 255:
        raise BadData(f"{where} has whole numbers outside 0 to 255; give uint8 or floats")
    return whole.to(torch.uint8)


def plain_picture(image: Any, where: str) -> Any:
    """A picture of PIL with one or three channels of 8 bits."""
    if image.mode[0] in "IF":  # conversion would silently clip these
        raise BadData(f"{where} (mode {image.mode}) has more than 8 bits per channel; save it with 8")
    return image.convert("L" if image.mode in ("1", "L", "LA") else "RGB")


def _as_labels(label: Any, is_batch: bool, name: str) -> Tensor:
    """The labels of a batch, (n,), or of one image, without dimension; int64."""
    try:
        labels = torch.as_tensor(label)
    except (TypeError, ValueError, RuntimeError) as error:
        raise BadData(f"{name} has a label {label!r}; number the classes from 0 (class_encode_column does)") from error
    if labels.dim() != is_batch:
        expected = "expected one whole number per image: give the argmax of one-hot labels"
        raise BadData(f"{name} has labels of shape {tuple(labels.shape)}; {expected}")
    if labels.is_floating_point() or labels.dtype == torch.bool:
        raise BadData(f"{name}: labels must be whole numbers, not {labels.dtype}")
    return labels.to(torch.int64)
