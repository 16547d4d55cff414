"""Aggregation over clients: the weighted mean of models, and what all rounds of a training share."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn

from fedortho.engines.engine import TrainingPlan
from fedortho.federated.messages import LocalResult
from fedortho.federated.wire import BadReply
from fedortho.models.norms import frozen_norms
from fedortho.storage.files import tensors_digest, write_tensors
from fedortho.training.loop import Epoch, Mask
from fedortho.training.recipe import Recipe


@dataclass
class RunningMean:
    """The weighted mean of models, added one by one into existing tensors, so that no further model is held."""

    into: Mapping[str, Tensor]
    weight: int = 0

    def add(self, state: Mapping[str, Tensor], weight: int) -> None:
        """Floats are averaged by weight; integers (batch-norm counters) take the largest."""
        self.weight += weight
        for name, value in state.items():
            mean = self.into[name]
            if self.weight == weight:  # the first model
                mean.copy_(value)
            elif value.is_floating_point():
                mean += (value - mean) * (weight / self.weight)
            else:
                mean.copy_(torch.maximum(mean, value))


@dataclass(frozen=True)
class TrainingJob:
    """What all rounds of a training share."""

    plan: TrainingPlan
    recipe: Recipe
    trainable: Mask | None
    local_epochs: int
    base: str  # digest of a model that has the frozen tensors: the plan's original, or the initial one without adapters
    updates: Path | None = None  # directory that keeps every client's model of every round
    norms: str = "fedavg"  # the federation's policy for running statistics

    @cached_property
    def teacher_digests(self) -> dict[str, str]:
        """The digest of each of the plan's teachers, by name."""
        return {name: tensors_digest(teacher.state_dict()) for name, teacher in self.plan.teachers.items()}

    def may_train(self, client: int) -> bool:
        """Whether this client may have images for the plan; a client that the plan excludes is not asked."""
        groups = [part.group for part in self.plan.parts if part.given is None]
        groups = [each for each in groups if each.exclude is None or client not in each.exclude.clients]
        named = [each.include.clients for each in groups if each.include is not None and each.include.kind == "client"]
        return len(groups) > len(named) or any(client in clients for clients in named)

    def save(self, number: int, name: str, state: Mapping[str, Tensor], images: int = 0) -> None:
        """Keep the model that round `number` starts from (`global`) or ends with on a client, if updates are kept."""
        if self.updates is not None:
            note = {"images": images, "epochs": self.local_epochs}
            write_tensors(self.updates / f"round-{number:05}" / f"{name}.safetensors", state, note)

    def frozen_tensors(self, model: nn.Module) -> tuple[str, ...]:
        """Tensors that do not change in training; clients do not send them back."""
        frozen = {name for name, mask in (self.trainable or {}).items() if not bool(mask.any())}
        frozen |= {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
        if self.plan.options.norms == "frozen":
            frozen |= {name for name, _ in model.named_buffers()}
        for norm in frozen_norms(model, self.plan.options.norms):
            frozen |= {f"{norm}.{name}" for name, _ in model.get_submodule(norm).named_buffers()}
        if self.norms == "local":
            frozen |= {name for name, _ in model.named_buffers() if name.endswith(("running_mean", "running_var"))}
        return tuple(name for name in model.state_dict() if name in frozen)

    def freezes(self, model: nn.Module, original: nn.Module) -> bool:
        """Whether the tensors of the model that do not change are those of the original."""
        mine, theirs = model.state_dict(), original.state_dict()
        return all(
            name in theirs and torch.equal(mine[name], theirs[name].cpu()) for name in self.frozen_tensors(model)
        )


def check_state(state: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Refuse a client's tensors unless they have the expected names, shapes and types and are finite."""
    if state.keys() != expected.keys():
        raise BadReply("its model has other tensors")
    for name, value in state.items():
        if value.shape != expected[name].shape or value.dtype != expected[name].dtype:
            raise BadReply(f"its {name} has another shape or type")
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            raise BadReply(f"its {name} is not finite")


def round_history(number: int, results: Sequence[LocalResult], seconds: float) -> Epoch:
    """A round as an entry of the history, weighted by images."""
    images = sum(result.images for result in results)
    penalties = [result.ortho for result in results if result.ortho is not None]
    return Epoch(
        number,
        loss=sum(result.images * result.loss for result in results) / images,
        accuracy=sum(result.images * result.accuracy for result in results) / images,
        ortho=sum(penalties) / len(penalties) if penalties else None,
        valid=None,
        seconds=seconds,
        clients=len(results),
        drift=sum(result.drift for result in results) / len(results),
        images=sum(result.images_trained for result in results),
    )
