"""Small networks on CIFAR without orthogonality, with the exact penalty and with the lazy one.

    python benchmarks/orthogonality.py --data-dir ../shared/data [--dataset cifar100 --epochs 12]

Trains one run directory per row under benchmarks/runs (those that later benchmarks build on are checked in), goes
on where it was stopped, and adds to benchmarks/results/orthogonality-DATASET.json after each row. Choices are
made on validation accuracy; test accuracy is reported beside it.
"""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fedortho.models.graph import select_layers, trace_layers
from fedortho.runs.run import Run
from fedortho.runs.settings import TrainSettings
from fedortho.runs.training import train_run
from fedortho.storage.provenance import add_row
from fedortho.training.loop import Progress

HERE = Path(__file__).parent
VARIANTS: dict[str, dict[str, Any]] = {
    "none": {"ortho": 0.0},
    "lazy-0.1": {"ortho": 0.1, "ortho_every": 4},
    "exact-0.1": {"ortho": 0.1, "ortho_every": 1},
    "exact-0.5": {"ortho": 0.5, "ortho_every": 1},
    "lazy-0.5": {"ortho": 0.5, "ortho_every": 4},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", default="../shared/data")
    parser.add_argument("--models", default="vgg-mini,resnet-mini")
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--dataset", default="cifar10")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--runs", type=Path, default=HERE / "runs")
    arguments = parser.parse_args()
    out = HERE / "results" / f"orthogonality-{arguments.dataset}.json"
    for seed in map(int, arguments.seeds.split(",")):
        for variant in arguments.variants.split(","):
            for model in arguments.models.split(","):
                about = {"model": model, "variant": variant, "seed": seed}
                path = arguments.runs / f"{arguments.dataset}-{model}-{variant}-seed{seed}"
                settings = TrainSettings(
                    data=arguments.dataset,
                    data_dir=arguments.data_dir,
                    model=model,
                    epochs=arguments.epochs,
                    seed=seed,
                    threads=1,
                    **VARIANTS[variant],
                )
                add(out, about | describe(train_run(path, settings, watch=tell(path.name))))


def add(out: Path, row: dict[str, Any]) -> None:
    def order(other: Mapping[str, Any]) -> Any:
        return other["model"], other["seed"], list(VARIANTS).index(other["variant"])

    command = " ".join(["python benchmarks/orthogonality.py", *sys.argv[1:]])
    what = "small networks with and without orthogonality, one thread"
    add_row(out, row, ("model", "variant", "seed"), order, what, command)
    print(row, flush=True)


def describe(run: Run) -> dict[str, Any]:
    """Accuracies, the paper's penalty, and how alike two kernels of a deep layer are on average."""
    history = run.history()
    result = run.record["result"]
    return {
        "epochs": len(history),
        "valid_accuracy": result["valid-accuracy"],
        "test_accuracy": result["test-accuracy"],
        "mean_abs_cosine": round(likeness(run), 5),
        "penalty": round(penalty(run), 5),
        "seconds": round(sum(entry.seconds for entry in history)),
        "weights": run.record["model"]["weights"],
        "digest": run.record["model"]["digest"],
        "threads": run.record["environment"]["threads"],
    }


def deep_kernels(run: Run) -> list[torch.Tensor]:
    model = run.load_model()
    layers = select_layers(trace_layers(model, (3, 32, 32)), "deep")
    return [model.get_parameter(f"{layer.name}.weight").detach().flatten(1) for layer in layers]


def penalty(run: Run) -> float:
    """The sum over the deep layers of ||W Wᵀ - I||², also for a model trained without it."""
    return sum(float((rows @ rows.T - torch.eye(len(rows))).square().sum()) for rows in deep_kernels(run))


def likeness(run: Run) -> float:
    """Mean |cosine| between two different kernels of a deep layer: 0 if orthogonal."""
    values = []
    for rows in deep_kernels(run):
        unit = rows / rows.norm(dim=1, keepdim=True)
        cosine = (unit @ unit.T).abs()
        values.append(float((cosine.sum() - cosine.trace()) / (len(rows) * (len(rows) - 1))))
    return sum(values) / len(values)


def tell(name: str) -> Any:
    told = 0

    def show(now: Progress) -> None:
        nonlocal told
        if len(now.history) > told:
            told, entry = len(now.history), now.history[-1]
            print(
                f"{name}: epoch {entry.epoch + 1}/{now.epochs} loss {entry.loss:.3f} validation {entry.valid:.3f} "
                f"ortho {entry.ortho or 0:.4f} {entry.seconds:.0f} s",
                file=sys.stderr,
                flush=True,
            )

    return show


if __name__ == "__main__":
    main()
