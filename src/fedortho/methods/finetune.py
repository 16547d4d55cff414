"""Go on training on what stays, and hope that the rest fades."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from torch import nn

from fedortho.data.request import KINDS, ForgetRequest
from fedortho.methods.method import Schedule, forget_and_retain
from fedortho.statistics.engine import Engine


@dataclass(frozen=True)
class FineTune(Schedule):
    """FT: the trained model, trained further on retained images (the paper: rate 0.001; its rounds are not told).

    It forgets little by design; of a class mostly through the classifier's bias. Results need the number of
    passes beside them.
    """

    name: ClassVar[str] = "finetune"
    kinds: ClassVar[tuple[str, ...]] = KINDS
    roles: ClassVar[str] = "retain: a few epochs"
    norms: ClassVar[str] = "updated by training"
    lr: Annotated[float, "learning rate"] = 0.001

    def __call__(self, model: nn.Module, engine: Engine, request: ForgetRequest) -> nn.Module:
        _, retain = forget_and_retain(self, engine, request)
        return engine.fit(model, retain, self.recipe)
