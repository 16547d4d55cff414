"""The CIFAR-10 networks that all benchmarks share: originals, and models that never saw what is asked to be forgotten.

    python benchmarks/manifest.py --data-dir ../shared/data [--only vgg-mini]

Trains what is not there into benchmarks/runs, goes on where it was stopped, and lists all in
benchmarks/runs/manifest.json. Several processes share the work: each takes what no other is at.

The class of the comparison was drawn before any of its networks was trained, from those that no choice of ours was made
on (0 and 3 served as examples): `random.Random("fedortho comparison 2026-11-16").sample([1, 2, 4, 5, 6, 7, 8, 9], 2)`
gave [1, 6]; 1 (automobile) is reported, hyper-parameters are found on 6 (frog) of seed 0. The sample request,
benchmarks/samples.txt, was drawn beforehand from the training rows (in order) of vgg-mini, seed 0:
`random.Random("fedortho comparison samples 2026-11-16").sample(rows, 100)`.
"""

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from orthogonality import VARIANTS, tell

from fedortho.data.request import ForgetRequest
from fedortho.errors import Busy
from fedortho.requests.references import (
    find_reference,
    finished_runs,
    reference_name,
    reference_settings,
    train_reference,
)
from fedortho.runs.run import Run
from fedortho.runs.settings import TrainSettings
from fedortho.runs.training import train_run
from fedortho.storage.files import locked, write_json

RUNS = Path(__file__).parent / "runs"
REPORTED, TUNED_ON = "class:1", "class:6"
SEEDS = {"vgg-mini": (0, 1, 2), "resnet-mini": (0,)}  # of originals
MORE_REFERENCES: dict[str, dict[int, tuple[int, ...]]] = {  # of other seeds, by the seed of the original
    "vgg-mini": {0: (1, 2, 3, 4), 1: (2,), 2: (1,)},
    "resnet-mini": {0: (1,)},
}
PLAIN: dict[str, tuple[int, ...]] = {"vgg-mini": (0,), "resnet-mini": ()}  # retrained without orthogonality


def original(model: str, seed: int, data_dir: str) -> Run:
    settings = TrainSettings(
        data="cifar10", data_dir=data_dir, model=model, epochs=6, seed=seed, threads=1, **VARIANTS["lazy-0.1"]
    )
    path = RUNS / f"cifar10-{model}-lazy-0.1-seed{seed}"
    return train_run(path, settings, watch=tell(path.name))


def reference(run: Run, request: str, data_dir: str, *, seed: int | None = None, plain: bool = False) -> Run:
    """The retrained model for a request, trained unless it is there."""
    asked = ForgetRequest.parse(request)
    settings = reference_settings(run, asked, seed=seed, plain=plain, data_dir=data_dir)
    found = find_reference(RUNS, settings, run.record["data"]["digest"])
    name = reference_name(run, asked, settings)
    return found or train_reference(RUNS, name, settings, watch=tell(name))


def jobs(models: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """What is trained, the most wanted first: model, and either the seed of an original or a reference."""
    for model in models:
        for seed in SEEDS[model]:
            yield model, {"original": seed}
            yield model, {"original": seed, "reference": seed}
    for model in models:
        for first, seeds in MORE_REFERENCES[model].items():
            for seed in seeds:
                yield model, {"original": first, "reference": seed}
        for seed in PLAIN[model]:
            yield model, {"original": seed, "reference": seed, "plain": True}


def do(model: str, what: dict[str, Any], data_dir: str) -> None:
    run = original(model, what["original"], data_dir)
    if "reference" in what:
        reference(run, REPORTED, data_dir, seed=what["reference"], plain=what.get("plain", False))


def write_manifest() -> None:
    rows = []
    for run in finished_runs(RUNS):
        about = {"run": run.path.name, "model": run.settings.model, "data": run.record["data"]["digest"]}
        about |= {"seed": run.settings.seed, "without": run.settings.without, "ortho": run.settings.ortho}
        rows.append(about | {"digest": run.record["model"]["digest"]} | run.record["result"])
    with locked(RUNS / "manifest.writing"):
        write_json(RUNS / "manifest.json", rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", default="../shared/data")
    parser.add_argument("--only", default="vgg-mini,resnet-mini", help="models, with commas between")
    arguments = parser.parse_args()
    waiting = list(jobs(arguments.only.split(",")))
    while waiting:
        left = []
        for model, what in waiting:
            try:
                do(model, what, arguments.data_dir)
                write_manifest()
            except Busy:
                left.append((model, what))
        if len(left) == len(waiting):
            time.sleep(10)
        waiting = left


if __name__ == "__main__":
    main()
