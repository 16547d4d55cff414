"""The images that a run was trained on, by digest: its data is recognised after forgotten images were deleted from it.

RUN/rows.safetensors, readable by its owner only, has digest, label and file name of every row. It is in no bundle.
"""

import secrets
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedortho.data.cache import PRIVATE, pack_names, unpack_names
from fedortho.data.images import Dataset, Images, RowIds
from fedortho.data.request import ForgetRequest
from fedortho.errors import BadCheckpoint, BadData
from fedortho.storage.files import locked, read_tensors, replacing, write_tensors

ROWS_FILE = "rows.safetensors"
KEY_FILE = "hash-ids.key"
Keys = Sequence[tuple[bytes, str]]  # digest and class of each image


@dataclass(frozen=True)
class TrainedRows:
    """Digest, label and file name of each row of a run's data, and the rows that it was trained or validated on."""

    ids: RowIds
    labels: Tensor
    rows: Tensor  # of training and validation images, also of those left out
    left_out: Tensor  # rows that were forgotten before the run was trained
    test_ids: RowIds
    test_labels: Tensor
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def save(self, directory: Path) -> None:
        tensors = {"labels": self.labels, "rows": self.rows, "left-out": self.left_out, "test-labels": self.test_labels}
        tensors |= {"digests": self.ids.digests, "files": pack_names(self.ids.files)}
        tensors |= {"test-digests": self.test_ids.digests, "test-files": pack_names(self.test_ids.files)}
        write_tensors(directory / ROWS_FILE, tensors, {"mean": self.mean, "std": self.std}, mode=PRIVATE)

    def without_names(self, request: ForgetRequest, names: tuple[str, ...]) -> "TrainedRows":
        """The same without the file names of rows that a request names; without any if it names them by hashes.

        Names that are missing would tell what the hashes hide.
        """
        is_hashed = any(word.startswith("hmac:") for word in request.samples)
        gone = self._named(request, names).tolist()
        files = tuple("" if is_hashed or is_gone else file for file, is_gone in zip(self.ids.files, gone, strict=False))
        return replace(self, ids=replace(self.ids, files=files))

    def left_out_besides(
        self, request: ForgetRequest, names: tuple[str, ...], other: "TrainedRows | None" = None
    ) -> Tensor:
        """The rows left out of training that a request does not name and another run has not left out."""
        rest = self.left_out[~self._named(request, names)[self.left_out]]
        return rest if other is None else rest[~torch.isin(rest, other.left_out)]

    def _named(self, request: ForgetRequest, names: tuple[str, ...]) -> Tensor:
        """A mask of the rows that a request names by class or by row."""
        known = ForgetRequest(request.classes, (), tuple(word for word in request.samples if "/" not in word))
        return known.mask(self._images(self.labels, names, self.ids))

    def restored(
        self, data: Dataset, names: tuple[str, ...], valid: Sequence[int], excluded: ForgetRequest | None
    ) -> Dataset:
        """The run's data in what is left of it: rows keep their numbers, those of deleted images are `gone`.

        Images may be missing only if they match `excluded`, what the run has forgotten or was trained without; images
        that the run did not have are not used.
        """
        excluded = excluded or ForgetRequest()
        forgotten = excluded.mask(self._images(self.labels, names, self.ids))
        forgotten[self.left_out] = True
        forgotten_test = ForgetRequest(excluded.classes).mask(self._images(self.test_labels, names))
        root = "" if data.train.ids is None else data.train.ids.root
        here = [(part, _keys(part.ids, part.store_labels, part.names)) for part in (data.train, data.test)]
        pixels, found = _filled(_keys(self.ids, self.labels, names), here[:1], forgotten)
        test_pixels, found_test = _filled(_keys(self.test_ids, self.test_labels, names), here[::-1], forgotten_test)
        lost = [_name(self.ids, row) for row in self.rows.tolist() if not (found[row] or forgotten[row])]
        lost += [_name(self.test_ids, row) for row in (~found_test & ~forgotten_test).nonzero().flatten().tolist()]
        if lost:
            more = f" and {len(lost) - 3} more" if len(lost) > 3 else ""
            raise BadData(f"it lacks images that the run has not forgotten: {', '.join(lost[:3])}{more}")
        kept = self.rows[found[self.rows]]
        is_valid = torch.isin(kept, torch.tensor(valid, dtype=torch.int64))
        about: dict[str, Any] = {"names": names, "mean": self.mean, "std": self.std}
        ids = replace(self.ids, root=root)
        whole = replace(data.train, pixels=pixels, store_labels=self.labels, ids=ids, **about)
        test = replace(data.test, pixels=test_pixels, store_labels=self.test_labels, ids=self.test_ids, **about)
        held_out = data.valid
        if data.valid.pixels.data_ptr() == data.test.pixels.data_ptr():  # part of the test split, by negative rows
            held_out = replace(test, rows=torch.tensor(valid, dtype=torch.int64)[found_test[list(valid)]])
            found_test[list(valid)] = False
        return replace(
            data,
            train=replace(whole, rows=kept[~is_valid]),
            valid=replace(whole, rows=kept[is_valid]) if data.is_one_store else held_out,
            test=replace(test, rows=found_test.nonzero().flatten()),
            gone=self.rows[~found[self.rows]],
        )

    def _images(self, labels: Tensor, names: tuple[str, ...], ids: RowIds | None = None) -> Images:
        """Rows without pixels, for a request to choose from."""
        return Images(torch.zeros(0), labels, torch.arange(len(labels)), names, self.mean, self.std, ids)


