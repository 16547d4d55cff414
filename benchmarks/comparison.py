"""All methods on the same networks: hyper-parameters tuned on one class by an equal budget, compared on another class.

    python benchmarks/comparison.py tune --data-dir ../shared/data --model vgg-mini
    python benchmarks/comparison.py compare --data-dir ../shared/data --model vgg-mini --seed 0
    python benchmarks/comparison.py federation --data-dir ../shared/data --run RUN --request client:7 --references DIR

Networks come from --networks and are trained there if they are missing; benchmarks/manifest.py says how the class was
drawn. `tune` gives every method six trials of 10,000 images and at most two epochs on validation images of seed 0 and
another class; `compare` gives each method that trains one epoch (a sixth of retraining) at the tuned learning rate.
Both resume where they were stopped. Tuned settings go to src/fedortho/methods/tuned, all trials to
benchmarks/results/tuning, results to benchmarks/results/comparison.json, edited models to runs/comparison.
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from manifest import REPORTED, TUNED_ON, benchmark_parser, open_network, original_name, reference_names
from result_files import add_row

from fedortho.data.request import ForgetRequest
from fedortho.methods import METHODS
from fedortho.methods.hyperparameters import TUNED, read_settings
from fedortho.methods.method import Schedule
from fedortho.requests.comparing import chosen_methods, compare
from fedortho.requests.tuning import Attempt, tune
from fedortho.runs.run import open_run
from fedortho.storage.records import to_json
from fedortho.storage.settings import field_types

HERE = Path(__file__).parent
OUT = HERE / "results" / "comparison.json"
TUNING = HERE / "results" / "tuning"
MODELS = HERE.parent / "runs" / "comparison"
ORDER = ("engine", "model", "seed", "request")


def main(words: list[str] | None = None) -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("part", choices=("tune", "compare", "federation"))
    parser.add_argument("--model", default="vgg-mini")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--run", type=Path, help="federation: run directory of the trained federation")
    parser.add_argument("--request", default=REPORTED)
    parser.add_argument("--references", type=Path, help="directory of the references; default: --networks")
    parser.add_argument("--methods", default="all")
    parser.add_argument("--epochs", type=int, default=1, help="epochs (in a federation: rounds) of methods that train")
    parser.add_argument("--out", type=Path, default=OUT, help="result file")
    arguments = parser.parse_args(words)
    if arguments.part == "tune":
        find_settings(arguments)
    else:
        measure(arguments)


def find_settings(arguments: Any) -> None:
    run = open_network(arguments.networks, original_name(arguments.model), arguments.data_dir)
    out, request = TUNING / f"cifar10-{arguments.model}.json", ForgetRequest.parse(TUNED_ON)
    data = run.load_data(arguments.data_dir)
    tune(run, request, arguments.methods, out=out, data=data, watch=print_trial)
    out.replace(TUNED / out.name)  # the trials stay beside the other results


def print_trial(name: str, number: int, trial: Attempt) -> None:
    print(name, json.dumps(asdict(trial)), file=sys.stderr, flush=True)


def measure(arguments: Any) -> None:
    is_federation = arguments.part == "federation"
    run = (
        open_run(arguments.run).at(arguments.data_dir)
        if is_federation
        else open_network(arguments.networks, original_name(arguments.model, arguments.seed), arguments.data_dir)
    )
    settings = read_settings(run.settings.data, run.settings.model, "tuned")
    for name, kind in METHODS.items():
        if issubclass(kind, Schedule):
            settings[name] = settings.get(name, {}) | {"epochs": arguments.epochs}
            if is_federation and "batch_size" in field_types(kind):
                settings[name] |= {"batch_size": run.settings.batch_size}
    request = ForgetRequest.parse(arguments.request)
    about = {"run": run.path.name, "model": run.settings.model, "seed": run.settings.seed, "request": str(request)}
    about["engine"] = "federation" if is_federation else "central"
    for reference in reference_names(run.path.name, str(request)):
        open_network(arguments.networks, reference, arguments.data_dir)
    place, references = MODELS / f"{run.path.name}-{request.word}", arguments.references or arguments.networks
    data = run.load_data(arguments.data_dir)
    for name in chosen_methods(arguments.methods):
        (row,) = compare(run, request, [name], out=place, data=data, settings=settings, references=references)
        values = {key: value for key, value in to_json(row).items() if key not in ("schema", "environment")}
        add(arguments.out, about | values)


def add(out: Path, row: dict[str, Any]) -> None:
    def order(other: Mapping[str, Any]) -> Any:
        return [*(other[word] for word in ORDER), list(METHODS).index(other["method"])]

    command = "python benchmarks/comparison.py compare|federation, with each --model, --seed, --run, --request"
    what = "methods side by side; test images; costs by what ran"
    add_row(out, row, ("run", "request", "method"), order, what, command)
    print({key: row[key] for key in ("run", "method", "accuracies", "refused")}, flush=True)


if __name__ == "__main__":
    main()
