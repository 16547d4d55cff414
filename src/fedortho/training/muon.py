"""Muon: SGD whose steps on convolution kernels are orthogonal matrices (Jordan et al., 2024)."""

import torch
from torch import Tensor

from fedortho.training.sgd import SGD

MOMENTUM = 0.8  # of kernels
STEPS = 4  # of the iteration: singular values above a hundredth of the norm end between 0.68 and 1.21
QUINTIC = (3.4445, -4.7750, 2.0315)  # its coefficients
LEAST = 1e-3  # norm below which kernels count as zero, and a relative step would not move them


class Muon(SGD):
    """SGD with its momentum for norms, biases and linear layers; for kernels `W ← W − lr · ‖W‖ · U / ‖U‖`.

    U is the nearest matrix with orthonormal rows to Nesterov's momentum, kernels as rows. So every direction of a
    layer moves equally far, by the share `lr` of its weights, where gradient steps move few directions. Kernels have no
    weight decay: it would change their norm and no step. Kernels of one input channel each are left to SGD.
    """

    @torch.no_grad()
    def step(self) -> None:
        lr: float = self.param_groups[0]["lr"]
        for weight in self.weights:
            if (gradient := weight.grad) is not None and weight.dim() == 4 and weight.shape[1] > 1:
                momentum = self.state[weight].setdefault("momentum_buffer", torch.zeros_like(weight))
                momentum.lerp_(gradient, 1 - MOMENTUM)
                step = orthogonal(gradient.lerp(momentum, MOMENTUM))
                length = lr * weight.norm().clamp_min(LEAST) / step.norm().clamp_min(LEAST)
                weight.sub_(step * length)
                weight.grad = None  # it is not for SGD
        super().step()


def orthogonal(kernels: Tensor) -> Tensor:
    """About U Vᵀ of the kernels' singular value decomposition U S Vᵀ, kernels as rows, by products of matrices.

    Newton and Schulz's iteration X ← (a + bA + cA²) X with A = X Xᵀ. All factors are polynomials of the first A, so
    they are multiplied in its size, and X, which is larger, is multiplied twice in all.
    """
    rows = kernels.flatten(1)
    wide = rows if len(rows) <= rows.shape[1] else rows.T
    wide = wide / wide.norm().clamp_min(1e-12)
    gram = wide @ wide.T
    a, b, c = QUINTIC
    unit = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    product = unit
    for left in reversed(range(STEPS)):
        factor = a * unit + b * gram + c * (gram @ gram)
        product = factor @ product
        gram = factor @ gram @ factor if left else gram
    turned: Tensor = product @ wide
    return (turned if len(rows) <= rows.shape[1] else turned.T).reshape(kernels.shape)
