"""Cost of the penalties: time of a training step with each of them divided by that of a plain step, in one run.

    python benchmarks/overhead.py [--models resnet18,resnet50,vgg16] [--rounds 7]

Variants alternate step by step, so that noise slows all of them equally. Noise only adds time, so the ratio is the
fastest step of a variant divided by the fastest plain step; `median` is the median over rounds of (variant's step) /
(plain step of the same round).
"""

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from result_files import write_results
from torch import nn
from torch.nn import functional

from fedortho.data.images import Images, images_from_tensors
from fedortho.models.zoo import build_model
from fedortho.training.augmentation import Augment
from fedortho.training.loop import _State, _take_step
from fedortho.training.objectives import FitOptions, TrainingSet
from fedortho.training.orthogonality import ortho_penalty
from fedortho.training.penalties import Penalties, ortho_layers
from fedortho.training.recipe import Recipe

HERE = Path(__file__).parent
PLAIN = Recipe(batch_size=50, ortho=0.0, align=0.0, lr=0.01)
VARIANTS = {
    "plain": PLAIN,
    "exact": replace(PLAIN, ortho=0.1, ortho_every=1),
    "exact + alignment": replace(PLAIN, ortho=0.1, ortho_every=1, align=0.1),
    "lazy": replace(PLAIN, ortho=0.1, ortho_every=4),
    "lazy + alignment": replace(PLAIN, ortho=0.1, ortho_every=4, align=0.1),
}


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="resnet18,resnet50,vgg16,vgg-mini,resnet-mini")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "overhead.json")
    arguments = parser.parse_args(words)
    rows: list[dict[str, Any]] = []
    for name in arguments.models.split(","):
        rows += measure(name, arguments.rounds)
        command = "python benchmarks/overhead.py " + " ".join(sys.argv[1:])
        write_results(arguments.out, "training step over a plain step, batch 50, 32x32", command.strip(), rows)


def measure(name: str, rounds: int) -> list[dict[str, Any]]:
    """One row per variant of one model."""
    pixels = torch.randint(0, 256, (50, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    images = images_from_tensors(pixels, torch.arange(50) % 10)
    model = build_model(name, num_classes=10)
    steps: dict[str, Callable[[int], object]] = {}
    for variant, recipe in VARIANTS.items():
        state = _penalised(model, images, recipe)
        steps[variant] = lambda step, state=state: _take_step(state, [images.rows], step, 1000)  # type: ignore[misc]  # bound early
    state = _penalised(model, images, VARIANTS["exact + alignment"])
    steps["autograd + alignment"] = lambda step: autograd_step(state, images)
    times: dict[str, list[float]] = {variant: [] for variant in steps}
    for turn in range(rounds + 1):
        for variant, take in steps.items():
            number = 4 if variant.startswith("lazy") else 1  # a lazy turn pays its penalty once in four steps
            started = time.perf_counter()
            for step in range(4 * turn, 4 * turn + number):
                take(step)
            if turn:  # the first one warms up
                times[variant].append((time.perf_counter() - started) / number)
        print(f"{name}: round {turn}/{rounds}", file=sys.stderr, flush=True)
    rows = []
    for variant, values in times.items():
        ratios = [value / plain for value, plain in zip(values, times["plain"], strict=True)]
        row = {"model": name, "variant": variant, "ratio": round(min(values) / min(times["plain"]), 4)}
        row |= {"median": round(statistics.median(ratios), 4), "rounds": rounds, "seconds": round(min(values), 5)}
        rows.append(row)
        print(f"  {variant:22} {row['ratio']:.3f}x  (median {row['median']:.3f}x)", flush=True)
    return rows


def _penalised(model: nn.Module, images: Images, recipe: Recipe) -> _State:
    twin, received = copy.deepcopy(model), model if recipe.align else None
    layers = ortho_layers(twin, images.shape, recipe, aligning=received is not None)
    state = _State(twin, [TrainingSet(images)], recipe, FitOptions(), torch.device("cpu"), {})
    state.penalties = Penalties(state.model, layers, recipe, received)
    return state


def autograd_step(state: Any, images: Any) -> None:
    """For comparison: both penalties in the autograd graph of the loss."""
    inputs = Augment(state.recipe.crop, state.recipe.flip)(images.normalise(images.pixels), torch.Generator())
    inputs = inputs.contiguous(memory_format=torch.channels_last)
    loss = functional.cross_entropy(state.model(inputs), images.labels)
    loss = loss + 0.1 * torch.stack([ortho_penalty(conv) for conv in state.penalties.convs]).sum()
    pairs = zip(state.penalties.aligned, state.penalties.reference, strict=True)
    loss = loss + 0.1 * torch.stack([(weight - received).square().sum() for weight, received in pairs]).sum()
    state.optimiser.zero_grad()
    loss.backward()
    state.optimiser.step()
    loss.item()


if __name__ == "__main__":
    main()
