"""SGD with momentum, without the import of torch's compiler.

The first step of any `torch.optim.Optimizer` imports `torch._dynamo`: a second or two and 800 modules in every process
that trains, though nothing is compiled. The arithmetic is torch's own function, so the bytes are those of
`torch.optim.SGD`.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.sgd import sgd


class SGD:
    """`torch.optim.SGD` for one group of weights, with its names for what is read and set from outside."""

    def __init__(
        self,
        weights: Iterable[Tensor],
        lr: float,
        momentum: float = 0.0,
        *,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        fused: bool = False,
    ) -> None:
        self.weights = list(weights)
        self.param_groups: list[dict[str, Any]] = [{"lr": lr}]
        self.state: dict[Tensor, dict[str, Tensor]] = defaultdict(dict)  # momentum_buffer of each weight
        self.momentum, self.weight_decay, self.nesterov, self.fused = momentum, weight_decay, nesterov, fused

    def zero_grad(self) -> None:
        for weight in self.weights:
            weight.grad = None

    @torch.no_grad()
    def step(self) -> None:
        moved = [weight for weight in self.weights if weight.grad is not None]
        buffers = [self.state[weight].get("momentum_buffer") for weight in moved] if self.momentum else []
        sgd(
            moved,
            [weight.grad for weight in moved if weight.grad is not None],
            buffers,
            fused=self.fused,
            weight_decay=self.weight_decay,
            momentum=self.momentum,
            lr=self.param_groups[0]["lr"],
            dampening=0.0,
            nesterov=self.nesterov,
            maximize=False,
        )
        for weight, buffer in zip(moved, buffers, strict=False):  # none without momentum
            if buffer is not None:
                self.state[weight]["momentum_buffer"] = buffer
