"""The head of a journal as a file that is kept elsewhere: committed, sent to a second machine, handed to an auditor.

Whoever has one finds a journal that was rolled back to before it, rewritten, or removed.
"""

from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import ClassVar

from fedortho.errors import BadRecord
from fedortho.evidence.signature import BadSignature, check_signature, load_key, public_half, require_signer
from fedortho.storage.files import canonical_json
from fedortho.storage.journal import BadJournal, Head, check_journal
from fedortho.storage.records import is_digest, read_record, to_json, write_record


@dataclass(frozen=True)
class PublishedHead:
    """Number and hash of the last entry that a journal had at a time."""

    schema: ClassVar[int] = 1

    number: int
    hash: str
    time: str  # UTC, when it was published
    signer: str | None = None  # public key, as hex
    signature: str | None = None  # hex, over all the rest

    def __post_init__(self) -> None:
        if self.number < 1 or not is_digest(self.hash):
            raise BadRecord(f"it names entry {self.number} with the hash {self.hash[:70]!r}; expected 64 hex digits")

    @property
    def head(self) -> Head:
        return Head(self.number, self.hash)

    @property
    def message(self) -> bytes:
        """What the signature covers."""
        return canonical_json(to_json(replace(self, signature=None))).encode()


def publish_head(directory: Path, out: Path, sign: Path | None = None) -> PublishedHead:
    """Check a journal and write its head to `out`, signed with a private key if one is given.

    A head that is there already must be in the journal: it is replaced by a later one, never by an earlier one.
    """
    journal = check_journal(directory, read_head(out).head if out.exists() else "")
    if not journal.entries:
        raise BadJournal(f"{directory / 'journal.jsonl'} has no entry yet; there is nothing to publish")
    key = None if sign is None else load_key(sign)
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    head = PublishedHead(journal.last.number, journal.last.hash, now, None if key is None else public_half(key))
    if key is not None:
        head = replace(head, signature=key.sign(head.message).hex())
    write_record(out, head)
    return head


def read_head(path: Path, public: Path | None = None) -> PublishedHead:
    """A published head; its signature must fit, and be of the key `public` if one is given."""
    head = read_record(PublishedHead, path)
    if head.signer is not None:
        try:
            check_signature(head.signer, bytes.fromhex(head.signature or ""), head.message)
        except (ValueError, BadSignature) as error:
            raise BadSignature(f"{path} was changed: {error}") from error
    require_signer(path, head.signer, public)
    return head
