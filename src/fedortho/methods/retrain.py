"""The standard that forgetting is measured by: new weights that never met what must go."""

from dataclasses import dataclass, fields
from typing import Annotated, ClassVar

from torch import nn

from fedortho.data.request import KINDS, ForgetRequest
from fedortho.methods.method import forget_and_retain
from fedortho.statistics.engine import Engine
from fedortho.training.recipe import Recipe


@dataclass(frozen=True)
class Retrain(Recipe):
    """A fresh network, trained on what stays by the recipe that these settings are, penalties and all.

    With the recipe of the original, which `compare` gives it, the gap to it tells what forgetting does, and not what
    a penalty does; left out, they are a recipe's defaults, whatever the original was. The classifier keeps its outputs:
    that of a forgotten class just never has an image. A federation averages over all clients, each with the
    images that it may keep.
    """

    name: ClassVar[str] = "retrain"
    kinds: ClassVar[tuple[str, ...]] = KINDS
    roles: ClassVar[str] = "retain: full training from new weights"
    norms: ClassVar[str] = "new, by training"

    def __call__(self, model: nn.Module, engine: Engine, request: ForgetRequest) -> nn.Module:
        _, retain = forget_and_retain(self, engine, request)
        recipe = Recipe(**{field.name: getattr(self, field.name) for field in fields(Recipe)})
        return engine.fit(engine.fresh(self.seed), retain, recipe)


@dataclass(frozen=True)
class RetrainPlain(Retrain):
    """The same without orthogonality and alignment: what the penalties do is seen beside it."""

    name: ClassVar[str] = "retrain-plain"
    ortho: Annotated[float, "weight of the orthogonality penalty; 0: off"] = 0.0
    align: Annotated[float, "weight of the distance to the received model, where there is one"] = 0.0
