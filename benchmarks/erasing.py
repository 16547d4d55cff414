"""The final protocol of erasing a class: methods that claim more than hiding, by the full audits, on test images.

    python benchmarks/erasing.py --data-dir ../shared/data [--networks DIR] [--models vgg-mini] [--seeds 0]
        [--requests class:0] [--methods hide,ssd] [--data cifar100]

Written down before its first run. vgg-mini of seeds 0 to 2 and resnet-mini of seed 0, CIFAR-10; the drawn classes
airplane and truck (benchmarks/manifest.py says how), on which nothing was chosen, and beside them automobile, which was
seen during development. Methods: hide, directions and regrow as they are by default; EU-k with the passes of regrow on
the last two stages; retrain; and regrow with every stage reset, which is retraining by regrow's recipe and shows what
the kept stages are worth. Every choice was made on bird, deer and frog of seed 0 by validation images
(benchmarks/regrow.py), but one that came later: how many stages are reset (benchmarks/false_alarms.py).

Each cell (network, class, method) is made and judged once, and a cell that has a row is left alone: the order is that
of the table, the process can be killed and started again, and several share the work. References are the networks of
the manifest that were retrained without the class for an original of any seed, at most three, that of the original's
own seed first (one of another seed was trained on another 45,000 of the 50,000 images); one that is missing in
--networks is trained before anything is judged. A retrained model is judged by the others, so `retrain` has audits only
where there is a second reference, and else accuracies and cost. Methods that read no image of the forget set are judged
a second time, by what they make of the same references (`alike`); that was added after the first rows, whose models are
made again for it and must have the same digest. Models go to runs/erasing, one row each to
benchmarks/results/erasing.json.

The rest of the methods came later: with one pass, as benchmarks/comparison.py tuned and compared them, and with the
quick audits (C1, C2, C3 by its prototype, C6). Later still, `regrow` reset all stages but the first by default; its
earlier rows, of two stages, are `regrow-2`. Rows that came later are judged against as many references as `hide` was on
that class, so that the rows of a class can be compared. Where a verdict by one reference is INCONCLUSIVE, it asks for
three, as a user would be asked: --references 3 trains what is missing and judges once more by what the method makes of
them; the first verdict stays in the row (`first-alike`).

CIFAR-100 (the half of its training images that there is, vgg-mini of seed 0, twelve epochs) has two classes that were
drawn before any of their references was trained, from those on which nothing was tried:
`random.Random("fedortho erasing cifar100 2026-11-19").sample([n for n in range(100) if n % 10], 2)` gave [23, 68],
clouds and roads. Each has one reference, retrained with the original's seed, and the quick audits.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from manifest import (
    DRAWN,
    REPORTED,
    SEEDS,
    benchmark_parser,
    epoch_printer,
    open_network,
    original_name,
    reference_names,
)
from result_files import add_row, read_results
from torch import nn

from fedortho.audits.judge import judge_case
from fedortho.audits.measurements import MeasurementCache
from fedortho.audits.verdict import Verdict
from fedortho.data.images import Dataset
from fedortho.data.request import ForgetRequest
from fedortho.errors import BadCheckpoint, Busy
from fedortho.evaluation.case import REFERENCES
from fedortho.methods import find_method, make_method
from fedortho.methods.hyperparameters import read_settings
from fedortho.requests.comparing import Row, compare
from fedortho.requests.counterfactuals import counterfactuals
from fedortho.requests.judging import reference_digests
from fedortho.requests.references import case_of, reference_cost, train_references
from fedortho.requests.run_context import open_context
from fedortho.runs.run import Run, open_run
from fedortho.storage.files import locked
from fedortho.storage.records import to_json

HERE = Path(__file__).parent
MODELS = HERE.parent / "runs" / "erasing"
ORIGINALS: Mapping[str, Mapping[str, Sequence[int]]] = {"cifar10": SEEDS, "cifar100": {"vgg-mini": (0,)}}
REQUESTS = {"cifar10": (*DRAWN, REPORTED), "cifar100": ("class:23", "class:68")}
LAYERS = {"vgg-mini": 6, "resnet-mini": 7}  # with weights, in the last two stages and behind them
METHODS = {"retrain": "retrain", "hide": "hide", "directions": "directions", "regrow": "regrow", "eu-k": "eu-k"}
METHODS |= {"regrow-all": "regrow", "regrow-2": "regrow"}  # the name of a row, and the method that makes its model
STAGES = {"regrow-all": 99, "regrow-2": 2}  # that are reset, where they are not the default's
REST = {name: name for name in ("ssd", "salun", "scrub", "cf-k", "neggrad", "logit-mask", "paper", "finetune")}
REST |= {"eu-k tuned": "eu-k"} | {name: name for name in ("unsir", "bad-teacher", "fused", "not")}
REST |= {name: name for name in ("class-pruning", "msg", "ct", "subspace")}
FULL = {"cifar10"}  # data on which METHODS have the full audits
SUMMARISED = ("outcome", "value", "limit", "unlearned", "original", "reference")  # of each audit
ORDER = ("data", "model", "seed", "request", "method")
SHARED: dict[str, nn.Module] = {}  # models by digest
CACHES: dict[tuple[str, int, str, str], MeasurementCache] = {}  # measurements by network and class
WHAT = "erasing a class: full audits of methods on test images, against retrained models"


@dataclass(frozen=True)
class Cell:
    """One method, by the name of its row, on one class of one original."""

    data: str
    model: str
    seed: int
    request: str
    method: str

    @property
    def settings(self) -> Mapping[str, Any]:
        if self.method in REST:
            return read_settings(self.data, self.model, "tuned").get(REST[self.method], {})
        if self.method == "eu-k":
            return {"epochs": 2, "lr": 0.05, "k": LAYERS[self.model]}
        return {"stages": STAGES[self.method]} if self.method in STAGES else {}

    @property
    def is_judged_alike(self) -> bool:
        is_full = self.method in METHODS and self.method != "regrow-all"
        return is_full and getattr(find_method(METHODS[self.method]), "has_counterfactual", False)

    @property
    def name(self) -> str:
        """Of the method that makes its model."""
        return (METHODS | REST)[self.method]

    @property
    def place(self) -> Path:
        name = f"{self.model}-seed{self.seed}-{self.request.replace(':', '-')}-{self.method.replace(' ', '-')}"
        return MODELS / (name if self.data == "cifar10" else f"{self.data}-{name}")

    @property
    def original(self) -> str:
        return original_name(self.model, self.seed, dataset=self.data)


def main(words: list[str] | None = None) -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--data", default="cifar10", choices=ORIGINALS)
    parser.add_argument("--models", default=",".join(SEEDS))
    parser.add_argument("--seeds", default="0,1,2", help="seeds of the originals")
    parser.add_argument("--requests", default="", help="to share the work; the order stays")
    parser.add_argument("--methods", default=",".join(METHODS | REST), help="names of rows")
    parser.add_argument("--references", type=int, default=0, help="judge again what is open, with so many references")
    parser.add_argument("--quick", action="store_true", help="no full audits, which take half an hour a model")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "erasing.json", help="result file")
    given = parser.parse_args(words)
    torch.set_num_threads(1)
    if given.quick:
        FULL.clear()
    requests = given.requests.split(",") if given.requests else REQUESTS[given.data]
    for cell in cells(given.data, given.models.split(","), given.seeds.split(",")):
        if cell.request not in requests or cell.method not in given.methods.split(","):
            continue
        try:
            with locked(cell.place):
                row = row_of_cell(given.out, cell)
                if not row or (cell.is_judged_alike and "alike" not in row):
                    serve(cell, given.networks, given.data_dir, given.out, row)
                elif number_of_references(row.get("alike", {})) < given.references and is_open(row["alike"]):
                    serve(cell, given.networks, given.data_dir, given.out, row, given.references)
        except Busy:
            print(cell, "is made by another process", flush=True)


def cells(data: str, models: list[str], seeds: list[str]) -> Iterator[Cell]:
    for methods in (METHODS, REST) if data == "cifar10" else (METHODS,):  # the rest is tuned on CIFAR-10
        for model in (model for model in models if model in ORIGINALS[data]):
            for seed in (seed for seed in ORIGINALS[data][model] if str(seed) in seeds):
                yield from (
                    Cell(data, model, seed, request, method) for request in REQUESTS[data] for method in methods
                )


def row_of_cell(out: Path, cell: Cell) -> Mapping[str, Any]:
    """The row of a cell; empty if it has none yet."""
    rows = read_results(out).rows if out.exists() else ()
    return next((row for row in rows if all(row[key] == getattr(cell, key) for key in ORDER)), {})


def number_of_references(found: Mapping[str, Any]) -> int:
    """How many references a verdict had, of those that nobody treated."""
    return sum(role in REFERENCES for role, _ in found.get("references", ()))


def is_open(found: Mapping[str, Any]) -> bool:
    """Whether an audit of a verdict could not decide."""
    return any(audit["outcome"] == "INCONCLUSIVE" for audit in found["audits"].values())


def serve(cell: Cell, networks: Path, data_dir: str, out: Path, row: Mapping[str, Any], more: int = 0) -> None:
    """Make a cell's model, judge it, and add its row, or to the row what it lacks; with `more` references if given."""
    original = open_network(networks, cell.original, data_dir)
    originals = [replace(cell, seed=seed).original for seed in ORIGINALS[cell.data][cell.model]]
    data = original.load_data(data_dir)
    names = [name for other in originals for name in reference_names(other, cell.request)]
    if not names:  # of CIFAR-100, before the manifest lists them
        wanted = ForgetRequest.parse(cell.request)
        trained = train_references(original.at(data_dir), wanted, (), networks, data, epoch_printer(cell.request))
        names = [next(trained).path.name]
    if hidden := row_of_cell(out, replace(cell, method="hide")):
        number = more or number_of_references(hidden)
        names = sorted(names, key=lambda name: not name.startswith(original.path.name))[:number]
    known = [open_network(networks, name, data_dir) for name in names]
    name, chosen = cell.name, {cell.name: cell.settings}
    (made,) = compare(original, cell.request, [name], out=cell.place, settings=chosen, references=networks, data=data)
    references = sorted(known, key=lambda run: nearness(original, run))
    others = [reference for reference in references if reference.record.model.digest != made.weights][: len(REFERENCES)]
    if row and row["weights"] != made.weights:
        raise BadCheckpoint(f"{cell} gave {row['weights'][:16]} before and {made.weights[:16]} here; not comparable")
    unlearned = open_run(cell.place / name)
    if not row:
        verdict = judged(cell, unlearned, original, others, data) if others else None
        row = row_of(cell, made, verdict, reference_cost(references[0], data).flops)
    if cell.is_judged_alike and others:
        method, request = make_method(name, made.settings), ForgetRequest.parse(cell.request)
        treated = counterfactuals(open_context(original, data), method, request, others, MODELS / "references")
        first = {"first-alike": row["alike"]} if more else {}
        row = {**row, **first, "alike": audits_of(judged(cell, unlearned, original, [*others, *treated], data))}
    add_row(out, row, ORDER, order, WHAT, "python benchmarks/erasing.py --data-dir ../shared/data")
    print(cell, row.get("label", "no second reference"), row.get("alike", {}).get("label", ""), flush=True)


