"""Evidence of one served request in one file, for an auditor who has neither the data nor trust.

A bundle holds the request, digests of the model before and after, the patch, settings, results and environment. It
holds no image of the data, no ledger, no model and nothing of what was removed. `manifest.json` lists every file with
its size and SHA-256 and ends in a digest over itself; the archive has one form (`archive.py`), so any other byte shows.
"""

import hashlib
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from html import unescape
from importlib import metadata
from pathlib import Path
from typing import Any

from fedortho.data.request import ForgetRequest
from fedortho.errors import FedOrthoError
from fedortho.evidence.canonical_zip import LARGEST, BadArchive, check_form, pack_files, unpack_files
from fedortho.evidence.redaction import without_images
from fedortho.evidence.signature import BadSignature, check_signature, load_key, load_public, public_half
from fedortho.models.patch import Patch, load_patch
from fedortho.runs.run import Run
from fedortho.runs.served import index_of_request
from fedortho.storage.files import canonical_json, file_digest, replacing
from fedortho.storage.journal import parse_entry, read_journal
from fedortho.storage.provenance import environment, read_verdict

BUNDLE_SCHEMA = 1
NEEDED = (
    *("README.txt", "digests.json", "entry.json", "environment.json"),
    *("patch.safetensors", "request.json", "settings.json"),
)
EXTRAS = ("verdict.json", "report.html")
ALLOWED = (*NEEDED, *EXTRAS, "journal.jsonl")
MANIFEST, SIGNATURE = "manifest.json", "manifest.sig"

README = """\
Evidence that a model was made to forget: {request}

Made by fedortho from the run {run}.
Model before  {before}
Model after   {after}

What is here
  request.json       what was asked, of which run, and what had been forgotten before
  entry.json         how it was served: settings, accuracies before and after, costs
  settings.json      which network, how it was trained, how it was made to forget
  digests.json       SHA-256 of the models (names, types, shapes and bytes of all tensors), of the patch, the data
                     and the ledger, and where the journal ended
  patch.safetensors  what was changed: which kernels, by which factors, and what took the place of other tensors
  environment.json   versions, machine and installed packages where this file was made; versions where it was trained
  journal.jsonl, verdict.json, report.html
                     if there were such: the journal's entries of this run, the audits' verdict, and the report, in
                     which images of data are left out
  manifest.json      size and SHA-256 of each of these, and a digest over itself; manifest.sig, if it was signed
Not here: images of the data, whether trained or tested on, sums over images, models, and the values that were removed.

What can be checked
  fedortho bundle check FILE
      Every digest is computed again, and every byte of the archive must follow from them. A changed byte shows.
      This needs no data. It shows that the parts belong together, not that they are true.
  ... --digest DIGEST
      Whoever changes the contents can make a new manifest. Compare its digest with one that you got another way.
  ... --model BEFORE.safetensors
      The patch is applied to the model before; the result must be the model after, bit for bit.
  ... --run RUN --data-dir DIR
      With the run and its data at hand the decision is made again, and must give the same patch. Float sums depend
      on processor, versions and threads: on other machines the patch may differ though nobody did wrong.
  ... --public KEY.pub
      The signature must be of this key. A signature proves who made this file, not that what it says is true.

What it does not show
  That the model after is the one in use: compare its digest there. That no copy of the model before was kept. That
  the knowledge is gone from the weights: see the audits in verdict.json, if there are any, and what they did not test.
  That the journal's entries are all there were: its chain can be checked only where the journal is.
  A patch with factors above 0 can be inverted by whoever has it and the model after: what it weakened is not erased.
"""


class BadBundle(FedOrthoError):
    """A bundle that is damaged, was changed, or contradicts itself."""


