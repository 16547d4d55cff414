"""The images of a dataset with their rows, classes, file names and digests."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fedortho.data.images import Dataset, Images
from fedortho.data.request import ForgetRequest
from fedortho.data.rows import find_rows, no_such_image

SPLITS = ("train", "valid", "test")


@dataclass(frozen=True)
class ImageRow:
    """One image of a dataset: its row, by which requests name it, and what else it is known by."""

    split: str  # train, valid or test; rows of test images are numbers of their own
    row: int
    label: str  # the name of its class
    file: str  # relative to the data directory; empty: it has none
    digest: str  # SHA-256 of its encoded bytes, as sha256sum prints it; empty: it is not known


def list_images(data: Dataset, words: Iterable[str] = (), *, label: str = "", limit: int = 0) -> list[ImageRow]:
    """The images of a dataset, or those that words name: training, validation and test images.

    A word is a file name, a glob, `sha256:DIGEST`, or the row of a training or validation image. With `label` only the
    images of this class are listed, with `limit` at most so many.
    """
    words = list(words)
    found = [row for word in words for row in _named(data, word)]
    if not words:
        found = [row for split in SPLITS for row in _described(data, split, getattr(data, split).rows.tolist())]
    name = data.train.names[ForgetRequest((label,)).labels(data.train.names)[0]] if label else ""
    return [row for row in dict.fromkeys(found) if name in ("", row.label)][: limit or None]


def _named(data: Dataset, word: str) -> list[ImageRow]:
    found: list[ImageRow] = []
    for split in SPLITS[:2] if word.isdecimal() else SPLITS:
        images: Images = getattr(data, split)
        if images.ids is not None:
            rows = find_rows(word, images.ids)
            rows = [*rows, *(row - len(images.pixels) for row in rows)]  # own validation images count from the end
            found += _described(data, split, sorted({*images.rows.tolist()}.intersection(rows)))
    if not found:
        raise no_such_image(word, data.train.ids)
    return found


def _described(data: Dataset, split: str, rows: Sequence[int]) -> list[ImageRow]:
    images: Images = getattr(data, split)
    ids, found = images.ids, []
    for row in rows:
        file = ids.files[row] if ids is not None and ids.files else ""
        digest = "" if ids is None else bytes(ids.digests[row].numpy()).hex()
        found.append(ImageRow(split, row, images.names[int(images.store_labels[row])], file, digest))
    return found
