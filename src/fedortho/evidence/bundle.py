"""Evidence of one served request in one file, for an auditor who has no access to the data.

A bundle has the request, digests of the model before and after, the patch, settings, results and environment. It has
no image of the data, no ledger, no model and none of the removed weights. `manifest.json` lists every file with its
size and SHA-256 and a digest over itself; the archive has one form (`canonical_zip.py`), so any other byte shows.
"""

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from hashlib import sha256
from html import unescape
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from fedortho.audits.verdict import Verdict, read_verdict
from fedortho.data.request import ForgetRequest
from fedortho.errors import BadRecord, FedOrthoError
from fedortho.evidence import contents
from fedortho.evidence.agreement import check_agreement
from fedortho.evidence.canonical_zip import LARGEST, pack_files, unpack_files
from fedortho.evidence.chain import chain_lines, read_chain
from fedortho.evidence.contents import MANIFEST, SIGNATURE, BadBundle, Bundle, FileRecord, JournalEnd, Manifest
from fedortho.evidence.signature import BadSignature, check_signature, load_key, public_half, require_signer
from fedortho.models.patch import Patch, load_patch
from fedortho.reports.page import without_images
from fedortho.runs.record import ServedRecord
from fedortho.runs.run import Run, index_of_request, open_run
from fedortho.storage.files import canonical_json, file_digest, parse_json, read_limited, replacing
from fedortho.storage.journal import JournalEntry, check_journal, read_journal
from fedortho.storage.provenance import environment
from fedortho.storage.records import from_json, to_json

R = TypeVar("R")


def make_bundle(
    run: Run | Path | str,
    request: ForgetRequest | str,
    out: Path | str,
    *,
    sign: Path | None = None,
    journal: Path | None = None,
) -> Bundle:
    """Write the evidence of a request that a run has served; the same run gives the same bytes on the same machine.

    `sign` is the file of a private key, `journal` the directory of the request's journal (default: the run's parent).
    """
    run, out = open_run(run), Path(out)
    request = run.request(request)
    if out.exists():
        raise FedOrthoError(f"{out} exists already; evidence is never overwritten: choose another -o")
    if journal is not None:
        check_journal(journal)  # refuses a directory that has none
    files = _collect(run, index_of_request(run, request), journal or run.path.resolve().parent)
    key = None if sign is None else load_key(sign)
    manifest = Manifest(
        made_by=contents.made_here(),
        files={name: _listed(data) for name, data in files.items()},
        signer=None if key is None else public_half(key),
        digest="",
    )
    files[MANIFEST] = _text(replace(manifest, digest=_manifest_digest(to_json(manifest))))
    if key is not None:
        files[SIGNATURE] = key.sign(files[MANIFEST]).hex().encode() + b"\n"
    archive = pack_files(files)
    bundle = read_bundle(archive, str(out))  # what is written passes every check
    with replacing(out) as temporary:
        temporary.write_bytes(archive)
    return bundle


def open_bundle(path: Path, *, digest: str = "", public: Path | None = None) -> Bundle:
    """Read a bundle and check every byte, and that its files agree with each other.

    `digest` is the manifest's digest as received by another channel; `public` the key that must have signed it.
    """
    bundle = read_bundle(read_limited(path, LARGEST, BadBundle), str(path))
    manifest = bundle.manifest
    if digest and digest != manifest.digest:
        raise BadBundle(f"{path}: {MANIFEST} has the digest {manifest.digest}, not {digest}: it is another bundle")
    require_signer(path, manifest.signer, public)
    return bundle


def read_bundle(archive: bytes, source: str) -> Bundle:
    """The bundle in these bytes, if every digest fits and its files agree."""
    files = unpack_files(archive, source)
    manifest = _read_manifest(files, source)
    for name, listed in manifest.files.items():
        if _listed(files[name]) != listed:
            raise BadBundle(f"{source}: {name} was changed: its size or SHA-256 is not what {MANIFEST} lists")
    if manifest.signer:
        _check_signed(files, manifest.signer, source)
    records: dict[str, Any] = {
        name: _record(partial(from_json, kind), files, f"{name}.json", source)
        for name, kind in contents.RECORDS.items()
    }
    told = _json(files, "verdict.json", source) if "verdict.json" in files else None
    records["verdict"] = None if told is None else _record(Verdict.from_json, files, "verdict.json", source)
    try:
        records["chain"] = read_chain(files.get("journal.jsonl", b""))
    except ValueError as error:
        raise BadBundle(f"{source}: {error}") from error
    bundle = Bundle(source, files, manifest, patch=_patch(files["patch.safetensors"], source), **records)
    check_agreement(bundle, told)
    return bundle


def _read_manifest(files: Mapping[str, bytes], source: str) -> Manifest:
    value = _json(files, MANIFEST, source)
    if _spelled(value) != files[MANIFEST] or value.get("digest") != _manifest_digest(value):
        raise BadBundle(f"{source}: {MANIFEST} was changed: its digest is not that of its contents")
    if value.get("schema") != Manifest.schema:
        raise BadBundle(
            f"{source} is a bundle of schema {value.get('schema')}, made by {value.get('made-by')}; this version reads "
            f"schema {Manifest.schema}: check it with the version that made it"
        )
    manifest = _record(partial(from_json, Manifest), files, MANIFEST, source)
    present = files.keys() - {MANIFEST} - ({SIGNATURE} if manifest.signer else set())
    for name in sorted({*manifest.files, *contents.NEEDED} - present):
        raise BadBundle(f"{source} lacks {name}")
    for name in sorted((present - manifest.files.keys()) | (present - {*contents.ALLOWED})):
        raise BadBundle(f"{source} holds {name}, which does not belong there")
    return manifest


