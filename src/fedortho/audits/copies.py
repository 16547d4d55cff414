"""C6: does what was forgotten come back in the copies that are deployed: rounded, folded, exported?"""

import io
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from fedortho.audits.audit import Audit
from fedortho.audits.measurements import (
    MeasurementCache,
    compared,
    forget_accuracy,
    once,
    ready,
    right,
    ruled,
    who_is_there,
)
from fedortho.audits.thresholds import LIMITS
from fedortho.data.images import Images
from fedortho.errors import first_line
from fedortho.evaluation.case import Case
from fedortho.models.graph import trace_layers


def deployed_copies(case: Case, cache: MeasurementCache, budget: str) -> Audit:
    """The largest rise of forget accuracy over the copies; a copy that cannot be made is an error, not a pass."""
    before = forget_accuracy(case, cache, "forgot")
    found, failed = once(case, cache, "forgot", "copies", lambda model, _: _tried(case, model))
    worst = max(found, key=lambda name: found[name], default="")
    rise = found.get(worst, 0.0) - before
    measured = {who: forget_accuracy(case, cache, who) for who in who_is_there(case)}
    measured["forgot"] = found.get(worst, before)
    says = f"of {len(found)} copies ({', '.join(found)}; numbers rounded by simulation) the worst, {worst}, "
    says += f"gets {compared(measured)} right, {100 * rise:+.1f} points"
    details: dict[str, Any] = {
        "accuracies": found,
        "before": before,
        "failed": failed,
        "simulated": ["fp16", "int8", "int4"],
    }
    details["folded_norms"] = len(foldable(case.forgot, case.judged.shape))
    details["norms"] = sum(isinstance(module, nn.BatchNorm2d) for module in case.forgot.modules())
    if failed and (not found or rise <= LIMITS["copies"]):
        name, reason = next(iter(failed.items()))
        return Audit("C6", "ERROR", f"the copy {name} could not be tested: {reason}", details=details)
    return ruled("C6", says, case, measured, rise, LIMITS["copies"], details)


def _tried(case: Case, model: nn.Module) -> tuple[dict[str, float], dict[str, str]]:
    """Forget accuracy of each copy, and why others could not be tested."""
    found, failed = {}, {}
    for name, make in COPIES.items():
        try:
            found[name] = right(case, make(ready(case, model), case.judged), case.judged, name)
        except Exception as error:  # a foreign model in a foreign exporter may fail in any way
            failed[name] = first_line(error)
    return found, failed


def halved(twin: nn.Module, images: Images) -> nn.Module:
    """Weights and statistics rounded to float16 and computed with in float32: simulated."""
    for tensor in (*twin.parameters(), *twin.buffers()):
        if tensor.is_floating_point():
            tensor.data = tensor.data.half().to(tensor.dtype)
    return twin


def quantised(twin: nn.Module, bits: int) -> nn.Module:
    """Weights of convolutions and linear layers on 2^bits − 1 symmetric steps per output channel: simulated."""
    for module in twin.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            module.weight.data = quantise(module.weight.data, bits)
    return twin


def quantise(weight: Tensor, bits: int) -> Tensor:
    """Each row rounded to multiples of its largest entry / (2^(bits−1) − 1).

    >>> quantise(torch.tensor([[0.0, 0.4, 7.0]]), 4).tolist()
    [[0.0, 0.0, 7.0]]
    """
    most = 2 ** (bits - 1) - 1
    step = weight.flatten(1).abs().amax(1).view(-1, *(1,) * (weight.dim() - 1)) / most
    return torch.where(step > 0, (weight / step).round().clamp(-most, most) * step, weight)


def folded(twin: nn.Module, images: Images) -> nn.Module:
    """Batch norms that read a convolution directly, multiplied into it; others stay as they are."""
    for conv, norm in foldable(twin, images.shape):
        merged = fuse_conv_bn_eval(twin.get_submodule(conv), twin.get_submodule(norm))  # type: ignore[type-var, arg-type]  # chosen by kind
        twin.set_submodule(conv, merged)
        twin.set_submodule(norm, nn.Identity())
    return twin


def foldable(model: nn.Module, shape: tuple[int, int, int]) -> list[tuple[str, str]]:
    """Convolutions and the batch norms, with statistics of their own, that can be folded into them."""
    with torch.enable_grad():  # the structure is traced by gradients
        layers = [layer for layer in trace_layers(model, shape) if layer.problem is None and layer.norm is not None]
    pairs = [(layer.name, layer.norm) for layer in layers if layer.norm_kind == "BatchNorm2d" and layer.norm]
    return [pair for pair in pairs if getattr(model.get_submodule(pair[1]), "running_mean", None) is not None]


def exported(twin: nn.Module, images: Images) -> nn.Module:
    """What `torch.export` makes of it, written and read again; it takes batches of any size."""
    example = torch.zeros(2, *images.shape, device=next(twin.parameters()).device)
    program = torch.export.export(twin, (example,), dynamic_shapes=({0: torch.export.Dim("images")},))
    store = io.BytesIO()
    torch.export.save(program, store)
    store.seek(0)
    return torch.export.load(store).module()


COPIES: Mapping[str, Callable[[nn.Module, Images], nn.Module]] = {
    "fp16": halved,
    "int8": lambda twin, _: quantised(twin, 8),
    "int4": lambda twin, _: quantised(twin, 4),
    "folded": folded,
    "exported": exported,
}
