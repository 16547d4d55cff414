"""The federation as an engine: averaged rounds, summed answers, patches, over whatever Flower grid it is given."""

import copy
import hashlib
import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import reduce
from operator import add
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from fedortho.engines.central import fresh_model
from fedortho.errors import BadCheckpoint, FedOrthoError
from fedortho.federated.aggregation import Order, RunningMean, checked, entry_of
from fedortho.federated.roster import Roster, TaskInfo, few
from fedortho.federated.transport import bytes_of, exchange_of
from fedortho.federated.wire import (
    BadReply,
    Note,
    Tensors,
    add_observations,
    below,
    blank_observations,
    pack,
    pack_queries,
    pack_selection,
    pack_training_plan,
    prefixed,
    unpack_observations,
)
from fedortho.models.norms import batch_norms
from fedortho.runs.federation import Federation, sample_clients
from fedortho.statistics.engine import Tally
from fedortho.statistics.observe import Observation
from fedortho.statistics.query import Query, Selection, Statistic
from fedortho.statistics.training_plan import TrainingPlan, as_training_plan
from fedortho.storage.files import read_tensors, tensors_digest, write_tensors
from fedortho.storage.settings import as_mapping
from fedortho.training.adapters import base_tensors
from fedortho.training.batches import step_seed
from fedortho.training.loop import Epoch, Mask
from fedortho.training.recipe import Recipe, learning_rate
from fedortho.unlearning.repair import norm_buffers

if TYPE_CHECKING:
    from flwr.serverapp import Grid


logger = logging.getLogger(__name__)
PARALLEL_TRIALS = 12  # candidates in one exchange
NO_MODEL: Tensors = {}


@dataclass(frozen=True)
class RoundProgress:
    """What a watcher is told after each answer and at the end of each round."""

    round: int
    rounds: int
    answered: int
    asked: int
    bytes_up: int
    bytes_down: int
    history: tuple[Epoch, ...]


