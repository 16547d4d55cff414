"""A network as somebody brings it, made into one that every step can work with."""

import copy
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize, prune, remove_spectral_norm, remove_weight_norm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from fedortho.errors import BadSetting, first_line

logger = logging.getLogger(__name__)
WRAPPERS = {"DataParallel": "module", "DistributedDataParallel": "module", "OptimizedModule": "_orig_mod"}
COMPUTED: dict[type[Any], tuple[Callable[[nn.Module, str], object], str]] = {  # hooks: their remover, where the name is
    WeightNorm: (remove_weight_norm, "name"),
    SpectralNorm: (remove_spectral_norm, "name"),
    prune.BasePruningMethod: (prune.remove, "_tensor_name"),
}


def prepare_model(model: Any, num_classes: int, name: str = "the model", *, fold: bool = True) -> nn.Module:
    """A copy of the network: float32, with plain weights, without wrappers, whose answer is the logits alone.

    DataParallel and `torch.compile` are taken off; unless `fold` is False, weight norm, spectral norm, pruning masks
    and parametrizations are folded into the weights. TorchScript and layers without weights yet are refused. The given
    model is not changed.
    """
    while type(model).__name__ in WRAPPERS:
        model = getattr(model, WRAPPERS[type(model).__name__])
    if isinstance(model, torch.jit.ScriptModule | torch.jit.ScriptFunction):
        raise BadSetting(f"{name} is TorchScript, which cannot be edited; give the nn.Module that it was made of")
    if not isinstance(model, nn.Module):
        raise BadSetting(f"{name} must be a torch.nn.Module, not {type(model).__name__}")
    if any(is_lazy(tensor) or tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise BadSetting(f"{name} has lazy layers, whose weights do not exist yet; give them their input sizes")
    computed = [tensor for module in model.modules() for tensor in vars(module).values() if isinstance(tensor, Tensor)]
    try:  # what a norm computes from other weights cannot be copied together with its gradient
        twin = copy.deepcopy(model, {id(tensor): tensor.detach().clone() for tensor in computed})
    except Exception as error:  # code of others may raise anything
        raise BadSetting(f"{name} cannot be copied ({first_line(error)}); it must survive copy.deepcopy") from error
    if folded := sum(_fold(module) for module in twin.modules() if fold):
        logger.info("%s: computed weights of %d layers are folded into plain ones", name, folded)
    if any(weight.is_floating_point() and weight.dtype != torch.float32 for weight in twin.parameters()):
        twin = twin.float()
    if not _hooks(twin):
        twin.register_forward_hook(_Logits(num_classes))
    return twin


def released(model: nn.Module) -> nn.Module:
    """The model itself, answering again as its author wrote it."""
    for key in _hooks(model):
        del model._forward_hooks[key]
    return model


def is_prepared(model: nn.Module) -> bool:
    return bool(_hooks(model))


def _hooks(model: nn.Module) -> list[int]:
    return [key for key, hook in model._forward_hooks.items() if isinstance(hook, _Logits)]


@dataclass(frozen=True)
class _Logits:
    """A forward hook: of whatever the network returns, the logits; it adds no name to the state dict."""

    num_classes: int

    def __call__(self, module: nn.Module, inputs: object, outputs: Any) -> Any:
        return find_logits(outputs, self.num_classes)


def find_logits(outputs: Any, num_classes: int) -> Any:
    """The logits in a tensor, tuple, list, dictionary or object with `logits`; the outputs as they are if none fits."""
    if isinstance(outputs, Tensor):
        is_flat = outputs.dim() == 2 or outputs.shape[:2].numel() != outputs.numel()
        return outputs if is_flat else outputs.flatten(1)
    is_mapping = isinstance(outputs, Mapping)
    named = outputs.get("logits") if is_mapping else getattr(outputs, "logits", None)
    if isinstance(named, Tensor):
        return find_logits(named, num_classes)
    parts = list(outputs.values()) if is_mapping else outputs if isinstance(outputs, tuple | list) else ()
    for part in parts:
        if isinstance(part, Tensor) and part.dim() > 1 and part.shape[1] == num_classes:
            return find_logits(part, num_classes)
    return outputs


def _fold(module: nn.Module) -> bool:
    """Make plain weights of those that the module computes; whether there were any."""
    names = list(module.parametrizations) if parametrize.is_parametrized(module) else []  # type: ignore[arg-type]  # a ModuleDict
    if names:
        kind = type(module)  # the given network has this class too, and loses nothing of it
        module.__class__ = type(kind.__name__, kind.__bases__, dict(vars(kind)))
    for name in names:
        parametrize.remove_parametrizations(module, name)
    computing = [hook for hook in module._forward_pre_hooks.values() if isinstance(hook, tuple(COMPUTED))]
    for hook in computing:
        remove, name = next(way for kind, way in COMPUTED.items() if isinstance(hook, kind))
        remove(module, getattr(hook, name))
    return bool(names or computing)
