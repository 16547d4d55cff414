"""Erasing on the embedded images: every class by the full audits, five classes in a row, and in a federation.

    python benchmarks/erasing_small.py [--parts classes,sequence,federation,federated] [--classes 0,4]

Written down before its first run. fashion-mini, vgg-mini, six epochs, seed 0; no setting was chosen on these classes,
except on Dress, the class of the demo, which is left out. All images that decide are test images.

- classes: `erase` as it is by default on each of the nine classes, judged by the full audits against two retrained
  models and what `erase` makes of them; `hide` beside it.
- sequence: `random.Random("fedortho erase sequence").sample(labels, 5)` draws five of the nine. They are erased one
  after the other, each from the model that the last request left; the same by `hide`. After each request: the accuracy
  on every class that was forgotten so far, and on all that are left. A network retrained without the five is beside it.
- federation: 20 clients (Dirichlet 0.3, half of them a round, 20 rounds). How many rounds `erase` takes is chosen on
  Dress by validation images (2, 4 or 8, the fewest within two points of the original's retain accuracy). Then the first
  class of the sequence is erased, and hidden, and the federation trains for 20 more rounds without it.
- federated, added later and written down before its first run: each of the five classes is erased from that federation
  as the level does it by default, and judged by the full audits against two federations that never had it and what
  `erase` makes of them.

A row that is there is not measured again; trained runs stay in runs/erasing-small, so a killed process goes on.

`erase` reset two stages at first; those rows are `erase-2` and `choice-2`. All was then measured again with its default
since, all stages but the first, on networks that were trained anew.
"""

import argparse
import random
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from result_files import add_row, read_results
from torch import nn

import fedortho as fo
from fedortho.federated.server import train_federation, train_on
from fedortho.requests.levels import chosen_method
from fedortho.requests.references import find_references, reference_cost
from fedortho.storage.records import to_json

HERE = Path(__file__).parent
RUNS = HERE.parent / "runs" / "erasing-small"
OUT = HERE / "results" / "erasing-small.json"
WHAT = "erasing on fashion-mini: full audits of nine classes, five classes in a row, a federation that trains on"
COMMAND = "python benchmarks/erasing_small.py"
PARTS = ("classes", "sequence", "federation", "federated")
LEVELS = ("erase", "hide")  # erase first: it trains what both are compared with
SUMMARISED = ("outcome", "value", "limit", "unlearned", "original", "reference")  # of each audit
LEFT_OUT, FURTHER = "Dress", 20
ROUNDS, WITHIN = (2, 4, 8), 0.02  # of erase in the federation, and the retain accuracy that it may lose
TRAINING = fo.TrainSettings(data="fashion-mini", model="vgg-mini", epochs=6, threads=1)
FEDERATION = fo.FederateSettings(
    data="fashion-mini",
    model="vgg-mini",
    clients=20,
    split="dirichlet:0.3",
    fraction=0.5,
    rounds=20,
    batch_size=32,
    threads=1,
)


