"""Ways to forget."""

from typing import Any

import torch
from torch import nn

from fedortho.data import Batches, Dataset, Images, make_dataset
from fedortho.errors import unknown
from fedortho.methods.fedortho import PRESETS, ForgetSettings, plan_forgetting
from fedortho.request import ForgetRequest
from fedortho.settings import make_settings


def preset(name: str, **changes: Any) -> ForgetSettings:
    """The settings of a preset, with changes."""
    if name not in PRESETS:
        raise unknown("preset", name, PRESETS)
    return make_settings(ForgetSettings, PRESETS[name], changes)


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
    return plan_forgetting(model, data, request, settings, device=device).patch.apply(model)
