"""A forged bundle for every value in it: is each lie found by whoever has the run and its data?

    python benchmarks/forging.py [--out benchmarks/results/forging.json]

An honest bundle is made of a small network. Then, for every value in every JSON file of it, two forgeries: another
value, and none. The forger knows how bundles are made: sizes, digests and the manifest fit, and a verdict's sentences
are written anew from its numbers. Each forgery is checked with the run and its data, all audits repeated. `refused`:
the check names the lie. `told`: it is not refused, and the check says that nobody can measure values of this kind
(times, costs, copies, name of the run, environment of its maker), or names more as not checked than for the honest
bundle. `same`: readers assume the value that was left out,
or it follows from others and was written anew. `accepted`: none of these, a forgery that worked.
"""

import argparse
import copy
import json
import math
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from result_files import write_results

from fedortho.audits import run_audits
from fedortho.audits.verdict import Verdict
from fedortho.data.images import Dataset
from fedortho.errors import FedOrthoError
from fedortho.evaluation.case import Case
from fedortho.evaluation.metric_suite import MetricSuite
from fedortho.evidence import claims, recheck
from fedortho.evidence.bundle import make_bundle, open_bundle
from fedortho.evidence.canonical_zip import pack_files
from fedortho.evidence.claims import BundleCheck
from fedortho.evidence.contents import Bundle
from fedortho.methods.hide import Hide
from fedortho.reports.gallery import audit_pictures, draw_gallery
from fedortho.reports.page import write_report
from fedortho.requests.forgetting import forget_run
from fedortho.requests.judging import JudgeOptions, judge_run
from fedortho.runs.run import Run
from fedortho.runs.settings import TrainSettings
from fedortho.runs.training import train_run
from fedortho.storage.files import canonical_json, tensors_digest

RESULT = Path(__file__).parent / "results" / "forging.json"
COMMAND = "python benchmarks/forging.py"
WHAT = "forged bundles: another value, or none, for every value of every JSON file of a bundle"
SETTINGS = TrainSettings(data="digits", model="vgg-mini", epochs=2, crop=0, flip=0.0, threads=1, device="cpu")
REQUEST = "class:3"
# what the check says that it does not know
TOLD: dict[str, tuple[str, ...]] = {
    "request.json": ("run",),
    "entry.json": claims.UNREPEATED,
    "environment.json": ("here", "packages"),
    "verdict.json": ("cost", "copies", "environment", "retrain-seconds"),
}
Place = tuple[str | int, ...]


def make_honest(place: Path) -> Path:
    """A network, the same after forgetting, its verdict, report and bundle."""
    run = train_run(place / "first", SETTINGS)
    how = Hide(ratio=0.25, statistics_images=200, trial_images=200, repair_images=200)
    done = forget_run(run, REQUEST, how, out=place / "second", device="cpu").run
    assert done is not None, "it was written"
    judge_run(done, REQUEST, JudgeOptions("quick", retrain=True, device="cpu"))
    write_report(done, images=False, device="cpu")
    make_bundle(done, REQUEST, place / "evidence.zip")
    return place / "evidence.zip"


def values_of(value: Any, place: Place = ()) -> Iterator[tuple[Place, Any]]:
    """Every number, text, truth value and None in a JSON value, and where it is."""
    if isinstance(value, dict | list):
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from values_of(each, (*place, key))
    else:
        yield place, value


def another(value: Any) -> Any:
    """A value of the same kind.

    >>> another(True), another(3), another("a1" * 32)[:4], another("hide"), another(None)
    (False, 4, 'b1a1', 'hidex', 0.5)
    """
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1 if isinstance(value, int) else 0.01 + (1.01 * value if math.isfinite(value) else 0.0)
    if isinstance(value, str):
        is_hex = len(value) == 64 and set(value) <= set("0123456789abcdef")
        return f"{(int(value[0], 16) + 1) % 16:x}{value[1:]}" if is_hex else f"{value}x"
    return 0.5


def changed(value: Any, place: Place, new: Any = None, *, remove: bool = False) -> Any:
    """A copy of a JSON value with another value, or none, at a place."""
    twin = copy.deepcopy(value)
    holder = twin
    for key in place[:-1]:
        holder = holder[key]
    if remove:
        del holder[place[-1]]
    else:
        holder[place[-1]] = new
    return twin


def forged(honest: Bundle, name: str, value: Any) -> bytes:
    """The bundle with another JSON file, all sizes and digests anew."""
    files = {key: data for key, data in honest.files.items() if key != "manifest.json"}
    files[name] = (json.dumps(value, indent=2, sort_keys=True) + "\n").encode()
    listed = {key: {"size": len(data), "sha256": sha256(data).hexdigest()} for key, data in files.items()}
    body = {key: each for key, each in json.loads(honest.files["manifest.json"]).items() if key != "digest"}
    body["files"] = listed
    whole = body | {"digest": sha256(canonical_json(body).encode()).hexdigest()}
    return pack_files(files | {"manifest.json": (json.dumps(whole, indent=2, sort_keys=True) + "\n").encode()})


def forgeries(name: str, value: Any) -> Iterator[tuple[Place, str, Any]]:
    """Every forgery of one file: the place, what is done there, and the file."""
    for place, old in values_of(value):
        yield place, "changed", rewritten(name, changed(value, place, another(old)))
        yield place, "removed", rewritten(name, changed(value, place, remove=True))


