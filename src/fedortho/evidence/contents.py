"""The files of a bundle, as records; README.txt beside this module explains them to whoever opens one."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import ClassVar

from fedortho.audits.verdict import Verdict
from fedortho.errors import BadRecord, FedOrthoError
from fedortho.evidence.chain import Chain
from fedortho.models.patch import Patch
from fedortho.runs.record import ServedRecord
from fedortho.storage.provenance import Environment, environment
from fedortho.storage.records import Scalar

MANIFEST, SIGNATURE = "manifest.json", "manifest.sig"


@dataclass(frozen=True)
class FileRecord:
    """One file of a bundle, as the manifest lists it."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """manifest.json: every file of the bundle, and a digest over the manifest itself."""

    schema: ClassVar[int] = 2

    made_by: str
    files: Mapping[str, FileRecord]
    signer: str | None  # the public key, as hex, whose holder signed it
    digest: str  # over the manifest without this line, and so over everything


@dataclass(frozen=True)
class RequestFile:
    """request.json: the request, the run that served it, and the requests before it."""

    request: str
    run: str
    number: int
    earlier: tuple[str, ...]

    def __post_init__(self) -> None:
        is_plain = self.run not in ("", "..") and Path(self.run).name == self.run
        if not is_plain or len(self.run) > 255 or not self.run.isprintable():
            raise BadRecord(f"request.json: run is {self.run!r:.80}; expected the plain name of a directory")


@dataclass(frozen=True)
class NetworkRecord:
    """The architecture of the model."""

    name: str
    num_classes: int
    channels: int


@dataclass(frozen=True)
class SettingsFile:
    """settings.json: the network, how it was trained, and the hyper-parameters of the method."""

    model: NetworkRecord
    training: Mapping[str, Scalar]
    forgetting: Mapping[str, Scalar]


@dataclass(frozen=True)
class JournalEnd:
    """Number and hash of the last entry of the journal."""

    number: int
    hash: str


@dataclass(frozen=True)
class DigestsFile:
    """digests.json: digests of the models, the patch, the data and the ledger, and the end of the journal."""

    before: str
    after: str
    run_now: str  # the model after, unless the run has served or trained more since
    patch: str
    data: str
    ledger: str | None
    journal: JournalEnd | None


@dataclass(frozen=True)
class EnvironmentFile:
    """environment.json: where the bundle was made, with all installed packages, and where the run was trained."""

    here: Environment
    packages: tuple[str, ...]
    run: Environment


RECORDS: Mapping[str, type] = {  # NAME.json → its kind
    "request": RequestFile,
    "entry": ServedRecord,
    "settings": SettingsFile,
    "digests": DigestsFile,
    "environment": EnvironmentFile,
}
NEEDED = ("README.txt", "patch.safetensors", *(f"{name}.json" for name in RECORDS))
ALLOWED = (*NEEDED, "verdict.json", "report.html", "journal.jsonl")


def made_here() -> str:
    """This version, as a manifest names it."""
    return f"fedortho {environment().versions['fedortho']}"


def readme_text(request: RequestFile, digests: DigestsFile) -> bytes:
    """README.txt, which this version writes into a bundle of these."""
    words = {"request": request.request, "run": request.run, "before": digests.before, "after": digests.after}
    return files("fedortho.evidence").joinpath("README.txt").read_text("utf-8").format(**words).encode()


class BadBundle(FedOrthoError):
    """A bundle that is damaged, was changed, whose files contradict each other, or that does not tell the truth."""


@dataclass(frozen=True)
class Bundle:
    """A bundle whose files match its manifest and agree with each other."""

    source: str
    files: Mapping[str, bytes]
    manifest: Manifest
    request: RequestFile
    entry: ServedRecord
    settings: SettingsFile
    digests: DigestsFile
    environment: EnvironmentFile
    patch: Patch
    verdict: Verdict | None = None
    chain: Chain = field(default_factory=Chain)
