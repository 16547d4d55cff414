"""Masked small gradients: reset the weights that matter least for the difference, then fine-tune them most."""

import copy
from dataclasses import dataclass, replace
from math import sqrt
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn

from fedortho.data.request import ForgetRequest
from fedortho.engines.engine import Engine, PlanPart, TrainingPlan
from fedortho.engines.query import Query, Statistic
from fedortho.methods.method import Schedule, check_gradient, forget_and_retain
from fedortho.storage.settings import SomeShare
from fedortho.training.objectives import FitOptions

SLOW = 0.1  # factor of the gradients of weights that are kept


@dataclass(frozen=True)
class MaskedSmallGradients(Schedule):
    """MSG (arXiv:2410.01276), the second of the NeurIPS 2023 unlearning challenge.

    g sums, over batches, the gradient of the mean loss on as many retained images as there are to forget, minus that on
    the forget set. In each convolution the share `ratio` of the weights with the smallest |g| gets new values (Kaiming
    normal by fan-out). Then the network learns from the retain set; the gradients of the convolutions' other weights
    are divided by ten. Weight decay is not.

    Published (the released code of the benchmark): ratio 0.3, 5 epochs, lr 0.001, batches of 64, a learning rate that
    rises for the first half of the epochs and then falls.
    """

    name: ClassVar[str] = "msg"
    needs: ClassVar[str] = "forget: one gradient pass; retain: one of as many images, and all epochs"
    schedule: ClassVar[str] = "triangle"
    lr: Annotated[float, "highest learning rate"] = 0.001
    ratio: Annotated[SomeShare, "share of each convolution's weights that is reset"] = 0.3
    images: Annotated[
        int, "retained images whose gradient is summed, shared evenly by clients; 0: as many as are forgotten"
    ] = 0

    def __call__(self, model: nn.Module, engine: Engine, request: ForgetRequest) -> nn.Module:
        forget, retain = forget_and_retain(self, engine, request)
        gradient, before = Statistic("gradient", batch_size=self.batch_size), replace(engine.tally)
        ((forgotten,),) = engine.measure(model, [Query((forget,), gradient)])
        check_gradient(self, engine, request, forgotten)
        number = engine.tally.since(before).images_trained  # the observation counts batches
        some = replace(retain, limit=self.images or number)
        ((retained,),) = engine.measure(model, [Query((some,), gradient)])
        change = {name: retained.sums[name] - forgotten.sums[name] for name in kernels_of(model)}
        mask = {n: smallest(g, self.ratio).view_as(model.get_parameter(n)) for n, g in change.items()}
        plan = TrainingPlan((PlanPart(retain),), FitOptions(masked_gradient=SLOW))
        return engine.fit(renewed(model, mask, self.seed), plan, self.recipe, trainable=mask)


def kernels_of(model: nn.Module) -> dict[str, Tensor]:
    """The weights of all convolutions, by the names of their parameters."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.Conv2d)}
    return {f"{name}.weight": module.weight for name, module in layers.items()}


def smallest(values: Tensor, ratio: float) -> Tensor:
    """Whether a value is among the share `ratio` with the smallest size, rounded; ties by order."""
    size = values.abs().flatten()
    chosen = torch.zeros(len(size), dtype=torch.bool)
    chosen[torch.argsort(size, stable=True)[: round(ratio * len(size))]] = True
    return chosen


def renewed(model: nn.Module, mask: dict[str, Tensor], seed: int) -> nn.Module:
    """A copy on the CPU in which the masked weights are drawn from N(0, 2 / fan-out)."""
    twin, generator = copy.deepcopy(model).cpu(), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in kernels_of(twin).items():
            out, _, height, width = weight.shape
            drawn = torch.randn(weight.shape, generator=generator) * sqrt(2 / (out * height * width))
            weight.copy_(torch.where(mask[name], drawn, weight))
    return twin
