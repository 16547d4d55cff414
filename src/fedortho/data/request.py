"""A request to forget classes, clients or samples: its text form, and its forget and retain set."""

import csv
import io
import os
import re
import shlex
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from fedortho.data.decoding import SUFFIXES
from fedortho.data.images import Dataset, Images, RowIds
from fedortho.data.rows import SAMPLE, training_rows
from fedortho.errors import BadCheckpoint, BadSetting, FedOrthoError, unknown
from fedortho.storage.files import read_limited

DIGITS = 18  # of a number, at most
KINDS = ("class", "client", "samples")
FORMS = "class:3, class:cat, client:12 or samples:FILE"
WORD = re.compile(r"""(?:"[^"]*"|'[^']*'|\\.|[^ \t\r\n"'\\])+""", re.DOTALL)  # of a request's text, with its quotes
QUOTED_NAMES = re.compile(r'class:([^"]*,)?"')
Clients = Mapping[int, Tensor]  # the rows that each client holds


class EmptyGroup(FedOrthoError):
    """A request whose forget set or retain set is empty."""


@dataclass(frozen=True)
class ForgetRequest:
    """A request to forget; it may name classes, clients and samples together.

    >>> request = ForgetRequest.parse("class:3,cat client:12")
    >>> request.classes, request.clients
    (('3', 'cat'), (12,))
    >>> str(request)
    'class:3,cat client:12'
    """

    classes: tuple[str, ...] = ()  # labels or names, as given
    clients: tuple[int, ...] = ()
    samples: tuple[str, ...] = ()  # `row`, `client/row` (among that client's images), `hmac:HASH`; or names to resolve

    @classmethod
    def parse(cls, text: str) -> "ForgetRequest":
        """Read `class:3`, `class:3,7`, `class:cat`, `client:12`, `samples:17,4/20`, or several.

        A class name with a comma stands in double quotes, as in CSV: `class:cat,"black, white"`. Quotes around a whole
        word are those of a shell; they keep its spaces. Samples may also be file names, globs or `sha256:DIGEST`, or be
        listed in a file (`samples:FILE`, one a line) or in a column of a table (`samples:FILE.csv:COLUMN`). A word with
        the suffix of an image is never read as a list.
        """
        try:
            words = shlex.split(text)
            if QUOTED_NAMES.search(text):
                words = [word if QUOTED_NAMES.match(word) else shlex.split(word)[0] for word in WORD.findall(text)]
        except ValueError as error:
            raise FedOrthoError(f"{text!r} is not a request: {error}") from error
        found: dict[str, list[str]] = {kind: [] for kind in KINDS}
        for word in words:
            kind, colon, rest = word.partition(":")
            if not colon or not rest:
                quoted = "with quotes around all of it if a name has spaces: 'class:Ankle boot'"
                raise FedOrthoError(f"{word!r} is not a request; write {FORMS}, {quoted}")
            if kind not in KINDS:
                raise unknown("kind of request", kind, KINDS)
            found[kind] += _sample_ids(rest) if kind == "samples" else _listed(rest)
        if not any(found.values()):
            raise FedOrthoError(f"{text!r} asks for nothing; write {FORMS}")
        for word in found["client"]:
            if not word.isdecimal() or len(word) > DIGITS:
                raise FedOrthoError(f"client:{word[:40]} must be a number, counted from 0")
        unique = {kind: tuple(dict.fromkeys(words)) for kind, words in found.items()}
        return cls(unique["class"], tuple(map(int, unique["client"])), unique["samples"])

    @property
    def _words(self) -> tuple[tuple[str, ...], ...]:
        """What is named, in the order of `KINDS`."""
        return self.classes, tuple(map(str, self.clients)), self.samples

    def __str__(self) -> str:
        kinds = zip(KINDS, self._words, strict=True)
        return shlex.join(f"{kind}:{','.join(map(_quoted, words))}" for kind, words in kinds if words)

    @property
    def word(self) -> str:
        """A short word for names of files, such as `class-3-cat-client-12`; long requests may share it."""
        return "".join(sign if sign.isalnum() else "-" for sign in str(self))[:40].strip("-")

    @property
    def kind(self) -> str:
        """`class`, `client` or `samples`; `mixed` if it asks for more than one of them."""
        return self.kinds[0] if len(self.kinds) == 1 else "mixed"

    @property
    def kinds(self) -> list[str]:
        """The kinds that the request names: class, client, samples."""
        return [kind for kind, words in zip(KINDS, self._words, strict=True) if words]

    def __add__(self, other: "ForgetRequest") -> "ForgetRequest":
        pairs = zip(self._words, other._words, strict=True)
        classes, clients, samples = (tuple(dict.fromkeys((*mine, *theirs))) for mine, theirs in pairs)
        return ForgetRequest(classes, tuple(map(int, clients)), samples)

    def settled(self, names: Sequence[str]) -> "ForgetRequest":
        """The same request in canonical form: labels as numbers (as names where a number is another class's name)."""
        numbers = sorted(set(self.labels(names)))
        labels = tuple(names[n] if str(n) in names and names[n] != str(n) else str(n) for n in numbers)
        return ForgetRequest(labels, tuple(sorted(self.clients)), tuple(sorted(self.samples)))

    def spelled(self, names: Sequence[str]) -> "ForgetRequest":
        """The same request with the names of classes as the data spells them: `class:Dress` for `class:dress`."""
        labels = zip(self.classes, self.labels(names), strict=True)
        words = (names[label] if _folded(word) == _folded(names[label]) else word for word, label in labels)
        return replace(self, classes=tuple(dict.fromkeys(words)))

    @property
    def has_names(self) -> bool:
        """Whether samples are named otherwise than by row or hash."""
        return not all(map(_is_id, self.samples))

    def resolved(self, data: Dataset) -> "ForgetRequest":
        """The same request with its samples by row: names, globs and digests are looked up in the training images."""
        rows = [[word] if _is_id(word) else map(str, training_rows(word, data)) for word in self.samples]
        return replace(self, samples=tuple(dict.fromkeys(chain.from_iterable(rows))))

    def hashed(self, ids: RowIds) -> "ForgetRequest":
        """The same request with its rows as keyed hashes, from which nobody without the key learns the rows."""
        words = [word if word.startswith("hmac:") else ids.hashed(word) for word in self.samples]
        return replace(self, samples=tuple(words))

    def covers(self, other: "ForgetRequest") -> bool:
        """Whether this request names everything that `other` names; both in canonical form."""
        return all(set(theirs) <= set(mine) for mine, theirs in zip(self._words, other._words, strict=True))

    def parts(self) -> list["ForgetRequest"]:
        """The parts that are ranked separately: each class, and all clients and samples together."""
        single = ForgetRequest(clients=self.clients, samples=self.samples)
        return [ForgetRequest((word,)) for word in self.classes] + [single] * bool(self.clients or self.samples)

    def on_client(self, client: int) -> "ForgetRequest":
        """The part that concerns this client: classes, the client itself, its samples and samples named by row only."""
        mine = tuple(word for word in self.samples if "/" not in word or word.startswith(f"{client}/"))
        return ForgetRequest(self.classes, (client,) if client in self.clients else (), mine)

    def holders(self) -> int | None:
        """How many clients can hold forget images; None: any number."""
        if self.classes or any("/" not in word for word in self.samples):
            return None
        return len(self.named_clients())

    def named_clients(self, clients: Clients | None = None) -> set[int]:
        """Clients that the request names, and those that hold its samples; samples named by row need `clients`.

        >>> sorted(ForgetRequest.parse("class:3 client:2 samples:0/5,17").named_clients({4: torch.tensor([16, 17])}))
        [0, 2, 4]
        """
        by_client = {int(word.partition("/")[0]) for word in self.samples if "/" in word}
        rows = torch.tensor([int(word) for word in self.samples if "/" not in word], dtype=torch.int64)
        by_row = {client for client, own in (clients or {}).items() if len(rows) and bool(torch.isin(rows, own).any())}
        return {*self.clients, *by_client, *by_row}

    def labels(self, names: Sequence[str]) -> list[int]:
        """The labels of the classes asked for."""
        return [_label(word, names) for word in self.classes]

    def mask(self, images: Images, clients: Clients | None = None) -> Tensor:
        """A mask of the forget set, (n,) bool; `clients` are the rows that each client holds."""
        chosen = torch.zeros(len(images), dtype=torch.bool)
        if self.classes:
            chosen |= torch.isin(images.labels, torch.tensor(self.labels(images.names)))
        rows = [_rows_of(client, clients) for client in self.clients]
        if bool((images.rows >= 0).any()):  # no sample has a negative row, that of a validation store of its own
            rows += [torch.tensor([_row(word, clients, images.ids) for word in self.samples], dtype=torch.int64)]
        if rows:
            chosen |= torch.isin(images.rows, torch.cat(rows))
        return chosen

    def split(
        self, images: Images, clients: Clients | None = None, *, gone: Tensor | None = None
    ) -> tuple[Images, Images]:
        """The forget set and the retain set; raises EmptyGroup if a sample is missing or a set is empty.

        Where images were deleted (their rows are `gone`), the forget set may be empty.
        """
        deleted = [] if gone is None else gone.tolist()
        known = {*images.rows.tolist(), *deleted} if self.samples else set()
        if missing := [word for word in self.samples if _row(word, clients, images.ids) not in known]:
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            why = f"; ids are rows {min(known)} to {max(known)} without the validation set"
            why = ": that image is in the validation set, or was forgotten before" if "/" in missing[0] else why
            raise EmptyGroup(f"no training image has the id {', '.join(missing[:3])}{more}{why}")
        chosen, text = self.mask(images, clients), str(self)
        short = text if len(text) < 60 else f"{text[:57]}..."
        if not chosen.any() and not deleted:
            why = "the forget set is empty or was forgotten before"
            raise EmptyGroup(f"{short} selects none of the {len(images)} images; {why}")
        if chosen.all():
            raise EmptyGroup(f"{short} selects all {len(images)} images; the retain set is empty")
        return images.subset(chosen), images.subset(~chosen)


