"""What the rounds of a federation have in common: the order that clients get, the mean of what they send back."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from fedortho.federated.wire import BadReply, Note
from fedortho.statistics.query import Selection
from fedortho.statistics.training_plan import TrainingPlan
from fedortho.storage.files import write_tensors
from fedortho.training.loop import Epoch, Mask
from fedortho.training.recipe import Recipe


@dataclass
class RunningMean:
    """A weighted mean of models, added one by one into tensors that are there: no further model is held."""

    into: Mapping[str, Tensor]
    weight: int = 0

    def add(self, state: Mapping[str, Tensor], weight: int) -> None:
        """Floats are averaged by weight; integers (batch-norm counters) take the largest."""
        self.weight += weight
        for name, value in state.items():
            held = self.into[name]
            if self.weight == weight:  # the first one
                held.copy_(value)
            elif value.is_floating_point():
                held += (value - held) * (weight / self.weight)
            else:
                held.copy_(torch.maximum(held, value))


@dataclass(frozen=True)
class Order:
    """What all rounds of a training have in common."""

    plan: TrainingPlan
    recipe: Recipe
    trainable: Mask | None
    local_epochs: int
    base: str  # digest of the model that it began with, without adapters
    updates: Path | None = None  # where to keep what clients send
    norms: str = "fedavg"  # the federation's policy for running statistics

    @property
    def pools(self) -> bool:
        """Whether running statistics are pooled when all rounds are done."""
        return self.norms != "fedavg" and self.plan.options.norms == "train"

    def concerns(self, client: int) -> bool:
        """Whether this client may have images for it; one that leaves is not even asked."""
        groups = [part.group for part in self.plan.parts if part.given is None]
        return any(_may_hold(group, client) for group in groups)

    def keep(self, turn: int, client: int, state: Mapping[str, Tensor], images: int) -> None:
        """Write what a client sent, or (client -1) the model that the round began with, where that is asked for."""
        if self.updates is not None:
            name = "global" if client < 0 else f"client-{client}"
            note = {"images": images, "epochs": self.local_epochs}
            write_tensors(self.updates / f"round-{turn:05}" / f"{name}.safetensors", state, note)

    def still(self, model: nn.Module) -> list[str]:
        """Tensors of which no coordinate may move: they need not travel back."""
        denied = {name for name, mask in (self.trainable or {}).items() if not bool(mask.any())}
        denied |= {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
        if self.plan.options.norms == "frozen":
            denied |= {name for name, _ in model.named_buffers()}
        elif self.norms == "local":
            denied |= {name for name, _ in model.named_buffers() if name.endswith(("running_mean", "running_var"))}
        return [name for name in model.state_dict() if name in denied]


def _may_hold(group: Selection, client: int) -> bool:
    if group.exclude is not None and client in group.exclude.clients:
        return False
    only = group.include
    return only is None or only.kind != "client" or client in only.clients


def checked(state: dict[str, Tensor], wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A client's weights, if they are those of this model and finite."""
    if state.keys() != wanted.keys():
        raise BadReply("its model has other tensors")
    for name, value in state.items():
        if value.shape != wanted[name].shape or value.dtype != wanted[name].dtype:
            raise BadReply(f"its {name} has another shape or type")
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            raise BadReply(f"its {name} is not finite")
    return state


def entry_of(turn: int, told: Sequence[Note], seconds: float) -> Epoch:
    """A round in the words of an epoch, weighted by images."""
    images = sum(note["images"] for note in told)
    loss, right = (sum(note["images"] * note[key] for note in told) / images for key in ("loss", "accuracy"))
    known = [note["ortho"] for note in told if note["ortho"] is not None]
    drift = sum(note["drift"] for note in told) / len(told)
    ortho = sum(known) / len(known) if known else None
    trained = sum(int(note["trained"]) for note in told)
    return Epoch(turn, loss, right, ortho, None, seconds, clients=len(told), drift=drift, images=trained)
