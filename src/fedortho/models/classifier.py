"""The linear layer whose outputs are the logits, and its inputs."""

import torch
from torch import Tensor, nn

from fedortho.models.capture import capture
from fedortho.models.split import Split, run_tail


def find_classifier(model: nn.Module, classes: int, example: Tensor) -> str | None:
    """The name of the linear layer whose output is the network's output; None if there is no such layer."""
    linear = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    names = [name for name, module in linear if module.out_features == classes]
    with torch.no_grad(), capture(model, names, lambda out: out) as seen:
        answer = model(example)
    for name, outputs in seen.items():
        if outputs[-1].shape == answer.shape and torch.equal(outputs[-1], answer):
            return name
    return None


def classifier_inputs(twin: nn.Module, split: Split, classifier: str, cached: Tensor) -> Tensor:
    """The inputs of the classifier, (n, features), on the CPU."""
    with torch.no_grad(), capture(twin, [classifier], lambda given: given, inputs=True) as seen:
        run_tail(twin, split, cached)
    return torch.cat(seen[classifier]).cpu()
