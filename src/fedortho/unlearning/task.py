"""One request on one model: the layers to edit, and the images that the edit is decided on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedortho.data.request import EmptyGroup, ForgetRequest
from fedortho.engines.engine import Engine, withheld_hint
from fedortho.engines.query import Selection, Statistic
from fedortho.errors import BadSetting
from fedortho.models.graph import select_layers
from fedortho.models.sites import Site, structure_for
from fedortho.models.split import find_classifier, on_device
from fedortho.statistics.observe import Observation
from fedortho.unlearning.settings import CalibrationSettings, EditSettings


@dataclass(frozen=True)
class Task:
    """A request that was checked."""

    model: nn.Module  # on the CPU, in eval mode; it is not changed
    engine: Engine
    request: ForgetRequest
    forgotten: ForgetRequest | None  # removed by earlier requests: no part of the retain set
    sites: Sequence[Site]
    statistic: Statistic  # which kernels queries are about
    seed: int
    left_out: Mapping[str, str]  # layers at the chosen depth that cannot be edited, each with the reason

    @property
    def parts(self) -> list[ForgetRequest]:
        """What is ranked on its own: each class, and all clients and samples together."""
        return self.request.parts()

    @property
    def removed(self) -> ForgetRequest:
        """All that is no part of the retain set: this request and the earlier ones."""
        return self.request if self.forgotten is None else self.forgotten + self.request

    def forget_sets(self, limit: int = 0, skip: int = 0, *, steady: bool = False) -> list[Selection]:
        """Training images of each part, at most `limit` of them (0: all)."""
        return [Selection("train", part, self.forgotten, limit, self.seed, skip, steady) for part in self.parts]

    def retain_set(self, limit: int = 0, split: str = "train", skip: int = 0, *, steady: bool = False) -> Selection:
        return Selection(split, None, self.removed, limit, self.seed, skip, steady)

    @property
    def example(self) -> Tensor:
        """Two random images, to find out how the network is built."""
        return torch.rand(2, *self.engine.info.image_shape, generator=torch.Generator().manual_seed(0))

    def check_measured(self, forget: Sequence[Observation], retain: Observation) -> None:
        """Refuse to go on where a forget set or the retain set turned out to be empty."""
        for part, observed in zip(self.parts, forget, strict=True):
            if not observed.images:
                hint = withheld_hint(self.engine)
                raise EmptyGroup(f"{part} has no training image (left){hint}; there is nothing to forget")
        if not retain.images:
            raise EmptyGroup(f"{self.request} selects all images; nothing would be left to keep: retrain")


def start_task(
    model: nn.Module,
    engine: Engine,
    request: ForgetRequest,
    settings: EditSettings,
    forgotten: ForgetRequest | None = None,
) -> Task:
    """The task of a request that the engine can serve."""
    engine.check(request, forgotten)
    model = on_device(model, "cpu")
    layers, edit, tap = settings.layers, settings.edit, settings.tap
    structure = structure_for(edit, model, engine.info.image_shape, engine.info.structure)
    sites, problems = structure.sites(layers, edit, tap), structure.problems(edit, tap)
    chosen = select_layers([finding.layer for finding in structure.findings], layers)
    left_out = {layer.name: problems[layer.name] for layer in chosen if layer.name in problems}
    statistic = Statistic("peaks", layers, edit, tap)
    task = Task(model, engine, request, forgotten, sites, statistic, settings.seed, left_out)
    may_scrub = isinstance(settings, CalibrationSettings) and settings.scrub and not settings.ratio
    may_scrub = may_scrub and request.kind == "class"  # a class can be removed from the classifier alone
    classes = len(engine.info.class_names)
    if not sites and not (may_scrub and find_classifier(model, classes, task.example) is not None):
        name, reason = next(iter(left_out.items()))
        raise BadSetting(f"no layer of {layers!r} can be edited ({name}: {reason}); see fedortho check")
    return task
