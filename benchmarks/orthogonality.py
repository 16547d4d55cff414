"""Small networks on CIFAR without orthogonality, with the exact penalty and with the lazy one.

    python benchmarks/orthogonality.py --data-dir ../shared/data [--networks DIR] [--dataset cifar100 --epochs 12]

Trains one run directory per row under --networks, resumes where it was stopped, and adds to
benchmarks/results/orthogonality-DATASET.json after each row. Choices are made on validation accuracy; test accuracy is
reported beside it.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from manifest import VARIANTS, benchmark_parser, check_digest, epoch_printer, original_name
from result_files import add_row

from fedortho.models.graph import select_layers, trace_layers
from fedortho.runs.run import Run
from fedortho.runs.settings import TrainSettings
from fedortho.runs.training import train_run

HERE = Path(__file__).parent


def main(words: list[str] | None = None) -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--models", default="vgg-mini,resnet-mini")
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--dataset", default="cifar10")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--out", type=Path, help="result file; default: benchmarks/results/orthogonality-DATASET.json")
    arguments = parser.parse_args(words)
    out = arguments.out or HERE / "results" / f"orthogonality-{arguments.dataset}.json"
    for seed in map(int, arguments.seeds.split(",")):
        for variant in arguments.variants.split(","):
            for model in arguments.models.split(","):
                about = {"model": model, "variant": variant, "seed": seed}
                name = original_name(model, seed, variant, arguments.dataset)
                settings = TrainSettings(
                    data=arguments.dataset,
                    data_dir=arguments.data_dir,
                    model=model,
                    epochs=arguments.epochs,
                    seed=seed,
                    threads=1,
                    **VARIANTS[variant],
                )
                run = train_run(arguments.networks / name, settings, watch=epoch_printer(name))
                add(out, about | describe(check_digest(run)))


def add(out: Path, row: dict[str, Any]) -> None:
    def order(other: Mapping[str, Any]) -> Any:
        return other["model"], other["seed"], list(VARIANTS).index(other["variant"])

    command = " ".join(["python benchmarks/orthogonality.py", *sys.argv[1:]])
    what = "small networks with and without orthogonality, one thread"
    add_row(out, row, ("model", "variant", "seed"), order, what, command)
    print(row, flush=True)


def describe(run: Run) -> dict[str, Any]:
    """Accuracies, the paper's penalty, and the mean absolute cosine of two kernels of a deep layer."""
    history = run.history()
    result = run.record.result
    return {
        "epochs": len(history),
        "valid_accuracy": result.valid_accuracy,
        "test_accuracy": result.test_accuracy,
        "mean_abs_cosine": round(mean_cosine(run), 5),
        "penalty": round(penalty(run), 5),
        "seconds": round(sum(entry.seconds for entry in history)),
        "weights": run.record.model.weights,
        "digest": run.record.model.digest,
        "threads": run.record.environment.threads,
    }


def deep_kernels(run: Run) -> list[torch.Tensor]:
    model = run.load_model()
    layers = select_layers(trace_layers(model, (3, 32, 32)), "deep")
    return [model.get_parameter(f"{layer.name}.weight").detach().flatten(1) for layer in layers]


def penalty(run: Run) -> float:
    """The sum over the deep layers of ||W Wᵀ - I||², also for a model trained without it."""
    return sum(float((rows @ rows.T - torch.eye(len(rows))).square().sum()) for rows in deep_kernels(run))


def mean_cosine(run: Run) -> float:
    """Mean |cosine| between two different kernels of a deep layer: 0 if orthogonal."""
    values = []
    for rows in deep_kernels(run):
        unit = rows / rows.norm(dim=1, keepdim=True)
        cosine = (unit @ unit.T).abs()
        values.append(float((cosine.sum() - cosine.trace()) / (len(rows) * (len(rows) - 1))))
    return sum(values) / len(values)


if __name__ == "__main__":
    main()