@dataclass(frozen=True)
class Bundle:
    """A bundle whose files are what its manifest says and agree with each other."""

    source: str
    files: Mapping[str, bytes]
    manifest: Mapping[str, Any]
    request: Mapping[str, Any]
    entry: Mapping[str, Any]
    settings: Mapping[str, Any]
    digests: Mapping[str, Any]
    environment: Mapping[str, Any]
    patch: Patch

    @property
    def digest(self) -> str:
        """Of the manifest, and so of everything: what to compare by another way."""
        return str(self.manifest["digest"])

    @property
    def signer(self) -> str | None:
        """The public key, as hex, whose holder signed it."""
        signer: str | None = self.manifest["signer"]
        return signer


def make_bundle(
    run: Run, request: ForgetRequest, out: Path, *, sign: Path | None = None, journal: Path | None = None
) -> Bundle:
    """Write the evidence of one of a run's served requests; the same run gives the same bytes on the same machine.

    `journal` is the directory with the journal that tells of the request, if that is not the one beside the run.
    """
    if out.exists():
        raise FedOrthoError(f"{out} is there already; evidence is never overwritten: choose another -o")
    files = _collect(run, index_of_request(run, request), journal or run.path.resolve().parent)
    key = None if sign is None else load_key(sign)
    listed = {name: _about(data) for name, data in files.items()}
    body = {
        "schema": BUNDLE_SCHEMA,
        "made-by": f"fedortho {environment()['versions']['fedortho']}",
        "files": listed,
        "signer": None if key is None else public_half(key),
    }
    files[MANIFEST] = _spelled(body | {"digest": _digest(canonical_json(body).encode())})
    if key is not None:
        files[SIGNATURE] = key.sign(files[MANIFEST]).hex().encode() + b"\n"
    archive = pack_files(files)
    bundle = read_bundle(archive, str(out))  # nothing leaves that would not pass
    with replacing(out) as temporary:
        temporary.write_bytes(archive)
    return bundle


def open_bundle(path: Path, *, digest: str = "", public: Path | None = None) -> Bundle:
    """Check all that can be checked of a bundle by itself: every byte, and that its parts agree.

    `digest` is the manifest's, as it was told by another way; `public` the key that must have signed it.
    """
    try:
        if path.stat().st_size > LARGEST:
            raise BadArchive(f"{path} has more than {LARGEST >> 20} MB: it is no bundle")
        archive = path.read_bytes()
    except OSError as error:
        raise BadBundle(f"{path} cannot be read: {error.strerror}") from error
    bundle = read_bundle(archive, str(path))
    if digest and digest != bundle.digest:
        raise BadBundle(f"{path}: {MANIFEST} has the digest {bundle.digest}, not {digest}: it is another bundle")
    if public is not None and (wanted := load_public(public)) != bundle.signer:
        signer = f"signed by the key {bundle.signer[:16]}" if bundle.signer else "not signed"
        raise BadSignature(f"{path} is {signer}; {public} is the key {wanted[:16]}")
    return bundle


def read_bundle(archive: bytes, source: str) -> Bundle:
    """The bundle in these bytes, checked."""
    files = unpack_files(archive, source)
    manifest = _read_manifest(files, source)
    for name, about in manifest["files"].items():
        if _about(files[name]) != about:
            raise BadBundle(f"{source}: {name} was changed: its size or SHA-256 is not what {MANIFEST} lists")
    check_form(archive, files, source)
    if signer := manifest["signer"]:
        _check_signed(files, signer, source)
    return _agreeing(files, manifest, source)


