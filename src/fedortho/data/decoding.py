"""Decode images of Parquet files or folders into uint8 tensors: check labels first, then decode in threads."""

import hashlib
import io
import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedortho.data.images import RowIds, channel_statistics, split_stratified
from fedortho.data.loaders import IMAGE_COLUMNS, LABEL_COLUMNS, plain_picture
from fedortho.errors import BadData, first_line
from fedortho.storage.files import parse_json, read_limited

logger = logging.getLogger(__name__)
Report = Callable[[int, int], None]  # images decoded so far, images in this split
Encoded = tuple[str, str, bytes | None]  # location for errors, file name (empty: none), encoded image

DECODER = 1  # part of every cache key: increase it when the same bytes decode to other pixels
TEST_SHARE, TEST_SEED = 0.2, 0  # for sources without a test split; a fixed seed, so the test set is always the same
FORMATS = ("PNG", "JPEG", "WEBP", "BMP")
SUFFIXES = {".png", ".jpg", ".jpeg", ".webp", ".bmp"}
MOST_IMAGE = 1 << 28  # bytes of an image file
BATCH, CHUNK = 1024, 64  # rows read at a time, and rows per task of a thread
THREADS = min(8, max(2, os.cpu_count() or 2))


@dataclass(frozen=True)
class SplitFiles:
    """The files of one split (`role`: train or test), or of a dataset that is not split yet (empty `role`)."""

    files: tuple[Path, ...]
    role: str = ""
    folders: tuple[str, ...] = ()  # class of each file, if every file is one image
    image: str = ""  # names of the columns; empty: the usual names are tried
    label: str = ""
    root: Path = Path()  # the data directory, which file names are relative to


@dataclass(frozen=True)
class DecodedImages:
    """Decoded images with their labels, and the rows of the training and of the test split."""

    pixels: Tensor  # (n, channels, height, width), uint8
    labels: Tensor  # (n,), int64
    train: Tensor  # rows, ascending
    test: Tensor
    test_from_train: bool  # the source has no test split; a share of its images is used as one
    names: tuple[str, ...]  # empty if the source has numbered classes only
    mean: tuple[float, ...]  # of the training rows
    std: tuple[float, ...]
    digest: str  # of the source's content
    ids: RowIds


@dataclass(frozen=True)
class EncodedImages:
    """Labels and splits of images that are not decoded yet; `images` yields batches of (location, name, bytes)."""

    labels: Tensor
    names: tuple[str, ...]
    splits: tuple[str, ...]  # one per row, or empty
    images: Callable[[], Iterator[list[Encoded]]]


def decode_files(source: SplitFiles, size: int, digest: str, progress: Report | None) -> DecodedImages:
    encoded = _open_source(source)
    if not len(encoded.labels):
        raise BadData(f"{source.files[0]} holds no images")
    train, test, test_from_train = _split_rows(encoded, source.role)
    pixels, ids = _decode(encoded, size, progress)
    mean, std = channel_statistics(pixels[train]) if len(train) else ((), ())
    return DecodedImages(pixels, encoded.labels, train, test, test_from_train, encoded.names, mean, std, digest, ids)


