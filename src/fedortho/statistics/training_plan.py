"""What a model is trained on: selections of images, their targets, and the fit options."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from fedortho.data.images import Images
from fedortho.statistics.query import Group, draw
from fedortho.training.adapters import Adapters
from fedortho.training.objectives import Aim, Lesson, Manner


@dataclass(frozen=True)
class Part:
    """Some images and what is to be learnt from them."""

    group: Group = field(default_factory=Group)
    aim: Aim = field(default_factory=Aim)
    fraction: float = 1.0  # of the group, drawn by its seed
    given: Images | None = None  # in place of the group: images that were made, not taken

    def lesson(self, images: Images) -> Lesson:
        """The same with the images of its group, as their holder has them."""
        if self.given is not None:
            return Lesson(self.given, self.aim, given=True)
        most = 0 if self.fraction >= 1 else max(round(self.fraction * len(images)), 1)
        return Lesson(draw(images, most, self.group.seed), self.aim)


@dataclass(frozen=True)
class Course:
    """What a model is taught: parts of the images, how they are taken, and what else that needs."""

    parts: tuple[Part, ...]
    manner: Manner = field(default_factory=Manner)
    teachers: Mapping[str, nn.Module] = field(default_factory=dict)  # by the names that aims give
    adapters: Adapters | None = None  # those that the model has


def as_course(what: Group | Course) -> Course:
    return what if isinstance(what, Course) else Course((Part(what),))
