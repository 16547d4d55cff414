"""The engine with all images in one place."""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

from fedortho.data.images import Dataset, Images
from fedortho.data.request import Clients, ForgetRequest
from fedortho.engines.answer import AnswerCache, answer
from fedortho.engines.engine import EngineInfo, Tally, TrainingPlan, as_training_plan
from fedortho.engines.query import Query, Selection
from fedortho.errors import BadData
from fedortho.models.split import on_device
from fedortho.models.zoo import reinitialised
from fedortho.statistics.observe import Observation
from fedortho.storage.files import tensors_digest
from fedortho.training.batches import count_images
from fedortho.training.loop import Mask, fit
from fedortho.training.recipe import Recipe


@dataclass
class CentralEngine:
    """All images in one place."""

    data: Dataset
    ledger: Observation | None = None
    clients: Clients | None = None  # rows of each client, where the images came from a federation
    device: torch.device | str = "cpu"
    tally: Tally = field(default_factory=Tally)
    build: Callable[[int], nn.Module] | None = None  # from a seed to a network with new weights

    def __post_init__(self) -> None:
        self._digest, self._memory = "", AnswerCache()
        self._model: nn.Module | None = None
        self._given: Callable[[], nn.Module | None] = lambda: None
        self._written: tuple[tuple[int, int], ...] = ()

    @cached_property
    def info(self) -> EngineInfo:
        train, ledger = self.data.train, self.ledger
        rows = tensors_digest({"rows": train.rows, "labels": train.labels})
        known = (train.names, train.shape, f"{self.data.digest}:{rows}:{train.input_digest}")
        structure = ledger.kept.structure if ledger is not None and ledger.kept is not None else None
        return EngineInfo(*known, has_ledger=ledger is not None, build=self.build, structure=structure)

    def fit(
        self,
        model: nn.Module,
        what: Selection | TrainingPlan,
        recipe: Recipe,
        *,
        trainable: Mask | None = None,
        after: int = 0,
    ) -> nn.Module:
        plan = as_training_plan(what)
        sets = [part.training_set(self._images(part.group)) for part in plan.parts]
        how: dict[str, Any] = {
            "trainable": trainable,
            "after": after,
            "options": plan.options,
            "teachers": plan.teachers,
        }
        trained = fit(model, sets, recipe, device=self.device, **how)
        seen, taught = count_images(sets, recipe.batch_size, recipe.epochs - after, plan.options)
        self.tally.images_read += taught
        self.tally.images_trained += seen
        return trained

    def measure(self, model: nn.Module, queries: Sequence[Query]) -> list[list[Observation]]:
        model, cache = self._remembered(model)
        found = []
        for query in queries:
            groups = [self._images(group) for group in query.selections]
            by_label = query.statistic.by_label or query.statistic.kind == "peaks"  # there is nobody to protect
            statistic = replace(query.statistic, by_label=by_label)
            found.append(answer(model, self.data.train, groups, statistic, cache=cache, device=self.device))
        return found

    def check(self, request: ForgetRequest, forgotten: ForgetRequest | None) -> None:
        request.split(Selection(exclude=forgotten).select(self.data.train, self.clients), self.clients)

    def _images(self, group: Selection) -> Images:
        return group.select(getattr(self.data, group.split), self.clients)

    def _remembered(self, model: nn.Module) -> tuple[nn.Module, AnswerCache]:
        """The model on the engine's device, a copy if need be, and what is known of it from earlier asks."""
        state = model.state_dict()
        # the same model, whose tensors no operation has written to since, has the same digest
        written = tuple((tensor.data_ptr(), tensor._version) for tensor in state.values())
        if self._model is not None and self._given() is model and written == self._written:
            return self._model, self._memory
        digest = tensors_digest(state)
        if digest != self._digest or self._model is None:
            ledger = self.ledger if self.ledger is not None and self.ledger.model == digest else None
            self._digest, self._memory = digest, AnswerCache(ledger, {}, {}, self.tally)
            self._model = on_device(model, self.device)
        self._given, self._written = weakref.ref(model), written
        return self._model, self._memory


def central_engine(
    model: nn.Module,
    data: Dataset,
    ledger: Observation | None = None,
    clients: Clients | None = None,
    device: torch.device | str = "cpu",
) -> CentralEngine:
    """An engine over a dataset, for this model; the ledger of another model is refused."""
    if ledger is not None and ledger.model != tensors_digest(model.state_dict()):
        raise BadData("the ledger is that of another model; observe this one, or leave the ledger out")
    return CentralEngine(data, ledger, clients, device, build=partial(reinitialised, model))
