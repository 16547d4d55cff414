"""SSD: dampen the weights that matter more to what must go than to everything (Foster et al., AAAI 2024)."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn

from fedortho.data.request import KINDS, ForgetRequest
from fedortho.errors import BadCheckpoint, BadSetting
from fedortho.methods.method import forget_and_retain
from fedortho.statistics.engine import Engine
from fedortho.statistics.query import Query, Selection, Statistic
from fedortho.storage.files import read_tensors, tensors_digest, write_tensors

Importance = Mapping[str, Tensor]  # parameter → one number per coordinate, flat


@dataclass(frozen=True)
class SSD:
    """Selective synaptic dampening: w ← w · min(λ I_D / I_u, 1) wherever I_u > α I_D (arXiv:2308.07707).

    I is the mean over batches of the squared gradient of a batch's mean cross-entropy, in evaluation mode, over
    all training images (D) and over those to forget (u); the last, smaller batch counts like the others, as
    published. Its size depends on the batch, so both use the same. In a federation batches are each client's own.
    The label-free variant takes the absolute gradient of the mean ‖logits‖² instead.
    """

    name: ClassVar[str] = "ssd"
    kinds: ClassVar[tuple[str, ...]] = KINDS
    roles: ClassVar[str] = "forget: one gradient pass; all: one gradient pass, before any request if kept"
    norms: ClassVar[str] = "statistics untouched, scale and shift dampened like weights"
    alpha: Annotated[float, "select where forget importance is so many times that of all images"] = 10.0
    lam: Annotated[float, "λ, what is left of a selected weight, times the ratio of importances"] = 1.0
    batch_size: Annotated[int, "images whose mean gradient is squared; the default alpha belongs to 64"] = 64
    label_free: Annotated[bool, "importance of the logits' size, which needs no labels"] = False
    keep: Annotated[str, "a file that keeps the importance of all images for later requests; empty: none"] = ""

    def __post_init__(self) -> None:
        if self.alpha <= 0 or self.lam < 0 or self.batch_size < 1:
            raise BadSetting(f"alpha and batch must be above 0 and lam not below, not {self}")

    def __call__(self, model: nn.Module, engine: Engine, request: ForgetRequest) -> nn.Module:
        forget, _ = forget_and_retain(self, engine, request)
        kind, loss = ("fisher-abs", "norm") if self.label_free else ("fisher", "cross-entropy")
        statistic = Statistic(kind, batch_size=self.batch_size, loss=loss)
        about = self._about(model, engine) if self.keep else {}
        known = self._kept(about)
        queries = [Query((forget, Selection()) if known is None else (forget,), statistic)]
        (found,) = engine.measure(model, queries)
        gone, *everything = [{name: found_one.mean(name) for name in found_one.sums} for found_one in found]
        if known is None:
            known = everything[0]
            self._keep(known, about)
        return dampened(model, gone, known, self.alpha, self.lam)

    def _about(self, model: nn.Module, engine: Engine) -> dict[str, object]:
        of_what = {"model": tensors_digest(model.state_dict()), "images": engine.identify(Selection())}
        return of_what | {"batch_size": self.batch_size, "label-free": self.label_free}

    def _kept(self, about: Mapping[str, object]) -> Importance | None:
        if not self.keep or not Path(self.keep).exists():
            return None
        tensors, note = read_tensors(Path(self.keep))
        if note != about:
            raise BadCheckpoint(
                f"{self.keep} holds importances of another model, batch or variant, or over other images; "
                "choose another keep"
            )
        return tensors

    def _keep(self, importance: Importance, about: Mapping[str, object]) -> None:
        if self.keep:
            write_tensors(Path(self.keep), importance, about)


def dampened(model: nn.Module, gone: Importance, everything: Importance, alpha: float, lam: float) -> nn.Module:
    """A copy with the selected coordinates dampened; the ratio is formed only where one was selected."""
    twin = copy.deepcopy(model).cpu().eval()
    with torch.no_grad():
        for name, weight in twin.named_parameters():
            flat = weight.flatten()  # a copy, if the channels of the weight come last in memory
            chosen = gone[name] > alpha * everything[name]
            factor = (lam * everything[name][chosen] / gone[name][chosen]).clamp_max(1.0)
            flat[chosen] = (flat[chosen].double() * factor).to(flat.dtype)
            weight.copy_(flat.view(weight.shape))
    return twin