def decode_rows(source: SplitFiles, size: int, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The pixels and the labels of these rows, ascending; no other image is decoded."""
    encoded, wanted = _open_source(source), set(rows.tolist())

    def some() -> Iterator[list[Encoded]]:
        first = 0
        for batch in encoded.images():
            yield [image for row, image in enumerate(batch, first) if row in wanted]
            first += len(batch)

    chosen = replace(encoded, labels=encoded.labels[rows], images=some)
    return _decode(chosen, size, None)[0], chosen.labels


def _open_source(source: SplitFiles) -> EncodedImages:
    return _open_folder(source) if source.folders else _open_parquet(source)


def _split_rows(encoded: EncodedImages, role: str) -> tuple[Tensor, Tensor, bool]:
    """Rows of the training split and of the test split, and whether the latter was taken from the former."""
    rows, none = torch.arange(len(encoded.labels)), torch.arange(0)
    if role:
        return (rows, none, False) if role == "train" else (none, rows, False)
    if encoded.splits:
        wanted = "test" if "test" in encoded.splits else "valid"
        test = rows[torch.tensor([split == wanted for split in encoded.splits])]
        rows = rows[torch.tensor([split == "train" for split in encoded.splits])]
        if len(test):
            return rows, test, False
    train, test = split_stratified(encoded.labels[rows], TEST_SHARE, TEST_SEED)
    return rows[train], rows[test], True


def _open_folder(source: SplitFiles) -> EncodedImages:
    names = tuple(sorted(set(source.folders)))
    number = {name: label for label, name in enumerate(names)}

    def images() -> Iterator[list[Encoded]]:
        for start in range(0, len(source.files), BATCH):
            some = source.files[start : start + BATCH]
            yield [(str(file), "", read_limited(file, MOST_IMAGE, BadData)) for file in some]

    return EncodedImages(torch.tensor([number[name] for name in source.folders]), names, (), images)


def _open_parquet(source: SplitFiles) -> EncodedImages:
    labels: list[Tensor] = []
    splits: list[str] = []
    names: tuple[str, ...] | None = None
    for file in source.files:
        with _parquet(file) as parquet:
            schema = parquet.schema_arrow
            label = _column(file, schema, "label", source.label, LABEL_COLUMNS)
            _column(file, schema, "image", source.image, IMAGE_COLUMNS)
            with_split = not source.role and "split" in schema.names
            table = parquet.read(columns=[label, "split"] if with_split else [label])
        own = _class_names(schema, label)
        if names not in (None, own):
            raise BadData(f"{file} has other class names than {source.files[0]}; load them as separate datasets")
        names = own
        labels.append(_labels(file, table[label], own))
        roles = [split_of(str(value)) for value in table["split"].to_pylist()] if with_split else []
        if "" in roles:
            row = roles.index("")
            raise BadData(f"{file}, row {row}: split {table['split'][row].as_py()!r}; choose from train, test, valid")
        splits += roles
    whole = torch.cat(labels)
    if len(splits) not in (0, len(whole)):
        raise BadData(f"some of the files beside {source.files[0]} lack the column 'split'; add it to all or to none")
    if not names and len(whole) and (high := int(whole.max())) >= len(whole):
        what = f"label {high} is out of range for {len(whole)} images"
        raise BadData(f"{source.files[0]}: {what}; number the classes from 0")

    def images() -> Iterator[list[Encoded]]:
        for file in source.files:
            yield from _encoded_images(file, source.image)

    return EncodedImages(whole, names or (), tuple(splits), images)


@contextmanager
def _parquet(file: Path) -> Iterator[Any]:
    import pyarrow
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(file) as parquet:
            yield parquet
    except (pyarrow.ArrowException, OSError) as error:
        raise BadData(f"{file} is not a whole Parquet file ({first_line(error)}); fetch or write it again") from error


def _column(file: Path, schema: Any, kind: str, wanted: str, usual: Sequence[str]) -> str:
    choices = [wanted] if wanted else usual
    for name in choices:
        if name in schema.names:
            return name
    found = f"its columns are {', '.join(schema.names) or 'none'}; rename one"
    raise BadData(f"{file} has no {kind} column: looked for {' or '.join(map(repr, choices))}, {found}")


def _class_names(schema: Any, label: str) -> tuple[str, ...]:
    """Class names from the metadata that the hub writes into the schema; empty if there are none."""
    try:
        note = parse_json(schema.metadata[b"huggingface"])
        return tuple(map(str, note["info"]["features"][label]["names"]))
    except (KeyError, TypeError, ValueError):
        return ()


def _labels(file: Path, column: Any, names: Sequence[str]) -> Tensor:
    from pyarrow.types import is_integer

    if not is_integer(column.type):
        raise BadData(f"{file}: labels must be whole numbers, not {column.type}; number the classes from 0")
    if column.null_count:
        row = column.is_null().to_pylist().index(True)
        raise BadData(f"{file}, row {row}: the label is missing; drop the row or give it a label")
    labels = torch.tensor(column.to_numpy().astype("int64"))
    wrong = (labels < 0) | (labels >= len(names)) if names else labels < 0
    if wrong.any():
        row = int(wrong.nonzero()[0])
        high = f"0 to {len(names) - 1}" if names else "from 0"
        raise BadData(f"{file}, row {row}: label {int(labels[row])} is out of range, labels run {high}")
    return labels


def _encoded_images(file: Path, wanted: str) -> Iterator[list[Encoded]]:
    from pyarrow.compute import struct_field
    from pyarrow.types import is_binary, is_large_binary, is_struct

    with _parquet(file) as parquet:
        schema = parquet.schema_arrow
        name = _column(file, schema, "image", wanted, IMAGE_COLUMNS)
        kind, first = schema.field(name).type, 0
        nested = is_struct(kind) and kind.get_field_index("bytes") >= 0
        if not (nested or is_binary(kind) or is_large_binary(kind)):
            raise BadData(f"{file}: column {name!r} holds {kind}, not encoded images: struct(bytes, path) or binary")
        for batch in parquet.iter_batches(BATCH, columns=[name]):
            column = struct_field(batch.column(0), "bytes") if nested else batch.column(0)
            has_names = nested and kind.get_field_index("path") >= 0
            names = struct_field(batch.column(0), "path").to_pylist() if has_names else [""] * len(column)
            images = enumerate(zip(names, column.to_pylist(), strict=True), first)
            yield [(f"{file}, row {row}", str(name or ""), blob) for row, (name, blob) in images]
            first += len(column)


def _decode(encoded: EncodedImages, size: int, progress: Report | None) -> tuple[Tensor, RowIds]:
    """All images as one tensor, with one channel if every image is grey and with three otherwise; and their ids."""
    digests, files = np.empty((len(encoded.labels), 32), np.uint8), []
    pixels, done, total, origin = np.empty((0, 1, 0, 0), np.uint8), 0, len(encoded.labels), ""
    coloured = list[str]()

    def decoded(chunk: Sequence[Encoded]) -> list[tuple[str, NDArray[np.uint8], bytes]]:
        return [(at, _decode_image(at, blob, size), hashlib.sha256(blob or b"").digest()) for at, _, blob in chunk]

    with ThreadPoolExecutor(THREADS) as pool:
        for batch in encoded.images():
            chunks = [batch[first : first + CHUNK] for first in range(0, len(batch), CHUNK)]
            files += [name for _, name, _ in batch]
            for where, image, digest in chain.from_iterable(pool.map(decoded, chunks)):
                if not done:
                    pixels, origin = np.empty((total, *image.shape), np.uint8), where
                if (shape := image.shape[1:]) != (first := pixels.shape[2:]):
                    known = f"the first one ({origin}) is {first[1]}x{first[0]}; pass --image-size N to resize them all"
                    raise BadData(f"{where}: the image is {shape[1]}x{shape[0]} pixels, {known}")
                if len(image) > pixels.shape[1]:
                    pixels = np.repeat(pixels, 3, axis=1)
                coloured += [where] if len(image) > 1 else []
                pixels[done], digests[done] = image, np.frombuffer(digest, np.uint8)
                done += 1
            if progress is not None:
                progress(done, total)
    if coloured and len(coloured) < total / 2:
        told = f"{len(coloured)} of {total} images have colours, the first is {coloured[0]}"
        logger.warning("%s: all are read with three channels; convert these if the model reads one", told)
    return torch.from_numpy(pixels), RowIds(torch.from_numpy(digests), tuple(files) if any(files) else ())


def _decode_image(where: str, blob: bytes | None, size: int) -> NDArray[np.uint8]:
    """One image as (1 or 3, height, width); its bytes, not its file name, decide the format."""
    from PIL import Image

    if not blob:
        raise BadData(f"{where}: the image is empty; drop the row or write it again")
    try:
        with Image.open(io.BytesIO(blob), formats=FORMATS) as image:
            plain = plain_picture(image, where)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        why = first_line(error).partition(" <")[0]
        raise BadData(f"{where}: the image cannot be decoded ({why}); use {', '.join(FORMATS)}") from error
    if size and plain.size != (size, size):
        plain = plain.resize((size, size), Image.Resampling.BILINEAR)
    array = np.asarray(plain)
    return array[None] if array.ndim == 2 else array.transpose(2, 0, 1)


def split_of(name: str) -> str:
    """The split that a name begins with: train, test or valid; empty if none."""
    match = re.match(r"train|test|valid|val(?![a-z])", name.lower())
    return "" if match is None else {"val": "valid"}.get(match[0], match[0])