def _read_manifest(files: Mapping[str, bytes], source: str) -> dict[str, Any]:
    manifest = _json(files, MANIFEST, source)
    body = {key: value for key, value in manifest.items() if key != "digest"}
    if _spelled(manifest) != files[MANIFEST] or manifest.get("digest") != _digest(canonical_json(body).encode()):
        raise BadBundle(f"{source}: {MANIFEST} was changed: its digest is not that of what it says")
    if manifest.get("schema") != BUNDLE_SCHEMA:
        raise BadBundle(
            f"{source}: {MANIFEST} is of schema {manifest.get('schema')}; this version reads {BUNDLE_SCHEMA}"
        )
    listed = manifest.get("files")
    if not isinstance(listed, dict) or not isinstance(manifest.get("signer", 0), str | None):
        raise BadBundle(f"{source}: {MANIFEST} does not list files and signer")
    there = files.keys() - {MANIFEST} - ({SIGNATURE} if manifest["signer"] else set())
    for name in sorted({*listed, *NEEDED} - there):
        raise BadBundle(f"{source} lacks {name}")
    for name in sorted((there - listed.keys()) | (there - {*ALLOWED})):
        raise BadBundle(f"{source} holds {name}, which does not belong there")
    return manifest


def _check_signed(files: Mapping[str, bytes], signer: str, source: str) -> None:
    if SIGNATURE not in files:
        raise BadBundle(f"{source} lacks {SIGNATURE}, though {MANIFEST} names a signer")
    try:
        signature = bytes.fromhex(files[SIGNATURE].decode("ascii"))
        check_signature(signer, signature, files[MANIFEST])
    except (ValueError, BadSignature) as error:
        raise BadBundle(f"{source}: {SIGNATURE} does not fit: {error}") from error
    if files[SIGNATURE] != signature.hex().encode() + b"\n":
        raise BadBundle(f"{source}: {SIGNATURE} is not spelled as signatures are")


def _agreeing(files: Mapping[str, bytes], manifest: Mapping[str, Any], source: str) -> Bundle:
    """The bundle, if what its files tell twice is the same both times."""
    request, entry, settings, digests, where = (
        _json(files, f"{name}.json", source) for name in ("request", "entry", "settings", "digests", "environment")
    )
    patch = _patch(files["patch.safetensors"], source)
    served = entry["digests"] if isinstance(entry.get("digests"), dict) else {}
    told = {
        "before": (digests.get("before"), patch.before, served.get("before")),
        "after": (digests.get("after"), patch.after, served.get("after")),
        "request": (request.get("request"), patch.note.get("request"), entry.get("request")),
        "settings": (settings.get("forgetting"), entry.get("settings")),
        "patch": (digests.get("patch"), _digest(files["patch.safetensors"])),
    }
    if "verdict.json" in files:
        verdict = _json(files, "verdict.json", source)
        told["the verdict's request"] = (entry.get("request"), verdict.get("request"))
        told["the verdict's model"] = (digests.get("after"), (verdict.get("digests") or {}).get("after"))
    for what, values in told.items():
        if any(value != values[0] for value in values) or not values[0]:
            raise BadBundle(f"{source}: its files disagree about {what}: {', '.join(map(str, values))}"[:300])
    for number, line in enumerate(files.get("journal.jsonl", b"").splitlines(), start=1):
        try:
            parse_entry(line)
        except (ValueError, RecursionError) as error:
            raise BadBundle(f"{source}: line {number} of journal.jsonl was changed: {error}") from error
    return Bundle(source, files, manifest, request, entry, settings, digests, where, patch)


