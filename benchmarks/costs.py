"""What every method sends and computes to forget a class in a small federation; accuracies beside it.

    python benchmarks/costs.py

fashion-mini, ten clients, Dirichlet 0.3, vgg-mini, eight rounds; methods that train have one round. Hyper-parameters
are those tuned for one machine (methods/tuned), published ones where there are none. `hide` is also run where no client
kept statistics since training. The federation and
the edited models are in runs/costs (minutes, once). Results go to benchmarks/results/costs.json, from which
`scripts/tables.py` draws and writes tables and sentences.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from comparison import SAMPLING, without_ledger
from result_files import write_results

from fedortho.federated.server import train_federation
from fedortho.methods import METHODS
from fedortho.requests.comparing import compare
from fedortho.runs.settings import FederateSettings
from fedortho.storage.records import to_json

HERE = Path(__file__).parent
RUNS = HERE.parent / "runs" / "costs"
REQUEST = "class:3"
LEFT_OUT = ("federaser",)  # it needs the history of all rounds
SETTINGS = FederateSettings(
    data="fashion-mini", clients=10, fraction=1.0, rounds=8, split="dirichlet:0.3", batch_size=32, threads=1
)


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "costs.json")
    arguments = parser.parse_args(words)
    torch.set_num_threads(1)
    run = train_federation(RUNS / "federation", SETTINGS)
    copy = without_ledger(run, RUNS / "nothing-kept")
    names = [name for name in METHODS if name not in LEFT_OUT]
    starts = [(name, name, run) for name in names] + [(f"{name}, nothing kept", name, copy) for name in SAMPLING]
    rows: list[dict[str, Any]] = []
    for label, method, start in sorted(starts, key=lambda each: names.index(each[1])):
        out = start.path.parent / "compared"
        (row,) = compare(start, REQUEST, [method], out=out, settings="tuned", passes="one")
        told = to_json(row)
        about = {key: told[key] for key in ("method", "request", "settings", "accuracies", "cost", "refused")}
        rows.append({"label": label} | about)
        print(label, told["accuracies"], told["cost"], row.refused, flush=True)
        what = "cost of a class request in a federation of ten clients; fashion-mini, vgg-mini; one round each"
        write_results(arguments.out, what, "python benchmarks/costs.py", rows)


if __name__ == "__main__":
    main()
