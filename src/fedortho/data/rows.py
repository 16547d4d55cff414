"""The rows that a word names: a row, a file name, a glob or the digest of an image's bytes."""

import difflib
import logging
import os
import re
from fnmatch import fnmatchcase
from unicodedata import normalize

import torch

from fedortho.data.images import Dataset, RowIds
from fedortho.errors import FedOrthoError, UnknownName

logger = logging.getLogger(__name__)
SAMPLE = re.compile(r"(?:(\d{1,18})/)?(\d{1,18})")  # row, or client/row
DIGEST = re.compile(r"sha256:([0-9a-f]*)")
LEAST_DIGITS = 8  # of a digest


def find_rows(word: str, ids: RowIds) -> list[int]:
    """The rows of a store that a word names, ascending; none if there are no such rows.

    A word is a row, `sha256:` and at least 8 hex digits, a file name or a glob. A file name is relative to the data
    directory, or a path to it from here.
    """
    if word.isdecimal() and len(word) <= 18:
        return [int(word)] if int(word) < len(ids.digests) else []
    if match := DIGEST.fullmatch(word.lower()):
        return _rows_of_digest(match[1], ids)
    spellings = _spellings(word, ids.root)
    if exact := next(filter(None, map(ids.by_file.get, spellings)), None):
        return exact
    globs = spellings if set(word) & set("*?[") else []
    matching = (file for file in ids.by_file if any(fnmatchcase(file, glob) for glob in globs))
    return sorted(row for file in matching for row in ids.by_file[file])


def _rows_of_digest(digits: str, ids: RowIds) -> list[int]:
    if not LEAST_DIGITS <= len(digits) <= 64:
        expected = f"expected {LEAST_DIGITS} to 64 of those that sha256sum prints"
        raise FedOrthoError(f"sha256:{digits} has {len(digits)} digits; {expected}")
    found = [(digest, row) for digest, row in ids.by_digest if digest.startswith(digits)]
    if found and found[0][0] != found[-1][0]:  # they are sorted
        one, other = (digest[: len(digits) + 8] for digest, _ in (found[0], found[-1]))
        raise FedOrthoError(f"sha256:{digits} begins the digests of several images ({one}, {other}); give more digits")
    return sorted(row for _, row in found)


def _spellings(word: str, root: str) -> list[str]:
    """The file names that a word may mean: as it stands, as a path from here, and below the data directory's name."""
    word = normalize("NFC", word)
    here, base = (os.path.abspath(os.path.expanduser(normalize("NFC", path))) for path in (word, root))
    spelled = [word.removeprefix("./"), word.removeprefix(f"{os.path.basename(base)}/")]
    return [*spelled, os.path.relpath(here, base)]


def training_rows(word: str, data: Dataset) -> list[int]:
    """The training rows that a word of a request names, those of deleted images too; several words may have commas."""
    ids, several = data.train.ids, word.split(",")
    if ids is None:
        raise FedOrthoError(f"samples:{word} names no row, and these images have neither names nor digests; give rows")
    rows = find_rows(word, ids)
    if not rows and len(several) > 1 and any(several):
        return [row for part in several if part for row in training_rows(part, data)]
    if not rows:
        raise no_such_image(word, ids)
    trained = {*data.train.rows.tolist(), *data.gone.tolist()}
    chosen = [row for row in rows if row in trained]
    if not chosen:
        raise FedOrthoError(f"samples:{word} is a validation or test image: the model was not trained on it")
    if others := len(rows) - len(chosen):
        logger.info("samples:%s also names %d validation or test images, which were not trained on", word, others)
    same = torch.cat([(ids.digests == ids.digests[row]).all(1).nonzero().flatten() for row in chosen])
    if twins := sorted(({*same.tolist()} & trained).difference(chosen)):
        names = ", ".join(ids.files[row] if ids.files else str(row) for row in twins[:3])
        logger.warning("samples:%s has copies that the request does not name: %s", word, names)
    return chosen


def no_such_image(word: str, ids: RowIds | None) -> UnknownName:
    """An error that names images whose names are near."""
    files = ids.by_file if ids is not None else {}
    if not files:
        return UnknownName(f"no image {word!r}: images have no file names here; give rows, or sha256: and a digest")
    same = [file for file in files if os.path.basename(file) == os.path.basename(word)]
    near = same[:3] or difflib.get_close_matches(word, list(files)[:20_000], n=3)
    hint = f"did you mean {', '.join(map(repr, near))}?" if near else f"names are such as {next(iter(files))!r};"
    return UnknownName(f"no image {word!r}, and no file of ids; {hint} fedortho data ls lists all")
