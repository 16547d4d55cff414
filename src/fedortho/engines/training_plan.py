"""What a model is trained on: selections of images, their targets, and the fit options."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from fedortho.data.images import Images
from fedortho.data.request import ForgetRequest
from fedortho.engines.query import Selection, draw
from fedortho.training.adapters import Adapters
from fedortho.training.objectives import FitOptions, Target, TrainingSet


@dataclass(frozen=True)
class PlanPart:
    """A selection of images and the target they are trained on."""

    group: Selection = field(default_factory=Selection)
    target: Target = field(default_factory=Target)
    fraction: float = 1.0  # of the group, drawn by its seed
    given: Images | None = None  # in place of the group: images that were made, not taken

    def training_set(self, images: Images) -> TrainingSet:
        """The same with the images of its group, as their holder has them."""
        if self.given is not None:
            return TrainingSet(self.given, self.target, given=True)
        most = 0 if self.fraction >= 1 else max(round(self.fraction * len(images)), 1)
        return TrainingSet(draw(images, most, self.group.seed), self.target)

    def given_share(self, start: float, end: float, seed: int) -> "PlanPart":
        """The same with the generated images between two shares of their order, which the seed draws.

        Copies of an image stand side by side: a share has few distinct images, and shares that do not overlap have
        others.
        """
        if self.given is None:
            return self
        _, image = self.given.rows.unique(return_inverse=True)
        rank = torch.randperm(int(image.max()) + 1, generator=torch.Generator().manual_seed(seed))
        ordered = torch.argsort(rank[image], stable=True)
        first, last = (round(share * len(ordered)) for share in (start, end))
        return replace(self, given=self.given.subset(ordered[first:last].sort().values))


@dataclass(frozen=True)
class TrainingPlan:
    """Parts of the images with their targets, fit options, and the teachers or adapters that they need."""

    parts: tuple[PlanPart, ...]
    options: FitOptions = field(default_factory=FitOptions)
    teachers: Mapping[str, nn.Module] = field(default_factory=dict)  # by the names in targets
    adapters: Adapters | None = None  # those that the model has

    def without(self, forgotten: ForgetRequest | None) -> "TrainingPlan":
        """The same plan less the images that earlier requests have removed."""
        return replace(self, parts=tuple(replace(part, group=part.group.without(forgotten)) for part in self.parts))


def as_training_plan(what: Selection | TrainingPlan) -> TrainingPlan:
    return what if isinstance(what, TrainingPlan) else TrainingPlan((PlanPart(what),))
