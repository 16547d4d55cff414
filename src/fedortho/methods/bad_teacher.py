"""Bad Teacher: imitate a randomly initialised network on the forget set (Chundawat et al., AAAI 2023)."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from torch import nn

from fedortho.data.request import ForgetRequest
from fedortho.engines.engine import Engine, PlanPart, TrainingPlan, fresh_model
from fedortho.methods.method import Schedule, forget_and_retain
from fedortho.storage.settings import Positive, SomeShare
from fedortho.training.objectives import FitOptions, Target


@dataclass(frozen=True)
class BadTeacher(Schedule):
    """Distillation from two teachers in evaluation mode (arXiv:2205.08096; BTF in the FedOrtho paper).

    On the forget set the student, in training mode, imitates a randomly initialised network, on a share of the retain
    set the original model. The loss is KL(teacher ‖ student) at temperature T, averaged over images, without the factor
    T². The published code also divides by the number of classes (`per_element`), which hardly matters to Adam.
    """

    name: ClassVar[str] = "bad-teacher"
    needs: ClassVar[str] = "forget: all epochs; retain: a share of them, all epochs; two more forward passes"
    epochs: Annotated[int, "passes over the images; in a federation rounds"] = 1
    lr: Annotated[float, "learning rate of Adam"] = 1e-4
    batch_size: Annotated[int, "images per step"] = 256
    weight_decay: Annotated[float, "weight decay"] = 0.0
    temperature: Annotated[Positive, "divides the logits"] = 1.0
    fraction: Annotated[SomeShare, "share of the retain set that is used"] = 0.3
    per_element: Annotated[bool, "divide the loss by the number of classes, as the published code does"] = False

    def __call__(self, model: nn.Module, engine: Engine, request: ForgetRequest) -> nn.Module:
        forget, retain = forget_and_retain(self, engine, request)
        parts = (PlanPart(forget, Target(teacher="bad")), PlanPart(retain, Target(teacher="good"), self.fraction))
        teachers = {"good": model, "bad": fresh_model(engine, self.seed + 1)}
        objective = "imitate-elements" if self.per_element else "imitate"
        options = FitOptions(optimiser="adam", objective=objective, temperature=self.temperature)
        return engine.fit(model, TrainingPlan(parts, options, teachers), self.recipe)