class FederatedEngine(Roster):
    """An engine whose images lie with clients."""

    parallel_trials = PARALLEL_TRIALS
    is_federated = True
    has_ledger = False  # ledgers stay with the clients

    def __init__(
        self,
        grid: "Grid",
        federation: Federation,
        about: TaskInfo,
        *,
        seed: int = 0,
        left: Sequence[int] = (),
        build: Callable[[int], nn.Module] | None = None,
        local_epochs: int = 1,
    ) -> None:
        super().__init__(grid, federation, about, left)
        self.seed, self.build, self.local_epochs = seed, build, local_epochs
        self._read = self._trained = self._withheld = 0
        self._tail_flops = 0.0
        self.contacts = dict.fromkeys(range(federation.clients), 0)

    @property
    def tally(self) -> Tally:
        up, down = bytes_of(self.transport.log)
        return Tally(self._read, self._trained, len(self.transport.log), up, down, self._tail_flops, self._withheld)

    def fresh(self, seed: int) -> nn.Module:
        return fresh_model(self.build, seed)

    def add_work(self, *, read: int = 0, trained: int = 0) -> None:
        self._read += read
        self._trained += trained

    def fit(
        self,
        model: nn.Module,
        what: Selection | TrainingPlan,
        recipe: Recipe,
        *,
        trainable: Mask | None = None,
        checkpoint: Path | None = None,
        score: Callable[[nn.Module], float] | None = None,
        watch: Callable[[RoundProgress], None] | None = None,
        updates: Path | None = None,
    ) -> nn.Module:
        """Federated averaging: `recipe.epochs` rounds of a few passes each; the model itself stays as it was.

        The rate follows the recipe by rounds. A client's first contact has no alignment. Running statistics are pooled
        after the last round, where the federation's policy says so. With a checkpoint a killed run goes on after its
        last whole round, to the same bytes. `updates` is a directory that keeps what every client sent in every round:
        much, and of interest to whoever reads it; only FedEraser needs it.
        """
        current = copy.deepcopy(model).cpu().eval()
        plan = as_training_plan(what)
        passes = plan.options.local_epochs or self.local_epochs
        order = Order(plan, recipe, trainable, passes, _base(model), updates, self.federation.norms)
        identity = _identity(model, order, self.federation)
        self.contacts = dict.fromkeys(self.contacts, 0)  # each training begins without alignment
        first, history = self._resume(checkpoint, identity, current)
        there = [client for client in self.present() if order.concerns(client)]
        for turn in range(first, recipe.epochs):
            entry = self._round(current, order, turn, there, history, watch)
            every = self.federation.evaluate_every
            is_due = self.federation.norms != "local"  # else its statistics are pooled only after the last round
            if score is not None and is_due and (turn + 1 == recipe.epochs or (every and (turn + 1) % every == 0)):
                entry = replace(entry, valid=score(current))
            history.append(entry)
            if checkpoint is not None:
                self._save(checkpoint, identity, turn + 1, current, history)
            if watch is not None:
                up, down = bytes_of(self.transport.log)
                watch(RoundProgress(turn + 1, recipe.epochs, 0, 0, up, down, tuple(history)))
        self.history = history
        if order.pools:
            self._pool_norms(current, order, there)
        return current

    def _round(
        self,
        current: nn.Module,
        order: Order,
        turn: int,
        there: Sequence[int],
        history: Sequence[Epoch],
        watch: Callable[[RoundProgress], None] | None,
    ) -> Epoch:
        """One round, in place; if all who were drawn turn out to hold nothing for it, others are drawn."""
        started, left = time.monotonic(), list(there)

        def progress(answered: int, asked: int) -> None:
            if watch is not None:
                up, down = bytes_of(self.transport.log)
                watch(RoundProgress(turn, order.recipe.epochs, answered, asked, up, down, tuple(history)))

        while left:
            chosen = sample_clients(left, self.federation, order.recipe.seed, turn)
            told = self._averaged(current, order, turn, chosen, progress)
            if told:
                return entry_of(turn, told, time.monotonic() - started)
            left = [client for client in left if client not in chosen]
        raise FedOrthoError(f"round {turn + 1}: none of the clients {few(there)} has images to train on")

    def _averaged(
        self, current: nn.Module, order: Order, turn: int, chosen: Sequence[int], progress: Callable[[int, int], None]
    ) -> list[Note]:
        """Send, train, average in the order of client numbers; what those who had images told.

        The mean grows in the tensors of the current model: beside it there is only the message that carries it.
        """
        state = current.state_dict()
        order.keep(turn, -1, state, 0)
        contents = self._contents(current, order, turn, chosen)
        still = order.still(current)
        wanted = {name: value for name, value in state.items() if name not in still}
        mean, told = RunningMean(wanted), []
        for client, answer, note in self.transport.ask("train.local", contents, progress=progress):
            self.contacts[client] += 1
            try:
                if not note["images"]:
                    continue
                news = {key: note[key] for key in ("images", "loss", "accuracy", "ortho", "drift", "read", "trained")}
                mine = checked(below("model.", answer), wanted)
                if int(note["images"]) < 1:
                    raise BadReply(f"it trained on {note['images']} images")
                mean.add(mine, int(note["images"]))
            except (BadReply, KeyError, TypeError, ValueError) as error:
                self.transport.log[-1].reject(client, f"its answer does not fit ({error})")
                continue
            order.keep(turn, client, mine, news["images"])
            self.add_work(read=int(news["read"]), trained=int(news["trained"]))
            told.append(news)
        return told

    def _contents(self, current: nn.Module, order: Order, turn: int, chosen: Sequence[int]) -> dict[int, Any]:
        """The message to each client; those that have what stays as it is are sent the rest only."""
        state, still = current.state_dict(), order.still(current)
        plan, note = pack_training_plan(order.plan)
        more = plan | prefixed("mask.", {n: m for n, m in (order.trainable or {}).items() if n not in still})
        told_all = {"course": note, "still": still, "share": len(chosen)}
        packed: dict[bool, Any] = {}
        contents = {}
        for client in chosen:
            has_base = bool(still) and self.clients[client]["model"] == order.base
            if has_base not in packed:
                part = {name: value for name, value in state.items() if not has_base or name not in still}
                packed[has_base] = pack(prefixed("model.", part) | more, {})
            own = self._order(order, turn, client) | told_all | {"base": order.base if has_base else ""}
            contents[client] = _with_note(packed[has_base], own)
        return contents

    @property
    def _task(self) -> Note:
        """What a client needs to know to build the network and to read its images."""
        return {"about": self.told, "classes": len(self.names), "channels": self.shape[0]}

    def _order(self, order: Order, turn: int, client: int) -> Note:
        """What a client is told to do in a round."""
        recipe = order.recipe
        seed = step_seed(recipe.seed, turn, client)
        local = replace(
            recipe,
            epochs=order.local_epochs,
            lr=learning_rate(recipe, turn),
            schedule="constant",
            warmup=0.0,
            seed=seed,
        )
        aligns = self.contacts[client] >= self.federation.warmup_contacts
        return self._task | {"round": turn, "recipe": as_mapping(local), "align": aligns}

    def _resume(self, path: Path | None, identity: str, current: nn.Module) -> tuple[int, list[Epoch]]:
        if path is None or not path.exists():
            return 0, []
        tensors, note = read_tensors(path)
        if note.get("belongs_to") != identity:
            raise BadCheckpoint(f"{path} belongs to other settings, clients or weights; remove it to start anew")
        current.load_state_dict({name: value.clone() for name, value in tensors.items()})
        self.contacts = {int(client): number for client, number in note["contacts"].items()}
        self.transport.log += [exchange_of(entry) for entry in note["exchanges"]]
        return note["rounds"], [Epoch(**entry) for entry in note["history"]]

    def _save(self, path: Path, identity: str, rounds: int, current: nn.Module, history: Sequence[Epoch]) -> None:
        note: Note = {"belongs_to": identity, "rounds": rounds, "contacts": self.contacts}
        note |= {"history": [asdict(entry) for entry in history]}
        note |= {"exchanges": [asdict(exchange) for exchange in self.transport.log if exchange.kind == "train.local"]}
        write_tensors(path, current.state_dict(), note)

    def measure(self, model: nn.Module, queries: Sequence[Query]) -> list[list[Observation]]:
        """Sums over all clients that are there and have this model; one exchange."""
        return self._observed(model, queries, self.present())

    def identify(self, group: Selection) -> str:
        """By how many images each client says it has: which ones they are is known only there."""
        held = {client: self.clients[client]["images"] for client in self.present()}
        return hashlib.sha256(json.dumps([pack_selection(group), self.told, held]).encode()).hexdigest()

    def _pool_norms(self, current: nn.Module, order: Order, there: Sequence[int]) -> None:
        """Give the model, in place, the batch-norm statistics of all images that it was trained on; one exchange."""
        norms = tuple(batch_norms(current))
        if not norms:
            return
        groups = tuple(part.group for part in order.plan.parts if part.given is None)
        statistic = Statistic("moments", layers="all", edit="conv", tap="conv", norms=norms)
        (found,) = self._observed(current, [Query(groups, statistic)], there, prefixed("model.", current.state_dict()))
        pooled = reduce(add, found)
        if pooled.images:
            current.load_state_dict(norm_buffers(pooled, 0, norms), strict=False)
        else:
            logger.warning("no client has --least-group images: running statistics were not pooled")

    def _observed(
        self, model: nn.Module, queries: Sequence[Query], there: Sequence[int], sent: Tensors = NO_MODEL
    ) -> list[list[Observation]]:
        """Sums over these clients; they have the model, or are sent it with the question and do not keep it."""
        digest = tensors_digest(model.state_dict())
        tensors, notes = pack_queries(queries)
        order = {"model": digest, "asks": notes, "share": max(len(there), 1)} | self._task
        content = pack({**tensors, **sent}, order | {"least-group": self.federation.least_group})
        blank, total = blank_observations(model, self.about.shape, self.names, queries), None
        for client, answer, note in self.transport.ask("query.observe", dict.fromkeys(there, content)):
            exchange = self.transport.log[-1]
            if "status" in note:
                exchange.reject(client, f"has {'left' if note['status'] == 'left' else 'another model'}")
                continue
            try:
                withheld, read, trained = (int(note[key]) for key in ("withheld", "read", "trained"))
                tried = float(note["tail-flops"])
                total = add_observations(blank if total is None else total, unpack_observations(answer, queries))
            except (FedOrthoError, KeyError, TypeError, ValueError, RuntimeError) as error:
                exchange.reject(client, f"its sums do not fit ({type(error).__name__})")
                continue
            self._withheld += withheld
            self._tail_flops += tried
            self.add_work(read=read, trained=trained)
        if total is None:
            raise FedOrthoError(f"no client has the model {digest[:12]}; send it with fedortho federate")
        return total


def _with_note(shared: Any, note: Note) -> Any:
    """A record of its own note that shares the arrays, which are many bytes."""
    from flwr.app import RecordDict

    return RecordDict({"tensors": shared["tensors"], "note": pack({}, note)["note"]})


def _base(model: nn.Module) -> str:
    """The digest of what clients have, if adapters are taken off."""
    return tensors_digest(base_tensors(model.state_dict()))


def _identity(model: nn.Module, order: Order, federation: Federation) -> str:
    lasting = replace(federation, timeout=1.0, evaluate_every=0, quorum=0.0)
    tensors, note = pack_training_plan(order.plan)
    group = order.plan.parts[0].group
    what = str(pack_selection(group) if order.plan == as_training_plan(group) else note)
    parts = [tensors_digest(model.state_dict()), what, str(order.recipe), str(lasting), str(order.local_epochs)]
    return "|".join(parts + [tensors_digest(held) for held in (tensors, order.trainable) if held])
