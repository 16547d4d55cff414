"""How far the outcome of `erase` on one class depends on chance: the same request with other seeds.

    python benchmarks/erasing_seeds.py --data-dir ../shared/data [--networks DIR] [--request class:9] [--seeds 0,1,2]

Written down before its first run, after truck had failed C1 on one processor and passed it on another with the same
seed: vgg-mini of seed 0, CIFAR-10, truck, `regrow` as it is by default with seeds 0 to 4, all of them reported. For
each the recall of C1's probe at every depth on test images, of the network and of what the same seed makes of the
reference model that was retrained without the class; the original and the reference beside them. Nothing is chosen by
it. Rows go to benchmarks/results/erasing-seeds.json; a seed that is there is not run again.

Seen after the first rows: `fo.forget` draws the new weights by PyTorch's own rule, a run by that of its network, so
these are other draws than those of `fedortho forget` with the same seed.
"""

from pathlib import Path
from typing import Any

import torch
from manifest import benchmark_parser, open_network, original_name, reference_names
from result_files import add_row, read_results
from torch import nn

import fedortho as fo
from fedortho.audits.measurements import MeasurementCache, balanced_sample, depth_features
from fedortho.audits.probe import recall
from fedortho.evaluation.case import Case
from fedortho.requests.run_context import method_for_run
from fedortho.storage.provenance import environment

OUT = Path(__file__).parent / "results" / "erasing-seeds.json"
KEY = ("request", "what", "seed")
ROLES = ("original", "retrained", "erased", "retrained, then erased")


def main(words: list[str] | None = None) -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--request", default="class:9")
    parser.add_argument("--seeds", default="0,1,2,3,4")
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args(words)
    torch.set_num_threads(1)
    run = open_network(given.networks, original_name("vgg-mini"), given.data_dir)
    reference = open_network(given.networks, reference_names(run.path.name, given.request)[0], given.data_dir)
    data = run.load_data(given.data_dir)
    models = {"original": run.load_model(), "retrained": reference.load_model()}
    for what, model in models.items():
        add(given.out, measured(model, data, given.request) | {"request": given.request, "what": what, "seed": 0})
    for seed in map(int, given.seeds.split(",")):
        for what, model in zip(ROLES[2:], models.values(), strict=True):
            about = {"request": given.request, "what": what, "seed": seed}
            if not is_there(given.out, about):
                method = method_for_run(run, "regrow", {"seed": seed})
                add(
                    given.out,
                    measured(fo.forget(model, data, given.request, method).model, data, given.request) | about,
                )


def is_there(out: Path, about: dict[str, Any]) -> bool:
    rows = read_results(out).rows if out.exists() else ()
    return any(all(row[key] == about[key] for key in KEY) for row in rows)


def add(out: Path, row: dict[str, Any]) -> None:
    row |= {"processor": environment().processor}
    command = "python benchmarks/erasing_seeds.py --data-dir ../shared/data"
    what = "recall of the probe at every depth after regrow by several seeds, test images"
    add_row(out, row, KEY, lambda each: (each["request"], ROLES.index(each["what"]), each["seed"]), what, command)
    print(row, flush=True)


def measured(model: nn.Module, data: fo.Dataset, request: str) -> dict[str, Any]:
    """Recall of the probe at every depth, and accuracies."""
    case = Case(model, model, (), data, fo.ForgetRequest.parse(request))
    labels, evaluated = balanced_sample(case).labels, case.forget_eval.labels
    found = depth_features(case, MeasurementCache(), "unlearned")
    ends = fo.accuracies_of(model, data, request)
    recalls = {depth: recall(*pair, labels, evaluated) for depth, pair in found.items()}
    return {"probe": recalls, "forget": ends.forget, "retain": ends.retain}


if __name__ == "__main__":
    main()