def rewritten(name: str, value: Any) -> Any:
    """A verdict with the sentences that follow from its numbers; other files as they are."""
    if name != "verdict.json":
        return value
    try:
        return Verdict.from_json(value, name).to_json()
    except (FedOrthoError, LookupError, TypeError, ValueError, AttributeError):
        return value  # no verdict any more: the reader will say so


@contextmanager
def measured_once() -> Iterator[None]:
    """Repeat each decision, audit, metric and figure once: for the same models they are the same."""
    known: dict[object, Any] = {}

    def once(key: object, work: Callable[[], Any]) -> Any:
        if key not in known:
            known[key] = work()
        return known[key]

    def of(case: Case) -> tuple[str, ...]:
        return tuple(tensors_digest(model.state_dict()) for model in case.models.values())

    measure, load = MetricSuite.measure, Run.load_data

    def decided(run: Any, request: Any, method: Any, *, data: Dataset, device: str, **more: Any) -> Any:
        return once(
            ("decide", str(request), method, device),
            lambda: forget_run(run, request, method, data=data, device=device, **more),
        )

    def audited(case: Case, budget: str, *, only: Sequence[str], **more: Any) -> Any:
        return once(("audit", of(case), budget, tuple(only)), lambda: run_audits(case, budget, only=only, **more))

    def measured(suite: MetricSuite, model: torch.nn.Module) -> Any:
        return once(("measure", tensors_digest(model.state_dict())), lambda: measure(suite, model))

    def drawn(run: Any, *words: Any, **more: Any) -> Any:
        return once(("draw", run.record.model.digest, str(more)), lambda: draw_gallery(run, *words, **more))

    def plotted(audits: Any) -> Any:
        return once(("plot", str(audits)), lambda: audit_pictures(audits))

    with ExitStack() as patched:
        patched.enter_context(patch.object(Run, "load_data", lambda run, *_: once(run.path, lambda: load(run))))
        patched.enter_context(
            patch.object(claims, "audit_pictures", lambda *told: once(str(told), lambda: audit_pictures(*told)))
        )
        patched.enter_context(patch.object(recheck, "forget_run", decided))
        patched.enter_context(patch.object(claims, "run_audits", audited))
        patched.enter_context(patch.object(MetricSuite, "measure", measured))
        patched.enter_context(patch.object(claims, "draw_gallery", drawn))
        yield


def campaign(honest: Path, run: Path, files: Sequence[str] = ()) -> list[dict[str, Any]]:
    """What becomes of each forgery, by file."""
    bundle, rows, forgery = open_bundle(honest), [], honest.with_name("forged.zip")
    with measured_once():
        known = doubts(recheck.check_bundle(honest, run=run, audits="all"))  # an honest one is not refused
        for name in files or [name for name in bundle.files if name.endswith(".json") and name != "manifest.json"]:
            counts: Counter[str] = Counter()
            accepted: list[str] = []
            value = json.loads(bundle.files[name])
            for place, what, told in forgeries(name, value):
                counts["cases"] += 1
                forgery.write_bytes(forged(bundle, name, told))
                try:
                    found = doubts(recheck.check_bundle(forgery, run=run, audits="all"))
                except FedOrthoError:
                    counts["refused"] += 1
                    continue
                if is_told(name, place, value) or found > known:
                    counts["told"] += 1
                elif told == value or (what == "removed" and reads_alike(bundle, forgery, name)):
                    counts["same"] += 1
                else:
                    counts["accepted"] += 1
                    accepted.append(f"{'.'.join(map(str, place))} {what}")
            row = {key: counts[key] for key in ("cases", "refused", "told", "same", "accepted")}
            rows.append({"file": name, "values": sum(1 for _ in values_of(value)), **row, "places": accepted})
            sys.stdout.write(f"{name}: {', '.join(f'{number} {key}' for key, number in row.items())}\n")
            sys.stdout.write("".join(f"  {where}\n" for where in accepted[:20]))
            sys.stdout.flush()
    return rows


def is_told(name: str, place: Place, value: Any) -> bool:
    """Whether the check says of values at this place that it does not know them."""
    if name == "verdict.json" and place[0] == "audits" and place[-1] == "finding":
        return bool(value["audits"][place[1]]["outcome"] == "NOT RUN")  # the reason is its maker's word
    return place[0] in TOLD.get(name, ()) or place[-1] == "seconds" or place == ("origin", "run")


def doubts(check: BundleCheck) -> int:
    """How many claims a check names that it could not confirm."""
    return sum(claim.state != "checked" for claim in check.claims)


def reads_alike(honest: Bundle, forgery: Path, name: str) -> bool:
    """Whether a file without a value is read as it is with it."""
    field = name.removesuffix(".json")
    return bool(getattr(open_bundle(forgery), field) == getattr(honest, field))


def main(words: list[str] | None = None) -> None:
    usage = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    usage.add_argument("--out", type=Path, default=RESULT)
    chosen = usage.parse_args(words)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="fedortho-forging-") as place:
        os.environ |= {"FEDORTHO_CACHE": f"{place}/cache", "FEDORTHO_STATE": f"{place}/state"}
        rows = campaign(make_honest(Path(place)), Path(place) / "first")
    write_results(chosen.out, WHAT, COMMAND, rows)
    sys.exit(any(row["accepted"] for row in rows))


if __name__ == "__main__":
    main()