def _is_id(word: str) -> bool:
    return SAMPLE.fullmatch(word) is not None or word.startswith("hmac:")


def _sample_ids(text: str) -> list[str]:
    """The words of `samples:TEXT`: ids, the lines or a column of a file, or TEXT itself, which names images."""
    if all(SAMPLE.fullmatch(word) for word in text.split(",")):
        return [_plain_id(word) for word in text.split(",")]
    table, _, column = text.rpartition(":")
    is_table = table.lower().endswith(".csv")
    path = Path(table if is_table else text).expanduser()
    if text.startswith("hmac:"):
        return text.split(",")
    if text.startswith("sha256:") or path.suffix.lower() in SUFFIXES or not (is_table or os.path.isfile(path)):
        return [text]
    try:
        stream = io.StringIO(read_limited(path).decode("utf-8-sig"), newline="")
        rows = csv.DictReader(stream) if is_table else None
        if rows and column not in (rows.fieldnames or ()):
            raise unknown(f"column of {path}", column, rows.fieldnames or ())
        lines = [line.strip() for line in ((row[column] or "" for row in rows) if rows else stream)]
    except (BadCheckpoint, UnicodeDecodeError, csv.Error) as error:
        raise FedOrthoError(f"samples:{text}: {path} cannot be read ({error}); give a text file") from error
    parts = [line.split() if all(map(SAMPLE.fullmatch, line.split())) else [line] for line in lines]
    words = [_plain_id(word) for word in chain.from_iterable(parts)]
    if not words:
        raise FedOrthoError(f"{path} names no sample; write one row, client/row, file name or sha256:DIGEST a line")
    return words


