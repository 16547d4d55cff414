"""Sums of products of layers' inputs, against explicit patches."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedortho.data.images import Dataset
from fedortho.statistics.gram import gram_matrices, gram_sums, layer_columns


def patches_one_by_one(conv: nn.Conv2d, image: Tensor) -> list[Tensor]:
    """What a kernel of each group is multiplied by, position by position."""
    (down, right), (height, width) = conv.stride, conv.kernel_size
    top = int(conv.padding[0])
    padded = functional.pad(image, (top, top, top, top))
    step = conv.dilation[0]
    rows = range(0, padded.shape[1] - step * (height - 1), down)
    columns = range(0, padded.shape[2] - step * (width - 1), right)
    return [
        padded[:, i : i + step * height : step, j : j + step * width : step].reshape(conv.groups, -1)
        for i in rows
        for j in columns
    ]


@pytest.mark.parametrize(
    "conv",
    [
        nn.Conv2d(2, 3, 3, padding=1),
        nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2),
        nn.Conv2d(2, 2, 2, dilation=2, groups=2),
        nn.Conv2d(3, 5, 1),
    ],
    ids=str,
)
def test_columns_are_the_patches_that_kernels_are_multiplied_by(conv: nn.Conv2d) -> None:
    inputs = torch.randn(3, conv.in_channels, 7, 6, generator=torch.Generator().manual_seed(0))
    expected = torch.stack([patch for image in inputs for patch in patches_one_by_one(conv, image)], 2)
    columns = layer_columns(conv, inputs)
    assert torch.equal(columns, expected)
    kernels = conv.weight.detach().reshape(conv.groups, -1, columns.shape[1])
    outputs = conv(inputs).detach() - (conv.bias.detach().view(-1, 1, 1) if conv.bias is not None else 0)
    assert torch.allclose((kernels @ columns).flatten(0, 1), outputs.transpose(0, 1).flatten(1), atol=1e-5)


def test_sums_over_batches_are_those_over_all_images_and_add_up_over_parts(digits: Dataset) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding="same"), nn.ReLU(), nn.Flatten(), nn.Linear(256, 10)).eval()
    images = digits.train.subset(range(120))  # more than two batches
    found = gram_sums(model, images)
    inputs = images.normalise(images.pixels[images.rows])
    hidden = model[:3](inputs).detach().double()
    assert found.images == 120
    assert torch.allclose(gram_matrices(found.sums["3"], 256)[0], hidden.T @ hidden, rtol=1e-4, atol=1e-3)
    parts = [gram_sums(model, images.subset(rows)) for rows in (range(7), range(7, 120), [])]
    together = parts[0] + parts[1] + parts[2]
    for name, value in found.sums.items():
        assert torch.allclose(together.sums[name], value, rtol=1e-5, atol=1e-3)
    assert together.images == 120
