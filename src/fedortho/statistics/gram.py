"""Second moments of what each layer receives: R Rᵀ, where the columns of R are a layer's inputs or patches of them."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedortho.data.images import Images, evaluation_batches
from fedortho.models.capture import capture
from fedortho.statistics.observe import Observation

BATCH = 50  # images; the patches of a 3x3 convolution take nine times the memory of its inputs


def gram_sums(model: nn.Module, images: Images, device: torch.device | str = "cpu") -> Observation:
    """Upper triangles of R Rᵀ for each convolution and linear layer, per group of channels."""
    layers = {name: m for name, m in model.named_modules() if isinstance(m, nn.Conv2d | nn.Linear)}
    sizes = {name: (getattr(m, "groups", 1), m.weight[0].numel()) for name, m in layers.items()}
    sums = {name: torch.zeros(1, n * size * (size + 1) // 2, dtype=torch.float64) for name, (n, size) in sizes.items()}
    with torch.no_grad():
        for inputs, _ in evaluation_batches(images, BATCH, device):
            with capture(model, layers, Tensor.clone, inputs=True) as seen:
                model(inputs)
            for name, given in seen.items():
                columns = layer_columns(layers[name], torch.cat(given))
                gram = (columns @ columns.mT).cpu().double()
                first, second = torch.triu_indices(gram.shape[1], gram.shape[1])
                sums[name] += gram[:, first, second].reshape(1, -1)
    return Observation(sums, torch.tensor([len(images)]))


def layer_columns(layer: nn.Conv2d | nn.Linear, inputs: Tensor) -> Tensor:
    """R, (groups, inputs of a kernel, images times positions): what the weight's rows are multiplied by."""
    if isinstance(layer, nn.Linear):
        return inputs.flatten(0, -2).T.unsqueeze(0)
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    padded = functional.pad(inputs, layer._reversed_padding_repeated_twice, mode)
    patches = functional.unfold(padded, layer.kernel_size, layer.dilation, stride=layer.stride)
    columns: Tensor = patches.unflatten(1, (layer.groups, -1)).permute(1, 2, 0, 3).flatten(2)
    return columns


def gram_matrices(sums: Tensor, size: int) -> Tensor:
    """The symmetric matrices, (groups, size, size), whose upper triangles were summed."""
    first, second = torch.triu_indices(size, size)
    upper = sums.view(-1, len(first))
    matrices = upper.new_zeros(len(upper), size, size)
    matrices[:, first, second] = upper
    matrices[:, second, first] = upper
    return matrices
