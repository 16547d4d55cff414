"""EU-k and CF-k: train the last k layers on the retain set, from new weights or from theirs (Goel et al., 2022)."""

import copy
from dataclasses import dataclass
from typing import Annotated, ClassVar

from torch import nn

from fedortho.data.request import ForgetRequest
from fedortho.engines.engine import Engine, PlanPart, TrainingPlan, fresh_model
from fedortho.errors import BadSetting
from fedortho.methods.method import Schedule, forget_and_retain
from fedortho.models.graph import WEIGHTED, weighted_order
from fedortho.storage.settings import Number
from fedortho.training.objectives import FitOptions


@dataclass(frozen=True)
class EUk(Schedule):
    """Exact-unlearning of the last k layers: reset them and train only them on the retain set (arXiv:2201.06640).

    Layers are convolutions and linear layers, counted from the output in the order of a forward pass; a norm belongs to
    the layer before it. The frozen part has no backward pass.

    Published (`scripts/unlearn.sh` and the defaults of the released code): 62 epochs, as long as the original training,
    lr 0.1, batches of 64, k from 1 to 3 by default and up to 7 of the 20 layers of a ResNet-20. Ours: k = 3; one cosine
    to 0 in place of warm restarts between 0.1 and 0.005; norms of the last k layers are reset with them; norms of the
    frozen layers keep their statistics, which the released code updates.
    """

    name: ClassVar[str] = "eu-k"
    needs: ClassVar[str] = "retain: all epochs, backward through the last k layers only"
    has_counterfactual: ClassVar[bool] = True
    norms: ClassVar[str] = "new in the last k layers, frozen in the others"
    schedule: ClassVar[str] = "cosine"
    resets: ClassVar[bool] = True
    epochs: Annotated[int, "passes over the images; in a federation rounds"] = 62
    lr: Annotated[float, "learning rate at the start; a cosine takes it to 0"] = 0.1
    k: Annotated[Number, "layers with weights that are trained, counted from the output"] = 3

    def __call__(self, model: nn.Module, engine: Engine, request: ForgetRequest) -> nn.Module:
        _, retain = forget_and_retain(self, engine, request)
        student = copy.deepcopy(model).cpu().requires_grad_(False)
        fresh = fresh_model(engine, self.seed) if self.resets else None
        for name in last_layers(model, self.k, engine.info.image_shape):
            student.get_submodule(name).requires_grad_(True)
            if fresh is not None:
                student.get_submodule(name).load_state_dict(fresh.get_submodule(name).state_dict())
        plan = TrainingPlan((PlanPart(retain),), FitOptions(norms="trainable"), original=model)
        return engine.fit(student, plan, self.recipe).requires_grad_(True)


@dataclass(frozen=True)
class CFk(EUk):
    """Catastrophic forgetting of the last k layers: as `eu-k`, without the reset (arXiv:2201.06640)."""

    name: ClassVar[str] = "cf-k"
    norms: ClassVar[str] = "updated by training in the last k layers, frozen in the others"
    resets: ClassVar[bool] = False


def last_layers(model: nn.Module, k: int, shape: tuple[int, int, int]) -> list[str]:
    """The last k convolutions and linear layers that a forward pass reaches, each followed by its norms."""
    order = weighted_order(model, shape)
    weighted = [place for place, name in enumerate(order) if isinstance(model.get_submodule(name), WEIGHTED)]
    if k > len(weighted):
        raise BadSetting(f"k is {k} but the network has {len(weighted)} layers with weights; choose at most that")
    return order[weighted[-k] :]
