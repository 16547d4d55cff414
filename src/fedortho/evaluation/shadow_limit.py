"""The accuracy that a model has on clients or samples which it was not trained on, estimated from shadow models."""

import copy
from dataclasses import dataclass
from math import exp, log

import torch
from torch import Tensor, nn

from fedortho.data.images import Images
from fedortho.errors import BadData
from fedortho.evaluation.shadows import Shadows
from fedortho.models.predictions import logits_of


@dataclass(frozen=True)
class ShadowLimit:
    """The limit of a request, and the three accuracies that it follows from."""

    limit: float  # the accuracy expected of this model, had it not been trained on the images
    never: float  # of shadow models, on those of the images that they were not trained on
    unseen: float  # of the same models, on validation images of the same labels
    own: float  # of the model itself, on these validation images
    images: int
    models: int

    def __str__(self) -> str:
        return (
            f"{self.limit:.1%}: {self.models} shadow models answer {self.never:.1%} of the {self.images} images that "
            f"they did not see and {self.unseen:.1%} of validation images of the same labels, this model "
            f"{self.own:.1%} of the latter"
        )


def shadow_limit(
    shadows: Shadows, forget: Tensor, model: nn.Module, valid: Images, device: torch.device | str = "cpu"
) -> ShadowLimit:
    """What the model would answer right of the images of a mask over the proxy, had it not been trained on them.

    Shadow models have fewer images, so their own accuracy is too low. What they tell is how much harder these images
    are than others of the same labels; the difference of the log-odds is added to the model's on validation images.
    """
    targets = shadows.proxy.subset(forget)
    if not len(targets) or not len(valid):
        raise BadData(f"{len(targets)} images and {len(valid)} validation images: a limit needs some of both")
    never = torch.zeros(len(targets), 2)
    of_labels = []
    for number in range(shadows.settings.models):
        shadow, outside = shadows.original(number), ~shadows.members[number][forget]
        never[:, 0] += _right(shadow, targets, device) * outside
        never[:, 1] += outside
        of_labels.append(_as_labelled(shadow, valid, targets.labels, device))
    answered = float((never[:, 0] / never[:, 1].clamp_min(1))[never[:, 1] > 0].mean())
    others, own = sum(of_labels) / len(of_labels), _as_labelled(model, valid, targets.labels, device)
    odds = sum(sign * _log_odds(share, len(targets)) for share, sign in ((own, 1), (answered, 1), (others, -1)))
    return ShadowLimit(1 / (1 + exp(-odds)), answered, others, own, len(targets), shadows.settings.models)


def _right(model: nn.Module, images: Images, device: torch.device | str) -> Tensor:
    logits = logits_of(copy.deepcopy(model).to(device), images, device=device)
    return (logits.argmax(1).cpu() == images.labels).float()


def _as_labelled(model: nn.Module, valid: Images, labels: Tensor, device: torch.device | str) -> float:
    """Accuracy on validation images, weighted as `labels` occur; a label without any has that of all."""
    right = _right(model, valid, device)
    shares = {int(label): float(right[valid.labels == label].mean()) for label in valid.labels.unique()}
    return sum(shares.get(label, float(right.mean())) for label in labels.tolist()) / len(labels)


def _log_odds(share: float, number: int) -> float:
    """The log-odds of a share, clipped to [0.5/n, 1 − 0.5/n] for a number n of images."""
    share = min(max(share, 0.5 / number), 1 - 0.5 / number)
    return log(share / (1 - share))
