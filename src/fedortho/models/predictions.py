"""Predictions of a model: logits, accuracy, loss and the confusion matrix."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedortho.data.images import Images, check_labels
from fedortho.data.loaders import ImageSource
from fedortho.devices import sum_dtype
from fedortho.errors import BadData, BadSetting, cannot_read
from fedortho.models.layout import ordered_batches
from fedortho.models.prepare import find_logits


@dataclass(frozen=True)
class Evaluation:
    """Loss, accuracy and confusion matrix of a model on some images."""

    images: int
    loss: float
    accuracy: float
    confusion: tuple[tuple[int, ...], ...]  # [true label][predicted label]

    @property
    def per_class(self) -> tuple[float | None, ...]:
        """Accuracy of each class; None for a class without images."""
        return tuple(row[label] / sum(row) if sum(row) else None for label, row in enumerate(self.confusion))


def evaluate(model: nn.Module, images: Images | ImageSource, *, device: torch.device | str = "cpu") -> Evaluation:
    """Loss, accuracy and confusion matrix, in evaluation mode and without augmentation; the model keeps its mode."""
    if not isinstance(model, nn.Module):
        raise BadSetting(f"the model must be a torch.nn.Module, not {type(model).__name__}; load a state dict into one")
    loss, counts = torch.zeros((), dtype=sum_dtype(device), device=device), None
    with evaluating(model):
        for outputs, labels in _answered(model, images, device):
            classes = outputs.shape[1]
            check_labels(labels, classes)
            loss = loss + functional.cross_entropy(outputs, labels, reduction="sum").to(sum_dtype(device))
            cells = torch.bincount(labels * classes + outputs.argmax(1), minlength=classes**2)
            counts = cells if counts is None else counts + cells
    if counts is None or not int(counts.sum()):
        raise BadData("there are no images to evaluate on")
    table, total = counts.view(classes, classes), int(counts.sum())
    return Evaluation(total, float(loss) / total, int(table.trace()) / total, tuple(map(tuple, table.tolist())))


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; the former mode of every module is restored afterwards."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(modes[model])  # a network's own train() may do more than set the modes
        for module, mode in modes.items():
            module.training = mode


def _answered(
    model: nn.Module, images: Images | ImageSource, device: torch.device | str
) -> Iterator[tuple[Tensor, Tensor]]:
    dtype = next((weight.dtype for weight in model.parameters()), torch.float32)
    classes = images.classes if isinstance(images, Images) else 0
    for inputs, labels in ordered_batches(model, images, device):
        if not inputs.is_floating_point():
            raise BadData(f"images must be floats, normalised as in training, not {inputs.dtype}")
        try:
            outputs = answers_of(model, inputs.to(dtype), classes)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise cannot_read(inputs.shape[1:], error) from error
        yield outputs.float(), labels


def logits_of(model: nn.Module, images: Images, *, device: torch.device | str = "cpu") -> Tensor:
    """The logits of each image, (n, classes), float64 on the CPU, in the order of the images."""
    if not len(images):
        raise BadData("there are no images to answer to")
    with evaluating(model):
        return torch.cat([outputs.cpu().double() for outputs, _ in _answered(model, images, device)])


def refuse_broken(logits: Tensor, what: str) -> None:
    """Raise BadData if a logit is not finite; `what` names the model."""
    bad = (~torch.isfinite(logits)).any(1)
    if bool(bad.any()):
        first = int(bad.nonzero()[0])
        example = f"the first to image {first}: {float(logits[first][~torch.isfinite(logits[first])][0])}"
        found = f"{int(bad.sum())} of {len(logits)} answers are not finite ({example})"
        raise BadData(f"{what}: {found}; the model is broken, retrain or restore it")


def answers_of(model: nn.Module, inputs: Tensor, num_classes: int = 0) -> Tensor:
    """The logits of a batch, (images, classes); raises BadSetting if the model returns none."""
    outputs = find_logits(model(inputs), num_classes)
    if not isinstance(outputs, Tensor) or outputs.dim() != 2 or len(outputs) != len(inputs):
        got = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
        mode = "training" if model.training else "evaluation"
        raise BadSetting(f"in {mode} the model answers {len(inputs)} images with {got}, not with (images, classes)")
    return outputs


def accuracy(model: nn.Module, images: Images | ImageSource, *, device: torch.device | str = "cpu") -> float:
    """The share of images whose class is predicted correctly."""
    return evaluate(model, images, device=device).accuracy
