"""Class-subspace projection: remove from each layer's inputs what only the class has (Kodge et al., TMLR 2024)."""

import copy
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn

from fedortho.data.request import ForgetRequest
from fedortho.engines.engine import Engine, withheld_hint
from fedortho.engines.query import Query, Statistic
from fedortho.errors import BadData
from fedortho.methods.method import forget_and_retain
from fedortho.statistics.gram import gram_matrices
from fedortho.storage.settings import Number, Positive, check_settings


@dataclass(frozen=True)
class Subspace:
    """W ← W (I − (M_f − M_f M_r))ᵀ for every convolution and linear layer (arXiv:2312.00761).

    R has the inputs of a layer as columns: images of a linear layer, patches of a convolution. With R = U S Vᵀ and
    λ_i = σ_i² / Σ σ², M = U diag(α λ / ((α − 1) λ + 1)) Uᵀ, once for retain images and once for forget images. U and σ²
    are the eigenvectors and eigenvalues of R Rᵀ, a sum over images: only forward passes are needed, and clients' sums
    add up. Biases and batch norms stay as they are.

    Published (the released script for CIFAR-10): alpha-retain 100, alpha-forget 3 and 900 images of each set. Ours: the
    retain images are drawn at random in place of 100 of each class, and all their patches are used in place of 10,000.
    """

    name: ClassVar[str] = "subspace"
    kinds: ClassVar[tuple[str, ...]] = ("class",)
    needs: ClassVar[str] = "forget and retain: one forward pass over some hundred images"
    norms: ClassVar[str] = "untouched"
    alpha_retain: Annotated[Positive, "how much of the retain images' directions is spared (paper: 10 to 1000)"] = 100.0
    alpha_forget: Annotated[Positive, "how much of the forget images' directions is removed"] = 3.0
    images: Annotated[Number, "images of the forget and of the retain set each, at most"] = 900
    seed: Annotated[int, "of the drawn images"] = 0

    def __post_init__(self) -> None:
        check_settings(self)

    def __call__(self, model: nn.Module, engine: Engine, request: ForgetRequest) -> nn.Module:
        selections = tuple(replace(each, limit=self.images) for each in forget_and_retain(self, engine, request))
        ((forget, retain),) = engine.measure(model, [Query(selections, Statistic("gram"))])
        if not (forget.images and retain.images):
            hint = withheld_hint(engine)
            raise BadData(f"{request} leaves the forget or the retain set without training images{hint}")
        twin = copy.deepcopy(model).cpu().eval()
        with torch.no_grad():
            for name in forget.sums:
                weight = twin.get_parameter(f"{name}.weight")
                of_forget, of_retain = (
                    scaled_projection(gram_matrices(seen.sums[name], weight[0].numel()), alpha)
                    for seen, alpha in ((forget, self.alpha_forget), (retain, self.alpha_retain))
                )
                # (groups, kernels, inputs)
                rows = weight.cpu().double().reshape(len(of_forget), -1, of_forget.shape[-1])
                removed = rows @ (of_forget - of_forget @ of_retain).mT
                weight.copy_((rows - removed).view(weight.shape).to(weight.dtype))
        return twin


def scaled_projection(gram: Tensor, alpha: float) -> Tensor:
    """U diag(α λ / ((α − 1) λ + 1)) Uᵀ of R Rᵀ; 0 where R is 0.

    >>> scaled_projection(torch.diag(torch.tensor([3.0, 1.0])), 3.0).diag()  # λ = 3/4, 1/4
    tensor([0.9000, 0.5000])
    """
    values, vectors = torch.linalg.eigh(gram)
    shares = values.clamp_min(0)
    shares = shares / shares.sum(-1, keepdim=True).clamp_min(torch.finfo(gram.dtype).tiny)
    kept = alpha * shares / ((alpha - 1) * shares + 1)
    projection: Tensor = (vectors * kept.unsqueeze(-2)) @ vectors.mT
    return projection
