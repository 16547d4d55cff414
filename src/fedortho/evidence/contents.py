"""The files of a bundle, as records, and the text that explains them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from fedortho.models.patch import Patch
from fedortho.runs.record import ServedRecord
from fedortho.storage.provenance import Environment
from fedortho.storage.records import Scalar

NEEDED = (
    *("README.txt", "digests.json", "entry.json", "environment.json"),
    *("patch.safetensors", "request.json", "settings.json"),
)
ALLOWED = (*NEEDED, "verdict.json", "report.html", "journal.jsonl")
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


README = """\
Evidence that a model was made to forget: {request}

Made by fedortho from the run {run}.
Model before  {before}
Model after   {after}

Contents
  request.json       the request, the run, and the requests that the run had served before
  entry.json         how it was served: method, settings, accuracies before and after, cost
  settings.json      the network, how it was trained, and the settings of the method
  digests.json       SHA-256 of the models (names, types, shapes and bytes of all tensors), of the patch, the data
                     and the ledger, and the end of the journal
  patch.safetensors  the edit: which kernels are scaled by which factors, and which tensors are replaced
  environment.json   versions, machine and installed packages where this file was made; versions where it was trained
  journal.jsonl, verdict.json, report.html
                     where they exist: the journal's entries of this run, the audits' verdict, and the report without
                     images of the data
  manifest.json      size and SHA-256 of each of these, and a digest over itself; manifest.sig, if it was signed
Not included: images of the data, sums over images, models, and the values that were removed.

What can be checked
  fedortho bundle check FILE
      Computes every digest again; every byte of the archive must follow from them, so a changed byte shows.
      This needs no data. It shows that the parts belong together, not that they are true.
  ... --digest DIGEST
      Whoever changes the contents can make a new manifest. Compare its digest with one that you got another way.
  ... --model BEFORE.safetensors
      Applies the patch to the model before; the result must be the model after, bit for bit.
  ... --run RUN --data-dir DIR
      Repeats the decision with the run and its data; it must give the same patch. Float sums depend on processor,
      versions and threads: on other machines the patch may differ though nobody did wrong.
  ... --public KEY.pub
      The signature must be of this key. A signature proves who made this file, not that its contents are true.

What it does not show
  That the model after is the one in use: compare its digest there. That no copy of the model before was kept. That
  the knowledge is gone from the weights: see the audits in verdict.json, if present, and what they did not test.
  That the journal's entries are complete: its chain can be checked only where the journal is.
  A patch with factors above 0 can be inverted by whoever has it and the model after: weakened is not erased.
"""
