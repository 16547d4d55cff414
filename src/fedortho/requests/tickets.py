"""Tickets: a request that has an id is served once, however often it is asked for."""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from fedortho.data.request import ForgetRequest
from fedortho.errors import FedOrthoError
from fedortho.runs.record import RunRecord, read_run_record
from fedortho.runs.run import Run, open_run
from fedortho.storage.journal import append_entry, read_journal


@dataclass(frozen=True)
class Ticket:
    """The id of a request on a run, whose result is written to `out`."""

    id: str
    run: Run
    request: ForgetRequest
    out: Path | None

    @property
    def details(self) -> dict[str, str]:
        """What the journal notes of it: `out` as seen from its directory, and the digest of the request as it is asked.

        Files that a request names may be deleted after it was served, so their rows cannot be compared.
        """
        if self.out is None:
            raise FedOrthoError(f"the ticket {self.id} needs a directory to write to; give out, and no dry run")
        asked = str(self.request.settled(self.run.record.data.class_names))
        out = os.path.relpath(self.out.absolute(), self.run.path.absolute().parent)
        return {"ticket": self.id, "out": out, "asked": hashlib.sha256(asked.encode()).hexdigest()}

    def finished(self) -> Run | None:
        """The run that the ticket led to; None if it was not served, or its run is gone.

        A ticket that was served for another run, request or `out` is refused.
        """
        directory, details, before = self.run.path.absolute().parent, self.details, self.run.record.model.digest
        entries = [entry for entry in read_journal(directory).entries if entry.details.get("ticket") == self.id]
        executed = [entry for entry in entries if entry.event == "executed"]
        for entry in executed:
            if entry.details != details or entry.before != before:
                what = f"{entry.request} on model {(entry.before or '')[:8]}, written to {entry.details['out']}"
                raise FedOrthoError(f"the ticket {self.id} was served for {what}; give this request another id")
        assert self.out is not None, "details has looked"
        record = read_run_record(self.out)
        if not isinstance(record, RunRecord) or not record.requests or record.requests[-1].ticket != self.id:
            return None
        last, received = record.requests[-1], [entry for entry in entries if entry.details == details]
        if not executed and received and last.model_before == before:  # a crash came between the run and the journal
            models = {"before": before, "after": last.model_after}
            executed = [append_entry(directory, "executed", self.out.name, last.request, **models, details=details)]
        return open_run(self.out) if executed else None
