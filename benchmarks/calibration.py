"""What audits say of models that never knew: every ordered pair of retrained models as (forgotten, reference).

    python benchmarks/calibration.py --data-dir ../shared/data [--run NAME] [--request class:1] [--seeds 0,1,2,3,4]

Reads the original and its references from benchmarks/runs (benchmarks/manifest.py trains them), goes on where it was
stopped, and writes benchmarks/results/calibration.json after each pair: all values, and the limits that follow (the
largest value, if it is above the proposal). `CALIBRATED` of src/fedortho/audits/limits.py must say the same.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path
from typing import Any

import torch
from manifest import REPORTED, RUNS

from fedortho.audits import run_audits
from fedortho.audits.audit import Audit
from fedortho.audits.measurements import MeasurementCache
from fedortho.audits.thresholds import PROPOSED, calibrated_limits
from fedortho.data.request import ForgetRequest
from fedortho.errors import BadCheckpoint
from fedortho.evaluation.case import Case
from fedortho.requests.references import find_reference, reference_settings
from fedortho.runs.run import Run, open_run
from fedortho.storage.provenance import write_results

ORIGINAL = "cifar10-vgg-mini-lazy-0.1-seed0"
OUT = Path(__file__).parent / "results" / "calibration.json"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", default="../shared/data")
    parser.add_argument("--runs", type=Path, default=RUNS)
    parser.add_argument("--run", default=ORIGINAL, help="the original")
    parser.add_argument("--request", default=REPORTED)
    parser.add_argument("--seeds", default="0,1,2,3,4", help="of the references, three or more")
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    run, request = open_run(given.runs / given.run), ForgetRequest.parse(given.request)
    references = {seed: reference(run, request, seed, given.data_dir) for seed in map(int, given.seeds.split(","))}
    digests = {str(seed): found.record["model"]["digest"] for seed, found in references.items()}
    about = {"original": run.record["model"]["digest"], "references": digests, "request": str(request)}
    saved = json.loads(given.out.read_text()) if given.out.exists() else {}
    rows: list[dict[str, Any]] = saved.get("rows", []) if saved.get("about") == about else []
    command = "python benchmarks/calibration.py " + " ".join(sys.argv[1:] if arguments is None else arguments)
    for row in measure(run, references, request, given.data_dir, rows):
        rows.append(row)
        print(row["forgot"], row["reference"], row["values"], row["outcomes"], flush=True)
        limits = limits_of(rows)
        write_results(given.out, "retrained against retrained", command.strip(), rows, about=about, limits=limits)
    raised = {name: limit for name, limit in limits_of(rows).items() if limit > PROPOSED[name]}
    print(f"CALIBRATED = {raised}")


def measure(
    run: Run, references: dict[int, Run], request: ForgetRequest, data_dir: str, done: list[dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """All audits of each pair that is not done; what is measured on one model is measured once."""
    original, data, cache = run.load_model(), run.load_data(data_dir), MeasurementCache()
    models = {seed: found.load_model() for seed, found in references.items()}
    pairs = {(row["forgot"], row["reference"]) for row in done}
    for forgot, other in permutations(models, 2):
        if (forgot, other) not in pairs:
            second = third(list(models), forgot, other)
            case = Case(models[forgot], original, models[other], models[second], data, request)
            audits = run_audits(case, "full", cache=cache)
            yield {"forgot": forgot, "reference": other, "second": second} | summary(audits)


def reference(run: Run, request: ForgetRequest, seed: int, data_dir: str) -> Run:
    settings = reference_settings(run, request, seed=seed, data_dir=data_dir)
    found = find_reference(run.path.parent, settings, run.record["data"]["digest"])
    if found is None:
        raise BadCheckpoint(f"no reference of seed {seed} for {run.path}; train it by benchmarks/manifest.py")
    return found


def third(seeds: list[int], forgot: int, reference: int) -> int:
    """The next seed, round the list, that is neither of the two."""
    later = seeds[seeds.index(forgot) :] + seeds[: seeds.index(forgot)]
    return next(seed for seed in later if seed not in (forgot, reference))


def summary(audits: list[Audit]) -> dict[str, Any]:
    """What is held against each limit (None: not measured), outcomes and details."""
    found = {audit.name: audit for audit in audits}
    relearnt = found["C3"].details.get("values", {})
    speeds = [value for name, value in relearnt.items() if name != "prototype"]
    values = {
        "probe": found["C1"].value,
        "norms": found["C2"].value,
        "prototype": relearnt.get("prototype"),
        "speed-up": max(speeds, default=None),
        "distance": found["C5"].value,
        "copies": found["C6"].value,
    }
    return {
        "values": values,
        "outcomes": {name: audit.outcome for name, audit in found.items()},
        "says": {name: audit.says for name, audit in found.items()},
        "details": {name: dict(audit.details) for name, audit in found.items()},
        "seconds": {name: round(audit.seconds, 1) for name, audit in found.items()},
    }


def limits_of(rows: list[dict[str, Any]]) -> dict[str, float]:
    return calibrated_limits(
        {name: [row["values"][name] for row in rows if row["values"][name] is not None] for name in PROPOSED}
    )


if __name__ == "__main__":
    main()
