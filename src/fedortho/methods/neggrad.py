"""NegGrad+: descend the loss on the retain set and ascend it on the forget set (Kurmanji et al., NeurIPS 2023)."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from torch import nn

from fedortho.data.request import ForgetRequest
from fedortho.engines.engine import Engine, PlanPart, TrainingPlan
from fedortho.methods.method import Schedule, forget_and_retain
from fedortho.storage.settings import Range
from fedortho.training.objectives import FitOptions, Target


@dataclass(frozen=True)
class NegGrad(Schedule):
    """Minimise β · mean loss on a retain batch − (1 − β) · mean loss on a forget batch (arXiv:2302.09880).

    An epoch is one pass over the retain set; batches of the forget set repeat as often as needed. Both batches go
    through the network together. The ascent is unbounded, so lr, epochs and β need tuning. In a federation a client
    that holds only forget images only ascends.
    """

    name: ClassVar[str] = "neggrad"
    needs: ClassVar[str] = "forget and retain: all epochs"
    epochs: Annotated[int, "epochs over the retain set; in a federation rounds"] = 2
    beta: Annotated[float, Range(0, 1, "[)"), "weight of the retain loss; the forget loss has weight beta − 1"] = 0.95

    def __call__(self, model: nn.Module, engine: Engine, request: ForgetRequest) -> nn.Module:
        forget, retain = forget_and_retain(self, engine, request)
        parts = (PlanPart(retain, Target(weight=self.beta)), PlanPart(forget, Target(weight=self.beta - 1)))
        return engine.fit(model, TrainingPlan(parts, FitOptions("paired")), self.recipe)
