"""What a model is trained on: training sets with their target, the options of a fit, and the loss of a step."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedortho.data.images import Images, check_labels, collect_images
from fedortho.data.loaders import ImageSource
from fedortho.errors import BadData, BadSetting, unknown
from fedortho.models.zoo import count_answers
from fedortho.storage.settings import Positive, check_settings
from fedortho.training.muon import Muon
from fedortho.training.recipe import Recipe
from fedortho.training.sgd import SGD

LABELS = ("true", "other", "any")
ORDERS = ("mixed", "paired", "turns")  # of batches from several training sets; see training/batches.py
BATCH_NORM = ("train", "trainable", "frozen")
Weights = Iterable[nn.Parameter]
OPTIMISERS: Mapping[str, Callable[[Weights, Recipe, bool], SGD | torch.optim.Adam]] = {  # weights, recipe, fused
    "sgd": lambda w, r, fused: SGD(w, r.lr, r.momentum, weight_decay=r.weight_decay, fused=fused),
    "adam": lambda w, r, fused: torch.optim.Adam(w, lr=r.lr, weight_decay=r.weight_decay, fused=fused),
    "muon": lambda w, r, fused: Muon(
        w, r.lr, r.momentum, weight_decay=r.weight_decay, nesterov=r.momentum > 0, fused=fused
    ),
}
Rows = list[Tensor]  # rows of one step, one tensor per training set; some may be empty
Objective = Callable[[Tensor, Tensor, Tensor | None, float], Tensor]  # outputs, labels, teacher's outputs, temperature


def _imitate(outputs: Tensor, labels: Tensor, teacher_outputs: Tensor | None, temperature: float) -> Tensor:
    """KL(teacher ‖ student) of softmax(logits / temperature), without the factor temperature²."""
    assert teacher_outputs is not None, "check_teachers has checked it"
    student = functional.log_softmax(outputs / temperature, 1)
    return functional.kl_div(student, functional.softmax(teacher_outputs / temperature, 1), reduction="batchmean")


OBJECTIVES: Mapping[str, Objective] = {
    "cross-entropy": lambda outputs, labels, _, __: functional.cross_entropy(outputs, labels),
    "imitate": _imitate,  # mean over images of the divergence
    "imitate-elements": lambda outputs, *rest: _imitate(outputs, *rest) / outputs.shape[1],  # over classes too
}


@dataclass(frozen=True)
class Target:
    """What the model learns from the images of a training set: labels, or the outputs of a teacher."""

    labels: Annotated[str, LABELS] = "true"  # true, other (random, never the true one) or any (random, any class)
    weight: float = 1.0  # of the loss; a negative weight ascends it
    teacher: str = ""  # name of the model whose outputs replace labels
    label_weight: float = 0.0  # of the cross-entropy with labels, beside a teacher
    batch_size: int = 0  # images of this set per step, where sets take turns or pairs; 0: the recipe's
    once: bool = False  # draw random labels once, with `seed`, and not anew at each step
    seed: int = 0

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True)
class FitOptions:
    """Batch order, optimiser, loss and batch-norm mode of a training; strings and numbers only."""

    order: Annotated[str, ORDERS] = "mixed"
    norms: Annotated[str, BATCH_NORM] = "train"  # trainable: those with fixed weights keep statistics; frozen: all
    optimiser: Annotated[str, OPTIMISERS] = "sgd"  # adam has own momenta; muon moves kernels by a share of their norm
    objective: Annotated[str, OBJECTIVES] = "cross-entropy"  # compares outputs with labels or with a teacher
    temperature: Positive = 1.0  # divides the logits of teacher and student
    masked_gradient: float = 0.0  # its factor where the mask is False; 0: such weights keep their value bit for bit
    local_epochs: int = 0  # in a federation: epochs of a client in a round; 0: as its settings say

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True)
class TrainingSet:
    """Images and their target; `given` images are generated (such as noise) and are not augmented."""

    images: Images
    target: Target = field(default_factory=Target)
    given: bool = False


def as_training_sets(what: Images | ImageSource | Sequence[TrainingSet]) -> list[TrainingSet]:
    """The training sets themselves, or images, a loader or a dataset as one training set with their true labels."""
    if isinstance(what, Sequence) and what and all(isinstance(training_set, TrainingSet) for training_set in what):
        return list(what)
    return [TrainingSet(what if isinstance(what, Images) else collect_images(what))]


def check_training_sets(model: nn.Module, training_sets: Sequence[TrainingSet], batch_size: int) -> None:
    """Refuse training sets that the model cannot be trained on; raises BadData or BadSetting."""
    if foreign := [each.images for each in training_sets if not isinstance(each.images, Images)]:
        got = type(foreign[0]).__name__
        raise BadData(f"training needs Images (such as data.train or images_from_tensors), not {got}")
    number = sum(len(training_set.images) for training_set in training_sets)
    if not number:
        raise BadData("there are no images to train on")
    for training_set in training_sets:
        check_labels(training_set.images.labels, count_answers(model, training_set.images.shape))
    for name, weight in model.named_parameters():
        if weight.dim() > 4:
            raise BadSetting(f"{name} has {weight.dim()} dimensions; only networks for 2d images are trained")
    if min(batch_size, number) == 1 and any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules()):
        if number == 1:
            raise BadData("there is only one image to train on, and batch norm needs two; give more images")
        raise BadSetting("batch norm cannot train on one image at a time; use a batch-size of at least 2")


def check_teachers(
    training_sets: Sequence[TrainingSet], options: FitOptions, teachers: Mapping[str, nn.Module]
) -> None:
    """Refuse a target whose teacher is missing, and a teacher that the objective would ignore."""
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
    """Σ weight · share · mean loss over training sets; the share of the step's images, or 1 if sets are paired."""
    start, total = 0, None
    for target, own in zip((each.target for each in training_sets), rows, strict=True):
        if not len(own):
            continue
        part = slice(start, start + len(own))
        start += len(own)
        teacher_outputs = None
        if target.teacher:
            with torch.no_grad():
                teacher_outputs = teachers[target.teacher](inputs[part]).float()
        loss = OBJECTIVES[options.objective](outputs[part], labels[part], teacher_outputs, options.temperature)
        share = 1.0 if options.order == "paired" else len(own) / len(inputs)
        if target.weight * share != 1.0:
            loss = loss * (target.weight * share)
        if target.label_weight:
            loss = loss + target.label_weight * share * functional.cross_entropy(outputs[part], labels[part])
        total = loss if total is None else total + loss
    assert total is not None, "every step has images"
    return total


LOSSES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross-entropy": functional.cross_entropy,
    "norm": lambda outputs, labels: outputs.square().sum(1).mean(),  # mean ‖logits‖², which needs no label
}
