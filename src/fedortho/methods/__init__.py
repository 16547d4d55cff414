"""Ways to forget: the table of methods, and the doors to them."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fedortho.data.images import Batches, Dataset, Images, make_dataset
from fedortho.data.request import ForgetRequest
from fedortho.engines.central import CentralEngine
from fedortho.errors import unknown
from fedortho.methods.bad_teacher import BadTeacher
from fedortho.methods.class_pruning import ClassPruning
from fedortho.methods.directions import Directions
from fedortho.methods.federaser import FedEraser
from fedortho.methods.finetune import FineTune
from fedortho.methods.fused import FUSED
from fedortho.methods.hide import Hide
from fedortho.methods.logit_mask import LogitMask
from fedortho.methods.method import Method, refusal, serves
from fedortho.methods.neggrad import NegGrad
from fedortho.methods.not_ import NoT
from fedortho.methods.paper import Paper
from fedortho.methods.retrain import Retrain, RetrainPlain
from fedortho.methods.salun import SalUn
from fedortho.methods.ssd import SSD
from fedortho.methods.unsir import UNSIR
from fedortho.statistics.engine import Engine
from fedortho.storage.settings import make_settings
from fedortho.unlearning.plan import ForgetSettings, plan_forgetting

METHODS: Mapping[str, type[Method]] = {
    "retrain": Retrain,
    "retrain-plain": RetrainPlain,
    "hide": Hide,
    "directions": Directions,
    "paper": Paper,
    "finetune": FineTune,
    "not": NoT,
    "fused": FUSED,
    "ssd": SSD,
    "salun": SalUn,
    "unsir": UNSIR,
    "bad-teacher": BadTeacher,
    "class-pruning": ClassPruning,
    "federaser": FedEraser,
    "neggrad": NegGrad,
    "logit-mask": LogitMask,
}


def make_method(name: str, *settings: Mapping[str, Any]) -> Method:
    """A method of the table with its hyper-parameters; those not given keep their published values."""
    if name not in METHODS:
        raise unknown("method", name, METHODS)
    return make_settings(METHODS[name], *settings)


def unlearn(model: nn.Module, engine: Engine, request: ForgetRequest | str, method: Method | str) -> nn.Module:
    """A new model that has forgotten by this method; a request that it cannot serve is refused by name."""
    request = ForgetRequest.parse(request) if isinstance(request, str) else request
    method = make_method(method) if isinstance(method, str) else method
    if not serves(method, request):
        raise refusal(method, request, [name for name, kind in METHODS.items() if serves(kind, request)])
    return method(model, engine, request)


def preset(name: str, **changes: Any) -> ForgetSettings:
    """The settings of a preset, with changes."""
    if name not in PRESETS:
        raise unknown("preset", name, PRESETS)
    return make_settings(PRESETS[name], changes)


def forget(
    model: nn.Module,
    data: Dataset | Images | Batches,
    request: ForgetRequest | str,
    settings: ForgetSettings | None = None,
    *,
    device: torch.device | str = "cpu",
) -> nn.Module:
    """A copy of the model that has forgotten what the request names; the model itself stays as it was.

    `data` is what the model was trained on: a dataset, images, or a re-iterable `DataLoader` of (images, labels).
    """
    data = data if isinstance(data, Dataset) else make_dataset(data)
    if isinstance(request, str):
        request = ForgetRequest.parse(request)
    return plan_forgetting(model, CentralEngine(data, device=device), request, settings).patch.apply(model)


PRESETS: Mapping[str, type[ForgetSettings]] = {"robust": Hide, "erase": Directions, "paper": Paper}
