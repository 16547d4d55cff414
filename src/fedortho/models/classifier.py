"""The linear layer that gives the answers, and what it receives."""

from typing import Any

import torch
from torch import Tensor, nn

from fedortho.models.split import Split, run_tail


def find_classifier(model: nn.Module, classes: int, example: Tensor) -> str | None:
    """The name of the linear layer whose output is the model's answer; None if there is no such layer."""
    outputs: dict[str, Tensor] = {}
    handles = [
        module.register_forward_hook(lambda _, __, out, name=name: outputs.update({name: out}))
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module.out_features == classes
    ]
    try:
        with torch.no_grad():
            answer = model(example)
    finally:
        for handle in handles:
            handle.remove()
    for name, out in outputs.items():
        if out.shape == answer.shape and torch.equal(out, answer):
            return name
    return None


def classifier_inputs(twin: nn.Module, split: Split, classifier: str, cached: Tensor) -> Tensor:
    """What the classifier receives, (n, features), float64 on the CPU."""
    seen: list[Tensor] = []

    def keep(_: nn.Module, given: tuple[Tensor, ...], __: Any) -> None:
        seen.append(given[0])

    handle = twin.get_submodule(classifier).register_forward_hook(keep)
    try:
        with torch.no_grad():
            run_tail(twin, split, cached)
    finally:
        handle.remove()
    return torch.cat(seen).cpu().double()
