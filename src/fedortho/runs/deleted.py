"""What was deleted of a run after a rewind: no later request on it may use the same data again."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from fedortho.data.request import ForgetRequest
from fedortho.errors import FedOrthoError
from fedortho.storage.records import read_record, write_record

DELETED = "deleted.json"  # in the directory of the run


@dataclass(frozen=True)
class DeletedRecord:
    """deleted.json: the data that a rewind left out when it deleted what this run had, and the run that it wrote."""

    schema: ClassVar[int] = 1

    without: str
    out: str  # as seen from the directory that holds the run

    def write(self, run: Path) -> None:
        """Write it into the directory of a run."""
        write_record(run / DELETED, self)


def check_deleted(run: Path, without: ForgetRequest, names: Sequence[str]) -> None:
    """Refuse to go on from a run with data for which it was deleted; `without` is what would be left out."""
    if not (run / DELETED).exists():
        return
    told = read_record(DeletedRecord, run / DELETED)
    if not without.settled(names).covers(ForgetRequest.parse(told.without).settled(names)):
        raise FedOrthoError(
            f"{run} was deleted for {told.without} (--delete-before), and this request would use that data again; give "
            f"it to {run.parent / told.out}, which is without it"
        )
