"""NoT: negate the weights of a layer, then fine-tune on the retain set (Khalil et al., CVPR 2025)."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn

from fedortho.data.request import ForgetRequest
from fedortho.engines.engine import Engine
from fedortho.errors import BadSetting
from fedortho.methods.method import Schedule, forget_and_retain
from fedortho.models.graph import select_layers, trace_layers


@dataclass(frozen=True)
class NoT(Schedule):
    """Negate the first convolution of the forward pass, then fine-tune on the retain set (arXiv:2503.05657).

    Weight and bias of the convolution are negated; scale and shift of the following batch norm are not, because
    negating both would cancel. Running statistics are stale after the negation; fine-tuning updates them.
    """

    name: ClassVar[str] = "not"
    needs: ClassVar[str] = "retain: a few epochs"
    has_counterfactual: ClassVar[bool] = True
    layers: Annotated[str, "convolutions to negate: names, patterns, depths; empty: the first"] = ""

    def __call__(self, model: nn.Module, engine: Engine, request: ForgetRequest) -> nn.Module:
        _, retain = forget_and_retain(self, engine, request)
        known = trace_layers(model, engine.info.image_shape)
        names = [layer.name for layer in select_layers(known, self.layers)] if self.layers else [known[0].name]
        return engine.fit(negated(model, names, engine.info.image_shape), retain, self.recipe)


def negated(model: nn.Module, names: Sequence[str], shape: tuple[int, int, int]) -> nn.Module:
    """A copy on the CPU with these layers negated; raises BadSetting if no output changes."""
    twin = copy.deepcopy(model).cpu()
    with torch.no_grad():
        for name in names:
            for weight in twin.get_submodule(name).parameters(recurse=False):
                weight.neg_()
    if torch.allclose(_outputs_on_noise(model, shape), _outputs_on_noise(twin, shape), atol=1e-6):
        raise BadSetting(f"negating {', '.join(names)} changes no output of this network; choose other layers")
    return twin


def _outputs_on_noise(model: nn.Module, shape: tuple[int, int, int]) -> Tensor:
    """Logits of a noise batch, normalised by that batch: stale running statistics would always differ."""
    twin = copy.deepcopy(model).cpu().eval()
    for module in twin.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.train()
    with torch.no_grad():
        outputs: Tensor = twin(torch.randn(8, *shape, generator=torch.Generator().manual_seed(0)))
    return outputs
