"""Regrow: begin the last stages again, and train the network on the retain set."""

import copy
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

from torch import nn

from fedortho.data.request import KINDS, ForgetRequest
from fedortho.engines.engine import Engine, fresh_model
from fedortho.engines.training_plan import PlanPart, TrainingPlan
from fedortho.errors import BadSetting
from fedortho.methods.method import Schedule, forget_and_retain
from fedortho.models.graph import stage_entries, weighted_order
from fedortho.training.objectives import FitOptions
from fedortho.training.recipe import Recipe


@dataclass(frozen=True)
class Regrow(Schedule):
    """FedOrtho beyond the paper: the last stages get new weights, then the network learns from the retain set only.

    A stage is a run of layers with outputs of one size. What is reset knows nothing of the forget set. What is before
    it knows less the longer it trains along, and all that it knew if it is `frozen`. A network that has no more stages
    is trained anew.
    """

    name: ClassVar[str] = "regrow"
    kinds: ClassVar[tuple[str, ...]] = KINDS
    needs: ClassVar[str] = "retain: all epochs"
    norms: ClassVar[str] = "new in the stages that are reset; before them updated by training, or kept (frozen)"
    epochs: Annotated[int, "passes over the images; in a federation rounds"] = 2
    lr: Annotated[float, "learning rate at the start; a cosine takes it to 0"] = 0.05
    stages: Annotated[int, "stages that are reset, counted from the output"] = 2
    frozen: Annotated[bool, "train only what is reset"] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stages < 1:
            raise BadSetting(f"stages must be at least 1, not {self.stages}")

    @property
    def recipe(self) -> Recipe:
        return replace(super().recipe, schedule="cosine")

    def __call__(self, model: nn.Module, engine: Engine, request: ForgetRequest) -> nn.Module:
        _, retain = forget_and_retain(self, engine, request)
        student = copy.deepcopy(model).cpu().requires_grad_(not self.frozen)
        fresh = fresh_model(engine, self.seed)
        for name in last_stages(model, self.stages, engine.info.image_shape):
            student.get_submodule(name).requires_grad_(True).load_state_dict(fresh.get_submodule(name).state_dict())
        options = FitOptions(norms="trainable" if self.frozen else "train")
        return engine.fit(student, TrainingPlan((PlanPart(retain),), options), self.recipe).requires_grad_(True)


def last_stages(model: nn.Module, stages: int, shape: tuple[int, int, int]) -> list[str]:
    """The layers with weights, and norms, of the last stages and behind them, in the order of a forward pass."""
    order, entries = weighted_order(model, shape), stage_entries(model, shape)
    return order if stages > len(entries) else order[order.index(entries[-stages]) :]
