"""Logit mask, a control: the class is never predicted, and nothing is forgotten."""

import copy
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from fedortho.data.request import ForgetRequest
from fedortho.engines.engine import Engine
from fedortho.errors import BadSetting
from fedortho.methods.method import forget_and_retain
from fedortho.models.split import find_classifier

NEVER = -1e4  # a logit below all others


@dataclass(frozen=True)
class LogitMask:
    """Set the classifier's row of the class to 0 and its bias to −10⁴; all features stay unchanged.

    A metric that this edit satisfies does not measure forgetting.
    """

    name: ClassVar[str] = "logit-mask"
    kinds: ClassVar[tuple[str, ...]] = ("class",)
    needs: ClassVar[str] = "none"
    norms: ClassVar[str] = "untouched"

    def __call__(self, model: nn.Module, engine: Engine, request: ForgetRequest) -> nn.Module:
        forget_and_retain(self, engine, request)
        twin = copy.deepcopy(model).cpu().eval()
        example = torch.rand(2, *engine.info.image_shape, generator=torch.Generator().manual_seed(0))
        name = find_classifier(twin, len(engine.info.class_names), example)
        classifier = None if name is None else twin.get_submodule(name)
        if not isinstance(classifier, nn.Linear) or classifier.bias is None:
            raise BadSetting("the logit mask needs a linear classifier with a bias as the last layer")
        with torch.no_grad():
            for label in request.labels(engine.info.class_names):
                classifier.weight[label] = 0.0
                classifier.bias[label] = NEVER
        return twin
