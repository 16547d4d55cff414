"""Regrow: reinitialise the last stages, and train the network on the retain set."""

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

from torch import nn

from fedortho.data.request import ForgetRequest
from fedortho.engines.engine import Engine, PlanPart, TrainingPlan, fresh_model
from fedortho.methods.method import Schedule, forget_and_retain
from fedortho.models.graph import stage_entries, trace_layers, weighted_order
from fedortho.storage.settings import Count
from fedortho.training.objectives import FitOptions

SHARE = 0.05  # passes, as a share of those of the training
FEWEST_ROUNDS = 4  # in a federation, whose clients take few steps in a round
UNKNOWN = 10  # passes where nobody knows how long the model was trained


@dataclass(frozen=True)
class Regrow(Schedule):
    """FedOrtho beyond the paper: all stages but the first get new weights, then the network learns from the retain set.

    A stage is a run of layers with outputs of one size. Stages that are reset hold nothing of the forget set. Those
    before them are trained along and hold less with every pass; if they are `frozen`, they hold what they held. A
    network with no more stages than are reset is trained from scratch. Muon trains it: a step moves every direction of
    a layer by the same share, so few passes both regrow the stages and take the class out of the others.
    """

    name: ClassVar[str] = "regrow"
    needs: ClassVar[str] = "retain: all epochs"
    has_counterfactual: ClassVar[bool] = True
    norms: ClassVar[str] = "new in the stages that are reset; before them updated by training, or kept (frozen)"
    schedule: ClassVar[str] = "linear"
    epochs: Annotated[int, "passes over the images; in a federation rounds"] = 2
    lr: Annotated[float, "share of a layer's weights that a step moves at the start; falls linearly to 0"] = 0.06
    batch_size: Annotated[int, "images per step"] = 128
    stages: Annotated[Count, "stages that are reset, counted from the output; 0: all but the first, at least two"] = 0
    frozen: Annotated[bool, "train only what is reset"] = False

    def __call__(self, model: nn.Module, engine: Engine, request: ForgetRequest) -> nn.Module:
        _, retain = forget_and_retain(self, engine, request)
        student = fresh_model(engine, self.seed).cpu()
        kept = first_layers(model, self.stages, engine.info.image_shape)
        of_kept = tuple(f"{name}." for name in kept)
        known = {name: value for name, value in model.state_dict().items() if name.startswith(of_kept)}
        student.load_state_dict(known, strict=False)  # all else is new, whatever kind of weight it is
        for name, weight in student.named_parameters():
            weight.requires_grad_(not (self.frozen and name.startswith(of_kept)))
        options = FitOptions(norms="trainable" if self.frozen else "train", optimiser="muon")
        return engine.fit(student, TrainingPlan((PlanPart(retain),), options), self.recipe).requires_grad_(True)


def first_layers(model: nn.Module, stages: int, shape: tuple[int, int, int]) -> list[str]:
    """The layers with weights, and norms, before the last stages, in forward order; none if all stages are reset."""
    order, entries = weighted_order(model, shape), stage_entries(model, shape)
    number = stages_reset(stages, len(entries))
    if number > len(entries):
        return []
    stage_of, entry = {layer.name: layer.stage for layer in trace_layers(model, shape)}, entries[-number]
    kept, is_kept = list[str](), True
    for name in order[: order.index(entry)]:  # a shortcut may run before its stage's entry
        if name in stage_of:  # else a norm, or a gate: with the convolution before it
            is_kept = stage_of[name] < stage_of[entry]
        kept += [name] * is_kept
    return kept


def stages_reset(stages: int, entries: int) -> int:
    """How many stages the setting means in a network with so many stage entries, one less than it has stages.

    >>> [stages_reset(0, entries) for entries in (3, 2, 1)], stages_reset(1, 3)
    ([3, 2, 2], 1)
    """
    return stages or max(entries, 2)


def passes_after(trained: int, unit: str = "epochs") -> int:
    """Passes, or rounds, that keep the retain accuracy of a model trained for so many; 0: nobody knows how many.

    >>> [passes_after(number) for number in (6, 150, 0)], [passes_after(number, "rounds") for number in (6, 150, 0)]
    ([2, 8, 10], [4, 8, 10])
    """
    fewest = FEWEST_ROUNDS if unit == "rounds" else Regrow().epochs
    return max(fewest, math.ceil(SHARE * trained)) if trained else UNKNOWN