def _manifest_digest(value: Mapping[str, Any]) -> str:
    body = canonical_json({key: each for key, each in value.items() if key != "digest"})
    return sha256(body.encode()).hexdigest()


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


def _collect(run: Run, number: int, beside: Path) -> dict[str, bytes]:
    """The files of a bundle except the manifest; no others are ever taken."""
    record, name = run.record, run.path.resolve().name
    entry, patch = record.requests[number], run.path / "patches" / f"{number:04}.safetensors"
    run.load_model()  # refuses weights that are not those of run.json
    if entry.model_before is None or entry.model_after is None or not patch.is_file():
        raise FedOrthoError(
            f"{run.path} has no patch of {entry.request} ({patch.name}): a comparison by {entry.method} wrote it, "
            "or it is damaged; give a run that fedortho forget wrote"
        )
    journal = read_journal(beside)
    about = lines_about(journal.entries, name, entry)
    end = JournalEnd(journal.last.number, journal.last.hash) if about else None
    models = (entry.model_before, entry.model_after, record.model.digest)
    digests = contents.DigestsFile(*models, file_digest(patch), record.data.digest, entry.ledger, journal=end)
    earlier = tuple(other.request for other in record.requests[:number])
    network = contents.NetworkRecord(run.settings.model, record.model.num_classes, record.model.channels)
    asked = contents.RequestFile(entry.request, name, number, earlier)
    files = {
        "README.txt": contents.readme_text(asked, digests),
        "request.json": _text(asked),
        "entry.json": _text(entry),
        "settings.json": _text(contents.SettingsFile(network, record.settings, entry.settings)),
        "digests.json": _text(digests),
        "environment.json": _text(contents.EnvironmentFile(environment(), _packages(), record.environment)),
        "patch.safetensors": patch.read_bytes(),
    }
    return files | _extras(run, number) | ({"journal.jsonl": chain_lines(journal.entries, about)} if about else {})


def _extras(run: Run, number: int) -> dict[str, bytes]:
    """Verdict and report, if they are about this request: after a later request they are about another model."""
    entry, verdict = run.record.requests[number], read_verdict(run.path)
    if number != len(run.record.requests) - 1 or (verdict and verdict.request != entry.request):
        return {}
    found, report = {}, run.path / "report.html"
    if verdict:
        found["verdict.json"] = (run.path / "verdict.json").read_bytes()
    if report.is_file():
        found["report.html"] = _report(report, [entry.model_after or "", verdict.sentence if verdict else ""])
    return found


def _report(path: Path, tells: Sequence[str]) -> bytes:
    """The report without images of the data; one about another model or verdict is refused."""
    page = path.read_text(encoding="utf-8")
    again = f"write it again: fedortho report {path.parent}"
    if not all(words in unescape(page) for words in tells):
        raise FedOrthoError(f"{path} is about another model or an older verdict; {again}")
    try:
        return without_images(page).encode()
    except FedOrthoError as error:
        raise FedOrthoError(f"{path}: {error}; {again}") from error


def lines_about(entries: Sequence[JournalEntry], run: str, served: ServedRecord) -> list[JournalEntry]:
    """The entries about a run, and about the request before the run existed."""
    asked = (served.request, served.model_before)
    return [entry for entry in entries if entry.run == run or (entry.request, entry.before) == asked]


def _packages() -> tuple[str, ...]:
    """Every installed package with its version, as `pip freeze` lists them."""
    found = {(each.metadata["Name"], each.version) for each in metadata.distributions()}
    return tuple(sorted(f"{name}=={version}" for name, version in found if name))


def _patch(data: bytes, source: str) -> Patch:
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "patch.safetensors"
        file.write_bytes(data)
        try:
            return load_patch(file)
        except (FedOrthoError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise BadBundle(f"{source}: patch.safetensors is not a patch ({error})") from error


def _record(read: Callable[[Any, str], R], files: Mapping[str, bytes], name: str, source: str) -> R:
    try:
        return read(_json(files, name, source), name)
    except BadRecord as error:
        raise BadBundle(f"{source}: {error}") from error


def _json(files: Mapping[str, bytes], name: str, source: str) -> dict[str, Any]:
    if name not in files:
        raise BadBundle(f"{source} lacks {name}: it is not a bundle, or is incomplete")
    try:
        value = parse_json(files[name])
    except ValueError as error:
        raise BadBundle(f"{source}: {name} is not JSON ({error})") from error
    if not isinstance(value, dict):
        raise BadBundle(f"{source}: {name} is not a mapping")
    return value


def _spelled(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, sort_keys=True) + "\n").encode()


def _text(record: Any) -> bytes:
    return _spelled(to_json(record))


def _listed(data: bytes) -> FileRecord:
    return FileRecord(len(data), sha256(data).hexdigest())
