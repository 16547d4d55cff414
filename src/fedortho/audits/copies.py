"""C6, deployed copies: does forget accuracy rise in copies that are rounded, folded or exported?"""

import copy
import io
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from fedortho.audits.audit import Audit
from fedortho.audits.measurements import MeasurementCache, accuracy_on, forget_accuracy, measure_model
from fedortho.audits.result import AuditResult, Limit, compared, decide, shares_text
from fedortho.data.images import Images
from fedortho.errors import first_line
from fedortho.evaluation.case import Case
from fedortho.models.graph import trace_layers

LIMIT = Limit("copies", 0.01)  # rise of forget accuracy in a copy


def deployed_copies(case: Case, cache: MeasurementCache, budget: str) -> AuditResult:
    """The largest rise of forget accuracy over the copies; a copy that cannot be made is an error."""
    before = forget_accuracy(case, cache, "unlearned")
    accuracies, failed = measure_model(case, cache, "unlearned", "copies", partial(_copy_accuracies, case))
    worst = max(accuracies, key=lambda name: accuracies[name], default="")
    rise = accuracies.get(worst, 0.0) - before
    measured = compared({role: forget_accuracy(case, cache, role) for role in case.models})
    measured["unlearned"] = accuracies.get(worst, before)
    details = {"accuracies": accuracies, "before": before, "failed": failed}
    if failed and (not accuracies or rise <= LIMIT.value):
        name, reason = next(iter(failed.items()))
        return AuditResult("ERROR", f"the copy {name} could not be tested: {reason}", details=details)
    finding = f"of {len(accuracies)} copies ({', '.join(accuracies)}; rounding is simulated) {worst} has the highest "
    finding += f"forget accuracy, {shares_text(measured, len(case.references))}, {100 * rise:+.1f} points"
    return decide(finding, measured, LIMIT, details, rise)


def _copy_accuracies(case: Case, model: nn.Module, _: str) -> tuple[dict[str, float], dict[str, str]]:
    """Forget accuracy of each copy, and the error of each copy that could not be tested."""
    accuracies, failed = {}, {}
    for name, make in COPIES.items():
        try:
            copied = make(copy.deepcopy(model), case.forget_eval)
            accuracies[name] = accuracy_on(case, copied, case.forget_eval, name)
        except Exception as error:  # a foreign model in a foreign exporter may fail in any way
            failed[name] = first_line(error)
    return accuracies, failed


def halved(twin: nn.Module, images: Images) -> nn.Module:
    """Weights and statistics rounded to float16; arithmetic stays float32 (simulated)."""
    for tensor in (*twin.parameters(), *twin.buffers()):
        if tensor.is_floating_point():
            tensor.data = tensor.data.half().to(tensor.dtype)
    return twin


def quantised(twin: nn.Module, bits: int) -> nn.Module:
    """Weights of convolutions and linear layers on 2^bits − 1 symmetric steps per output channel (simulated)."""
    for module in twin.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            module.weight.data = quantise(module.weight.data, bits)
    return twin


def quantise(weight: Tensor, bits: int) -> Tensor:
    """Each row rounded to multiples of its largest entry / (2^(bits−1) − 1).

    >>> quantise(torch.tensor([[0.0, 0.4, 7.0]]), 4).tolist()
    [[0.0, 0.0, 7.0]]
    """
    steps = 2 ** (bits - 1) - 1
    step = weight.flatten(1).abs().amax(1).view(-1, *(1,) * (weight.dim() - 1)) / steps
    return torch.where(step > 0, (weight / step).round().clamp(-steps, steps) * step, weight)


def folded(twin: nn.Module, images: Images) -> nn.Module:
    """Batch norms with running statistics that directly follow a convolution are multiplied into it; others stay."""
    with torch.enable_grad():  # tracing follows gradients
        layers = [layer for layer in trace_layers(twin, images.shape) if layer.problem is None]
    for layer in layers:
        norm = twin.get_submodule(layer.norm) if layer.norm else None
        if layer.norm and isinstance(norm, nn.BatchNorm2d) and norm.running_mean is not None:
            merged = fuse_conv_bn_eval(twin.get_submodule(layer.name), norm)  # type: ignore[type-var]  # a convolution
            twin.set_submodule(layer.name, merged)
            twin.set_submodule(layer.norm, nn.Identity())
    return twin


def exported(twin: nn.Module, images: Images) -> nn.Module:
    """The model after `torch.export`, written and read again; it takes batches of any size.

    A network that can only be exported for one size of batch (`x.view(len(x), -1)` fixes it) is exported for one image.
    """
    device = next(twin.parameters()).device
    try:
        example, sizes = torch.zeros(2, *images.shape, device=device), ({0: torch.export.Dim("images")},)
        return _read_again(torch.export.export(twin, (example,), dynamic_shapes=sizes))
    except (torch._dynamo.exc.UserError, ValueError):  # the size of the batch was made a constant
        example = torch.zeros(1, *images.shape, device=device)
        return _OneByOne(_read_again(torch.export.export(twin, (example,))))


def _read_again(program: torch.export.ExportedProgram) -> nn.Module:
    store = io.BytesIO()
    torch.export.save(program, store)
    store.seek(0)
    return torch.export.load(store).module()


class _OneByOne(nn.Module):
    """A network that reads one image at a time."""

    def __init__(self, single: nn.Module) -> None:
        super().__init__()
        self.single = single

    def forward(self, images: Tensor) -> Tensor:
        return torch.cat([self.single(image) for image in images.split(1)])


COPIES: Mapping[str, Callable[[nn.Module, Images], nn.Module]] = {
    "fp16": halved,
    "int8": lambda twin, _: quantised(twin, 8),
    "int4": lambda twin, _: quantised(twin, 4),
    "folded": folded,
    "exported": exported,
}

DEPLOYED_COPIES = Audit("C6", "deployed copies", deployed_copies, (LIMIT,))
