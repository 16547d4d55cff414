"""Class requests on the networks of `benchmarks/orthogonality.py`: hide and paper, with and without orthogonality.

    python benchmarks/forgetting.py --data-dir ../shared/data [--networks DIR] [--dataset cifar10] [--classes 0,1]

For each network and class: hide; the paper's edit as printed (ratio 0.01); the paper's edit at the best ratio under the
same retain budget; each also after batch-norm statistics are re-estimated on retained images (an attack that needs no
label). Choices are made on validation images, the figures are from test images. Resumes where it was stopped and writes
benchmarks/results/forgetting-DATASET.json after each class.
"""

import copy
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from frontier import trace_frontier
from manifest import benchmark_parser, open_network, original_name
from result_files import write_results
from torch import Tensor, nn

from fedortho.data.images import Dataset, evaluation_batches
from fedortho.data.request import ForgetRequest, union_of
from fedortho.engines.central import central_engine
from fedortho.engines.cost import flops_per_image
from fedortho.evaluation.accuracies import accuracies_of
from fedortho.methods.hide import Hide
from fedortho.methods.paper import Paper
from fedortho.models.norms import batch_norms, estimate_norms
from fedortho.models.predictions import accuracy
from fedortho.models.sites import find_sites
from fedortho.models.split import Split, entry_inputs, find_split, run_tail, tail_model
from fedortho.runs.run import Run
from fedortho.statistics.ledger import forget_lines, keep_activations, load_ledger, rebind_ledger, write_ledger
from fedortho.statistics.observe import Observation
from fedortho.unlearning.calibrate import Refused
from fedortho.unlearning.plan import ForgetPlan

HERE = Path(__file__).parent
PAPER_EDIT = Hide(edit="conv", tap="conv", spread="equal", alpha=0.5, repair=False, scrub=False)  # that of Paper, tried
METHODS = ("original", "hide", "hide of before", "paper", "paper, best ratio")
PAPER_RATIOS = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5)


def main(words: list[str] | None = None) -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--dataset", default="cifar10")
    parser.add_argument("--models", default="vgg-mini,resnet-mini")
    parser.add_argument("--variants", default="none,lazy-0.1")
    parser.add_argument("--classes", default="0,1,2,3,4,5,6,7,8,9")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-retain-drop", type=float, default=Hide().max_retain_drop)
    parser.add_argument("--out", type=Path, help="another result file, for a second process at the same time")
    arguments = parser.parse_args(words)
    torch.set_num_threads(1)
    out = arguments.out or HERE / "results" / f"forgetting-{arguments.dataset}.json"
    saved = json.loads(out.read_text()) if out.exists() else {}
    rows: list[dict[str, Any]] = saved.get("rows", [])
    more: dict[str, list[dict[str, Any]]] = {key: saved.get(key, []) for key in ("sequence", "samples")}

    def name(model: str, variant: str) -> str:
        return original_name(model, arguments.seed, variant, arguments.dataset)

    pairs = [(model, variant) for variant in arguments.variants.split(",") for model in arguments.models.split(",")]
    for model, variant in pairs:
        run = open_network(arguments.networks, name(model, variant), arguments.data_dir)
        data = run.load_data(arguments.data_dir)
        ledger, test = ledger_of(run, data), CachedTest(run.load_model(), data)
        for label in map(int, arguments.classes.split(",")):
            about = {"model": model, "variant": variant, "class": label}
            known = {row["method"] for row in rows if about.items() <= row.items()}
            if new := measure(run, data, ledger, test, arguments.max_retain_drop, about, known):
                rows = sorted(rows + new, key=place_of_row)
                save(out, arguments.dataset, rows, more)
    for model, variant in pairs:
        if variant == "none":
            continue  # the rest is about the method, not about orthogonality
        run = open_network(arguments.networks, name(model, variant), arguments.data_dir)
        data = run.load_data(arguments.data_dir)
        for key, measured in (("samples", samples), ("sequence", sequence)):
            if not any(row["model"] == model and row["variant"] == variant for row in more[key]):
                more[key] += [
                    {"model": model, "variant": variant} | row for row in measured(run, data, ledger_of(run, data))
                ]
                save(out, arguments.dataset, rows, more)


