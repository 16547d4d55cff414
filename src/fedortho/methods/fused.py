"""FUSED: train sparse adapters over frozen weights on the retain set; reversible (Zhong et al., CVPR 2025)."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import nn

from fedortho.data.request import ForgetRequest
from fedortho.engines.engine import Engine, PlanPart, TrainingPlan
from fedortho.engines.query import Query, Selection, Statistic
from fedortho.methods.method import Schedule, forget_and_retain
from fedortho.training.adapters import ADAPTERS, Adapters, attach, merge
from fedortho.training.objectives import FitOptions, Target

CLASS_MODES = ("exclude", "relabel")
SIZES = ("sum", "mean")


@dataclass(frozen=True)
class FUSED(Schedule):
    """Adapters in the layers that local training changes most (arXiv:2502.20709).

    Layers are ranked by Σ_k |D_k| ‖p_l^k − p_l‖₁ over clients k after one local epoch; centrally there is one client.
    The paper's adapters are a fixed random subset of the weights (`sparse`); the released code has low-rank adapters in
    layers named in advance (`low-rank`; its dropout of 0.1 is omitted). The paper trains on the retain set only
    (`exclude`); the released code also trains on the forget set with random labels, drawn once (`relabel`). Everything
    but the adapters is frozen, batch-norm statistics included, so removing the adapters (`take_off`) restores the
    original bit for bit: the forgotten information remains stored.
    """

    name: ClassVar[str] = "fused"
    needs: ClassVar[str] = "all: one local epoch; retain: all epochs; forget (relabel): all epochs"
    norms: ClassVar[str] = "frozen"
    epochs: Annotated[int, "passes over the images; in a federation rounds"] = 10
    lr: Annotated[float, "learning rate of the adapters"] = 0.005
    adapter: Annotated[str, ADAPTERS, "sparse (paper) or low-rank (released code)"] = "sparse"
    layers: Annotated[str, "comma-separated layer names; empty: the layers that change most"] = ""
    number: Annotated[int, "number of layers, if they are not named"] = 4
    size: Annotated[str, SIZES, "change of a layer: sum over its weights (paper, favours large layers) or mean"] = "sum"
    density: Annotated[float, "share of a layer's weights in a sparse adapter"] = 0.05
    rank: Annotated[int, "of a low-rank adapter"] = 16
    scale: Annotated[float, "of a low-rank adapter (released code: 32 / 16)"] = 2.0
    class_mode: Annotated[str, CLASS_MODES, "forget set: exclude (paper) or relabel (released code)"] = "exclude"

    def __call__(self, model: nn.Module, engine: Engine, request: ForgetRequest) -> nn.Module:
        adapted, adapters = self.adapt(model, engine, request)
        return merge(model, adapted, adapters)

    def adapt(self, model: nn.Module, engine: Engine, request: ForgetRequest) -> tuple[nn.Module, Adapters]:
        """The model with its trained adapters, not merged, and their description."""
        forget, retain = forget_and_retain(self, engine, request)
        layers = tuple(word.strip() for word in self.layers.split(",") if word.strip())
        layers = layers or self.critical_layers(model, engine)
        adapters = Adapters(layers, self.adapter, self.density, self.rank, self.scale, self.seed)
        relabelled = PlanPart(forget, Target("other", once=True, seed=self.seed))
        parts = (PlanPart(retain), relabelled) if self.class_mode == "relabel" else (PlanPart(retain),)
        plan = TrainingPlan(parts, FitOptions(norms="frozen"), adapters=adapters)
        return engine.fit(attach(model, adapters), plan, self.recipe), adapters

    def critical_layers(self, model: nn.Module, engine: Engine) -> tuple[str, ...]:
        """The convolutions and linear layers that one local epoch changes most, in descending order."""
        statistic = Statistic("drift", batch_size=self.batch_size, lr=self.lr)
        ((drift,),) = engine.measure(model, [Query((Selection("train"),), statistic)])
        known = [n for n, m in model.named_modules() if isinstance(m, nn.Conv2d | nn.Linear)]
        sizes = torch.stack([drift.mean(f"{name}.weight").sum() for name in known])
        if self.size == "mean":
            sizes /= torch.tensor([model.get_parameter(f"{name}.weight").numel() for name in known])
        order = torch.argsort(sizes, descending=True, stable=True)[: self.number]
        return tuple(known[place] for place in order.tolist())
