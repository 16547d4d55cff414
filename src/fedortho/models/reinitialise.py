"""A network of the same architecture with new weights."""

import copy

import torch
from torch import nn

from fedortho.errors import BadSetting


def reinitialised(model: nn.Module, seed: int) -> nn.Module:
    """A copy whose modules have drawn their initial weights again, by the seed."""
    fresh = copy.deepcopy(model).cpu()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for name, module in fresh.named_modules():
            reset = getattr(module, "reset_parameters", None)
            if callable(reset):
                reset()
            elif next(module.parameters(recurse=False), None) is not None:
                raise BadSetting(
                    f"{name or type(module).__name__} has weights and no reset_parameters(), so no new network can be "
                    "made of this one; give the engine build=, a function from a seed to a network"
                )
    return fresh
