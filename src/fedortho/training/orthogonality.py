"""The paper's two penalties, orthogonality and alignment, and their gradients in closed form.

Kernels of a convolution become the rows of a matrix W, (out, in*k*k), one matrix per group. With
G = W Wᵀ − I the penalty ‖G‖²_F has the gradient 4 G W: two matrix products, no graph. The other
Gram matrix gives the same gradient, W Wᵀ W − W either way, so the smaller one is used.
"""

import itertools
import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

TALL = ("columns", "rows", "skip")


def kernel_matrix(conv: nn.Conv2d) -> Tensor:
    """The kernels of a convolution as rows, (groups, out/groups, in*k*k); a view where memory allows."""
    weight = conv.weight
    if not weight.is_contiguous():  # channels-last: this order of columns needs no copy
        weight = weight.permute(0, 2, 3, 1)
    return weight.reshape(conv.groups, weight.shape[0] // conv.groups, -1)


def is_tall(conv: nn.Conv2d) -> bool:
    """Whether one group has more kernels than inputs, so that its kernels cannot all be orthogonal."""
    return conv.weight.shape[0] // conv.groups > conv.weight[0].numel()


def ortho_penalty(conv: nn.Conv2d, tall: str = "columns") -> Tensor:
    """How far the kernels of one layer are from orthonormal: ‖W Wᵀ − I‖²_F (paper, section 4.1), 0 if they are.

    A tall layer cannot reach 0: its least value is out − in*k*k per group. With tall="columns" its
    columns are judged instead, ‖Wᵀ W − I‖²_F, the same penalty less that constant.

    >>> conv = nn.Conv2d(4, 2, 1, bias=False)
    >>> _ = nn.init.constant_(conv.weight, 0.5)      # two equal kernels of length 1
    >>> float(ortho_penalty(conv).detach())
    2.0
    """
    rows = kernel_matrix(conv).float()
    if is_tall(conv) and tall == "columns":
        rows = rows.transpose(1, 2)
    return (rows @ rows.transpose(1, 2) - _identity(rows)).square().sum()


def add_ortho_gradient(convs: Iterable[nn.Conv2d], weight: float, most: float = math.inf) -> None:
    """Add weight · d‖W Wᵀ − I‖²/dW to the gradients, in closed form: 4 · weight · (W Wᵀ − I) W.

    `most` bounds the curvature of what is added: 4 · weight · (2 + 3 ‖W Wᵀ − I‖₂), as far as a few
    power iterations see it. A step larger than that would swing past the orthonormal point and diverge.
    """
    with torch.no_grad():
        for conv in convs:
            if not conv.weight.requires_grad:
                continue  # frozen: it stays as it is
            rows = kernel_matrix(conv)
            narrow = rows.transpose(1, 2) if is_tall(conv) else rows
            gram = _gram(narrow) - _identity(narrow)
            bound = (most / (2 + 3 * _spectral_norm(gram))).clamp(max=4 * weight) if most < math.inf else 4 * weight
            gram *= bound  # the smallest of the matrices to scale
            if conv.weight.grad is None:
                conv.weight.grad = torch.zeros_like(conv.weight)
            gradient = conv.weight.grad
            if not conv.weight.is_contiguous():
                gradient = gradient.permute(0, 2, 3, 1)
            pair = (rows, gram) if is_tall(conv) else (gram, rows)
            if gradient.is_contiguous():
                gradient.view(rows.shape).baddbmm_(*pair)
            else:
                gradient.add_((pair[0] @ pair[1]).view(gradient.shape))


def _gram(rows: Tensor, blocks: int = 4) -> Tensor:
    """W Wᵀ of matrices, (groups, n, n); it is symmetric, so the blocks above the diagonal are copied, not computed."""
    count = rows.shape[1]
    if rows.shape[1] * rows.shape[2] < 1 << 18:
        return rows @ rows.transpose(1, 2)  # too small for the saving to show
    gram = rows.new_empty(len(rows), count, count)
    bounds = [count * block // blocks for block in range(blocks + 1)]
    for start, stop in itertools.pairwise(bounds):
        strip = rows[:, start:stop] @ rows[:, :stop].transpose(1, 2)
        gram[:, start:stop, :stop] = strip
        gram[:, :start, start:stop] = strip[:, :, :start].transpose(1, 2)
    return gram


def _spectral_norm(gram: Tensor, iterations: int = 4) -> Tensor:
    """About the largest |eigenvalue| of symmetric matrices, (groups, 1, 1), from their longest column on."""
    longest = gram.norm(dim=1).argmax(1)
    vector = gram[torch.arange(len(gram), device=gram.device), :, longest].unsqueeze(2)
    for _ in range(iterations):
        vector = gram @ (vector / vector.norm(dim=1, keepdim=True).clamp_min(1e-12))
    norm: Tensor = vector.norm(dim=1, keepdim=True)
    return norm


def _identity(rows: Tensor) -> Tensor:
    return torch.eye(rows.shape[1], dtype=rows.dtype, device=rows.device).expand(len(rows), -1, -1)


def add_align_gradient(weights: Sequence[Tensor], reference: Sequence[Tensor], weight: float) -> None:
    """Add weight · d‖W − W_global‖²/dW = 2 · weight · (W − W_global) to the gradients, fused over tensors."""
    with torch.no_grad():
        for w in weights:
            if w.grad is None:  # the loss does not depend on it
                w.grad = torch.zeros_like(w)
        gradients = [w.grad for w in weights if w.grad is not None]
        drift = torch._foreach_sub(list(weights), list(reference))
        torch._foreach_add_(gradients, drift, alpha=2 * weight)
