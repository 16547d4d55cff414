"""One request on one model: the layers to edit, and the images that the edit is decided on."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedortho.data.request import EmptyGroup, ForgetRequest
from fedortho.engines.engine import Engine, withheld_hint
from fedortho.engines.query import Selection, Statistic
from fedortho.models.sites import Site, find_sites
from fedortho.statistics.observe import Observation
from fedortho.unlearning.settings import EditSettings


@dataclass(frozen=True)
class Task:
    """A request that was checked, on a copy of the model."""

    model: nn.Module  # on the CPU, in eval mode
    engine: Engine
    request: ForgetRequest
    forgotten: ForgetRequest | None  # removed by earlier requests: no part of the retain set
    sites: Sequence[Site]
    statistic: Statistic  # which kernels queries are about
    seed: int

    @property
    def parts(self) -> list[ForgetRequest]:
        """What is ranked on its own: each class, and all clients and samples together."""
        return self.request.parts()

    @property
    def removed(self) -> ForgetRequest:
        """All that is no part of the retain set: this request and the earlier ones."""
        return self.request if self.forgotten is None else self.forgotten + self.request

    def forget_sets(self, limit: int = 0) -> list[Selection]:
        """Training images of each part, at most `limit` of them (0: all)."""
        return [Selection("train", part, self.forgotten, limit, self.seed) for part in self.parts]

    def retain_set(self, limit: int = 0, split: str = "train") -> Selection:
        return Selection(split, None, self.removed, limit, self.seed)

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
    model = copy.deepcopy(model).cpu().eval()
    layers, edit, tap = settings.layers, settings.edit, settings.tap
    sites = find_sites(model, engine.info.image_shape, layers, edit, tap)
    return Task(model, engine, request, forgotten, sites, Statistic("peaks", layers, edit, tap), settings.seed)
