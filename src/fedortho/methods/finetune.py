"""Fine-tuning: continue training on the retain set."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from torch import nn

from fedortho.data.request import ForgetRequest
from fedortho.engines.engine import Engine
from fedortho.methods.method import Schedule, forget_and_retain


@dataclass(frozen=True)
class FineTune(Schedule):
    """FT: train the original model further on the retain set (FedOrtho's appendix: lr 0.001, rounds not stated).

    It forgets little by design, and a class mostly through the classifier's bias; report the number of epochs.
    """

    name: ClassVar[str] = "finetune"
    needs: ClassVar[str] = "retain: a few epochs"
    has_counterfactual: ClassVar[bool] = True
    lr: Annotated[float, "learning rate"] = 0.001

    def __call__(self, model: nn.Module, engine: Engine, request: ForgetRequest) -> nn.Module:
        _, retain = forget_and_retain(self, engine, request)
        return engine.fit(model, retain, self.recipe)
