"""FUSED: train small adapters over frozen weights on what stays; it can be reversed (Zhong et al., CVPR 2025)."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import nn

from fedortho.data.request import KINDS, ForgetRequest
from fedortho.errors import unknown
from fedortho.methods.method import Schedule, forget_and_retain
from fedortho.statistics.engine import Engine
from fedortho.statistics.query import Query, Selection, Statistic
from fedortho.statistics.training_plan import PlanPart, TrainingPlan
from fedortho.storage.settings import kebab
from fedortho.training.adapters import ADAPTERS, Adapters, attach, merge
from fedortho.training.objectives import FitOptions, Target

CLASS_MODES = ("exclude", "relabel")
SIZES = ("sum", "mean")


@dataclass(frozen=True)
class FUSED(Schedule):
    """Adapters in the layers that local training moves most (arXiv:2502.20709).

    Layers are ranked by Σ_k |D_k| ‖p_l^k − p_l‖₁ over clients k after one local epoch; centrally there is one
    client. The paper's adapters are a fixed random set of coordinates (`sparse`); the released code has low-rank
    ones in layers named in advance (`low-rank`; its dropout of 0.1 is left out). Only what stays is learnt
    (`exclude`, the paper); the released code instead relabels images of a class at random, once (`relabel`).
    Everything but the adapters is frozen, batch-norm statistics too, so that taking them off (`take_off`) gives
    the original back bit for bit: what was forgotten is still stored, and this is not erasure.
    """

    name: ClassVar[str] = "fused"
    kinds: ClassVar[tuple[str, ...]] = KINDS
    roles: ClassVar[str] = "all: one local epoch; retain: all epochs; forget (relabel): all epochs"
    norms: ClassVar[str] = "frozen"
    epochs: Annotated[int, "passes over the images; in a federation rounds"] = 10
    lr: Annotated[float, "learning rate of the adapters"] = 0.005
    adapter: Annotated[str, "sparse (paper) or low-rank (released code)"] = "sparse"
    layers: Annotated[str, "names of the layers, with commas between; empty: those that move most"] = ""
    number: Annotated[int, "how many layers, if they are not named"] = 4
    size: Annotated[str, "of a layer's move: sum (paper, favours big layers) or mean over its weights"] = "sum"
    density: Annotated[float, "share of a layer's coordinates in a sparse adapter"] = 0.05
    rank: Annotated[int, "of a low-rank adapter"] = 16
    scale: Annotated[float, "of a low-rank adapter (released code: 32 / 16)"] = 2.0
    class_mode: Annotated[str, "images of what must go: exclude (paper) or relabel (released code)"] = "exclude"

    def __post_init__(self) -> None:
        super().__post_init__()
        for kind, choices in (("adapter", ADAPTERS), ("class_mode", CLASS_MODES), ("size", SIZES)):
            if getattr(self, kind) not in choices:
                raise unknown(kebab(kind), getattr(self, kind), choices)

    def __call__(self, model: nn.Module, engine: Engine, request: ForgetRequest) -> nn.Module:
        adapted, adapters = self.adapt(model, engine, request)
        return merge(model, adapted, adapters)

    def adapt(self, model: nn.Module, engine: Engine, request: ForgetRequest) -> tuple[nn.Module, Adapters]:
        """The model with its trained adapters still apart."""
        forget, retain = forget_and_retain(self, engine, request)
        layers = tuple(word.strip() for word in self.layers.split(",") if word.strip())
        adapters = Adapters(
            layers or self.critical_layers(model, engine), self.adapter, self.density, self.rank, self.scale, self.seed
        )
        wrong = PlanPart(forget, Target("other", once=True, seed=self.seed))
        parts = (PlanPart(retain), wrong) if self.class_mode == "relabel" else (PlanPart(retain),)
        plan = TrainingPlan(parts, FitOptions(norms="frozen"), adapters=adapters)
        return engine.fit(attach(model, adapters), plan, self.recipe), adapters

    def critical_layers(self, model: nn.Module, engine: Engine) -> tuple[str, ...]:
        """Convolutions and linear layers whose weights one local epoch moves most, the most moved first."""
        statistic = Statistic("drift", batch_size=self.batch_size, lr=self.lr)
        ((moved,),) = engine.measure(model, [Query((Selection("train"),), statistic)])
        known = [n for n, m in model.named_modules() if isinstance(m, nn.Conv2d | nn.Linear)]
        sizes = torch.stack([moved.mean(f"{name}.weight").sum() for name in known])
        if self.size == "mean":
            sizes /= torch.tensor([model.get_parameter(f"{name}.weight").numel() for name in known])
        order = torch.argsort(sizes, descending=True, stable=True)[: self.number]
        return tuple(known[place] for place in order.tolist())
