"""Retraining from scratch on the retain set: the reference for every other method."""

from dataclasses import dataclass, fields
from typing import ClassVar

from torch import nn

from fedortho.data.request import KINDS, ForgetRequest
from fedortho.engines.engine import Engine, fresh_model
from fedortho.methods.method import CannotServe, forget_and_retain
from fedortho.training.recipe import Recipe

NO_RECIPE = (
    "0 epochs give an untrained network, no reference; name the training of an imported model by --recipe FILE.toml "
    "(epochs, lr, batch-size, …), or bring a reference that was trained elsewhere by import FILE --without REQUEST"
)


@dataclass(frozen=True)
class Retrain(Recipe):
    """Train freshly initialised weights on the retain set with this recipe, penalties included.

    `compare` passes the recipe of the original, so that the gap to this reference shows the effect of unlearning and
    not that of a penalty; otherwise the recipe's defaults apply. The classifier keeps all its outputs; a forgotten
    class has no training images. A federation averages over all clients, each with its part of the retain set.
    """

    name: ClassVar[str] = "retrain"
    kinds: ClassVar[tuple[str, ...]] = KINDS
    needs: ClassVar[str] = "retain: full training from new weights"
    norms: ClassVar[str] = "new, by training"

    def __call__(self, model: nn.Module, engine: Engine, request: ForgetRequest) -> nn.Module:
        if not self.epochs:
            raise CannotServe(f"{self.name}: {NO_RECIPE}")
        _, retain = forget_and_retain(self, engine, request)
        recipe = Recipe(**{field.name: getattr(self, field.name) for field in fields(Recipe)})
        return engine.fit(fresh_model(engine, self.seed), retain, recipe)
