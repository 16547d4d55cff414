"""SCRUB: leave the original model on the forget set and stay with it on the retain set (Kurmanji et al., 2023)."""

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

from torch import nn

from fedortho.data.request import ForgetRequest
from fedortho.engines.engine import Engine, PlanPart, TrainingPlan
from fedortho.methods.method import Schedule, forget_and_retain
from fedortho.storage.settings import Count, Number, Positive, Weight
from fedortho.training.objectives import FitOptions, Target


@dataclass(frozen=True)
class SCRUB(Schedule):
    """Distillation from the original model, away from it on the forget set (arXiv:2302.09880), without rewinding.

    With D = T² · KL(original ‖ student) at temperature T: in each of the first `max_epochs` epochs a pass over the
    forget set maximises D; in every epoch a pass over the retain set minimises alpha · D + gamma · cross-entropy.

    Published (the released code for CIFAR-10): SGD, and all default values here; images are not augmented. Its models
    have no batch norm; here both passes update the statistics. Ours: momentum starts anew after the last epoch that
    maximises. SCRUB+R, which rewinds to an earlier epoch against membership attacks, is left out.
    """

    name: ClassVar[str] = "scrub"
    needs: ClassVar[str] = "forget: the first epochs; retain: all epochs; one more forward pass of each"
    norms: ClassVar[str] = "updated by training, by the forget set too"
    epochs: Annotated[int, "passes over the retain set; in a federation rounds"] = 3
    max_epochs: Annotated[Count, "epochs that begin with a pass over the forget set"] = 2
    lr: Annotated[float, "learning rate"] = 5e-4
    batch_size: Annotated[int, "retain images per step"] = 256
    forget_batch_size: Annotated[Number, "forget images per step"] = 512
    crop: Annotated[int, "pixels of padding before a random crop; 0: none"] = 0
    flip: Annotated[float, "probability of a left-right flip"] = 0.0
    alpha: Annotated[Weight, "weight of the divergence on the retain set"] = 0.001
    gamma: Annotated[Weight, "weight of the cross-entropy on the retain set"] = 0.99
    temperature: Annotated[Positive, "divides the logits"] = 4.0

    def __call__(self, model: nn.Module, engine: Engine, request: ForgetRequest) -> nn.Module:
        forget, retain = forget_and_retain(self, engine, request)
        scale = self.temperature**2
        leave = PlanPart(forget, Target(weight=-scale, teacher="original", batch_size=self.forget_batch_size))
        stay = PlanPart(retain, Target(weight=self.alpha * scale, teacher="original", label_weight=self.gamma))
        options = FitOptions("turns", objective="imitate", temperature=self.temperature)
        first = min(self.max_epochs, self.epochs)
        student = model
        for parts, epochs, seed in (((leave, stay), first, 0), ((stay,), self.epochs - first, 1)):
            if epochs:
                recipe = replace(self.recipe, epochs=epochs, seed=self.seed + seed)
                student = engine.fit(student, TrainingPlan(parts, options, {"original": model}), recipe)
        return student