class Bench:
    """Where rows and runs are, and the images."""

    def __init__(self, out: Path, runs: Path) -> None:
        self.out, self.runs, self.data = out, runs, fo.load_images("fashion-mini")
        self.names = self.data.train.names
        self.labels = [label for label, name in enumerate(self.names) if name != LEFT_OUT]
        self.sequence = random.Random("fedortho erase sequence").sample(self.labels, 5)

    def has(self, **key: Any) -> bool:
        rows = read_results(self.out).rows if self.out.exists() else ()
        return any(all(row.get(name) == value for name, value in key.items()) for row in rows)

    def add(self, row: Mapping[str, Any]) -> None:
        key = ("part", "request", "level", "step")
        add_row(self.out, {"step": 0} | dict(row), key, order, WHAT, COMMAND)
        print({name: row[name] for name in row if name not in ("audits", "details")}, flush=True)

    def classes(self, chosen: list[int], levels: list[str]) -> None:
        """Every class but the demo's: erased, hidden, and judged."""
        original = fo.train_run(self.runs / "original", TRAINING)
        for label in chosen or self.labels:
            for level in levels:
                about = {"part": "classes", "request": f"class:{label}", "level": level}
                if not self.has(**about):
                    row = self.judged(original, f"class:{label}", level, self.runs / f"{level}-class-{label}")
                    self.add(about | {"name": self.names[label]} | row)

    def federated(self) -> None:
        """The five classes, each erased from the federation that has all of them, and judged."""
        original = train_federation(self.runs / "federation", FEDERATION)
        for label in self.sequence:
            about = {"part": "federated", "request": f"class:{label}", "level": "erase"}
            if not self.has(**about):
                row = self.judged(original, f"class:{label}", "erase", self.runs / f"federated-erase-class-{label}")
                self.add(about | {"name": self.names[label]} | row)

    def judged(self, original: fo.Run, request: str, level: str, out: Path) -> dict[str, Any]:
        """What one level leaves of a class, by the full audits; C4, which needs shadow models, is not run."""
        served = fo.forget_run(original, request, level=level, out=out, hide_first=False, data=self.data)
        options = fo.JudgeOptions(audit="full", retrain=True, references=self.runs / "references")
        verdict = fo.judge_run(out, None, options, original=original, data=self.data)
        reference = find_references(original, fo.ForgetRequest.parse(request), self.runs / "references")[0]
        share = served.result.cost.flops / reference_cost(reference, self.data).flops
        retrained = fo.accuracies_of(reference.load_model(), self.data, request)
        return {
            "before": to_json(served.record.before),
            "after": to_json(served.record.after),
            "retrained": to_json(retrained),
            "share": share,
            "label": verdict.label,
            "audits": {audit.name: {key: getattr(audit, key) for key in SUMMARISED} for audit in verdict.results},
            "details": {audit.name: dict(audit.details) for audit in verdict.audits},
        }

    def in_a_row(self) -> None:
        """Five classes, one after the other, by each level; and a network retrained without them."""
        original = fo.train_run(self.runs / "original", TRAINING)
        for level in LEVELS:
            run = original
            for step, label in enumerate(self.sequence, 1):
                out, request = self.runs / f"sequence-{level}-{step}", f"class:{label}"
                served = fo.forget_run(run, request, level=level, out=out, hide_first=False, data=self.data)
                assert served.run is not None, "it was written"
                run = served.run
                about = {"part": "sequence", "request": request, "level": level, "step": step}
                about |= {"name": self.names[label]}
                self.add(about | self.by_class(run.load_model(), self.sequence[:step]))
        everything = f"class:{','.join(map(str, self.sequence))}"
        settings = fo.TrainSettings(**asdict(TRAINING) | {"without": everything})
        retrained = fo.train_run(self.runs / "sequence-retrained", settings)
        about = {"part": "sequence", "request": everything, "level": "exact", "step": len(self.sequence)}
        self.add(about | self.by_class(retrained.load_model(), self.sequence))

    def by_class(self, model: nn.Module, gone: list[int], images: fo.Images | None = None) -> dict[str, Any]:
        """Accuracy on each class that was forgotten, and its mean over the others; default: test images."""
        shares = fo.evaluate(model, self.data.test if images is None else images).per_class
        kept = mean(share for label, share in enumerate(shares) if label not in gone and share is not None)
        return {"forgotten": {self.names[label]: shares[label] for label in gone}, "retain": kept}

    def federation(self) -> None:
        """Erase and hide in a federation, then further rounds."""
        run = train_federation(self.runs / "federation", FEDERATION)
        data, demo, rounds = run.load_data(), self.names.index(LEFT_OUT), ROUNDS[-1]
        before = self.by_class(run.load_model(), [demo], data.valid)["retain"]
        for number in ROUNDS:
            method = chosen_method(run, "regrow", changes={"epochs": number, "batch_size": FEDERATION.batch_size})
            tried = fo.forget_run(run, f"class:{demo}", method, data=data)
            row = self.by_class(tried.result.model, [demo], data.valid) | {"before": before}
            self.add({"part": "federation", "request": f"class:{demo}", "level": "choice", "step": number} | row)
            if row["retain"] >= before - WITHIN:
                rounds = number
                break
        label = self.sequence[0]
        about: dict[str, Any] = {"part": "federation", "request": f"class:{label}"}
        self.add(about | {"level": "before"} | self.by_class(run.load_model(), [label]))
        changes: dict[str, dict[str, Any]]
        changes = {"erase": {"epochs": rounds, "batch_size": FEDERATION.batch_size}, "hide": {"max_retain_drop": 0.03}}
        for level, name in (("erase", "regrow"), ("hide", "hide")):
            method = chosen_method(run, name, changes=changes[level])
            out = self.runs / f"federation-{level}"
            served = fo.forget_run(run, f"class:{label}", method, out=out, hide_first=False, data=data)
            assert served.run is not None, "it was written"
            cost, row = served.result.cost, about | {"level": level}
            spent: dict[str, Any] = {
                "bytes_up": cost.bytes_up,
                "bytes_down": cost.bytes_down,
                "exchanges": cost.exchanges,
            }
            spent["settings"] = dict(served.result.settings)
            self.add(row | self.by_class(served.run.load_model(), [label]) | spent)
            further = train_on(served.run, FURTHER)
            self.add(row | {"step": FURTHER} | self.by_class(further.load_model(), [label]))


def order(row: Mapping[str, Any]) -> Any:
    levels = ("choice-2", "choice", "before", "erase-2", *LEVELS, "exact")
    place = row["request"] if row["part"] in ("classes", "federated") else ""
    return PARTS.index(row["part"]), place, levels.index(row["level"]), row["step"]


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help="separated by commas")
    parser.add_argument("--classes", default="", help="labels, separated by commas; default: all but the demo's")
    parser.add_argument("--levels", default=",".join(LEVELS), help="of the part classes, separated by commas")
    parser.add_argument("--out", type=Path, default=OUT, help="result file")
    parser.add_argument("--runs", type=Path, default=RUNS, help="directory of the trained runs")
    given = parser.parse_args(words)
    torch.set_num_threads(1)
    bench, parts = Bench(given.out, given.runs), given.parts.split(",")
    if "sequence" in parts:
        bench.in_a_row()
    if "federation" in parts:
        bench.federation()
    if "federated" in parts:
        bench.federated()
    if "classes" in parts:
        bench.classes([int(label) for label in given.classes.split(",") if label], given.levels.split(","))


if __name__ == "__main__":
    main()
