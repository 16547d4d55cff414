"""The hyper-parameters of training as one flat value, and the learning rate schedules."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from fedortho.errors import BadSetting
from fedortho.storage.settings import Count, Number, Seed, Share, Weight, check_settings
from fedortho.training.orthogonality import TALL

SCHEDULES: dict[str, Callable[["Recipe", float], float]] = {  # factor of lr after so many epochs
    "cosine": lambda recipe, clock: 0.5 * (1 + math.cos(math.pi * min(clock / max(recipe.epochs, 1e-9), 1.0))),
    "linear": lambda recipe, clock: max(1 - clock / max(recipe.epochs, 1e-9), 0.0),
    "steps": lambda recipe, clock: float(recipe.gamma ** sum(clock >= epoch for epoch in _milestones(recipe))),
    "geometric": lambda recipe, clock: float(recipe.gamma ** math.floor(clock)),
    "triangle": lambda recipe, clock: _triangle(math.floor(clock) + 1, recipe.epochs),
    "constant": lambda recipe, clock: 1.0,
}


@dataclass(frozen=True)
class Recipe:
    """Hyper-parameters of training; every field is a number or a string, as TOML, flags and run configs need."""

    epochs: Annotated[Count, "passes over the training images"] = 6
    batch_size: Annotated[Number, "images per step"] = 64
    accumulate: Annotated[Number, "parts of a batch, one after the other, whose gradients are added: less memory"] = 1
    lr: Annotated[Weight, "learning rate at the start"] = 0.05
    schedule: Annotated[
        str, SCHEDULES, "cosine or linear to 0, triangle, steps at milestones, geometric (gamma each epoch), constant"
    ] = "cosine"
    milestones: Annotated[str, "epochs after which the schedule steps multiplies lr by gamma"] = "30,60"
    gamma: Annotated[Weight, "factor of the schedules steps and geometric (the paper: 0.1, and 0.998 a round)"] = 0.1
    warmup: Annotated[Weight, "epochs over which lr rises from 0"] = 0.0
    momentum: Annotated[Share, "momentum of SGD"] = 0.9
    weight_decay: Annotated[Weight, "weight decay"] = 5e-4
    crop: Annotated[Count, "pixels of padding before a random crop; 0: none"] = 2
    flip: Annotated[Share, "probability of a left-right flip"] = 0.5
    erase: Annotated[Share, "probability of erasing a rectangle"] = 0.0
    ortho: Annotated[Weight, "weight of the orthogonality penalty; 0: off"] = 0.1
    ortho_layers: Annotated[str, "its layers: shallow, mid, deep, all, names, patterns, re:EXPRESSION"] = "deep"
    ortho_every: Annotated[Number, "apply it at every n-th step with n times the weight; 1: at each step"] = 4
    tall: Annotated[
        str, TALL, "layers with more kernels than inputs: columns or rows (one step, two values), or skip"
    ] = "columns"
    align: Annotated[Weight, "weight of the distance to the received model, where there is one"] = 0.1
    align_layers: Annotated[str, ("ortho", "all"), "the layers of ortho-layers (ortho) or all weights (all)"] = "ortho"
    precision: Annotated[str, ("float32", "bfloat16"), "float32, or bfloat16 for mixed precision"] = "float32"
    seed: Annotated[Seed, "seed of the weights, the batch order and the augmentation"] = 0

    def __post_init__(self) -> None:
        check_settings(self)
        _milestones(self)


def _triangle(epoch: int, epochs: int) -> float:
    """Rises by epochs, counted from 1, to 1 in the middle one, and falls after it.

    >>> [round(_triangle(epoch, 5), 2) for epoch in range(1, 6)]
    [0.33, 0.67, 1.0, 0.67, 0.33]
    """
    middle = (epochs + 1) // 2
    return epoch / middle if epoch <= middle else max(epochs + 1 - epoch, 0) / (epochs + 1 - middle)


def _milestones(recipe: Recipe) -> list[float]:
    try:
        return [float(word) for word in recipe.milestones.split(",") if word.strip()]
    except ValueError as error:
        raise BadSetting(f"milestones must be numbers with commas between, not {recipe.milestones!r}") from error


def learning_rate(recipe: Recipe, clock: float) -> float:
    """The learning rate after `clock` epochs, or rounds of a federation (the paper: `geometric`, gamma 0.998)."""
    rising = min((clock + 1e-9) / recipe.warmup, 1.0) if recipe.warmup else 1.0
    return recipe.lr * rising * SCHEDULES[recipe.schedule](recipe, clock)
