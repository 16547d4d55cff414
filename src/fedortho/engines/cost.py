"""What a method has cost: time, images passed through networks, FLOPs and bytes, from what really ran."""

import copy
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace

import torch
from torch import nn

from fedortho.data.request import ForgetRequest
from fedortho.devices import FlopCounter, flops_of
from fedortho.engines.engine import Engine, EngineInfo, Tally, TrainingPlan
from fedortho.engines.query import Query, Selection
from fedortho.errors import FedOrthoError
from fedortho.statistics.observe import Observation
from fedortho.training.loop import Epoch, Mask
from fedortho.training.penalties import ortho_flops
from fedortho.training.recipe import Recipe


@dataclass(frozen=True)
class Cost:
    """Sums over all who took part; of a simulated federation `seconds` is the time of all clients, one by one.

    FLOPs are given by two conventions. Everything counted (`flops`): also what made statistics that were stored before
    the request. Kept by everybody (`request_flops`): without statistics that do not depend on the request, whether they
    were stored or computed again: sums of whole labels, gradients over all training images.
    """

    seconds: float
    images_read: int  # forward passes during the request; not those of activations that were kept with a ledger
    images_trained: int  # forward and backward passes
    flops: float  # multiplications and additions, both counted, as torch counts them
    exchanges: int
    bytes_up: int
    bytes_down: int
    kept_flops: float = 0.0  # the part of `flops` that does not depend on the request; old records do not tell it
    withheld: int = 0  # groups of few images that clients did not answer for; old records do not tell it

    @property
    def request_flops(self) -> float:
        """The FLOPs that the request costs where everybody keeps what can be kept."""
        return self.flops - self.kept_flops


def flops_per_image(model: nn.Module, shape: tuple[int, int, int]) -> tuple[int, int]:
    """Of one image forward, and forward and backward; what is frozen has no backward.

    >>> flops_per_image(nn.Sequential(nn.Conv2d(1, 2, 3, bias=False)), (1, 5, 5))
    (324, 648)
    """
    twin, inputs = copy.deepcopy(model).cpu().eval(), torch.zeros(2, *shape)

    def work(backward: bool) -> None:
        with torch.set_grad_enabled(backward):
            outputs = twin(inputs)
            if outputs.requires_grad:
                outputs.sum().backward()

    return flops_of(lambda: work(False)) // len(inputs), flops_of(lambda: work(True)) // len(inputs)


class Meter:
    """An engine that passes everything on to another, less what earlier requests have removed, and adds up the cost.

    As a context it counts the FLOPs of everything that its thread computes, those of a method included; clients count
    theirs and send the number.
    """

    def __init__(self, engine: Engine, forgotten: ForgetRequest | None = None) -> None:
        self.engine, self.forgotten = engine, forgotten
        self._counter = FlopCounter()
        self._before, self._started = replace(engine.tally), time.perf_counter()

    def __enter__(self) -> "Meter":
        self._counter.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._counter.__exit__(*error)

    @property
    def info(self) -> EngineInfo:
        info, gone = self.engine.info, self.forgotten
        return info if gone is None else replace(info, data_digest=f"{info.data_digest} without {gone}")

    @property
    def tally(self) -> Tally:
        return self.engine.tally

    def fit(
        self,
        model: nn.Module,
        what: Selection | TrainingPlan,
        recipe: Recipe,
        *,
        trainable: Mask | None = None,
        after: int = 0,
    ) -> nn.Module:
        how = {"after": after} if after else {}  # engines of others may not know it
        return self.engine.fit(model, what.without(self.forgotten), recipe, trainable=trainable, **how)

    def measure(self, model: nn.Module, queries: Sequence[Query]) -> list[list[Observation]]:
        return self.engine.measure(model, [query.without(self.forgotten) for query in queries])

    def check(self, request: ForgetRequest, forgotten: ForgetRequest | None) -> None:
        self.engine.check(request, forgotten or self.forgotten)

    def cost(self) -> Cost:
        spent = asdict(self.engine.tally.since(self._before))
        spent["flops"] += self._counter.flops
        known = {field.name: spent[field.name] for field in fields(Cost) if field.name in spent}
        return Cost(seconds=time.perf_counter() - self._started, **known)


def training_cost(
    history: Sequence[Epoch], model: nn.Module, shape: tuple[int, int, int], recipe: Recipe, tally: Tally
) -> Cost:
    """What a training has cost by its own record, penalties included; `tally` holds what travelled."""
    if any(entry.images is None for entry in history):
        raise FedOrthoError("this training's history does not tell how many images were read; train it again")
    images = sum(entry.images or 0 for entry in history)
    pushes = images / recipe.batch_size / recipe.ortho_every
    flops = flops_per_image(model, shape)[1] * float(images) + ortho_flops(model, shape, recipe) * pushes
    seconds = sum(entry.seconds for entry in history)
    return Cost(seconds, 0, images, flops, tally.exchanges, tally.bytes_up, tally.bytes_down)
