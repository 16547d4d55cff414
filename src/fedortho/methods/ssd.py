"""SSD: dampen weights that are more important to the forget set than to all data (Foster et al., AAAI 2024)."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn

from fedortho.data.request import KINDS, ForgetRequest
from fedortho.engines.engine import Engine
from fedortho.engines.query import Query, Selection, Statistic
from fedortho.errors import BadCheckpoint
from fedortho.methods.method import check_gradient, forget_and_retain
from fedortho.storage.files import read_tensors, tensors_digest, write_tensors
from fedortho.storage.settings import Number, Positive, Weight, check_settings

Importance = Mapping[str, Tensor]  # parameter → one number per coordinate, flat


@dataclass(frozen=True)
class SSD:
    """Selective synaptic dampening: w ← w · min(λ I_D / I_u, 1) wherever I_u > α I_D (arXiv:2308.07707).

    The importance I is the mean over batches of the squared gradient of the batch's mean cross-entropy, in evaluation
    mode, over all training images (D) and over the forget set (u). A last, smaller batch counts like the others, as in
    the published code. I depends on the batch size, so both use the same; in a federation each client forms its own
    batches. The label-free variant takes the absolute gradient of the mean ‖logits‖² instead.
    """

    name: ClassVar[str] = "ssd"
    kinds: ClassVar[tuple[str, ...]] = KINDS
    needs: ClassVar[str] = "forget: one gradient pass; all: one gradient pass, before any request if kept"
    norms: ClassVar[str] = "statistics untouched, scale and shift dampened like weights"
    alpha: Annotated[Positive, "select weights whose forget importance exceeds alpha times that of all images"] = 10.0
    lam: Annotated[Weight, "λ; a selected weight is multiplied by λ times the ratio of importances, at most 1"] = 1.0
    batch_size: Annotated[Number, "images per squared mean gradient; the default alpha is tuned for 64"] = 64
    label_free: Annotated[bool, "importance by ‖logits‖², without labels"] = False
    keep: Annotated[str, "file that caches the importance of all images for later requests; empty: none"] = ""

    def __post_init__(self) -> None:
        check_settings(self)

    def __call__(self, model: nn.Module, engine: Engine, request: ForgetRequest) -> nn.Module:
        forget, _ = forget_and_retain(self, engine, request)
        kind, loss = ("fisher-abs", "norm") if self.label_free else ("fisher", "cross-entropy")
        statistic = Statistic(kind, batch_size=self.batch_size, loss=loss)
        note: dict[str, object] = {"batch_size": self.batch_size, "label-free": self.label_free}
        note |= {"model": tensors_digest(model.state_dict()), "images": engine.info.data_digest}
        importance, before = self._read_cache(note, engine), engine.tally.kept_flops
        selections = (forget, Selection()) if importance is None else (forget,)
        (observed,) = engine.measure(model, [Query(selections, statistic)])
        check_gradient(self, engine, request, observed[0])
        of_forget, *of_all = [{name: one.mean(name) for name in one.sums} for one in observed]
        if importance is None:
            importance = of_all[0]
            if self.keep:
                write_tensors(Path(self.keep), importance, note | {"flops": engine.tally.kept_flops - before})
        return dampened(model, of_forget, importance, self.alpha, self.lam)

    def _read_cache(self, expected: Mapping[str, object], engine: Engine) -> Importance | None:
        """The stored importances, if there are any; what they cost is added to the engine's tally."""
        if not self.keep or not Path(self.keep).exists():
            return None
        tensors, note = read_tensors(Path(self.keep))
        flops = note.pop("flops", None)
        if note != expected:
            what = "importances of another model, batch or variant, or over other images"
            raise BadCheckpoint(f"{self.keep} holds {what}; choose another file for keep")
        if flops is None:  # of an earlier version, which did not store what they cost: computed again
            return None
        engine.tally.flops += flops
        engine.tally.kept_flops += flops
        return tensors


def dampened(model: nn.Module, of_forget: Importance, of_all: Importance, alpha: float, lam: float) -> nn.Module:
    """A copy of the model with the selected weights dampened; ratios are formed only for selected weights."""
    twin = copy.deepcopy(model).cpu().eval()
    with torch.no_grad():
        for name, weight in twin.named_parameters():
            flat = weight.flatten()  # a copy if the weight is channels-last in memory
            chosen = of_forget[name] > alpha * of_all[name]
            factor = (lam * of_all[name][chosen] / of_forget[name][chosen]).clamp_max(1.0)
            flat[chosen] = (flat[chosen].double() * factor).to(flat.dtype)
            weight.copy_(flat.view(weight.shape))
    return twin
