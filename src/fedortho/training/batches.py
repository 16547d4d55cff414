"""Batches for training: which rows make up each step of an epoch, and their augmented images and labels."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fedortho.devices import to_device
from fedortho.training.augmentation import Augment
from fedortho.training.objectives import FitOptions, Rows, TrainingSet

NO_ROWS = torch.zeros(0, dtype=torch.int64)
SMALLEST_BATCH = 8  # fewer left-over images join the step before: batch norm over two or three makes gradients explode


def step_seed(seed: int, epoch: int, step: int) -> int:
    """A separate seed for every step, and in a federation for every round and client."""
    return int(np.random.SeedSequence([seed, epoch, step]).generate_state(1, np.uint64)[0] >> 1)


def plan_steps(training_sets: Sequence[TrainingSet], batch_size: int, seed: int, epoch: int, order: str) -> list[Rows]:
    """The rows of every step of an epoch, shuffled."""
    if len(training_sets) == 1:
        return [[rows] for rows in _shuffled(training_sets[0].images.rows, batch_size, step_seed(seed, epoch, 0))]
    return _ORDERS[order](training_sets, batch_size, seed, epoch)


def _smallest_batch(batch_size: int) -> int:
    return min(max(min(SMALLEST_BATCH, batch_size // 2), 2), batch_size)


def _shuffled(rows: Tensor, batch_size: int, seed: int) -> list[Tensor]:
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    batches = list(rows[order].split(batch_size))
    if len(batches) > 1 and len(batches[-1]) < _smallest_batch(batch_size):
        batches[-2:] = [torch.cat(batches[-2:])]
    return batches


def _mixed(training_sets: Sequence[TrainingSet], batch_size: int, seed: int, epoch: int) -> list[Rows]:
    """One shuffled pass over the images of all training sets."""
    places = torch.arange(sum(len(training_set.images) for training_set in training_sets))
    ends = torch.tensor([len(training_set.images) for training_set in training_sets]).cumsum(0)
    rows = torch.cat([training_set.images.rows for training_set in training_sets])
    owner = torch.bucketize(places, ends, right=True)
    return [
        [rows[chosen[owner[chosen] == number]] for number in range(len(training_sets))]
        for chosen in _shuffled(places, batch_size, step_seed(seed, epoch, 0))
    ]


def _each(training_sets: Sequence[TrainingSet], batch_size: int, seed: int, epoch: int) -> list[list[Tensor]]:
    """The shuffled batches of each training set; an empty set has none."""
    first = step_seed(seed, epoch, 0)
    return [
        _shuffled(own.images.rows, own.target.batch_size or batch_size, first + number) if len(own.images) else []
        for number, own in enumerate(training_sets)
    ]


def _paired(training_sets: Sequence[TrainingSet], batch_size: int, seed: int, epoch: int) -> list[Rows]:
    """At every step one batch of each set, for one pass over the first non-empty set; shorter sets repeat."""
    batches = _each(training_sets, batch_size, seed, epoch)
    steps = next((len(own) for own in batches if own), 0)
    return [[own[step % len(own)] if own else NO_ROWS for own in batches] for step in range(steps)]


def _turns(training_sets: Sequence[TrainingSet], batch_size: int, seed: int, epoch: int) -> list[Rows]:
    """All batches of the first set, then all of the next; a batch below the smallest size joins its neighbour."""
    steps: list[Rows] = []
    for number, own in enumerate(_each(training_sets, batch_size, seed, epoch)):
        for rows in own:
            step = [rows if place == number else NO_ROWS for place in range(len(training_sets))]
            if steps and min(len(rows), sum(map(len, steps[-1]))) < _smallest_batch(batch_size):
                steps[-1] = [torch.cat(pair) for pair in zip(steps[-1], step, strict=True)]
            else:
                steps.append(step)
    return steps


_ORDERS = {"mixed": _mixed, "paired": _paired, "turns": _turns}


def count_images(
    training_sets: Sequence[TrainingSet], batch_size: int, epochs: int, options: FitOptions
) -> tuple[int, int]:
    """Images read during training, counted at every reading, and how many of them a teacher reads too."""
    seen = taught = 0
    for rows in plan_steps(training_sets, batch_size, 0, 0, options.order):  # the same number in every epoch
        seen += sum(map(len, rows))
        taught += sum(len(own) for each, own in zip(training_sets, rows, strict=True) if each.target.teacher)
    return epochs * seen, epochs * taught


def read_step(
    training_sets: Sequence[TrainingSet], rows: Rows, augment: Augment, seed: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """The normalised, augmented images of a step and their target labels, one training set after the other."""
    generator, label_generator = (torch.Generator().manual_seed(seed + offset) for offset in (0, 1))
    inputs, labels = [], []
    for training_set, own in zip(training_sets, rows, strict=True):
        if not len(own):
            continue
        pixels = training_set.images.normalise(to_device(training_set.images.pixels[own], device))
        inputs.append(pixels if training_set.given else augment(pixels, generator))
        labels.append(to_device(_target_labels(training_set, own, label_generator), device))
    return (inputs[0], labels[0]) if len(inputs) == 1 else (torch.cat(inputs), torch.cat(labels))


def _target_labels(training_set: TrainingSet, rows: Tensor, generator: torch.Generator) -> Tensor:
    true, target, classes = training_set.images.store_labels[rows], training_set.target, training_set.images.classes
    if target.labels == "true":
        return true
    low = 1 if target.labels == "other" else 0  # a shift of 0 gives the true label
    if target.once:
        stored = len(training_set.images.store_labels)
        shift = torch.randint(low, classes, (stored,), generator=torch.Generator().manual_seed(target.seed))[rows]
    else:
        shift = torch.randint(low, classes, rows.shape, generator=generator)
    return (true + shift) % classes
