"""The penalties of a training: the weights they act on, and what they add to the gradients of a step."""

import copy
from collections.abc import Sequence

import torch
from torch import nn

from fedortho.devices import flops_of
from fedortho.errors import BadSetting
from fedortho.models.graph import Layer, select_layers, trace_layers
from fedortho.training.orthogonality import add_align_gradient, add_ortho_gradient, is_tall, ortho_penalty
from fedortho.training.recipe import Recipe


class Penalties:
    """ortho · ‖W Wᵀ − I‖² over the chosen layers, and align · ‖W − W_ref‖² where there is a reference."""

    def __init__(
        self, model: nn.Module, layers: Sequence[Layer], recipe: Recipe, reference: nn.Module | None = None
    ) -> None:
        self.recipe = recipe
        self.convs = [_conv(model, layer.name) for layer in layers]
        mine = dict(model.named_parameters())
        theirs = {} if reference is None or not recipe.align else dict(reference.named_parameters())
        names = list(mine) if recipe.align_layers == "all" else [f"{layer.name}.weight" for layer in layers]
        names = [name for name in names if theirs and mine[name].requires_grad]
        if other := [name for name in names if name not in theirs or theirs[name].shape != mine[name].shape]:
            raise BadSetting(f"the reference is another network: it lacks {other[0]} or has it in another shape")
        self.aligned = [mine[name] for name in names]
        self.reference = [torch.empty_like(mine[name]).copy_(theirs[name]).detach() for name in names]

    def add_gradients(self, lr: float, step: int) -> None:
        """Add the gradients at this step since the start; orthogonality acts at every `ortho_every`-th."""
        recipe = self.recipe
        if lr and self.is_due(step):
            add_ortho_gradient(self.convs, recipe.ortho * recipe.ortho_every, curvature_limit(recipe, lr))
        if self.aligned:
            add_align_gradient(self.aligned, self.reference, recipe.align)

    def is_due(self, step: int) -> bool:
        """Whether orthogonality acts at this step, if the learning rate is not 0."""
        return bool(self.recipe.ortho) and step % self.recipe.ortho_every == 0

    def ortho(self) -> float | None:
        """The orthogonality penalty, summed over the layers; None if there is none."""
        if not self.convs:
            return None
        with torch.no_grad():
            return float(sum(ortho_penalty(conv, self.recipe.tall) for conv in self.convs))


def curvature_limit(recipe: Recipe, lr: float) -> float:
    """Largest stable curvature of a penalty step: momentum descent with a push every k steps is stable below 3.6/k."""
    return min(2.4, 1.3 * (1 + recipe.momentum)) / (recipe.ortho_every * lr)  # without momentum the limit is 2/k


def ortho_flops(model: nn.Module, shape: tuple[int, int, int], recipe: Recipe) -> int:
    """FLOPs of one step of the orthogonality penalty: the products of its gradient."""
    twin = copy.deepcopy(model).cpu()
    penalties = Penalties(twin, ortho_layers(twin, shape, recipe), recipe)
    return flops_of(lambda: penalties.add_gradients(1.0, 0))


def ortho_layers(
    model: nn.Module, shape: tuple[int, int, int], recipe: Recipe, *, aligning: bool = False
) -> list[Layer]:
    """The layers that the penalties act on; raises BadSetting for a layer that cannot have one."""
    if not recipe.ortho and not (aligning and recipe.align and recipe.align_layers == "ortho"):
        return []
    chosen = select_layers(trace_layers(model, shape), recipe.ortho_layers)
    if unused := [layer.name for layer in chosen if layer.stage < 0]:
        raise BadSetting(f"no forward pass reaches {', '.join(unused)}; choose other ortho-layers")
    if computed := [x.name for x in chosen if not isinstance(_conv(model, x.name).weight, nn.Parameter)]:
        raise BadSetting(f"the weights of {', '.join(computed)} are computed (such as by weight norm); choose others")
    left = [layer for layer in chosen if recipe.tall != "skip" or not is_tall(_conv(model, layer.name))]
    if not left:
        raise BadSetting(f"tall = skip leaves none of the layers {recipe.ortho_layers!r}; choose others")
    return left


def _conv(model: nn.Module, name: str) -> nn.Conv2d:
    conv = model.get_submodule(name)
    assert isinstance(conv, nn.Conv2d)
    return conv
