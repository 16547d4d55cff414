"""What a method has cost: time, images passed through networks, FLOPs and bytes, from what really ran."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from fedortho.data.request import ForgetRequest
from fedortho.devices import flops_of, work_clock
from fedortho.engines.engine import Engine, EngineInfo, Tally
from fedortho.engines.query import Query, Selection
from fedortho.engines.training_plan import TrainingPlan
from fedortho.errors import FedOrthoError
from fedortho.statistics.observe import Observation
from fedortho.training.loop import Epoch, Mask
from fedortho.training.recipe import Recipe


@dataclass(frozen=True)
class Cost:
    """Sums over all who took part; of a simulated federation `seconds` is the time of all clients, one by one."""

    seconds: float
    images_read: int  # forward passes
    images_trained: int  # forward and backward passes
    flops: float  # multiplications and additions, both counted, as torch counts them
    exchanges: int
    bytes_up: int
    bytes_down: int


def flops_per_image(model: nn.Module, shape: tuple[int, int, int]) -> tuple[int, int]:
    """Of one image forward, and forward and backward, by torch's own counter; what is frozen has no backward.

    >>> flops_per_image(nn.Sequential(nn.Conv2d(1, 2, 3, bias=False)), (1, 5, 5))
    (324, 648)
    """
    twin = copy.deepcopy(model).cpu().eval()
    inputs = torch.zeros(2, *shape)

    def work(backward: bool) -> None:
        with torch.set_grad_enabled(backward):
            outputs = twin(inputs)
            if outputs.requires_grad:
                outputs.sum().backward()

    forward, both = (flops_of(partial(work, backward)) // len(inputs) for backward in (False, True))
    return forward, both


def _build_of(model: nn.Module) -> tuple[object, ...]:
    """What a network's FLOPs depend on besides its images: its modules, their shapes, and which of them learn."""
    kinds = [type(module) for module in model.modules()]
    shapes = [(name, tensor.shape, tensor.requires_grad) for name, tensor in model.state_dict(keep_vars=True).items()]
    return (*kinds, *shapes, str(model))


class Meter:
    """An engine that passes everything on to another, less what earlier requests have removed, and adds up the cost.

    FLOPs are those of one step per network, times the images of the steps that ran; a candidate that
    starts from cached activations counts only the tail of the network. The time that counting takes is no part
    of the seconds, and it is done once for networks that are built alike.
    """

    def __init__(self, engine: Engine, model: nn.Module, forgotten: ForgetRequest | None = None) -> None:
        self.engine, self.model, self.forgotten = engine, model, forgotten
        self.flops = 0.0
        self._read = self._trained = 0  # images that were counted in the FLOPs
        self._known: dict[tuple[object, ...], tuple[int, int]] = {}
        self._before, self._started = replace(engine.tally), work_clock()

    @property
    def info(self) -> EngineInfo:
        info = self.engine.info
        if self.forgotten is None:
            return info
        return replace(info, data_digest=f"{info.data_digest} without {self.forgotten}")

    @property
    def tally(self) -> Tally:
        return self.engine.tally

    def fit(
        self, model: nn.Module, what: Selection | TrainingPlan, recipe: Recipe, *, trainable: Mask | None = None
    ) -> nn.Module:
        before = replace(self.engine.tally)
        trained = self.engine.fit(model, what.without(self.forgotten), recipe, trainable=trainable)
        self._count(model, before)
        return trained

    def measure(self, model: nn.Module, queries: Sequence[Query]) -> list[list[Observation]]:
        before = replace(self.engine.tally)
        found = self.engine.measure(model, [query.without(self.forgotten) for query in queries])
        self._count(model, before)
        return found

    def check(self, request: ForgetRequest, forgotten: ForgetRequest | None) -> None:
        self.engine.check(request, forgotten or self.forgotten)

    def _count(self, model: nn.Module, before: Tally) -> None:
        spent = self.engine.tally.since(before)
        self._read += spent.images_read
        self._trained += spent.images_trained
        self.flops += self._flops(model, spent.images_read, spent.images_trained) + spent.tail_flops

    def _flops(self, model: nn.Module, read: int, trained: int) -> float:
        with work_clock.stopped():
            key = _build_of(model)
            if key not in self._known:
                self._known[key] = flops_per_image(model, self.info.image_shape)
            forward, step = self._known[key]
        return float(forward * read + step * trained)

    def cost(self) -> Cost:
        """The cost since the meter was made; what the method computed by itself counts as work on the model."""
        seconds = work_clock() - self._started
        spent = self.engine.tally.since(self._before)
        read, trained = spent.images_read, spent.images_trained
        flops = self.flops + self._flops(self.model, read - self._read, trained - self._trained)
        return Cost(seconds, read, trained, flops, spent.exchanges, spent.bytes_up, spent.bytes_down)


def training_cost(history: Sequence[Epoch], model: nn.Module, shape: tuple[int, int, int], tally: Tally) -> Cost:
    """What a training has cost by its own record; `tally` holds what travelled."""
    if any(entry.images is None for entry in history):
        raise FedOrthoError("this training's history does not tell how many images were read; train it again")
    images = sum(entry.images or 0 for entry in history)
    flops = flops_per_image(model, shape)[1] * float(images)
    seconds = sum(entry.seconds for entry in history)
    return Cost(seconds, 0, images, flops, tally.exchanges, tally.bytes_up, tally.bytes_down)
