"""What training is to teach: parts of images, what the model is to answer to each, and in which order they come."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedortho.data.images import Augment, Images, check_labels
from fedortho.errors import BadData, BadSetting, unknown
from fedortho.models.zoo import count_answers

LABELS = ("true", "other", "any")
BATCH_NORM = ("train", "frozen")


Weights = Iterable[nn.Parameter]


def _sgd(weights: Weights, lr: float, weight_decay: float, momentum: float, fused: bool) -> torch.optim.Optimizer:
    return torch.optim.SGD(weights, lr=lr, momentum=momentum, weight_decay=weight_decay, fused=fused)


def _adam(weights: Weights, lr: float, weight_decay: float, momentum: float, fused: bool) -> torch.optim.Optimizer:
    return torch.optim.Adam(weights, lr=lr, weight_decay=weight_decay, fused=fused)


OPTIMISERS: Mapping[str, Callable[[Weights, float, float, float, bool], torch.optim.Optimizer]] = {
    "sgd": _sgd,
    "adam": _adam,
}


@dataclass(frozen=True)
class Target:
    """What the model is to learn from some images."""

    labels: str = "true"  # true, other (random, never the true one) or any (random)
    weight: float = 1.0  # of the loss; below 0 it is ascended
    teacher: str = ""  # the name of a model to imitate, in place of labels
    once: bool = False  # random labels stay as drawn for `seed`, instead of being drawn at each step
    seed: int = 0

    def __post_init__(self) -> None:
        if self.labels not in LABELS:
            raise unknown("kind of labels", self.labels, LABELS)


@dataclass(frozen=True)
class FitOptions:
    """How lessons are taken; plain words and numbers."""

    order: str = "mixed"  # one of ORDERS
    norms: str = "train"  # frozen: batch norm uses its running statistics and leaves them as they are
    optimiser: str = "sgd"  # sgd, or adam (which has its own momenta)
    objective: str = "cross-entropy"  # one of OBJECTIVES: how answers are compared with labels or teachers
    temperature: float = 1.0  # of teachers and pupil
    local_epochs: int = 0  # in a federation: passes of a client in a round; 0: as many as it is used to

    def __post_init__(self) -> None:
        for name, choices in (
            ("order", ORDERS),
            ("norms", BATCH_NORM),
            ("optimiser", OPTIMISERS),
            ("objective", OBJECTIVES),
        ):
            if getattr(self, name) not in choices:
                raise unknown(name, getattr(self, name), choices)
        if self.temperature <= 0:
            raise BadSetting(f"temperature must be above 0, not {self.temperature}")


@dataclass(frozen=True)
class TrainingSet:
    """Images and what is to be learnt from them; `given` ones were made, not taken, and are not augmented."""

    images: Images
    target: Target = field(default_factory=Target)
    given: bool = False


def as_training_sets(what: Images | Sequence[TrainingSet]) -> list[TrainingSet]:
    """Plain images are one lesson."""
    if isinstance(what, Sequence) and what and all(isinstance(training_set, TrainingSet) for training_set in what):
        return list(what)
    return [TrainingSet(what)]  # type: ignore[arg-type]  # whatever else it is, it is refused where images are checked


def check_training_sets(model: nn.Module, training_sets: Sequence[TrainingSet], batch_size: int) -> None:
    """Refuse images and a model that could not take a single step together."""
    for training_set in training_sets:
        if not isinstance(training_set.images, Images):
            got = type(training_set.images).__name__
            raise BadData(f"training needs Images (such as data.train or images_from_tensors), not {got}")
    number = sum(len(training_set.images) for training_set in training_sets)
    if not number:
        raise BadData("there are no images to train on")
    for training_set in training_sets:
        check_labels(training_set.images.labels, count_answers(model, training_set.images.shape))
    if deep := next((name for name, weight in model.named_parameters() if weight.dim() > 4), None):
        raise BadSetting(
            f"{deep} has {model.get_parameter(deep).dim()} dimensions; only networks for 2d images are trained"
        )
    if min(batch_size, number) == 1 and any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules()):
        if number == 1:
            raise BadData("there is only one image to train on, and batch norm needs two; give more images")
        raise BadSetting("batch norm cannot train on one image at a time; use a batch of at least 2")


Rows = list[Tensor]  # of one step: the rows of each lesson, some of them empty
FEW = 8  # images that are left over join the step before: batch norm over two or three of them makes gradients explode


def step_seed(seed: int, epoch: int, step: int) -> int:
    """A seed of its own for every step, and in a federation for every round and client."""
    return int(np.random.SeedSequence([seed, epoch, step]).generate_state(1, np.uint64)[0] >> 1)


def plan_steps(training_sets: Sequence[TrainingSet], batch_size: int, seed: int, epoch: int, order: str) -> list[Rows]:
    """The rows of every step of an epoch, shuffled."""
    if len(training_sets) == 1:
        return [[rows] for rows in _shuffled(training_sets[0].images.rows, batch_size, step_seed(seed, epoch, 0))]
    return ORDERS[order](training_sets, batch_size, seed, epoch)


def _least(batch_size: int) -> int:
    """How many images a step has at least, if there are so many."""
    return min(max(min(FEW, batch_size // 2), 2), batch_size)


def _shuffled(rows: Tensor, batch_size: int, seed: int) -> list[Tensor]:
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    batches = list(rows[order].split(batch_size))
    if len(batches) > 1 and len(batches[-1]) < _least(batch_size):
        batches[-2:] = [torch.cat(batches[-2:])]
    return batches


def _mixed(training_sets: Sequence[TrainingSet], batch_size: int, seed: int, epoch: int) -> list[Rows]:
    """All images of all lessons in one shuffled pass."""
    places = torch.arange(sum(len(training_set.images) for training_set in training_sets))
    ends = torch.tensor([len(training_set.images) for training_set in training_sets]).cumsum(0)
    rows = torch.cat([training_set.images.rows for training_set in training_sets])
    owner = torch.bucketize(places, ends, right=True)
    return [
        [rows[chosen[owner[chosen] == number]] for number in range(len(training_sets))]
        for chosen in _shuffled(places, batch_size, step_seed(seed, epoch, 0))
    ]


def _each(training_sets: Sequence[TrainingSet], batch_size: int, seed: int, epoch: int) -> list[list[Tensor]]:
    """Shuffled batches of each lesson by itself; none of an empty one."""
    first = step_seed(seed, epoch, 0)
    return [
        _shuffled(training_set.images.rows, batch_size, first + number) if len(training_set.images) else []
        for number, training_set in enumerate(training_sets)
    ]


def _paired(training_sets: Sequence[TrainingSet], batch_size: int, seed: int, epoch: int) -> list[Rows]:
    """A batch of each lesson at every step, for one pass over the first lesson that has images; others begin anew."""
    batches = _each(training_sets, batch_size, seed, epoch)
    steps = next((len(own) for own in batches if own), 0)
    nothing = torch.zeros(0, dtype=torch.int64)
    return [[own[step % len(own)] if own else nothing for own in batches] for step in range(steps)]


def _turns(training_sets: Sequence[TrainingSet], batch_size: int, seed: int, epoch: int) -> list[Rows]:
    """All batches of the first lesson, then all of the next; a lesson of a handful shares a step with its neighbour."""
    nothing = torch.zeros(0, dtype=torch.int64)
    steps: list[Rows] = []
    for number, own in enumerate(_each(training_sets, batch_size, seed, epoch)):
        for rows in own:
            step = [rows if place == number else nothing for place in range(len(training_sets))]
            if steps and min(len(rows), sum(map(len, steps[-1]))) < _least(batch_size):
                steps[-1] = [torch.cat(pair) for pair in zip(steps[-1], step, strict=True)]
            else:
                steps.append(step)
    return steps


ORDERS: Mapping[str, Callable[[Sequence[TrainingSet], int, int, int], list[Rows]]] = {
    "mixed": _mixed,
    "paired": _paired,
    "turns": _turns,
}


def count_images(
    training_sets: Sequence[TrainingSet], batch_size: int, epochs: int, options: FitOptions
) -> tuple[int, int]:
    """How many images training reads, each time counted, and how many of them a teacher reads too."""
    seen = taught = 0
    for rows in plan_steps(training_sets, batch_size, 0, 0, options.order):  # every epoch has as many
        seen += sum(map(len, rows))
        taught += sum(
            len(own) for training_set, own in zip(training_sets, rows, strict=True) if training_set.target.teacher
        )
    return epochs * seen, epochs * taught


def read_step(
    training_sets: Sequence[TrainingSet], rows: Rows, augment: Augment, seed: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """The normalised, augmented images of a step and the labels they are to be given, lesson after lesson."""
    generator, drawing = (torch.Generator().manual_seed(seed + more) for more in (0, 1))
    inputs, labels = [], []
    for training_set, own in zip(training_sets, rows, strict=True):
        if not len(own):
            continue
        pixels = training_set.images.normalise(training_set.images.pixels[own].to(device))
        inputs.append(pixels if training_set.given else augment(pixels, generator))
        labels.append(_labels(training_set, own, drawing).to(device))
    return (inputs[0], labels[0]) if len(inputs) == 1 else (torch.cat(inputs), torch.cat(labels))


def _labels(training_set: TrainingSet, rows: Tensor, generator: torch.Generator) -> Tensor:
    true, target, classes = training_set.images.store_labels[rows], training_set.target, training_set.images.classes
    if target.labels == "true":
        return true
    low = 1 if target.labels == "other" else 0  # a shift of 0 keeps the true label
    if target.once:
        whole = len(training_set.images.store_labels)
        shift = torch.randint(low, classes, (whole,), generator=torch.Generator().manual_seed(target.seed))[rows]
    else:
        shift = torch.randint(low, classes, rows.shape, generator=generator)
    return (true + shift) % classes


Objective = Callable[[Tensor, Tensor, Tensor | None, float], Tensor]


def _cross_entropy(outputs: Tensor, labels: Tensor, taught: Tensor | None, temperature: float) -> Tensor:
    return functional.cross_entropy(outputs, labels)


def _imitate(outputs: Tensor, labels: Tensor, taught: Tensor | None, temperature: float) -> Tensor:
    """KL(teacher ‖ pupil), both softened by the temperature, without a factor of its square."""
    assert taught is not None, "checked when the lessons were given"
    pupil = functional.log_softmax(outputs / temperature, 1)
    return functional.kl_div(pupil, functional.softmax(taught / temperature, 1), reduction="batchmean")


def _imitate_elements(outputs: Tensor, labels: Tensor, taught: Tensor | None, temperature: float) -> Tensor:
    return _imitate(outputs, labels, taught, temperature) / outputs.shape[1]


OBJECTIVES: Mapping[str, Objective] = {
    "cross-entropy": _cross_entropy,
    "imitate": _imitate,  # the divergence of one image, averaged over images
    "imitate-elements": _imitate_elements,  # divided by the number of classes as well
}


def check_teachers(
    training_sets: Sequence[TrainingSet], options: FitOptions, teachers: Mapping[str, nn.Module]
) -> None:
    """Refuse lessons whose teacher is missing, and teachers that nobody would listen to."""
    wanted = {training_set.target.teacher for training_set in training_sets}
    if options.objective == "cross-entropy" and wanted - {""}:
        raise BadSetting(f"a teacher needs the objective imitate, not {options.objective}")
    if options.objective != "cross-entropy" and (missing := sorted(wanted - teachers.keys())):
        raise unknown("teacher", missing[0], teachers)


def step_loss(
    training_sets: Sequence[TrainingSet],
    rows: Rows,
    options: FitOptions,
    inputs: Tensor,
    outputs: Tensor,
    labels: Tensor,
    teachers: Mapping[str, nn.Module],
) -> Tensor:
    """Σ weight · mean loss of each lesson, by its share of the step's images (one for one if they are paired)."""
    objective, start, total = OBJECTIVES[options.objective], 0, None
    for training_set, own in zip(training_sets, rows, strict=True):
        if not len(own):
            continue
        there = slice(start, start + len(own))
        start += len(own)
        taught = None
        if training_set.target.teacher:
            with torch.no_grad():
                taught = teachers[training_set.target.teacher](inputs[there]).float()
        loss = objective(outputs[there], labels[there], taught, options.temperature)
        share = 1.0 if options.order == "paired" else len(own) / len(inputs)
        if training_set.target.weight * share != 1.0:
            loss = loss * (training_set.target.weight * share)
        total = loss if total is None else total + loss
    assert total is not None, "a step has images"
    return total


LOSSES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross-entropy": functional.cross_entropy,
    "norm": lambda outputs, labels: outputs.square().sum(1).mean(),  # ‖logits‖², which needs no label
}