def rows_of(data: Dataset, left_out: Tensor) -> TrainedRows | None:
    """The rows of a dataset; None if they have no digests."""
    train, test = data.train, data.test
    if train.ids is None or test.ids is None:
        return None
    labels, about = (train.store_labels, test.store_labels), (train.mean, train.std)
    return TrainedRows(train.ids, labels[0], data.known_rows, left_out, test.ids, labels[1], *about)


def hash_key(directory: Path, *, make: bool = False) -> bytes:
    """The key of hashed ids beside a run, or a directory further up for references; empty: there is none.

    It is not in the run, so that who gets the run or a bundle cannot try out which row has which hash.
    """
    files = [place / KEY_FILE for place in directory.resolve().parents[:2]]
    with locked(files[0], timeout=60) if make else nullcontext():
        found = [file for file in files if file.is_file()]
        if not found and make:
            with replacing(files[0], PRIVATE) as temporary:
                temporary.write_text(secrets.token_hex(32))
            found = files[:1]
    try:
        return bytes.fromhex(found[0].read_text(encoding="ascii")) if found else b""
    except (OSError, ValueError) as error:
        raise BadCheckpoint(f"{found[0]} is not a key of hashed ids ({error}); restore it") from error


def read_rows(directory: Path) -> TrainedRows | None:
    """The rows of a run; None if it has none: runs of earlier versions, and on datasets that everybody has."""
    if not (directory / ROWS_FILE).exists():
        return None
    tensors, note = read_tensors(directory / ROWS_FILE)
    ids, test = (RowIds(tensors[f"{of}digests"], unpack_names(tensors[f"{of}files"])) for of in ("", "test-"))
    ids = replace(ids, key=hash_key(directory))
    rows = (tensors["labels"], tensors["rows"], tensors["left-out"], test, tensors["test-labels"])
    return TrainedRows(ids, *rows, tuple(note["mean"]), tuple(note["std"]))


def _keys(ids: RowIds | None, labels: Tensor, names: Sequence[str]) -> Keys:
    assert ids is not None, "data of a run with digests has digests"
    return [(bytes(each), names[label]) for each, label in zip(ids.digests.numpy(), labels.tolist(), strict=True)]


def _filled(wanted: Keys, sources: Sequence[tuple[Images, Keys]], last: Tensor) -> tuple[Tensor, Tensor]:
    """The pixels of the wanted images, each from an image of the sources that serves no other, and which were found.

    Of images with the same bytes, those that `last` marks go without if there are too few.
    """
    pixels, found = sources[0][0].pixels.new_zeros(len(wanted), *sources[0][0].pixels.shape[1:]), torch.zeros_like(last)
    for images, keys in sources:
        places: dict[tuple[bytes, str], list[int]] = {}
        for place in reversed(range(len(keys))):
            places.setdefault(keys[place], []).append(place)
        order = [*(~last).nonzero().flatten().tolist(), *last.nonzero().flatten().tolist()]
        pairs = [(row, places[wanted[row]].pop()) for row in order if not found[row] and places.get(wanted[row])]
        if pairs:
            rows, taken = torch.tensor(pairs).unbind(1)
            pixels[rows], found[rows] = images.pixels[taken], True
    return pixels, found


def _name(ids: RowIds, row: int) -> str:
    return (ids.files[row] if ids.files else "") or f"row {row} (sha256:{bytes(ids.digests[row].numpy()).hex()[:12]})"