def _collect(run: Run, number: int, beside: Path) -> dict[str, bytes]:
    """The files of a bundle, but for the manifest; these and no others are ever taken."""
    record, name = run.record, run.path.resolve().name
    entry, patch = record["requests"][number], run.path / "patches" / f"{number:04}.safetensors"
    run.load_model()  # refuses weights that are not those of run.json
    if "digests" not in entry:
        how = f"{run.path} is what {entry.get('method', 'a method')} came to in a comparison, and has no patch"
        raise FedOrthoError(f"{how}; give a run that fedortho forget wrote")
    if not patch.is_file():
        raise FedOrthoError(f"there is no {patch}: the run's directory is not whole")
    earlier = [other["request"] for other in record["requests"][:number]]
    model = {key: record["model"][key] for key in ("classes", "channels")} | {"name": run.settings.model}
    digests = entry["digests"] | {
        "run-now": record["model"]["digest"],  # the model after, unless more was forgotten or trained since
        "patch": file_digest(patch),
        "data": record["data"]["digest"],
        "ledger": entry.get("ledger"),
    }
    lines, head = _journal(run, entry, beside)
    texts = {"request": entry["request"], "run": name} | entry["digests"]
    where = {"here": environment(), "packages": _packages(), "run": record["environment"]}
    files = {
        "README.txt": README.format(**texts).encode(),
        "request.json": _spelled({"request": entry["request"], "run": name, "number": number, "earlier": earlier}),
        "entry.json": _spelled(entry),
        "settings.json": _spelled({"model": model, "training": record["settings"], "forgetting": entry["settings"]}),
        "digests.json": _spelled(digests | {"journal": head}),
        "environment.json": _spelled(where),
        "patch.safetensors": patch.read_bytes(),
    }
    return files | _extras(run, number) | ({"journal.jsonl": lines} if lines else {})


def _extras(run: Run, number: int) -> dict[str, bytes]:
    """Verdict and report, if they are about this request: a later one's verdict is on another model."""
    entry, verdict = run.record["requests"][number], read_verdict(run.path)
    if number != len(run.record["requests"]) - 1 or (verdict and verdict["request"] != entry["request"]):
        return {}
    found, report = {}, run.path / "report.html"
    if verdict:
        found["verdict.json"] = (run.path / "verdict.json").read_bytes()
    if report.is_file():
        found["report.html"] = _report(report, [entry["digests"]["after"], (verdict or {}).get("sentence", "")])
    return found


def _report(path: Path, tells: Sequence[str]) -> bytes:
    """The report as it is handed out, without images of data, if it tells of this model and verdict."""
    page = path.read_text(encoding="utf-8")
    again = f"write it again: fedortho report {path.parent}"
    if not all(words in unescape(page) for words in tells):
        raise FedOrthoError(f"{path} is about another model or an older verdict; {again}")
    try:
        return without_images(page).encode()
    except FedOrthoError as error:
        raise FedOrthoError(f"{path}: {error}; {again}") from error


def _journal(run: Run, entry: Mapping[str, Any], beside: Path) -> tuple[bytes, dict[str, Any] | None]:
    """The journal's lines about a run and about the request where it was still that of another, and where it ends."""
    journal = read_journal(beside)
    if not journal.entries:
        return b"", None
    asked = (entry["request"], entry["digests"]["before"])
    about = [e for e in journal.entries if e.run == run.path.resolve().name or (e.request, e.before) == asked]
    last = asdict(journal.last)
    return "".join(f"{e.line}\n" for e in about).encode(), {key: last[key] for key in ("number", "hash")}


def _packages() -> list[str]:
    """Every installed package with its version, as `pip freeze` lists them."""
    found = {(each.metadata["Name"], each.version) for each in metadata.distributions()}
    return sorted(f"{name}=={version}" for name, version in found if name)


def _patch(data: bytes, source: str) -> Patch:
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "patch.safetensors"
        file.write_bytes(data)
        try:
            patch = load_patch(file)
            return replace(patch, note=dict(patch.note))
        except (FedOrthoError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise BadBundle(f"{source}: patch.safetensors is no patch ({error})") from error


def _json(files: Mapping[str, bytes], name: str, source: str) -> dict[str, Any]:
    if name not in files:
        raise BadBundle(f"{source} lacks {name}: it is no bundle, or not a whole one")
    try:
        value = json.loads(files[name])
    except (ValueError, RecursionError) as error:
        raise BadBundle(f"{source}: {name} is not JSON ({error})") from error
    if not isinstance(value, dict):
        raise BadBundle(f"{source}: {name} holds no values by name")
    return value


def _spelled(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, sort_keys=True) + "\n").encode()


def _about(data: bytes) -> dict[str, Any]:
    return {"size": len(data), "sha256": _digest(data)}


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
