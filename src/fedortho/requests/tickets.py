"""Tickets: a request that has an id is served once, however often it is asked for."""

import hashlib
import hmac
from dataclasses import dataclass
from pathlib import Path

from fedortho.data.request import ForgetRequest
from fedortho.errors import FedOrthoError
from fedortho.requests.transaction import Step, relative_out, settle
from fedortho.runs.record import RunRecord, read_run_record
from fedortho.runs.rows import hash_key
from fedortho.runs.run import Run, open_run
from fedortho.storage.journal import read_journal


@dataclass(frozen=True)
class Ticket:
    """The id of a request on a run, whose result is written to `out`."""

    id: str
    run: Run
    request: ForgetRequest  # as it is asked: names are not resolved, and rows not hashed
    out: Path | None

    @property
    def details(self) -> dict[str, str]:
        """What the journal notes of it: `out` as seen from its directory, and the digest of the request as it is asked.

        Files that a request names may be deleted after it was served, so their rows cannot be compared. With a key of
        hashed ids beside the run the digest is keyed: nobody without it can try out which rows were asked for.
        """
        return self._details(hash_key(self.run.path))

    def _details(self, key: bytes) -> dict[str, str]:
        if self.out is None:
            raise FedOrthoError(f"the ticket {self.id} needs a directory to write to; give out, and no dry run")
        asked = str(self.request.settled(self.run.record.data.class_names)).encode()
        digest = hmac.digest(key, asked, "sha256") if key else hashlib.sha256(asked).digest()
        return {"ticket": self.id, "out": relative_out(self.run, self.out), "asked": digest.hex()}

    def finished(self) -> Run | None:
        """The run that the ticket led to; None if it was not served, or its run is gone.

        A ticket that was served for another run, request or `out` is refused.
        """
        directory, before = self.run.path.absolute().parent, self.run.record.model.digest
        known = (self.details, self._details(b""))  # the key may be younger than the entry
        entries = [entry for entry in read_journal(directory).entries if entry.details.get("ticket") == self.id]
        executed = [entry for entry in entries if entry.event == "executed"]
        for entry in executed:
            told = {name: value for name, value in entry.details.items() if name in self.details}
            if told not in known or entry.before != before:
                what = f"{entry.request} on model {(entry.before or '')[:8]}, written to {entry.details['out']}"
                raise FedOrthoError(f"the ticket {self.id} was served for {what}; give this request another id")
        assert self.out is not None, "details has looked"
        record = read_run_record(self.out)
        if not isinstance(record, RunRecord) or not record.requests or record.requests[-1].ticket != self.id:
            return None
        received = [entry for entry in entries if entry.details in known]
        if not executed and (not received or record.requests[-1].model_before != before):
            return None
        done = open_run(self.out)
        if not executed:  # a crash came between the run and the journal
            settle(self.run, done, Step(details=received[-1].details))
        return done
