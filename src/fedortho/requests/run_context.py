"""A run opened for methods: its data, its clients, and a new engine for each method."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import nn

from fedortho.data.images import Dataset
from fedortho.data.request import Clients, ForgetRequest
from fedortho.devices import choose_device
from fedortho.engines.central import CentralEngine
from fedortho.engines.engine import Engine
from fedortho.engines.query import Selection
from fedortho.errors import FedOrthoError
from fedortho.evaluation.accuracies import accuracies_of
from fedortho.federated.server import copied_clients, federated_engine, local_grid, patches_of
from fedortho.methods import find_method, make_method
from fedortho.methods.method import Method, Schedule
from fedortho.methods.regrow import Regrow, passes_after
from fedortho.methods.retrain import Retrain
from fedortho.runs.record import Accuracies
from fedortho.runs.run import Run, served_requests
from fedortho.runs.settings import FederateSettings
from fedortho.statistics.ledger import load_ledger
from fedortho.storage.settings import field_types
from fedortho.training.recipe import Recipe


@dataclass(frozen=True)
class RunContext:
    """A run, its data, the rows of its clients, and the images that its model must not know already."""

    run: Run
    data: Dataset
    clients: Clients | None
    forgotten: ForgetRequest | None
    device: torch.device

    @contextmanager
    def engine(self) -> Iterator[Engine]:
        """A new engine, so that no method profits from another; a federation works on a copy of its directories."""
        settings, model = self.run.settings, self.run.load_model()
        if not isinstance(settings, FederateSettings):
            ledger, known = load_ledger(self.run.path / "ledger.safetensors", model), Selection(exclude=self.forgotten)
            data = replace(self.data, train=known.select(self.data.train), valid=known.select(self.data.valid))
            yield CentralEngine(data, ledger, None, self.device, build=self.run.new_model)
            return
        if settings.without:
            raise FedOrthoError(
                f"{self.run.path} was trained --without {settings.without}, which its clients still hold and methods "
                "would learn; compare the federation that was trained with everything"
            )
        with copied_clients(self.run) as store, local_grid(settings, store, run=self.run.path) as grid:
            engine = federated_engine(grid, settings, self.data, served_requests(self.run))
            engine.bring_up_to_date(model, patches_of(self.run), self.run.excluded)
            yield engine

    def accuracies(self, model: nn.Module, request: ForgetRequest) -> Accuracies:
        """Forget, retain and test accuracy; what the run has forgotten before is not part of the retain set."""
        how: dict[str, Any] = {"forgotten": self.forgotten, "clients": self.clients, "device": self.device}
        return accuracies_of(model.to(self.device), self.data, request, **how)


def open_context(run: Run, data: Dataset) -> RunContext:
    """The run with its data, on the device of its settings."""
    return RunContext(run, data, run.clients(data), run.excluded, choose_device(run.settings.device))


def method_for_run(run: Run, name: str, *settings: Mapping[str, Any]) -> Method:
    """The method with the run's seed, precision and, unless it publishes its own, augmentation.

    Retraining has the run's recipe.
    """
    kind = find_method(name)
    shared: tuple[str, ...] = ("crop", "flip", "precision", "seed")
    if issubclass(kind, Schedule):
        shared = tuple(key for key in shared if getattr(kind(), key) == getattr(Schedule(), key))
    own = {key: getattr(run.settings, key) for key in shared if key in field_types(kind)}
    if issubclass(kind, Recipe):
        own = {field.name: getattr(run.settings, field.name) for field in fields(Recipe)}
        own["epochs"] = run.settings.passes.planned
    if issubclass(kind, Regrow):
        passes = run.settings.passes
        own["epochs"] = passes_after(passes.planned if run.settings.epochs else 0, passes.unit)
        if isinstance(run.settings, FederateSettings):  # a client has few images, and takes few steps in a round
            own["batch_size"] = min(kind().batch_size, run.settings.batch_size)
    if "updates" in field_types(kind):
        own["updates"] = str(run.path / "updates")
    if "kept" in field_types(kind):
        own["kept"] = str(run.path / run.settings.passes.unit)
    chosen = () if issubclass(kind, Retrain) else settings  # retraining is the standard: nothing of it is chosen
    return make_method(name, own, *chosen)
