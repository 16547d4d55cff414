"""The images that a run was trained on, by digest: its data is recognised after forgotten images were deleted from it.

RUN/rows.safetensors, readable by its owner only, has digest, label and file name of every row. It is in no bundle.
"""

import secrets
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from fedortho.data.cache import pack_names, unpack_names
from fedortho.data.images import Dataset, Images, RowIds
from fedortho.data.request import Clients, ForgetRequest
from fedortho.errors import BadCheckpoint, BadData
from fedortho.runs.settings import FederateSettings, TrainSettings, partitioned
from fedortho.storage.files import PRIVATE, damage_named, locked, read_limited, read_tensors, replacing, write_tensors

ROWS_FILE = "rows.safetensors"
KEY_FILE = "hash-ids.key"
PREFIXES = {"train": "", "test": "test-", "valid": "valid-"}  # of the names of tensors, by split


@dataclass(frozen=True)
class Store:
    """What each row of a store of images is known by, without its pixels."""

    ids: RowIds
    labels: Tensor

    def mask(self, request: ForgetRequest, names: Sequence[str], clients: Clients | None = None) -> Tensor:
        """A mask of the rows that a request names."""
        rows = torch.arange(len(self.labels))
        return request.mask(Images(torch.zeros(0), self.labels, rows, tuple(names), (), (), self.ids), clients)

    def unnamed(self, mask: Tensor) -> "Store":
        """The same without the file names of these rows."""
        files = zip(self.ids.files, mask.tolist(), strict=False)
        return replace(self, ids=replace(self.ids, files=tuple("" if is_gone else file for file, is_gone in files)))

    def name(self, row: int) -> str:
        """The file name of a row, or its number and digest."""
        file = self.ids.files[row] if self.ids.files else ""
        return file or f"row {row} (sha256:{bytes(self.ids.digests[row].numpy()).hex()[:12]})"

    def filled(self, sources: Sequence[Images], names: Sequence[str], last: Tensor) -> tuple[Images, Tensor]:
        """The store's images, recognised by bytes and class in the sources, each once, and a mask of those found.

        Of images with the same bytes, those that `last` marks go without if there are too few.
        """
        wanted, first = _keys(self.ids, self.labels, names), sources[0]
        pixels, found = first.pixels.new_zeros(len(wanted), *first.pixels.shape[1:]), torch.zeros_like(last)
        order = [*(~last).nonzero().flatten().tolist(), *last.nonzero().flatten().tolist()]
        for images in sources:
            places: dict[tuple[bytes, str], list[int]] = {}
            for place, key in reversed([*enumerate(_keys(images.ids, images.store_labels, images.names))]):
                places.setdefault(key, []).append(place)
            pairs = [(row, places[wanted[row]].pop()) for row in order if not found[row] and places.get(wanted[row])]
            if pairs:
                rows, taken = torch.tensor(pairs).unbind(1)
                pixels[rows], found[rows] = images.pixels[taken], True
        ids = replace(self.ids, root="" if first.ids is None else first.ids.root)
        return replace(first, pixels=pixels, store_labels=self.labels, ids=ids, names=tuple(names)), found


def _keys(ids: RowIds | None, labels: Tensor, names: Sequence[str]) -> list[tuple[bytes, str]]:
    """Digest and class of each image."""
    assert ids is not None, "data of a run with digests has digests"
    return [(bytes(each), names[label]) for each, label in zip(ids.digests.numpy(), labels.tolist(), strict=True)]


