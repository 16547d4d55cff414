"""The order of a network's values in memory: channels last, which is faster, wherever the network can read it."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from fedortho.data.images import Images, evaluation_batches
from fedortho.data.loaders import ImageSource
from fedortho.models.graph import once_per_architecture
from fedortho.models.prepare import prepare_model


@once_per_architecture
def memory_format_of(model: nn.Module, shape: tuple[int, int, int]) -> torch.memory_format:
    """Channels last, unless the network fails on it (`.view` behind a convolution) or gives other answers."""
    if any(isinstance(module, torch.fx.GraphModule) for module in model.modules()):  # exported: copying it warns
        return torch.contiguous_format  # the order that it was exported with
    twin = prepare_model(model, 0).cpu().eval()
    example = torch.rand(2, *shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        try:
            plain = twin(example)
        except Exception:  # code of others may raise anything; whoever runs the network tells what it was
            return torch.channels_last
        try:
            other = arranged(twin, torch.channels_last)(example.contiguous(memory_format=torch.channels_last))
        except RuntimeError:
            return torch.contiguous_format
    if not isinstance(plain, Tensor) or not isinstance(other, Tensor):
        return torch.channels_last
    close = 1e-3 * float(plain.abs().nan_to_num().max())  # another order of sums
    is_same = plain.shape == other.shape and torch.allclose(plain, other, rtol=1e-3, atol=close, equal_nan=True)
    return torch.channels_last if is_same else torch.contiguous_format


def ordered_batches(
    model: nn.Module, images: Images | ImageSource, device: torch.device | str = "cpu"
) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches for evaluation, in the memory format of the network."""
    order = None
    for inputs, labels in evaluation_batches(images, device=device):
        order = order or memory_format_of(model, (inputs.shape[1], inputs.shape[2], inputs.shape[3]))
        yield inputs.contiguous(memory_format=order), labels


def arranged(model: nn.Module, order: torch.memory_format) -> nn.Module:
    """The model itself with its weights in this memory format."""
    return model.to(memory_format=order)  # type: ignore[call-overload, no-any-return]  # torch's stub lacks this form
