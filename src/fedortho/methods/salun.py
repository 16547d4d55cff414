"""SalUn: train the forget set on random labels, only where weights are salient to it (Fan et al., ICLR 2024)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn

from fedortho.data.request import ForgetRequest
from fedortho.engines.engine import Engine, PlanPart, TrainingPlan
from fedortho.engines.query import Query, Statistic
from fedortho.methods.method import Schedule, check_gradient, forget_and_retain
from fedortho.storage.settings import SomeShare
from fedortho.training.objectives import ORDERS, FitOptions, Target


@dataclass(frozen=True)
class SalUn(Schedule):
    """Saliency unlearning (arXiv:2310.12508).

    The mask selects the share `ratio` of all weights with the largest |Σ_b ∇ mean loss of batch b| on the forget set.
    Only these change; momentum and weight decay do not reach the others (in the authors' code they did until 2026).
    Random labels exclude the true one, as in the paper's objective; the published code draws from all classes
    (`exclude_true` off). Batch-norm statistics are not masked: training updates them.
    """

    name: ClassVar[str] = "salun"
    needs: ClassVar[str] = "forget: one gradient pass and all epochs; retain: all epochs"
    epochs: Annotated[int, "passes over the images; in a federation rounds"] = 10
    lr: Annotated[float, "learning rate"] = 0.013
    batch_size: Annotated[int, "images per step, and per gradient of the mask"] = 256
    ratio: Annotated[SomeShare, "share of the weights that may change"] = 0.5
    exclude_true: Annotated[bool, "random labels are never the true ones"] = True
    order: Annotated[str, ORDERS, "turns (forget first, then retain), or mixed (in the code for CIFAR-100)"] = "turns"

    def __call__(self, model: nn.Module, engine: Engine, request: ForgetRequest) -> nn.Module:
        forget, retain = forget_and_retain(self, engine, request)
        ((gradient,),) = engine.measure(model, [Query((forget,), Statistic("gradient", batch_size=self.batch_size))])
        check_gradient(self, engine, request, gradient)
        mask = salient(dict(model.named_parameters()), gradient.sums, self.ratio)
        relabelled = PlanPart(forget, Target("other" if self.exclude_true else "any"))
        plan = TrainingPlan((relabelled, PlanPart(retain)), FitOptions(self.order))
        return engine.fit(model, plan, self.recipe, trainable=mask)


def salient(weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor], ratio: float) -> dict[str, Tensor]:
    """A mask of the ⌊ratio · n⌋ weights with the largest gradients over all parameters; ties by order."""
    size = torch.cat([gradients[name].abs().flatten() for name in weights])
    chosen = torch.zeros(len(size), dtype=torch.bool)
    chosen[torch.argsort(size, descending=True, stable=True)[: int(ratio * len(size))]] = True
    parts = chosen.split([weight.numel() for weight in weights.values()])
    return {name: part.view(weight.shape) for (name, weight), part in zip(weights.items(), parts, strict=True)}
