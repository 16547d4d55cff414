"""Decoded images on disk: memory-mapped, readable by their owner only, and without the images that were forgotten.

CACHE/*.safetensors   decoded images, with the digest of every row
CACHE/forgotten.txt   digests of images that were forgotten: they are never written again, and never trained on

Pixels of a forgotten row are zero in these files and its label is -1. While its image is still in the source, it is
decoded again into memory where a run needs it.
"""

import logging
import os
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedortho.data.decoding import DecodedImages
from fedortho.data.images import Dataset, RowIds
from fedortho.errors import BadCheckpoint, BadData, FedOrthoError
from fedortho.storage.files import PRIVATE, locked, read_tensors, replacing, write_tensors

logger = logging.getLogger(__name__)
LONGEST_WAIT = 600.0  # seconds for another process that writes decoded images
SHORT = 16  # bytes of a SHA-256 by which rows are compared
UNREADABLE = (BadCheckpoint, KeyError, ValueError, OSError, RuntimeError)


def cache_dir() -> Path:
    """The directory of decoded images and downloads; all but `forgotten.txt` may be deleted at any time."""
    if own := os.environ.get("FEDORTHO_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "fedortho"


def cached(key: str, decode: Callable[[], DecodedImages]) -> DecodedImages:
    """The decoded images of this key: from the cache, or decoded now and cached."""
    try:
        return read_decoded(cache_dir() / f"{key[:40]}.safetensors")
    except UNREADABLE as error:
        logger.debug("no decoded images in the cache: %s", error)
    store = decode()
    try:
        write_decoded(cache_dir() / f"{key[:40]}.safetensors", store)
    except (OSError, RuntimeError, FedOrthoError) as error:  # RuntimeError: there is no home directory
        logger.warning("decoded images are not cached (%s); set FEDORTHO_CACHE to a writable directory", error)
    return store


def read_decoded(file: Path) -> DecodedImages:
    """The images of a file of the cache; writing to its tensors does not change the file."""
    tensors, note = read_tensors(file)
    pixels, labels = tensors["pixels"], tensors["labels"]
    ids = RowIds(tensors["digests"], unpack_names(tensors["files"]))
    if pixels.dtype != torch.uint8 or pixels.dim() != 4 or not len(pixels) == len(labels) == len(ids.digests):
        raise ValueError(f"{file} does not hold images")
    names, mean, std = (tuple(note[key]) for key in ("names", "mean", "std"))
    known = (tensors["train"], tensors["test"], note["test-from-train"], names, mean, std, note["digest"], ids)
    return DecodedImages(pixels, labels, *known)


def write_decoded(file: Path, store: DecodedImages) -> None:
    """Write decoded images to a file of the cache, without those that were forgotten."""
    note = {"test-from-train": store.test_from_train, "names": store.names, "mean": store.mean, "std": store.std}
    tensors = {"pixels": store.pixels, "train": store.train, "test": store.test}
    tensors |= {"digests": store.ids.digests, "files": pack_names(store.ids.files)}
    with _locked_list():  # a purge finds the file, or this finds what the purge has remembered
        gone = forgotten_mask(store.ids).nonzero().flatten()
        kept, labels = store.pixels[gone], store.labels.clone()
        store.pixels[gone], labels[gone] = 0, -1
        try:
            write_tensors(file, tensors | {"labels": labels}, note | {"digest": store.digest}, mode=PRIVATE)
        finally:
            store.pixels[gone] = kept  # the caller may still need them


def _locked_list() -> AbstractContextManager[None]:
    return locked(cache_dir() / "forgotten.txt", timeout=LONGEST_WAIT)


def pack_names(names: tuple[str, ...]) -> Tensor:
    """File names as one tensor of bytes, (n,) uint8."""
    return torch.frombuffer(bytearray("".join(f"{name}\0" for name in names).encode() or b"\0"), dtype=torch.uint8)


def unpack_names(packed: Tensor) -> tuple[str, ...]:
    """The file names that were packed; empty if there are none.

    >>> unpack_names(pack_names(("cat/1.png", "cat/2, old.png")))
    ('cat/1.png', 'cat/2, old.png')
    """
    names = bytes(packed.numpy()).decode().split("\0")[:-1]
    return tuple(names) if any(names) else ()


def is_among(digests: Tensor, others: Tensor) -> Tensor:
    """Which rows of `digests`, (n, 16 or 32) uint8, are among those of `others`; the first 16 bytes count."""
    parts = [np.ascontiguousarray(each[:, :SHORT].numpy()) for each in (digests, others)]
    mine, theirs = (part.view(f"V{SHORT}")[:, 0] for part in parts)
    return torch.from_numpy(np.isin(mine, theirs))


def forgotten_mask(ids: RowIds | None) -> Tensor:
    """Which rows of a store were forgotten and purged, (store,) bool."""
    if ids is None:
        return torch.zeros(0, dtype=torch.bool)
    return is_among(ids.digests, _forgotten())


def _forgotten() -> Tensor:
    """The digests that `purge_images` has remembered, (n, 16) uint8."""
    try:
        file = cache_dir() / "forgotten.txt"
        digests = bytearray.fromhex(file.read_text(encoding="ascii")) if file.exists() else bytearray()
    except RuntimeError:  # there is no home directory, and so no cache
        digests = bytearray()
    except (OSError, ValueError) as error:
        raise BadData(f"{file}, the list of forgotten images, cannot be read ({error}); restore it") from error
    return torch.tensor(list(digests), dtype=torch.uint8)[: len(digests) // SHORT * SHORT].view(-1, SHORT)


def without_forgotten(data: Dataset) -> Dataset:
    """The dataset without training and validation images that were forgotten and purged."""
    left = data.without_rows(forgotten_mask(data.train.ids).nonzero().flatten())
    if number := len(data.train) + len(data.valid) - len(left.train) - len(left.valid):
        logger.info("%s: %d images that were forgotten are left out (see fedortho data purge)", data.name, number)
    return left


@dataclass(frozen=True)
class DataCopy:
    """A place that has, or had, images of a forget set."""

    what: str  # source, decoded images, or activations of a ledger
    where: str
    images: int  # that are still there
    removed: int  # that were there

    def __str__(self) -> str:
        left = f"{self.images} image{'s' * (self.images != 1)} of the forget set" if self.images else "nothing"
        return f"{self.what} {self.where}: {left} left, {self.removed} removed"


def _decoded_files() -> Iterator[tuple[Path, DecodedImages | None]]:
    """Every file of decoded images; without images if it is damaged, or of a version that did not know digests."""
    for file in sorted(file for file in cache_dir().glob("*.safetensors") if re.fullmatch(r"[0-9a-f]{40}", file.stem)):
        try:
            yield file, read_decoded(file)
        except UNREADABLE:
            yield file, None


def decoded_copies(digests: Tensor) -> list[DataCopy]:
    """The files of the cache that have, or had before a purge, images with these digests, (n, 16 or 32) uint8."""
    found = []
    for file, store in _decoded_files():
        if store is not None and (mine := is_among(store.ids.digests, digests)).any():
            left = int((mine & (store.labels >= 0)).sum())
            found.append(DataCopy("decoded images", file.name, left, int(mine.sum()) - left))
    return found


def purge_images(digests: Tensor) -> list[DataCopy]:
    """Remove the images with these digests, (n, 16 or 32) uint8, from all decoded images, and remember the digests.

    They are never written to the cache again, and `load_images` leaves them out. Files of versions that did not know
    digests are deleted; their images are decoded again when they are needed.
    """
    with _locked_list():
        every = torch.cat([_forgotten(), digests[:, :SHORT]]).unique(dim=0)
        lines = "".join(f"{bytes(digest).hex()}\n" for digest in every.numpy())
        with replacing(cache_dir() / "forgotten.txt", PRIVATE) as temporary:
            temporary.write_text(lines, encoding="ascii")
    for file, store in _decoded_files():
        if store is None:
            file.unlink(missing_ok=True)
        elif bool((is_among(store.ids.digests, digests) & (store.labels >= 0)).any()):
            write_decoded(file, store)
    return decoded_copies(digests)
