"""A network split before its first edited layer: activations there are cached, and trials run the tail alone."""

import copy
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedortho.data.images import Images, evaluation_batches
from fedortho.models.capture import capture
from fedortho.models.sites import Site

logger = logging.getLogger(__name__)
BATCH = 256


@dataclass(frozen=True)
class Split:
    """Cached activations enter at `entry`; the modules `before` it are skipped."""

    entry: str | None  # None: the network cannot be split and runs as a whole
    before: tuple[str, ...] = ()


def on_device(model: nn.Module, device: torch.device | str) -> nn.Module:
    """The model itself where it is on the device and in eval mode all through; otherwise a copy that is."""
    kind = torch.device(device)
    is_there = all(tensor.device.type == kind.type for tensor in model.state_dict().values())
    if is_there and kind.index is None and not any(module.training for module in model.modules()):
        return model
    return copy.deepcopy(model).to(device).eval()


def find_split(model: nn.Module, sites: Sequence[Site], example: Tensor) -> Split:
    """A split before the first edited layer; see `split_before`."""
    edited = {layer.name for site in sites for layer in site.layers}
    return split_before(model, next((name for name in _leaf_order(model, example) if name in edited), ""), example)


def split_before(model: nn.Module, first: str, example: Tensor) -> Split:
    """A split at the outermost module that holds the layer `first` and is not the first itself.

    The tail must give the outputs of the whole network for the example; otherwise (a skip connection leads around the
    entry) there is no split.
    """
    order, parts = _leaf_order(model, example), first.split(".")
    for depth in range(1, len(parts) + 1 if first else 0):
        entry = ".".join(parts[:depth])
        before = order[: next(i for i, name in enumerate(order) if name == entry or name.startswith(f"{entry}."))]
        if before:
            split = Split(entry, tuple(before))
            if _agrees(model, split, example):
                return split
            break
    logger.info("the network cannot be split before %s", first)
    return Split(None)


def _leaf_order(model: nn.Module, example: Tensor) -> list[str]:
    leaves = [name for name, module in model.named_modules() if name and not list(module.children())]
    with torch.no_grad(), capture(model, leaves, lambda _: None) as seen:
        model(example)
    return list(seen)


def _agrees(model: nn.Module, split: Split, example: Tensor) -> bool:
    with torch.no_grad():
        whole = model(example)
        try:
            short = run_tail(tail_model(model, split), split, entry_inputs(model, split, example))
        except (RuntimeError, ValueError, TypeError):
            return False
    return whole.shape == short.shape and torch.allclose(whole, short, rtol=1e-4, atol=1e-5)


def entry_inputs(model: nn.Module, split: Split, inputs: Tensor) -> Tensor:
    """What the entry receives for these images; the images themselves if the network is not split."""
    if split.entry is None:
        return inputs
    parts = []
    with torch.no_grad():
        for batch in inputs.split(BATCH):
            with capture(model, [split.entry], Tensor.clone, inputs=True, stop=True) as seen:
                model(batch)
            parts.append(seen[split.entry][0])
    return torch.cat(parts)


def image_activations(model: nn.Module, split: Split, images: Images, device: torch.device | str = "cpu") -> Tensor:
    """What the entry receives for these images, read in batches."""
    batches = evaluation_batches(images, BATCH, device)
    return torch.cat([entry_inputs(model, split, inputs) for inputs, _ in batches])


def tail_model(model: nn.Module, split: Split) -> nn.Module:
    """A copy without the modules before the entry: they pass their input on, and their weights are not copied."""
    memo: dict[int, Any] = {id(model.get_submodule(name)): nn.Identity() for name in split.before}
    return copy.deepcopy(model, memo)


def run_tail(twin: nn.Module, split: Split, cached: Tensor) -> Tensor:
    """The outputs of a tail for cached activations."""
    entry, answers = twin.get_submodule(split.entry or ""), []  # the name of the network itself is empty
    for batch in cached.split(BATCH):
        handle = entry.register_forward_pre_hook(lambda _, __, batch=batch: (batch,))
        try:
            answers.append(twin(batch))
        finally:
            handle.remove()
    return torch.cat(answers)


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


def classifier_inputs(twin: nn.Module, split: Split, cached: Tensor, classifier: str) -> Tensor:
    """The inputs of the classifier, (n, features), on the CPU."""
    with torch.no_grad(), capture(twin, [classifier], lambda given: given, inputs=True) as seen:
        run_tail(twin, split, cached)
    return torch.cat(seen[classifier]).cpu()


class Tail(nn.Module):
    """The network behind a split as a network of its own, which reads cached activations."""

    def __init__(self, model: nn.Module, split: Split) -> None:
        super().__init__()
        self.network, self.split = tail_model(model, split), split

    def forward(self, cached: Tensor) -> Tensor:
        return run_tail(self.network, self.split, cached)
