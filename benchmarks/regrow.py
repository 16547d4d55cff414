"""Regrow and the probe at every depth, on validation images of the classes that choices may look at.

    python benchmarks/regrow.py --data-dir ../shared/data [--networks DIR] [--model vgg-mini] [--classes 2,4,6]

Takes the original and its references from --networks (and trains those of the manifest that are missing), runs
`--method regrow` as it is by default, and writes benchmarks/results/regrow.json after each class; a class that is there
with as many stages reset is not run again: the default was two, and is all but the first since. No test image is read.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from manifest import benchmark_parser, open_network, original_name, reference_names
from result_files import add_row, read_results

import fedortho as fo
from fedortho.audits.measurements import MeasurementCache, balanced_sample, depth_features
from fedortho.audits.probe import recall
from fedortho.evaluation.case import Case
from fedortho.methods.regrow import Regrow
from fedortho.requests.references import reference_cost
from fedortho.requests.run_context import method_for_run

OUT = Path(__file__).parent / "results" / "regrow.json"
KEY = ("model", "request", "stages")
COMMAND = "python benchmarks/regrow.py --data-dir ../shared/data --model vgg-mini|resnet-mini"


def main(words: list[str] | None = None) -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--model", default="vgg-mini")
    parser.add_argument("--classes", default="2,4,6")
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args(words)
    torch.set_num_threads(1)
    run = open_network(given.networks, original_name(given.model), given.data_dir)
    data = run.load_data(given.data_dir)
    data = replace(data, test=data.valid)
    for label in given.classes.split(","):
        request = f"class:{label}"
        rows, stages = read_results(given.out).rows if given.out.exists() else (), Regrow().stages
        if any((row["model"], row["request"], row["stages"]) == (given.model, request, stages) for row in rows):
            continue
        reference = open_network(given.networks, reference_names(run.path.name, request)[0], given.data_dir)
        row = measure(run, reference, data, request) | {"model": given.model, "request": request, "stages": stages}
        what = "the probe at every depth after regrow, on validation images"
        add_row(given.out, row, KEY, lambda row: [row[name] for name in KEY], what, COMMAND)
        print(row, flush=True)


def measure(run: fo.Run, reference: fo.Run, data: fo.Dataset, request: str) -> dict[str, Any]:
    """Recall of the probe at every depth, and accuracies, of original, reference and regrown network, and the cost.

    `share` is that of the reference's FLOPs, which took so many `epochs`.
    """
    original, method = run.load_model(), method_for_run(run, "regrow")
    result = fo.forget(original, data, request, method)
    models = {"original": original, "reference": reference.load_model(), "unlearned": result.model}
    parsed, cache = fo.ForgetRequest.parse(request), MeasurementCache()
    case = Case(models["unlearned"], original, (models["reference"],), data, parsed)
    labels, evaluated = balanced_sample(case).labels, case.forget_eval.labels
    recalls = {
        role: {depth: recall(*pair, labels, evaluated) for depth, pair in depth_features(case, cache, role).items()}
        for role in models
    }
    ends = {role: fo.accuracies_of(model, data, request) for role, model in models.items()}
    accuracies = {role: {"forget": found.forget, "retain": found.retain} for role, found in ends.items()}
    share, epochs = result.cost.flops / reference_cost(reference, data).flops, reference.settings.epochs
    cost = {"flops": result.cost.flops, "share": share, "epochs": epochs, "seconds": result.cost.seconds}
    return {"settings": dict(result.settings), "probe": recalls, "accuracies": accuracies} | cost


if __name__ == "__main__":
    main()
