"""Small trainable additions to frozen weights of chosen layers; removing them restores the model bit for bit."""

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from fedortho.storage.settings import Number, SomeShare, check_settings

ADAPTERS = ("sparse", "low-rank")
MARK = ".parametrizations.weight"


@dataclass(frozen=True)
class Adapters:
    """Which layers get which kind of adapter; server and clients build the same adapters from it."""

    layers: tuple[str, ...]
    kind: Annotated[str, ADAPTERS] = "sparse"
    density: SomeShare = 0.05  # sparse: share of the weights that are trained, drawn with the seed
    rank: Number = 16  # low-rank: rank of the two factors
    scale: float = 2.0  # low-rank: factor of their product
    seed: int = 0

    def __post_init__(self) -> None:
        check_settings(self)


class Sparse(nn.Module):
    """W + m ⊙ a: a fixed random subset of the weights has a trainable addition, 0 at first."""

    def __init__(self, weight: Tensor, adapters: Adapters, seed: int) -> None:
        super().__init__()
        number = max(round(adapters.density * weight.numel()), 1)
        order = torch.randperm(weight.numel(), generator=torch.Generator().manual_seed(seed))
        self.register_buffer("places", order[:number].sort().values, persistent=False)  # known from the seed
        self.values = nn.Parameter(torch.zeros(number))

    def forward(self, weight: Tensor) -> Tensor:
        places = self.get_buffer("places")
        added = torch.zeros(weight.numel(), dtype=weight.dtype, device=weight.device)
        return weight + added.index_put((places,), self.values).view(weight.shape)


class LowRank(nn.Module):
    """W + scale · B A with B 0 at first; the rows of a convolution are its kernels."""

    def __init__(self, weight: Tensor, adapters: Adapters, seed: int) -> None:
        super().__init__()
        inputs = weight[0].numel()
        rank = min(adapters.rank, inputs, len(weight))
        draw = torch.rand(rank, inputs, generator=torch.Generator().manual_seed(seed))
        self.down = nn.Parameter((2 * draw - 1) * (1 / math.sqrt(inputs)))
        self.up, self.scale = nn.Parameter(torch.zeros(len(weight), rank)), adapters.scale

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.scale * (self.up @ self.down).view(weight.shape)


def attach(model: nn.Module, adapters: Adapters) -> nn.Module:
    """A copy of the model on the CPU with adapters; all other weights are frozen."""
    twin = copy.deepcopy(model).cpu().requires_grad_(False)
    for number, name in enumerate(adapters.layers):
        layer = twin.get_submodule(name)
        kind = Sparse if adapters.kind == "sparse" else LowRank
        adapter = kind(layer.get_parameter("weight"), adapters, adapters.seed + number)
        parametrize.register_parametrization(layer, "weight", adapter)
    return twin


def base_tensors(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a state without adapters, under their original names."""
    return {name.replace(f"{MARK}.original", ".weight"): t for name, t in state.items() if not is_adapter(name)}


def is_adapter(name: str) -> bool:
    return f"{MARK}.0." in name


def take_off(model: nn.Module, adapted: nn.Module) -> nn.Module:
    """The model without adapters: a copy of `model`, of the same architecture, with the frozen weights."""
    return _loaded(model, base_tensors(adapted.state_dict()))


def merge(model: nn.Module, adapted: nn.Module, adapters: Adapters) -> nn.Module:
    """A model without adapters that computes the same outputs as the adapted one."""
    state = base_tensors(adapted.state_dict())
    with torch.no_grad():
        for name in adapters.layers:
            weight = adapted.get_submodule(name).weight
            assert isinstance(weight, Tensor)
            state[f"{name}.weight"] = weight.detach()
    return _loaded(model, state)


def _loaded(model: nn.Module, state: Mapping[str, Tensor]) -> nn.Module:
    twin = copy.deepcopy(model)
    twin.load_state_dict(state)
    return twin.eval()
