import math

import pytest
import torch
from torch import nn

from fedortho.training.orthogonality import (
    add_align_gradient,
    add_ortho_gradient,
    is_tall,
    kernel_matrix,
    ortho_penalty,
)
from fedortho.training.penalties import curvature_limit
from fedortho.training.recipe import Recipe

SHAPES = {
    "wide": (16, 8, 3, 1),
    "square": (9, 1, 3, 1),
    "tall": (24, 4, 1, 1),
    "grouped": (8, 8, 3, 2),
    "depthwise": (6, 6, 3, 6),
    "large": (130, 225, 3, 1),  # from 2**18 weights on, half of the Gram matrix is copied
}


def conv_of(shape: str, order: torch.memory_format = torch.contiguous_format, dtype=torch.float64) -> nn.Conv2d:
    out, inputs, size, groups = SHAPES[shape]
    torch.manual_seed(1)
    conv = nn.Conv2d(inputs, out, size, groups=groups, bias=False, dtype=dtype)
    return conv.to(memory_format=order)


def slow_penalty(conv: nn.Conv2d) -> float:
    """Pairs of kernels of one group, one after the other: the squared distance of their products from 0 or 1."""
    total, per_group = 0.0, conv.out_channels // conv.groups
    for first in range(conv.out_channels):
        for second in range(conv.out_channels):
            if first // per_group == second // per_group:
                product = float((conv.weight[first] * conv.weight[second]).sum().detach())
                total += (product - (first == second)) ** 2
    return total


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape != "large"])
def test_the_penalty_counts_every_pair_of_kernels_of_a_group(shape: str) -> None:
    conv = conv_of(shape)
    assert float(ortho_penalty(conv, "rows").detach()) == pytest.approx(slow_penalty(conv), rel=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
def test_the_closed_form_equals_the_gradient_of_autograd(shape: str, order: torch.memory_format) -> None:
    conv = conv_of(shape, order)
    (expected,) = torch.autograd.grad(0.3 * _double_penalty(conv), conv.weight)
    conv.weight.grad = torch.ones_like(conv.weight)
    add_ortho_gradient([conv], 0.3)
    assert torch.allclose(conv.weight.grad, expected + 1, rtol=1e-10, atol=1e-10)


def test_the_closed_form_equals_autograd_in_float32_too() -> None:
    conv = nn.Conv2d(32, 64, 3, bias=False)
    (expected,) = torch.autograd.grad(ortho_penalty(conv), conv.weight)
    add_ortho_gradient([conv], 1.0)
    assert (conv.weight.grad - expected).abs().max() / expected.abs().max() < 1e-5


def _double_penalty(conv: nn.Conv2d) -> torch.Tensor:
    rows = kernel_matrix(conv)
    return (rows @ rows.transpose(1, 2) - torch.eye(rows.shape[1], dtype=rows.dtype)).square().sum()


def test_rows_and_columns_of_a_tall_layer_differ_by_its_floor_and_not_in_their_step() -> None:
    conv = conv_of("tall")
    assert is_tall(conv)
    rows, columns = ortho_penalty(conv, "rows"), ortho_penalty(conv, "columns")
    assert float((rows - columns).detach()) == pytest.approx(24 - 4, rel=1e-5)
    (by_rows,) = torch.autograd.grad(rows, conv.weight)
    (by_columns,) = torch.autograd.grad(columns, conv.weight)
    assert torch.allclose(by_rows, by_columns, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", ["wide", "square", "grouped"])
def test_descending_the_penalty_makes_the_kernels_orthonormal(shape: str) -> None:
    conv = conv_of(shape)
    optimiser = torch.optim.SGD(conv.parameters(), lr=0.05)
    for _ in range(400):
        optimiser.zero_grad()
        add_ortho_gradient([conv], 1.0)
        optimiser.step()
    assert float(ortho_penalty(conv).detach()) < 1e-6


@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9, 0.99])
def test_the_cap_of_training_is_below_the_limit_of_momentum_descent(every: int, momentum: float) -> None:
    """The eigenvalues of `every` steps, the first with a kick, against the cap on rate times curvature."""
    kick = curvature_limit(Recipe(ortho_every=every, momentum=momentum), lr=1.0)
    first = torch.tensor([[1 - kick, -momentum], [kick, momentum]])  # of place and speed
    coast = torch.tensor([[1, -momentum], [0, momentum]])
    turn = torch.linalg.matrix_power(coast, every - 1) @ first
    assert torch.linalg.eigvals(turn).abs().max() < 1


@pytest.mark.parametrize(("every", "bounded"), [(1, True), (4, True), (4, False)])
def test_lazy_steps_at_lambda_a_half_settle_only_when_they_are_bounded(every: int, bounded: bool) -> None:
    conv = conv_of("wide")
    nn.init.normal_(conv.weight, std=math.sqrt(2 / 72), generator=torch.Generator().manual_seed(2))
    optimiser = torch.optim.SGD(conv.parameters(), lr=0.1, momentum=0.9)
    for step in range(400):
        optimiser.zero_grad(set_to_none=False)
        if step % every == 0:
            most = 2.4 / (every * 0.1) if bounded else math.inf
            add_ortho_gradient([conv], 0.5 * every, most)
        optimiser.step()
    settled = bool(torch.isfinite(conv.weight).all()) and float(ortho_penalty(conv).detach()) < 1e-3
    assert settled == bounded


def test_the_bound_leaves_a_gentle_step_as_it_is() -> None:
    free, bound = conv_of("wide"), conv_of("wide")
    add_ortho_gradient([free], 0.1)
    add_ortho_gradient([bound], 0.1, most=1e6)
    assert torch.allclose(free.weight.grad, bound.weight.grad, rtol=1e-12)


def test_alignment_pulls_towards_the_reference_with_twice_the_drift() -> None:
    weights = [torch.nn.Parameter(torch.tensor([3.0, 1.0])), torch.nn.Parameter(torch.tensor([[2.0]]))]
    reference = [torch.tensor([1.0, 1.0]), torch.tensor([[5.0]])]
    penalty = sum((weight - fixed).square().sum() for weight, fixed in zip(weights, reference, strict=True))
    assert float(penalty.detach()) == 4 + 9
    expected = torch.autograd.grad(0.5 * penalty, weights)
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    add_align_gradient(weights, reference, 0.5)
    for weight, gradient in zip(weights, expected, strict=True):
        assert torch.equal(weight.grad, gradient)


def test_alignment_reaches_weights_that_the_loss_does_not_depend_on() -> None:
    weight = torch.nn.Parameter(torch.tensor([3.0]))
    add_align_gradient([weight], [torch.ones(1)], 0.5)
    assert weight.grad.tolist() == [2.0]


def test_a_frozen_layer_gets_no_gradient() -> None:
    conv = conv_of("wide").requires_grad_(False)
    add_ortho_gradient([conv], 1.0)
    assert conv.weight.grad is None
