"""Audits of retrained models against each other: every ordered pair of references as (forgotten, reference).

    python benchmarks/calibration.py --data-dir ../shared/data [--networks DIR] [--run NAME] [--request class:1]

Takes the original and its references from --networks (and trains those of the manifest that are missing), resumes where
it was stopped, and writes benchmarks/results/calibration.json after each pair: all values, and the thresholds that
follow (the largest value where it is above the proposed threshold). The calibrated limits in src/fedortho/audits have
the same values.
"""

import sys
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path
from typing import Any

import torch
from manifest import REPORTED, benchmark_parser, check_digest, open_network, original_name, reference_names
from result_files import read_results, write_results

from fedortho.audits import AUDITS, run_audits
from fedortho.audits.measurements import MeasurementCache
from fedortho.audits.result import AuditResult
from fedortho.data.request import ForgetRequest
from fedortho.errors import BadCheckpoint
from fedortho.evaluation.case import Case
from fedortho.requests.references import find_reference, reference_settings
from fedortho.runs.run import Run

OUT = Path(__file__).parent / "results" / "calibration.json"
PROPOSED = {limit.name: limit.proposed for name in AUDITS if name != "C4" for limit in AUDITS[name].limits}


def main(words: list[str] | None = None) -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--run", default=original_name("vgg-mini"), help="name of the original")
    parser.add_argument("--request", default=REPORTED)
    parser.add_argument("--seeds", default="0,1,2,3,4", help="seeds of the references, three or more")
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args(words)
    torch.set_num_threads(1)
    run = open_network(given.networks, given.run, given.data_dir)
    request = ForgetRequest.parse(given.request)
    references = {seed: reference(run, request, seed, given.data_dir) for seed in map(int, given.seeds.split(","))}
    digests = {str(seed): other.record.model.digest for seed, other in references.items()}
    about = {"original": run.record.model.digest, "references": digests, "request": str(request)}
    saved = read_results(given.out) if given.out.exists() else None
    rows: list[dict[str, Any]] = (
        [dict(row) for row in saved.rows] if saved is not None and saved.more.get("about") == about else []
    )
    command = "python benchmarks/calibration.py " + " ".join(sys.argv[1:] if words is None else words)
    for row in measure(run, references, request, given.data_dir, rows):
        rows.append(row)
        print(row["unlearned"], row["reference"], row["values"], row["outcomes"], flush=True)
        limits = limits_of(rows)
        write_results(given.out, "retrained against retrained", command.strip(), rows, about=about, limits=limits)
    raised = {name: limit for name, limit in limits_of(rows).items() if limit > PROPOSED[name]}
    print(f"CALIBRATED = {raised}")


def measure(
    run: Run, references: dict[int, Run], request: ForgetRequest, data_dir: str, done: list[dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """All audits of each pair that is not done; measurements of one model are shared between its pairs."""
    original, data, cache = run.load_model(), run.load_data(data_dir), MeasurementCache()
    models = {seed: other.load_model() for seed, other in references.items()}
    pairs = {(row["unlearned"], row["reference"]) for row in done}
    for forgot, other in permutations(models, 2):
        if (forgot, other) not in pairs:
            second = third(list(models), forgot, other)
            case = Case(models[forgot], original, models[other], models[second], data, request)
            audits = run_audits(case, "full", cache=cache)
            yield {"unlearned": forgot, "reference": other, "second": second} | summary(audits)


def reference(run: Run, request: ForgetRequest, seed: int, data_dir: str) -> Run:
    """The reference of this seed; one that the manifest lists is trained if it is missing."""
    for name in reference_names(run.path.name, str(request)):
        if name.endswith(f"-seed{seed}"):
            return open_network(run.path.parent, name, data_dir)
    settings = reference_settings(run, request, seed=seed, data_dir=data_dir)
    other = find_reference(run.path.parent, settings, run.record.data.digest)
    if other is None:
        raise BadCheckpoint(f"no reference of seed {seed} for {run.path}; train it with fedortho train --without")
    return check_digest(other)


def third(seeds: list[int], forgot: int, reference: int) -> int:
    """The next seed, round the list, that is neither of the two."""
    later = seeds[seeds.index(forgot) :] + seeds[: seeds.index(forgot)]
    return next(seed for seed in later if seed not in (forgot, reference))


def summary(audits: list[AuditResult]) -> dict[str, Any]:
    """The value of each threshold's audit (None: not measured), outcomes and details."""
    by_name = {audit.name: audit for audit in audits}
    relearning = by_name["C3"].details.get("values", {})
    speeds = [value for name, value in relearning.items() if name != "prototype"]
    values = probe_gaps(by_name["C1"].details["stages"]) | {
        "norms": by_name["C2"].value,
        "prototype": relearning.get("prototype"),
        "speed-up": max(speeds, default=None),
        "distance": by_name["C5"].value,
        "copies": by_name["C6"].value,
    }
    return {
        "values": values,
        "outcomes": {name: audit.outcome for name, audit in by_name.items()},
        "findings": {name: audit.finding for name, audit in by_name.items()},
        "details": {name: dict(audit.details) for name, audit in by_name.items()},
        "seconds": {name: round(audit.seconds, 1) for name, audit in by_name.items()},
    }


def probe_gaps(recalls: dict[str, dict[str, float]]) -> dict[str, float | None]:
    """By how much the probe recalls more than in the reference model: before the classifier, and at the worst entry."""
    *entries, last = (recalls["unlearned"][depth] - recalls["reference"][depth] for depth in recalls["unlearned"])
    return {"probe": last, "entry probe": max(entries, default=None)}


def limits_of(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Each proposal, or the largest value between reference models if that is larger.

    Rounded up to a thousandth, so that the pair with the largest value passes.
    """
    values = {name: [row["values"][name] for row in rows if row["values"][name] is not None] for name in PROPOSED}
    largest = {
        name: max((-(-value * 1000 // 1) / 1000 for value in found), default=0.0) for name, found in values.items()
    }
    return {name: max(limit, largest[name]) for name, limit in PROPOSED.items()}


if __name__ == "__main__":
    main()
