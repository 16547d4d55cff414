"""How far retrained networks are from each other: every ordered pair of references as (forgotten, reference).

    python benchmarks/calibration.py --data-dir ../shared/data [--networks DIR] [--runs A,B] [--request class:1]

Takes originals and their references from --networks (and trains those of the manifest that are missing) and runs the
audits on each reference: what they measure on one model does not depend on the other, so pairs are differences. It
resumes where it was stopped and writes benchmarks/results/calibration.json after each model: the measurements of all
models, the values of all pairs of one original, and the limits that follow (the proposal, or the largest value if that
is larger). The calibrated limits in src/fedortho/audits have the same values. Steps of relearning take most of the time
and are measured with --relearning.
"""

import sys
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path
from typing import Any

import torch
from manifest import REPORTED, SEEDS, benchmark_parser, check_digest, open_network, original_name, reference_names
from result_files import read_results, write_results

from fedortho.audits import AUDITS, relearn, run_audits
from fedortho.audits.distance import DISTANCE
from fedortho.audits.measurements import MeasurementCache
from fedortho.audits.probe import depth_limits
from fedortho.audits.relearn import speed_up
from fedortho.audits.reset_tail import tail_limits
from fedortho.audits.result import AuditResult
from fedortho.data.request import ForgetRequest
from fedortho.evaluation.case import Case
from fedortho.requests.references import find_references
from fedortho.runs.run import Run

OUT = Path(__file__).parent / "results" / "calibration.json"
PROPOSED = {limit.name: limit.proposed for name in AUDITS if name != "C4" for limit in AUDITS[name].limits}
RUNS = ",".join(original_name(model, seed) for model, seeds in SEEDS.items() for seed in seeds)
Measured = dict[str, Any]  # of one model
PARTS = {"C1": "probe", "C2": "norms", "C3": "reset tail", "C6": "copies"}


def main(words: list[str] | None = None) -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--runs", default=RUNS, help="names of originals, with commas")
    parser.add_argument("--request", default=REPORTED)
    parser.add_argument("--relearning", action="store_true", help="measure the steps of relearning, too")
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args(words)
    torch.set_num_threads(1)
    if not given.relearning:
        relearn.SAMPLES = ()
    request = ForgetRequest.parse(given.request)
    saved = read_results(given.out) if given.out.exists() else None
    models: dict[str, Measured] = dict(saved.more.get("models", {})) if saved is not None else {}
    rows = [] if saved is None else [dict(row) for row in saved.rows if "original" in row]
    command = "python benchmarks/calibration.py " + " ".join(sys.argv[1:] if words is None else words)

    def save() -> None:
        write_results(given.out, "retrained pairs", command.strip(), rows, models=models, limits=limits_of(rows))

    for name in given.runs.split(","):
        run = open_network(given.networks, name, given.data_dir)
        references = references_of(run, request, given.networks, given.data_dir)
        for digest, measured in measure(run, references, request, given, models):
            models[digest] = measured
            print(name, measured, flush=True)
            save()
        rows = [row for row in rows if row["original"] != name]
        rows += pair_rows(run, references, request, given, models)
        save()
    raised = {name: limit for name, limit in limits_of(rows).items() if limit > PROPOSED[name]}
    print(f"CALIBRATED = {raised}")


def references_of(run: Run, request: ForgetRequest, networks: Path, data_dir: str) -> list[Run]:
    """The references of an original; those that the manifest lists are trained if they are missing."""
    for name in reference_names(run.path.name, str(request)):
        open_network(networks, name, data_dir)
    return [check_digest(other) for other in find_references(run, request, networks)]


