"""A request, and what somebody could do to its bundle who knows how it is made."""

import json
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from fedortho.audits import AUDITS
from fedortho.audits.result import AuditResult
from fedortho.audits.verdict import Verdict
from fedortho.data.request import ForgetRequest
from fedortho.evidence.bundle import _spelled, open_bundle
from fedortho.evidence.canonical_zip import pack_files
from fedortho.methods.hide import Hide
from fedortho.runs.run import Run
from fedortho.storage.files import canonical_json
from fedortho.storage.records import to_json

HOW = Hide(ratio=0.25, statistics_images=200, trial_images=200, repair_images=200)
REQUEST = ForgetRequest.parse("class:3")
Runs = dict[str, Run]
BETTER = {"forget": 0.0, "retain": 0.999, "test": 0.9}  # accuracies of a forger


def no_audits(request: str, after: str) -> Verdict:
    """A verdict without metrics and results on a model, about a class whose name has to be escaped in HTML."""
    reason = "no audits requested (--audit none)"
    audits = tuple(AuditResult("NOT RUN", reason, name=name, title=audit.title) for name, audit in AUDITS.items())
    return Verdict(request, 'class "3"', "hide", (), audits, None, has_reference=False, digests={"after": after})


def forge(made: Path, files: Mapping[str, bytes], without: Sequence[str] = ()) -> bytes:
    """The bundle of somebody who knows how manifests are made: other files, and all digests anew."""
    bundle = open_bundle(made)
    left_out = ("manifest.json", *without)
    changed = {name: data for name, data in (bundle.files | files).items() if name not in left_out}
    return pack_files(changed | {"manifest.json": manifest(to_json(bundle.manifest), changed)})


def manifest(like: Mapping[str, Any], files: Mapping[str, bytes]) -> bytes:
    listed = {name: {"size": len(data), "sha256": sha256(data).hexdigest()} for name, data in files.items()}
    body = {key: value for key, value in like.items() if key != "digest"} | {"files": listed}
    return _spelled(body | {"digest": sha256(canonical_json(body).encode()).hexdigest()})


def edited(made: Path, name: str, change: Callable[[Any], Any]) -> bytes:
    return _spelled(change(json.loads(open_bundle(made).files[name])))


def all_passed(value: dict[str, Any]) -> dict[str, Any]:
    """A verdict in which every audit passes, with fitting numbers, words and label."""
    audits = [
        audit | {"outcome": "PASS", "finding": "nothing is found", "value": 0.0, "limit": audit["limit"] or limit}
        for audit in value["audits"]
        for limit in [AUDITS[audit["name"]].limits[0].value]
    ]
    return Verdict.from_json(value | {"audits": audits}, "verdict.json").to_json()


def better(value: dict[str, Any]) -> dict[str, Any]:
    """An entry with better accuracies."""
    paid = value["before"]["retain"] - BETTER["retain"]
    return value | {"after": BETTER, "retain-paid": paid, "all-forgotten": {value["request"]: 0.0}}


def better_metrics(value: dict[str, Any]) -> dict[str, Any]:
    """A verdict with the same accuracies."""
    for metric in value["metrics"]:
        metric["value"] = BETTER.get(metric["name"].removesuffix("-accuracy"), metric["value"])
    return value


def wholly_forged(made: Path) -> bytes:
    """Every audit passed, better accuracies, no journal and another report, all of which agree."""
    page = open_bundle(made).files["report.html"].replace(b"FAIL", b"PASS")
    files = {
        "verdict.json": edited(made, "verdict.json", lambda value: all_passed(better_metrics(value))),
        "entry.json": edited(made, "entry.json", better),
        "digests.json": edited(made, "digests.json", lambda value: value | {"journal": None}),
        "report.html": page,
    }
    return forge(made, files, without=["journal.jsonl"])
