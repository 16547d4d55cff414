"""Convolution transpose: transpose every kernel, then fine-tune on the retain set (DeepUnlearn, NeurIPS 2024)."""

import copy
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import nn

from fedortho.data.request import ForgetRequest
from fedortho.engines.engine import Engine
from fedortho.errors import BadSetting
from fedortho.methods.method import Schedule, forget_and_retain


@dataclass(frozen=True)
class ConvolutionTranspose(Schedule):
    """CT (arXiv:2410.01276): height and width of every square kernel are swapped, then the network is fine-tuned.

    Published (the released code of the benchmark): 3 epochs, lr 0.001, batches of 64, a cosine by epochs; ours falls by
    steps. Kernels that are not square cannot be swapped and stay.
    """

    name: ClassVar[str] = "ct"
    needs: ClassVar[str] = "retain: a few epochs"
    has_counterfactual: ClassVar[bool] = True
    schedule: ClassVar[str] = "cosine"
    epochs: Annotated[int, "passes over the images; in a federation rounds"] = 3
    lr: Annotated[float, "learning rate at the start; a cosine takes it to 0"] = 0.001

    def __call__(self, model: nn.Module, engine: Engine, request: ForgetRequest) -> nn.Module:
        _, retain = forget_and_retain(self, engine, request)
        return engine.fit(transposed(model), retain, self.recipe)


def transposed(model: nn.Module) -> nn.Module:
    """A copy on the CPU with height and width of square kernels swapped; BadSetting if no kernel changes."""
    twin = copy.deepcopy(model).cpu()
    convolutions = (module for module in twin.modules() if isinstance(module, nn.Conv2d))
    swapped = [each for each in convolutions if each.kernel_size[0] == each.kernel_size[1] > 1]
    if not swapped:
        raise BadSetting("the network has no square kernel larger than 1x1; ct would change nothing")
    with torch.no_grad():
        for module in swapped:
            module.weight.copy_(module.weight.swapaxes(2, 3).clone())
    return twin
