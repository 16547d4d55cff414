"""ResNet-18 itself, the paper's smallest network, once: methods, costs and audits on a class of CIFAR-10.

    python benchmarks/resnet18.py --data-dir ../shared/data [--rows retrain,hide]

Written down before its first run. All 45,000 training images at 32x32, three epochs in bfloat16 with orthogonality as
in benchmarks/manifest.py, one seed; class 0 (airplane), the paper's first class and one of the two drawn for the
comparison. Nothing is chosen on this network: hide, erase and the paper's edit are as they are by default, and
fine-tuning, SalUn and SSD have the hyper-parameters that were tuned for resnet-mini on frog, with one pass. The paper's
edit is also run at the ratio that was tuned there (0.4). A one-pass rival is a third of the original's training here
and erase, with two passes, two thirds: at 150 epochs they are less than a hundredth and five hundredths.

Each model is judged by the quick audits against one retrained network, on test images; the first rows have accuracies
only and are made again. With --alike, erase is judged
once more, by what it makes of that network. A row that is there is not measured again, a killed process goes on, and
two processes share the rows; models go to runs/resnet18, one row each to benchmarks/results/resnet18.json.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from erasing import audits_of
from manifest import benchmark_parser
from result_files import add_row, read_results

from fedortho.audits.judge import judge_case
from fedortho.audits.verdict import Verdict
from fedortho.data.images import Dataset
from fedortho.data.request import ForgetRequest
from fedortho.errors import BadSetting, Busy
from fedortho.methods import make_method
from fedortho.methods.hyperparameters import read_settings
from fedortho.requests.comparing import compare
from fedortho.requests.counterfactuals import counterfactuals
from fedortho.requests.judging import reference_digests
from fedortho.requests.references import case_of, find_references, reference_cost
from fedortho.requests.run_context import open_context
from fedortho.runs.run import Run, open_run
from fedortho.runs.settings import TrainSettings
from fedortho.runs.training import train_run
from fedortho.storage.files import locked
from fedortho.storage.records import to_json

HERE = Path(__file__).parent
MODELS = HERE.parent / "runs" / "resnet18"
NAME = "cifar10-resnet18-lazy-0.1-seed0"
REQUEST = ForgetRequest.parse("class:0")
TRAINING = TrainSettings(data="cifar10", model="resnet18", epochs=3, precision="bfloat16", threads=1)
TUNED = {name: {**values, "epochs": 1} for name, values in read_settings("cifar10", "resnet-mini", "tuned").items()}
ROWS: dict[str, tuple[str, Mapping[str, Any]]] = {  # the method that makes each, and its settings
    "retrain": ("retrain", {}),
    "hide": ("hide", {}),
    "paper": ("paper", {}),
    "paper r=0.4": ("paper", {"ratio": 0.4}),
    "logit-mask": ("logit-mask", {}),
    "regrow": ("regrow", {}),
    "finetune": ("finetune", TUNED["finetune"]),
    "salun": ("salun", TUNED["salun"]),
    "ssd": ("ssd", {name: value for name, value in TUNED["ssd"].items() if name != "epochs"}),
}
WHAT = "ResNet-18 on CIFAR-10, one seed and class: accuracies, costs and quick audits, test images"
COMMAND = "python benchmarks/resnet18.py --data-dir ../shared/data"


def main(words: list[str] | None = None) -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--rows", default=",".join(ROWS), help="to share the work, separated by commas")
    parser.add_argument("--alike", action="store_true", help="judge erase by what it makes of the retrained network")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "resnet18.json", help="result file")
    given = parser.parse_args(words)
    torch.set_num_threads(1)
    original = train_run(given.networks / NAME, replace(TRAINING, data_dir=given.data_dir))
    data, names = original.load_data(given.data_dir), given.rows.split(",")
    for name in names:
        if name not in ROWS:
            raise BadSetting(f"no row {name!r}; choose from {', '.join(ROWS)}")
    for name in names:
        try:
            with locked(MODELS / name.replace(" ", "-")):
                row = row_of(given.out, name)
                is_judged = bool(row) and (name == "retrain" or "audits" in row)
                if not is_judged or (given.alike and name == "regrow" and "alike" not in row):
                    serve(name, original, data, given, row if is_judged else {})
        except Busy:
            print(name, "is made by another process", flush=True)


def row_of(out: Path, name: str) -> Mapping[str, Any]:
    """The row of this name; empty if there is none yet."""
    rows = read_results(out).rows if out.exists() else ()
    return next((row for row in rows if row["method"] == name), {})


def serve(name: str, original: Run, data: Dataset, given: Any, row: Mapping[str, Any]) -> None:
    """Make the model of a row, judge it, and write the row or what it lacks."""
    method, settings = ROWS[name]
    place = MODELS / name.replace(" ", "-")
    chosen = {method: settings}
    (made,) = compare(original, REQUEST, [method], out=place, settings=chosen, references=given.networks, data=data)
    assert made.accuracies is not None, made.refused
    reference, *_ = find_references(original, REQUEST, given.networks)
    if not row:
        retraining = reference_cost(reference, data).flops
        cost = to_json(made.cost) if made.cost else None
        row = {"method": name, "settings": dict(made.settings), "weights": made.weights, "cost": cost}
        row |= {"accuracies": to_json(made.accuracies), "share": (cost or {"flops": retraining})["flops"] / retraining}
        row |= {"retraining-flops": retraining, "epochs": original.settings.epochs}
        if method == "retrain":
            context = open_context(original, data)
            row |= {"before": to_json(context.accuracies(original.load_model(), REQUEST))}
        else:
            row |= audits_of(judged(name, open_run(place / method), original, [reference], data))
    if given.alike and name == "regrow":
        like = make_method(method, made.settings)
        treated = counterfactuals(open_context(original, data), like, REQUEST, [reference], MODELS / "references")
        verdict = judged(name, open_run(place / method), original, [reference, *treated], data)
        row = {**row, "alike": audits_of(verdict)}
    add_row(given.out, row, ("method",), lambda each: list(ROWS).index(each["method"]), WHAT, COMMAND)
    print(name, row["accuracies"], row.get("label", ""), row.get("alike", {}).get("label", ""), flush=True)


def judged(name: str, run: Run, original: Run, references: list[Run], data: Dataset) -> Verdict:
    """The quick audits."""
    case = case_of(run, REQUEST, data, original, references)
    digests = {"before": original.record.model.digest, "after": run.record.model.digest}
    digests |= reference_digests(references)
    return judge_case(case, "quick", method=ROWS[name][0], digests=digests)


if __name__ == "__main__":
    main()
