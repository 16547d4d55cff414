"""How often audits fail a network that never saw the class, and how often they fail one that did.

    python benchmarks/false_alarms.py [--classes 0,4]

Written down before its first run. An audit that fails `erase` says something only if it passes networks that never saw
the class. fashion-mini, vgg-mini, six epochs, as in benchmarks/erasing_small.py; all ten classes, since nothing is
chosen here; test images; the quick audits (C1, C2, C3 by its prototype, C5, C6) with the limits of the package. Of each
class there are three reference models, of seeds 0 to 2. Every model below is judged three times, each time against two
of them; a reference is judged against the other two, so once:

- retrained: a reference model itself, which is what exactness would give;
- retrained, then erased: what `erase` makes of a reference, judged against the other two and what it makes of those;
- erased and hidden: what the levels `erase` and `hide` make of the original.

The first two never saw the class: their failures are false alarms. The last should fail: its passes are misses.
A row that is there is not measured again; networks stay in runs/false-alarms, so a killed process goes on.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from erasing_small import SUMMARISED, TRAINING
from result_files import add_row, read_results
from torch import nn

import fedortho as fo
from fedortho.audits import run_audits
from fedortho.audits.measurements import MeasurementCache
from fedortho.audits.result import label
from fedortho.audits.retention import RETENTION
from fedortho.evaluation.case import Case
from fedortho.requests.counterfactuals import counterfactuals
from fedortho.requests.levels import chosen_method
from fedortho.requests.references import train_references
from fedortho.requests.run_context import open_context

HERE = Path(__file__).parent
RUNS = HERE.parent / "runs" / "false-alarms"
OUT = HERE / "results" / "false-alarms.json"
WHAT = "audits of networks that never saw a class, and of erased and hidden ones; fashion-mini, test images"
COMMAND = "python benchmarks/false_alarms.py"
REFERENCES = 3
KINDS = ("retrained", "retrained, then erased", "erased", "hidden")
DETAILED = ("C1", "C3")  # audits whose recalls are kept
KEY = ("request", "kind", "number")


@dataclass(frozen=True)
class Networks:
    """The networks of one class; the treated ones are what `erase` makes of the references, in their order."""

    references: tuple[nn.Module, ...]
    treated: tuple[nn.Module, ...]
    erased: nn.Module
    hidden: nn.Module

    def judged(self) -> Iterator[tuple[str, int, nn.Module, tuple[nn.Module, ...], tuple[nn.Module, ...]]]:
        """Kind, number, model, references and counterfactuals of each verdict; the number is the reference left out."""
        for number in range(REFERENCES):
            others = tuple(model for at, model in enumerate(self.references) if at != number)
            alike = tuple(model for at, model in enumerate(self.treated) if at != number)
            yield "retrained", number, self.references[number], others, ()
            yield "retrained, then erased", number, self.treated[number], others, alike
            yield "erased", number, self.erased, others, alike
            yield "hidden", number, self.hidden, others, ()


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--classes", default="", help="labels, separated by commas; default: all")
    parser.add_argument("--out", type=Path, default=OUT, help="result file")
    parser.add_argument("--runs", type=Path, default=RUNS, help="directory of the networks")
    given = parser.parse_args(words)
    torch.set_num_threads(1)
    data = fo.load_images("fashion-mini")
    original = fo.train_run(given.runs / "original", TRAINING)
    for number in map(int, given.classes.split(",")) if given.classes else range(data.train.classes):
        request = fo.ForgetRequest.parse(f"class:{number}")
        done = {(row["kind"], row["number"]) for row in rows_of(given.out) if row["request"] == str(request)}
        if len(done) < REFERENCES * len(KINDS):
            judge_class(original, request, data, given.runs, given.out, done)


def rows_of(out: Path) -> tuple[Any, ...]:
    return read_results(out).rows if out.exists() else ()


def judge_class(
    original: fo.Run, request: fo.ForgetRequest, data: fo.Dataset, runs: Path, out: Path, done: set[tuple[str, int]]
) -> None:
    """Make the networks of a class and add a row for each verdict on them that is missing."""
    before, cache, networks = original.load_model(), MeasurementCache(), networks_of(original, request, data, runs)
    for kind, number, model, references, alike in networks.judged():
        if (kind, number) not in done:
            case = Case(model, before, references, data, request, counterfactuals=alike)
            audits = run_audits(case, "quick", cache=cache)
            row: dict[str, Any] = {"request": str(request), "name": data.train.names[int(request.classes[0])]}
            row |= {"kind": kind, "number": number, "label": label(audits)}
            results = (*audits, RETENTION(case, cache))
            row["audits"] = {each.name: {key: getattr(each, key) for key in SUMMARISED} for each in results}
            row["details"] = {each.name: dict(each.details) for each in audits if each.name in DETAILED}
            add_row(out, row, KEY, order, WHAT, COMMAND)
            print(row["name"], kind, number, row["label"], flush=True)


def networks_of(original: fo.Run, request: fo.ForgetRequest, data: fo.Dataset, runs: Path) -> Networks:
    """Three reference models and what `erase` makes of them; the original erased, and hidden."""
    context, method = open_context(original, data), chosen_method(original, "regrow")
    trained = list(islice(train_references(original, request, (), runs / "references", data, None), REFERENCES))
    treated = counterfactuals(context, method, request, trained, runs / "treated")
    made = []
    for level in ("erase", "hide"):
        place = runs / f"{level}-{request.word}"
        if not (place / "run.json").exists():
            fo.forget_run(original, request, level=level, out=place, hide_first=False, data=data)
        made.append(fo.open_run(place).load_model())
    references, alike = (tuple(run.load_model() for run in found) for found in (trained, treated))
    return Networks(references, alike, *made)


def order(row: Any) -> Any:
    return row["request"], KINDS.index(row["kind"]), row["number"]


if __name__ == "__main__":
    main()