def measure(
    run: Run, references: list[Run], request: ForgetRequest, given: Any, known: dict[str, Measured]
) -> Iterator[tuple[str, Measured]]:
    """What the audits measure on each reference, if it is not known yet; it is its own reference for arrival."""
    original, data, cache = run.load_model(), run.load_data(given.data_dir), MeasurementCache()
    for other in references:
        found: Measured = known.get(other.record.model.digest, {"name": other.path.name})
        only = [name for name, part in PARTS.items() if part not in found]
        only += ["C3"] if given.relearning and not found.get("relearning") and "C3" not in only else []
        if only:
            model = other.load_model()
            case = Case(model, original, (model,), data, request)
            audits = {each.name: each for each in run_audits(case, "full", only=only, cache=cache) if each.name in only}
            for audit in audits.values():
                found |= parts_of(audit)
            seconds = {audit.name: round(audit.seconds, 1) for audit in audits.values()}
            yield other.record.model.digest, found | {"seconds": found.get("seconds", {}) | seconds}


def parts_of(audit: AuditResult) -> Measured:
    """What an audit measured on the model, by name of the part."""
    details = audit.details
    if audit.name == "C1":
        return {"probe": [[depth, details["stages"]["unlearned"][depth]] for depth in details["depths"]]}
    if audit.name == "C2":
        return {"norms": {name: shares["unlearned"] for name, shares in details["attacks"].items()}}
    if audit.name == "C6":
        return {"copies": audit.value}
    steps = {k: found["unlearned"] for k, found in details["relearning"].items()}
    return {
        "prototype": details["prototype"]["unlearned"],
        "reset tail": details["reset tail"]["recalls"],
        "steps": details["reset tail"]["steps"],
    } | ({"relearning": steps} if steps else {})


def pair_rows(
    run: Run, references: list[Run], request: ForgetRequest, given: Any, models: dict[str, Measured]
) -> list[dict[str, Any]]:
    """One row for each ordered pair of an original's references, with the value of each limit's audit."""
    loaded, cache, rows = [other.load_model() for other in references], MeasurementCache(), []
    original, data = run.load_model(), run.load_data(given.data_dir)
    for mine, theirs in permutations(range(len(references)), 2):
        values = gaps(*(models[references[place].record.model.digest] for place in (mine, theirs)))
        if third := [place for place in range(len(references)) if place not in (mine, theirs)]:
            pair = (loaded[theirs], loaded[third[0]])
            values["distance"] = DISTANCE(Case(loaded[mine], original, pair, data, request), cache, "full").value
        names = {"unlearned": references[mine].path.name, "reference": references[theirs].path.name}
        rows.append({"original": run.path.name, **names, "values": values})
    return rows


def gaps(mine: Measured, theirs: Measured) -> dict[str, float | None]:
    """The value of each limit's audit: by how much `mine` exceeds `theirs`; None: not measured."""
    values: dict[str, float | None] = dict.fromkeys(PROPOSED)
    depths = depth_limits([depth for depth, _ in mine["probe"]])
    for (depth, one), (_, other) in zip(mine["probe"], theirs["probe"], strict=True):
        name = depths[depth].name
        values[name] = max(one - other, -1.0 if values[name] is None else values[name])
    tails, others = mine.get("reset tail", {}), theirs.get("reset tail", {})
    for entry, limit in tail_limits(list(depths)[:-1]).items():
        for k in tails.get(entry, {}) if entry in others else ():
            gap = tails[entry][k]["unlearned"] - others[entry][k]["unlearned"]
            values[limit.name] = max(gap, -1.0 if values[limit.name] is None else values[limit.name])
    relearned = theirs.get("relearning", {})
    steps = [speed_up(one, relearned[k]) for k, one in mine.get("relearning", {}).items() if k in relearned]
    return values | {
        "norms": max(mine["norms"][name] - theirs["norms"][name] for name in mine["norms"]),
        "prototype": mine["prototype"] - theirs["prototype"],
        "speed-up": max(steps, default=None),
        "copies": mine["copies"],
    }


def limits_of(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Each proposal, or the largest value between reference models if that is larger.

    Rounded up to a thousandth, so that the pair with the largest value passes.
    """
    values = {name: [row["values"][name] for row in rows if row["values"].get(name) is not None] for name in PROPOSED}
    largest = {
        name: max((-(-value * 1000 // 1) / 1000 for value in found), default=0.0) for name, found in values.items()
    }
    return {name: max(limit, largest[name]) for name, limit in PROPOSED.items()}


if __name__ == "__main__":
    main()