def place_of_row(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["model"] != "vgg-mini", row["variant"] == "none", row["class"], METHODS.index(row["method"])


def save(out: Path, dataset: str, rows: list[dict[str, Any]], more: dict[str, list[dict[str, Any]]]) -> None:
    command = "python benchmarks/forgetting.py " + " ".join(sys.argv[1:])
    what = f"class requests, {dataset}, test images; digest of each original in `before`"
    write_results(out, what, command.strip(), rows, **more)


def sequence(run: Run, data: Dataset, ledger: Observation) -> list[dict[str, Any]]:
    """Five classes one after the other, each with a retain budget of 2 points; stops at a refusal."""
    model: nn.Module = run.load_model()
    test = CachedTest(model, data)
    right, done, rows = test.right(model), list[ForgetRequest](), list[dict[str, Any]]()
    for label in range(5):
        request, before = ForgetRequest.parse(f"class:{label}"), union_of(done)
        try:
            outcome = Hide(max_retain_drop=0.02).plan(model, central_engine(model, data, ledger), request, before)
        except Refused as refusal:
            rows.append({"request": str(request), "refused": str(refusal)})
            break
        edited = outcome.patch.apply(model)
        stays = (request if before is None else before + request).split(data.train)[1]
        ledger = forget_lines(rebind_ledger(ledger, model, edited, data.train), stays)
        model, earlier = edited, right
        right = test.right(model)
        done.append(request)
        retained = test.labels > label
        forgotten = {str(old): share(right[test.labels == number]) for number, old in enumerate(done)}
        kept = {"retain_before": share(earlier[retained]), "retain": share(right[retained])}
        rows.append({"request": str(request), **kept, "forgotten": forgotten})
        print(rows[-1], flush=True)
    return rows


def share(right: Tensor) -> float:
    return float(right.double().mean())


def samples(run: Run, data: Dataset, ledger: Observation) -> list[dict[str, Any]]:
    """A hundred training images drawn beforehand (seed 0), contrasted with all retained and with the same classes."""
    model = run.load_model()
    order = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(0))[:100]
    request = ForgetRequest(samples=tuple(str(int(row)) for row in data.train.rows[order]))
    before, rows = accuracies_of(model, data, request), []
    for contrast in ("retain", "same-class"):
        settings = Hide(contrast=contrast)
        row: dict[str, Any] = {"contrast": contrast, "forget_before": before.forget, "retain_before": before.retain}
        try:
            outcome = settings.plan(model, central_engine(model, data, ledger), request)
            after = accuracies_of(outcome.patch.apply(model), data, request)
            row |= {"forget": after.forget, "retain": after.retain, "limit": outcome.trials[0].limit} | summary(outcome)
        except Refused as refusal:
            row["refused"] = str(refusal)
        rows.append(row)
        print(row, flush=True)
    return rows


class CachedTest:
    """Activations of the test images where the network's tail begins; evaluating an edit runs the tail alone."""

    def __init__(self, model: nn.Module, data: Dataset) -> None:
        example = data.test.normalise(data.test.pixels[data.test.rows[:2]])
        sites = find_sites(model, data.test.shape, "deep", "channel", "stream")
        self.split, self.labels, self.names = find_split(model, sites, example), data.test.labels, data.test.names
        parts = [entry_inputs(model, self.split, inputs) for inputs, _ in evaluation_batches(data.test)]
        self.cached = torch.cat(parts)

    def right(self, model: nn.Module) -> Tensor:
        """Of each image whether the answer is right."""
        with torch.no_grad():
            return run_tail(tail_model(model, self.split), self.split, self.cached).argmax(1) == self.labels

    def accuracies(self, model: nn.Module, request: ForgetRequest) -> dict[str, float]:
        right, forget = self.right(model), torch.isin(self.labels, torch.tensor(request.labels(self.names)))
        parts = {"forget": right[forget], "retain": right[~forget], "test": right}
        return {name: share(part) for name, part in parts.items()}