@dataclass(frozen=True)
class TrainedRows:
    """The stores of a run's data, and the rows that it was trained or validated on."""

    stores: Mapping[str, Store]  # train, test and, if validation images have a directory of their own, valid
    rows: Tensor  # of training and validation images in the training store, also of those left out
    left_out: Tensor  # rows that were forgotten before the run was trained
    mean: tuple[float, ...]
    std: tuple[float, ...]
    clients: Clients | None = None  # the rows that each client of a federation holds or held

    def save(self, directory: Path) -> None:
        tensors = {"rows": self.rows, "left-out": self.left_out}
        for split, store in self.stores.items():
            known = {"digests": store.ids.digests, "files": pack_names(store.ids.files), "labels": store.labels}
            tensors |= {f"{PREFIXES[split]}{key}": tensor for key, tensor in known.items()}
        write_tensors(directory / ROWS_FILE, tensors, {"mean": self.mean, "std": self.std}, mode=PRIVATE)

    def without_names(self, request: ForgetRequest, names: Sequence[str]) -> "TrainedRows":
        """The same without the file names of images that a request names; of no training image if it has hashes."""
        classes = ForgetRequest(request.classes)  # they name test and validation images, too
        gone = {split: store.mask(classes, names) for split, store in self.stores.items()}
        is_hashed = any(word.startswith("hmac:") for word in request.samples)  # a missing name would tell its row
        gone["train"] = torch.ones_like(gone["train"]) if is_hashed else self._named(request, names)
        return replace(self, stores={split: store.unnamed(gone[split]) for split, store in self.stores.items()})

    def left_out_besides(
        self, request: ForgetRequest, names: Sequence[str], other: "TrainedRows | None" = None
    ) -> Tensor:
        """The rows left out of training that a request does not name and another run has not left out."""
        rest = self.left_out[~self._named(request, names)[self.left_out]]
        return rest if other is None else rest[~torch.isin(rest, other.left_out)]

    def _named(self, request: ForgetRequest, names: Sequence[str]) -> Tensor:
        return self.stores["train"].mask(request, names, self.clients)

    def restored(
        self, data: Dataset, names: Sequence[str], valid: Sequence[int], excluded: ForgetRequest | None
    ) -> Dataset:
        """The run's data in what is left of it: rows keep their numbers, those of deleted images are `gone`.

        Images may be missing only if they match `excluded`, what the run has forgotten or was trained without; images
        that the run did not have are not used.
        """
        excluded = excluded or ForgetRequest()
        classes = ForgetRequest(excluded.classes)
        sources = {"train": [data.train], "test": [data.test, data.train], "valid": [data.valid]}
        made: dict[str, Images] = {}
        found: dict[str, Tensor] = {}
        lost: list[str] = []
        for split, store in self.stores.items():
            needed, may_lack = torch.ones(len(store.labels), dtype=torch.bool), store.mask(classes, names)
            if split == "train":
                needed[:], needed[self.rows] = False, True
                may_lack = self._named(excluded, names)
                may_lack[self.left_out] = True
            images, found[split] = store.filled(sources[split], names, may_lack)
            made[split] = replace(images, mean=self.mean, std=self.std)
            lost += [store.name(row) for row in (needed & ~found[split] & ~may_lack).nonzero().flatten().tolist()]
        if lost:
            more = f" and {len(lost) - 3} more" if len(lost) > 3 else ""
            raise BadData(f"it lacks images that the run has not forgotten: {', '.join(lost[:3])}{more}")
        chosen, kept = torch.tensor(valid, dtype=torch.int64), self.rows[found["train"][self.rows]]
        if "valid" in found:  # rows of a store of their own count from its end
            held_out = replace(made["valid"], rows=found["valid"].nonzero().flatten() - len(found["valid"]))
        elif len(chosen) and int(chosen[0]) < 0:  # part of the test split, by negative rows
            held_out = replace(made["test"], rows=chosen[found["test"][chosen]])
            found["test"][chosen] = False
        else:
            held_out = replace(made["train"], rows=kept[torch.isin(kept, chosen)])
        return replace(
            data,
            train=replace(made["train"], rows=kept[~torch.isin(kept, chosen)]),
            valid=held_out,
            test=replace(made["test"], rows=found["test"].nonzero().flatten()),
            gone=self.rows[~found["train"][self.rows]],
        )


def rows_of(data: Dataset, left_out: Tensor) -> TrainedRows | None:
    """The rows of a dataset; None if they have no digests."""
    splits = {"train": data.train, "test": data.test} | ({"valid": data.valid} if data.valid_digest else {})
    stores = {split: Store(part.ids, part.store_labels) for split, part in splits.items() if part.ids is not None}
    if stores.keys() != splits.keys():
        return None
    return TrainedRows(stores, data.known_rows, left_out, data.train.mean, data.train.std)


def read_rows(directory: Path, settings: TrainSettings) -> TrainedRows | None:
    """The rows of a run; None if it has none: runs of earlier versions, and on datasets that everybody has."""
    if not (directory / ROWS_FILE).exists():
        return None
    tensors, note = read_tensors(directory / ROWS_FILE)
    stores, key = {}, hash_key(directory)
    with damage_named(directory / ROWS_FILE):
        for split, prefix in PREFIXES.items():
            if split != "valid" or f"{prefix}digests" in tensors:
                digests, files, labels = (tensors[f"{prefix}{part}"] for part in ("digests", "files", "labels"))
                stores[split] = Store(RowIds(digests, unpack_names(files), key=key), labels)
        known = TrainedRows(stores, tensors["rows"], tensors["left-out"], tuple(note["mean"]), tuple(note["std"]))
    if not isinstance(settings, FederateSettings):
        return known
    return replace(known, clients=partitioned(known.rows, stores["train"].labels, settings, settings.partition_seed))


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
        return bytes.fromhex(read_limited(found[0], 1024).decode("ascii")) if found else b""
    except ValueError as error:
        raise BadCheckpoint(f"{found[0]} is not a key of hashed ids ({error}); restore it") from error
