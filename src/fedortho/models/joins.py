"""Where a residual stream is added up: which layers' responses, and what comes beside them."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedortho.models.capture import capture
from fedortho.models.graph import Layer


@dataclass(frozen=True)
class Join:
    """A module whose output is a sum, or that sum after a ReLU."""

    module: str
    layers: tuple[str, ...]  # whose responses are added, in the order of the network
    beside: str = ""  # what is added to them: the output of this module or, if it is the join itself, its input


def find_joins(model: nn.Module, shape: tuple[int, int, int], layers: Sequence[Layer]) -> dict[str, Join]:
    """For each layer that writes to a residual stream the place where it is added, found by trying.

    The responses of a block's layers and of its shortcut's must give the block's output; or those of its last layer and
    what the block receives, or what another part of it returns. Layers of which none of this is true are left out.
    """
    writers = [layer for layer in layers if len(layer.writers) > 1]
    if not writers:
        return {}
    seen = _Seen.of(model, shape)
    found: dict[str, Join] = {}
    for layer in writers:
        if not layer.is_shortcut and (join := _join_of(layer, writers, seen)) is not None:
            found |= dict.fromkeys(join.layers, join)
    return found


@dataclass(frozen=True)
class _Seen:
    """What the modules of a network receive and return; of those that run several times nothing."""

    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]

    @classmethod
    def of(cls, model: nn.Module, shape: tuple[int, int, int]) -> "_Seen":
        """Of a copy with random norms: where a scale is 0, as at the end of some new blocks, every sum would fit."""
        twin, generator = copy.deepcopy(model).cpu().eval(), torch.Generator().manual_seed(0)
        with torch.no_grad():
            for module in twin.modules():
                if isinstance(module, nn.modules.batchnorm._NormBase | nn.GroupNorm) and module.weight is not None:
                    module.weight.uniform_(0.5, 1.5, generator=generator)
                    module.bias.uniform_(-0.5, 0.5, generator=generator)
            names = [name for name, _ in twin.named_modules() if name]
            images = torch.rand(2, *shape, generator=generator)
            with capture(twin, names, _kept, inputs=True) as given, capture(twin, names, _kept) as made:
                twin(images)
        parts = ({name: v[0] for name, v in seen.items() if len(v) == 1} for seen in (given, made))
        return cls(*({name: value for name, value in part.items() if value is not None} for part in parts))


def _kept(value: object) -> Tensor | None:
    return value.clone() if isinstance(value, Tensor) else None


def _join_of(layer: Layer, writers: Sequence[Layer], seen: _Seen) -> Join | None:
    own, parts = seen.outputs.get(layer.norm or layer.name), layer.name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        module = ".".join(parts[:end])
        total = seen.outputs.get(module)
        if own is None or total is None or total.shape != own.shape:
            continue
        for join, beside in _candidates(module, layer, writers, seen):
            if beside.shape == own.shape and _is_sum(total, own + beside):
                return join
    return None


def _candidates(module: str, layer: Layer, writers: Sequence[Layer], seen: _Seen) -> list[tuple[Join, Tensor]]:
    """What may be added to a layer inside a module: a shortcut with weights, its input, what another part returns."""
    inside = f"{module}."
    found = []
    for other in writers:
        response = seen.outputs.get(other.norm or other.name)
        if other.is_shortcut and other.name in layer.writers and other.name.startswith(inside) and response is not None:
            both = tuple(x.name for x in writers if x.name in (layer.name, other.name))
            found.append((Join(module, both), response))
    if module in seen.inputs:
        found.append((Join(module, (layer.name,), module), seen.inputs[module]))
    for name, value in seen.outputs.items():
        is_part = name.startswith(inside) and "." not in name[len(inside) :]
        if is_part and not f"{layer.name}.".startswith(f"{name}.") and name != layer.norm:
            found.append((Join(module, (layer.name,), name), value))
    return found


def _is_sum(total: Tensor, parts: Tensor) -> bool:
    return any(torch.allclose(total, each, rtol=1e-4, atol=1e-5) for each in (parts.relu(), parts))