def _plain_id(word: str) -> str:
    """An id as it is written here, so that equal ids are equal words; other words as they are.

    >>> _plain_id("007"), _plain_id("4/020"), _plain_id("007.png")
    ('7', '4/20', '007.png')
    """
    return "/".join(str(int(part)) for part in word.split("/")) if SAMPLE.fullmatch(word) else word


def _listed(text: str) -> list[str]:
    try:
        return [word for word in next(csv.reader([text], strict=True)) if word]
    except csv.Error as error:
        raise FedOrthoError(f"{text!r} is not a list of names: {error}; quote them as in CSV") from error


def _quoted(word: str) -> str:
    """A name as `_listed` reads it."""
    return '"' + word.replace('"', '""') + '"' if set(word) & set(',"\r\n') else word


def _folded(name: str) -> str:
    """A name without what readers do not see: case, spaces around it, accents as characters of their own (macOS)."""
    return unicodedata.normalize("NFC", name.strip().casefold())


def _label(word: str, names: Sequence[str]) -> int:
    same = [label for label, name in enumerate(names) if name == word]
    if not same and word.isdecimal() and len(word) <= DIGITS and int(word) < len(names):
        return int(word)
    same = same or [label for label, name in enumerate(names) if _folded(name) == _folded(word)]
    if len(same) > 1:
        raise FedOrthoError(f"{len(same)} classes are called {word!r}: {', '.join(map(str, same))}; name one by number")
    if not same:
        numbers = [] if [*names] == [*map(str, range(len(names)))] else [f"0 to {len(names) - 1}"]
        raise unknown("class", word, [*numbers, *map(_quoted, names)])
    return same[0]


def _rows_of(client: int, clients: Clients | None) -> Tensor:
    if clients is None:
        raise FedOrthoError(f"client:{client} needs a federation; this model was trained without clients")
    if client not in clients:
        raise FedOrthoError(f"no client {client}; clients run 0 to {max(clients, default=0)}")
    return clients[client]


def _row(word: str, clients: Clients | None, ids: RowIds | None) -> int:
    if word.startswith("hmac:"):
        if ids is None or word not in ids.by_hash:
            advice = "its key is not here; put hash-ids.key beside the run"
            if ids is not None and ids.key:
                advice = f"none of the {len(ids.digests)} rows has it: there is no such row, or the key is another one"
            raise FedOrthoError(f"samples:{word} is a hashed id, and {advice}")
        return ids.by_hash[word]
    if (match := SAMPLE.fullmatch(word)) is None:
        what = "neither ids nor a readable file; names of images: request.resolved(data)"
        raise FedOrthoError(f"samples:{word[:60]} names {what}")
    client, row = match.groups()
    rows = None if client is None else _rows_of(int(client), clients)
    if rows is not None and int(row) >= len(rows):
        raise FedOrthoError(f"no sample {word}; client {client} has rows 0 to {len(rows) - 1}")
    return int(row if rows is None else rows[int(row)])


def as_request(request: ForgetRequest | str, data: Dataset) -> ForgetRequest:
    """A request from its text, with its samples by row of this data."""
    if not isinstance(request, ForgetRequest | str):
        raise BadSetting(f"the request is {request!r}; expected text, such as 'class:3' or 'samples:0,1'")
    return (ForgetRequest.parse(request) if isinstance(request, str) else request).resolved(data)


def union_of(requests: Sequence[ForgetRequest]) -> ForgetRequest | None:
    """One request that names everything these requests name; None if there are none."""
    return sum(requests[1:], requests[0]) if requests else None