def nearness(original: Run, reference: Run) -> tuple[bool, bool, int]:
    """The order of references: those of the original's training images first, and of them that of its seed."""
    own, other = original.settings, reference.settings
    return own.partition_seed != other.partition_seed, own.seed != other.seed, other.seed


def judged(cell: Cell, run: Run, original: Run, references: list[Run], data: Dataset) -> Verdict:
    """The full or the quick audits; measurements of the original and the references serve all cells of a class."""
    case = case_of(run, ForgetRequest.parse(cell.request), data, original, references)
    first = [each for each in references if not each.record.is_edited]
    shared = [SHARED.setdefault(each.record.model.digest, each.load_model()) for each in (original, *first)]
    digests = {"before": original.record.model.digest, "after": run.record.model.digest}
    digests |= reference_digests(references)
    cache = CACHES.setdefault((cell.model, cell.seed, cell.data, cell.request), MeasurementCache())
    case = replace(case, original=shared[0], references=tuple(shared[1:]))
    audit = "full" if cell.data in FULL and cell.method in METHODS else "quick"
    return judge_case(case, audit, cache=cache, method=cell.method, digests=digests)


def row_of(cell: Cell, made: Row, verdict: Verdict | None, retraining: float) -> dict[str, Any]:
    """What the table and the figure show of a cell, and the measurements of its audits."""
    assert made.accuracies is not None, "none of the methods refuses a class"
    row = {key: getattr(cell, key) for key in ORDER} | {"settings": dict(made.settings), "weights": made.weights}
    row |= {"accuracies": to_json(made.accuracies), "seconds": made.cost.seconds if made.cost else None}
    row |= {"share": (made.cost.flops if made.cost else retraining) / retraining}
    return row if verdict is None else row | audits_of(verdict)


def audits_of(verdict: Verdict) -> dict[str, Any]:
    """What the audits found, and the models that they compared with."""
    found: dict[str, Any] = {"label": verdict.label, "references": sorted(verdict.digests.items())}
    found["audits"] = {audit.name: {key: getattr(audit, key) for key in SUMMARISED} for audit in verdict.results}
    return found | {"details": {audit.name: dict(audit.details) for audit in verdict.audits}}


def order(row: Mapping[str, Any]) -> Any:
    place = REQUESTS[row["data"]].index(row["request"])
    return row["data"], row["model"], row["seed"], place, list(METHODS | REST).index(row["method"])


if __name__ == "__main__":
    main()
