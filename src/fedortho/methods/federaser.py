"""FedEraser: replay stored rounds without a client, with calibrated updates (Liu et al., IWQoS 2021)."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn

from fedortho.data.request import ForgetRequest
from fedortho.engines.engine import Engine, PlanPart, TrainingPlan
from fedortho.engines.query import Selection
from fedortho.errors import BadCheckpoint
from fedortho.methods.method import CannotServe, forget_and_retain
from fedortho.storage.files import damage_named, read_tensors
from fedortho.storage.settings import Count, Number, SomeShare, Weight
from fedortho.training.batches import step_seed
from fedortho.training.objectives import FitOptions
from fedortho.training.recipe import SCHEDULES, Recipe, learning_rate

State = Mapping[str, Tensor]


@dataclass(frozen=True)
class StoredRound:
    """One stored round: the model at its start, and each client's model and number of images at its end."""

    begin: State
    clients: Mapping[int, State]
    images: Mapping[int, int]
    epochs: int  # of local training
    number: int


@dataclass(frozen=True)
class FedEraser(Recipe):
    """Calibrated replay of a federation's stored rounds without the forgotten clients.

    The first round is the weighted mean of the remaining clients' updates. In each later round every remaining client
    trains `ratio` of its former epochs (at least one) from the new model. Its stored update U_k gives the length and
    the calibrating update Û_k the direction: Σ_k w_k ‖U_k‖ Û_k / ‖Û_k‖ per tensor, as in the paper. The published code
    averages before it normalises (`average_first`: one exchange a round instead of one a client). Batch-norm
    statistics are those of the calibrating training. It needs a federation that stored its updates.

    `compare` passes the run's recipe (penalties, schedule by rounds); else lr is the published one, without penalty.
    """

    name: ClassVar[str] = "federaser"
    kinds: ClassVar[tuple[str, ...]] = ("client",)
    needs: ClassVar[str] = "retain: a calibrating epoch for each stored round; every client's stored updates"
    norms: ClassVar[str] = "updated by the calibrating training"
    epochs: Annotated[Count, "rounds of the replayed training, for the schedule of lr"] = 100
    lr: Annotated[Weight, "learning rate at the start"] = 0.005
    schedule: Annotated[str, SCHEDULES, "schedule of lr, by rounds"] = "constant"
    ortho: Annotated[Weight, "weight of the orthogonality penalty; 0: off"] = 0.0
    align: Annotated[Weight, "not used: in a calibration each client has no earlier model"] = 0.0
    most: Annotated[int, "stored rounds to replay, at most, from the first; 0: all"] = 0
    ratio: Annotated[SomeShare, "share of the former local epochs used for calibration"] = 0.5
    interval: Annotated[Number, "replay every n-th stored round"] = 1
    average_first: Annotated[bool, "normalise the mean update, as the published code does, not each client's"] = False
    updates: Annotated[str, "directory of the stored updates"] = ""

    def __call__(self, model: nn.Module, engine: Engine, request: ForgetRequest) -> nn.Module:
        forget_and_retain(self, engine, request)
        places = sorted(Path(self.updates).glob("round-*")) if self.updates else []
        if not engine.info.is_federated or not places:
            missing = f"{self.updates or 'no directory'} holds none; train with --keep-updates, or retrain"
            raise CannotServe(f"federaser replays a federation's stored updates, and {missing}")
        new = copy.deepcopy(model).cpu().eval()
        for number, place in enumerate(places[:: self.interval][: self.most or None]):
            stored = read_round(place, model, request)
            team = tuple(stored.clients)
            if number == 0:
                sent = stored.clients[team[0]] if team else {}  # lacks running statistics where those stay local
                means = {n: _mean(stored, team, n) if v.is_floating_point() else v for n, v in sent.items()}
                new.load_state_dict({**stored.begin, **means})
            elif team:
                new.load_state_dict(self._calibrated(new, stored, engine, request))
        # no training: pools batch-norm statistics if the settings say so
        return engine.fit(new, Selection("train", None, request), self._recipe(0, epochs=0))

    def _recipe(self, number: int, epochs: int) -> Recipe:
        """The recipe of one stored round; its own seed, so that clients do not shuffle alike in every round."""
        whole = Recipe(**{field.name: getattr(self, field.name) for field in fields(Recipe)})
        lr, seed = learning_rate(whole, number), step_seed(self.seed, number, 0)
        return replace(whole, epochs=epochs, lr=lr, schedule="constant", warmup=0.0, seed=seed)

    def _calibrated(self, new: nn.Module, stored: StoredRound, engine: Engine, request: ForgetRequest) -> State:
        teams = [tuple(stored.clients)] if self.average_first else [(client,) for client in stored.clients]
        options = FitOptions(local_epochs=max(round(self.ratio * stored.epochs), 1))
        total = sum(stored.images.values())
        steps: dict[str, Tensor] = {}
        fresh: dict[str, Tensor] = {}
        begin_state = {name: value.clone() for name, value in new.state_dict().items()}
        recipe = self._recipe(stored.number, epochs=1)
        for team in teams:
            group = Selection("train", ForgetRequest(clients=team), request)
            trained = engine.fit(new, TrainingPlan((PlanPart(group),), options), recipe).state_dict()
            share = sum(stored.images[client] for client in team) / total
            for name, value in trained.items():
                if not value.is_floating_point():
                    fresh[name] = value
                    continue
                step = value - begin_state[name]
                if name in dict(new.named_parameters()):
                    old = _mean(stored, team, name) - stored.begin[name]
                    step = old.norm() * step / step.norm() if float(step.norm()) else torch.zeros_like(step)
                steps[name] = share * step + steps.get(name, 0.0)
        return {name: fresh[name] if name in fresh else value + steps[name] for name, value in begin_state.items()}


def read_round(place: Path, model: nn.Module, request: ForgetRequest) -> StoredRound:
    """A stored round without the forgotten clients; raises BadCheckpoint for one of another network."""
    state, note = read_tensors(place / "global.safetensors")
    if {name: tensor.shape for name, tensor in state.items()} != {n: t.shape for n, t in model.state_dict().items()}:
        raise BadCheckpoint(f"{place} holds the updates of another network; choose another directory")
    clients, images = {}, {}
    with damage_named(place):
        for path in sorted(place.glob("client-*.safetensors")):
            client = int(path.stem.partition("-")[2])
            if client not in request.clients:
                clients[client], about = read_tensors(path)
                images[client] = int(about["images"])
        return StoredRound(state, clients, images, int(note["epochs"]), int(place.name.partition("-")[2]))


def _mean(stored: StoredRound, team: tuple[int, ...], name: str) -> Tensor:
    whole = sum(stored.images[client] for client in team)
    return torch.stack([stored.clients[c][name] * (stored.images[c] / whole) for c in team]).sum(0)