def ledger_of(run: Run, data: Dataset) -> Observation:
    path, model = run.path / "ledger.safetensors", run.load_model()
    if not path.exists():
        write_ledger(path, model, data.train, valid=data.valid)
    ledger = load_ledger(path, model)
    assert ledger is not None, "these networks have deep layers"
    if ledger.kept is None:  # written before activations were kept
        kept = keep_activations(model, data.train, data.valid)
        forward = flops_per_image(model, data.train.shape)[0]
        ledger = replace(ledger, kept=replace(kept, flops=float(forward * (ledger.images + len(kept.rows)))))
    return ledger


def measure(
    run: Run, data: Dataset, ledger: Observation, test: CachedTest, drop: float, about: dict[str, Any], known: set[str]
) -> list[dict[str, Any]]:
    """One row per method that is not known, for one class; `drop` is the largest loss of retain accuracy."""
    model, request = run.load_model(), ForgetRequest.parse(f"class:{about['class']}")

    def attempt(settings: Hide | Paper) -> dict[str, Any]:
        try:
            outcome = settings.plan(model, central_engine(model, data, ledger), request)
        except Refused as refusal:
            frontier = [replace(trial, patch=None) for trial in refusal.frontier]  # type: ignore[arg-type]  # not for a file
            return {"refused": str(refusal), "frontier": [asdict(trial) for trial in frontier]}
        edited = outcome.patch.apply(model)
        return summary(outcome) | test.accuracies(edited, request) | attacked(edited, data, request)

    def best_paper() -> dict[str, Any]:
        best = best_ratio(model, data, request, ledger, drop)
        result = {"refused": "no ratio keeps the budget"} if best is None else attempt(replace(Paper(), ratio=best))
        return {"ratio": best} | result

    steps: dict[str, Callable[[], dict[str, Any]]] = {
        "original": lambda: test.accuracies(model, request) | {"before": run.record.model.digest},
        "hide": lambda: attempt(Hide(max_retain_drop=drop)),
        "paper": lambda: attempt(Paper()),
        "paper, best ratio": best_paper,
    }
    rows = [about | {"method": name} | step() for name, step in steps.items() if name not in known]
    for row in rows:
        print(
            {key: row.get(key) for key in (*about, "method", "forget", "retain", "forget_bn", "retain_bn")}, flush=True
        )
    return rows


def summary(outcome: ForgetPlan) -> dict[str, Any]:
    value: dict[str, Any] = {f"{key}_seconds": round(spent, 3) for key, spent in outcome.seconds.items()}
    value["images_read"] = dict(outcome.images_read)
    value["kernels"] = {site: len(edit["kernels"]) for site, edit in outcome.patch.note["sites"].items()}
    if outcome.chosen is not None:
        value |= {"ratio": outcome.chosen.ratio, "scrub": outcome.chosen.scrub, "trials": len(outcome.trials)}
        pruned = [t for t in outcome.trials if t.ratio == outcome.chosen.ratio and not t.scrub]
        value["forget_pruned_only"] = pruned[0].forget if pruned else None  # on validation images
    return value


def best_ratio(
    model: nn.Module, data: Dataset, request: ForgetRequest, ledger: Observation, drop: float
) -> float | None:
    """The ratio within hide's retain budget at which the paper's edit has the lowest forget accuracy on validation."""
    none, *trials = trace_frontier(PAPER_EDIT, model, central_engine(model, data, ledger), request, PAPER_RATIOS)
    affordable = [trial for trial in trials if trial.retain >= none.retain - drop]
    return min(affordable, key=lambda trial: trial.forget).ratio if affordable else None


def attacked(model: nn.Module, data: Dataset, request: ForgetRequest) -> dict[str, float]:
    """Accuracy on all test images of the class and on 2,000 others after all batch norms are re-estimated.

    On 2,048 retained training images, without labels and gradients.
    """
    retain, (forget_test, retain_test) = request.split(data.train)[1], request.split(data.test)
    order = torch.Generator().manual_seed(1)
    part = retain.subset(torch.randperm(len(retain), generator=order)[:2048])
    victim = copy.deepcopy(model)
    estimate_norms(victim, Split(None), batch_norms(model), part.normalise(part.pixels[part.rows]))
    part_test = retain_test.subset(torch.randperm(len(retain_test), generator=order)[:2000])
    return {"forget_bn": accuracy(victim, forget_test), "retain_bn": accuracy(victim, part_test)}


if __name__ == "__main__":
    main()
