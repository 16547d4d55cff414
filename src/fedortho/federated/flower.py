"""The federation as an engine: averaged rounds, summed answers, patches, over whatever Flower grid it is given."""

import copy
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fedortho.engine import Ask, Group, Tally
from fedortho.errors import BadCheckpoint, FedOrthoError
from fedortho.federated.exchange import Line, bytes_of
from fedortho.federated.wire import (
    BadReply,
    Note,
    add_observations,
    below,
    blank_observations,
    pack,
    pack_asks,
    pack_group,
    prefixed,
    unpack_observations,
)
from fedortho.federation import Federation, sample_clients
from fedortho.files import read_tensors, tensors_digest, write_tensors
from fedortho.observe import Observation
from fedortho.prune import Patch
from fedortho.recipe import Recipe, learning_rate
from fedortho.request import EmptyGroup, ForgetRequest
from fedortho.serve import joined
from fedortho.settings import as_mapping
from fedortho.train import Epoch, Mask, step_seed

if TYPE_CHECKING:
    from flwr.serverapp import Grid

logger = logging.getLogger(__name__)
AT_ONCE = 12  # candidates in one exchange
COUNTERS = "num_batches_tracked"


@dataclass(frozen=True)
class About:
    """What clients need to know of the common task."""

    names: tuple[str, ...]
    shape: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]


@dataclass(frozen=True)
class News:
    """What a watcher is told after each answer and at the end of each round."""

    round: int
    rounds: int
    answered: int
    asked: int
    bytes_up: int
    bytes_down: int
    history: tuple[Epoch, ...]


@dataclass
class RunningMean:
    """A weighted mean of models, added one by one: the server never holds more than this and the current one."""

    weight: int = 0
    state: dict[str, Tensor] = field(default_factory=dict)

    def add(self, state: Mapping[str, Tensor], weight: int) -> None:
        """Floats are averaged by weight; integers (batch-norm counters) take the largest."""
        self.weight += weight
        for name, value in state.items():
            if name not in self.state:
                self.state[name] = value.clone()
            elif value.is_floating_point():
                self.state[name] += (value - self.state[name]) * (weight / self.weight)
            else:
                self.state[name] = torch.maximum(self.state[name], value)


class FlowerEngine:
    """An engine whose images lie with clients."""

    at_once = AT_ONCE
    is_federated = True
    has_ledger = False  # ledgers stay with the clients

    def __init__(
        self, grid: "Grid", federation: Federation, about: About, *, seed: int = 0, left: Sequence[int] = ()
    ) -> None:
        self.federation, self.about, self.seed = federation, about, seed
        self.left = frozenset(left)  # by earlier requests: nobody waits for them
        self.line = Line(grid, federation.timeout, federation.quorum)
        self.withheld = 0  # groups that clients did not tell of, because they are too small
        self._read = 0
        self._told = {"names": about.names, "mean": about.mean, "std": about.std}
        self.clients = self.hello()
        self.contacts = dict.fromkeys(range(federation.clients), 0)

    @property
    def names(self) -> tuple[str, ...]:
        return self.about.names

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.about.shape

    @property
    def tally(self) -> Tally:
        up, down = bytes_of(self.line.log)
        return Tally(self._read, len(self.line.log), up, down)

    def hello(self) -> dict[int, Note]:
        """Who is there, by client number."""
        expected = set(range(self.federation.clients)) - self.left
        found = self.line.gather("query.hello", pack({}, {"about": self._told}), len(expected))
        strange = [client for client in found if not 0 <= client < self.federation.clients]
        if strange:
            raise FedOrthoError(f"client {strange[0]} is none of the {self.federation.clients} of this federation")
        if missing := sorted(expected - found.keys()):
            logger.warning("%d of %d clients are not there: %s", len(missing), self.federation.clients, _few(missing))
        return found

    def present(self) -> list[int]:
        """Clients that are there and have not left."""
        return [client for client, note in self.clients.items() if not note["left"] and client not in self.left]

    # training

    def fit(
        self,
        model: nn.Module,
        group: Group,
        recipe: Recipe,
        *,
        trainable: Mask | None = None,
        local_epochs: int = 1,
        checkpoint: Path | None = None,
        score: Callable[[nn.Module], float] | None = None,
        watch: Callable[[News], None] | None = None,
        without: Sequence[int] = (),
    ) -> nn.Module:
        """Federated averaging: `recipe.epochs` rounds of `local_epochs` passes each; the model itself stays as it was.

        The rate follows the recipe by rounds. A client's first contact has no alignment. With a checkpoint a
        killed run goes on after its last whole round, to the same bytes.
        """
        current = copy.deepcopy(model).cpu().eval()
        identity = _identity(model, group, recipe, self.federation, trainable, local_epochs)
        first, history = self._resume(checkpoint, identity, current)
        there = [client for client in self.present() if client not in without]
        for turn in range(first, recipe.epochs):
            entry = self._round(current, group, recipe, turn, there, trainable, local_epochs, history, watch)
            every = self.federation.evaluate_every
            if score is not None and (turn + 1 == recipe.epochs or (every and (turn + 1) % every == 0)):
                entry = replace(entry, valid=score(current))
            history.append(entry)
            if checkpoint is not None:
                self._save(checkpoint, identity, turn + 1, current, history)
            if watch is not None:
                up, down = bytes_of(self.line.log)
                watch(News(turn + 1, recipe.epochs, 0, 0, up, down, tuple(history)))
        self.history = history
        return current

    def _round(
        self,
        current: nn.Module,
        group: Group,
        recipe: Recipe,
        turn: int,
        there: Sequence[int],
        trainable: Mask | None,
        local_epochs: int,
        history: Sequence[Epoch],
        watch: Callable[[News], None] | None,
    ) -> Epoch:
        """One round, in place: send, train, average in the order of client numbers."""
        started = time.monotonic()
        chosen = sample_clients(there, self.federation, self.seed, turn)
        state = current.state_dict()
        still = _still(state, trainable)
        tensors = prefixed("model.", state) | prefixed("mask.", trainable or {})
        shared = pack(tensors, {})
        contents = {}
        for client in chosen:
            note = self._order(recipe, turn, client, local_epochs) | {"group": pack_group(group), "still": still}
            contents[client] = _with_note(shared, note)
        mean, told = RunningMean(), []

        def progress(answered: int, asked: int) -> None:
            if watch is not None:
                up, down = bytes_of(self.line.log)
                watch(News(turn, recipe.epochs, answered, asked, up, down, tuple(history)))

        wanted = {name: value for name, value in state.items() if name not in still}
        for client, answer, note in self.line.ask("train.local", contents, progress=progress):
            self.contacts[client] += 1
            try:
                if not note["images"]:
                    continue
                news = {key: note[key] for key in ("images", "loss", "accuracy", "ortho", "drift")}
                mean.add(_checked(below("model.", answer), wanted), int(note["images"]))
            except (BadReply, KeyError, TypeError, ValueError) as error:
                self.line.log[-1].reject(client, f"its answer does not fit ({error})")
                continue
            told.append(news)
        if not mean.weight:
            raise FedOrthoError(f"round {turn + 1}: none of the clients {_few(chosen)} has images to train on")
        current.load_state_dict({**state, **mean.state})
        return _entry(turn, told, time.monotonic() - started)

    def _order(self, recipe: Recipe, turn: int, client: int, local_epochs: int) -> Note:
        """What a client is told to do in a round."""
        seed = step_seed(self.seed, turn, client)
        local = replace(
            recipe,
            epochs=local_epochs,
            rate=learning_rate(recipe, turn),
            schedule="constant",
            warmup=0.0,
            seed=seed,
        )
        aligns = self.contacts[client] >= self.federation.warmup_contacts
        about = {"about": self._told, "classes": len(self.names), "channels": self.shape[0]}
        norms = self.federation.norms
        return about | {"round": turn, "recipe": as_mapping(local), "align": aligns, "norms": norms}

    def _resume(self, path: Path | None, identity: str, current: nn.Module) -> tuple[int, list[Epoch]]:
        if path is None or not path.exists():
            return 0, []
        tensors, note = read_tensors(path)
        if note.get("belongs_to") != identity:
            raise BadCheckpoint(f"{path} belongs to other settings, clients or weights; remove it to start anew")
        current.load_state_dict({name: value.clone() for name, value in tensors.items()})
        self.contacts = {int(client): number for client, number in note["contacts"].items()}
        return note["rounds"], [Epoch(**entry) for entry in note["history"]]

    def _save(self, path: Path, identity: str, rounds: int, current: nn.Module, history: Sequence[Epoch]) -> None:
        note: Note = {"belongs_to": identity, "rounds": rounds, "contacts": self.contacts}
        write_tensors(path, current.state_dict(), note | {"history": [asdict(entry) for entry in history]})

    # questions

    def measure(self, model: nn.Module, asks: Sequence[Ask]) -> list[list[Observation]]:
        """Sums over all clients that are there and have this model; one exchange."""
        digest = tensors_digest(model.state_dict())
        there = self.present()
        tensors, notes = pack_asks(asks)
        order = {"model": digest, "asks": notes, "share": max(len(there), 1), "about": self._told}
        content = pack(tensors, order | {"least-group": self.federation.least_group})
        blank, total = blank_observations(model, self.about.shape, self.names, asks), None
        for client, answer, note in self.line.ask("query.observe", dict.fromkeys(there, content)):
            exchange = self.line.log[-1]
            if "status" in note:
                exchange.reject(client, f"has {'left' if note['status'] == 'left' else 'another model'}")
                continue
            try:
                withheld, read = int(note["withheld"]), int(note["read"])
                total = add_observations(blank if total is None else total, unpack_observations(answer, asks))
            except (FedOrthoError, KeyError, TypeError, ValueError, RuntimeError) as error:
                exchange.reject(client, f"its sums do not fit ({type(error).__name__})")
                continue
            self.withheld += withheld
            self._read += read
        if total is None:
            raise FedOrthoError(f"no client has the model {digest[:12]}; send it with fedortho federate")
        return total

    def check(self, request: ForgetRequest, forgotten: ForgetRequest | None) -> None:
        request.labels(self.names)
        for client in request.clients:
            if not 0 <= client < self.federation.clients:
                raise FedOrthoError(f"no client {client}; clients run 0 to {self.federation.clients - 1}")
            if client in self.left or self.clients.get(client, {}).get("left"):
                raise EmptyGroup(f"client {client} has left already; there is nothing to forget")
            if client not in self.clients:
                raise FedOrthoError(
                    f"client {client} is not connected, and what it contributed is known only on its own disk; "
                    "start its node, or retrain without it"
                )
        own = any(note["own"] for note in self.clients.values())
        if own and any("/" not in word for word in request.samples):
            raise FedOrthoError("clients have images of their own: name samples as client/row, such as 3/17")
        if again := [w for w in request.classes if forgotten is not None and w in forgotten.classes]:
            raise EmptyGroup(f"class:{again[0]} selects none of the images: it was forgotten before")

    # models and patches

    def send_model(
        self,
        model: nn.Module,
        clients: Sequence[int] | None = None,
        *,
        ledger: bool = True,
        gone: ForgetRequest | None = None,
    ) -> list[int]:
        """Give clients the model that requests will be about, and what it forgot; returns those that have it."""
        chosen = self.present() if clients is None else list(clients)
        note = {"ledger": ledger, "about": self._told, "gone": None if gone is None else asdict(gone)}
        content = pack(prefixed("model.", model.state_dict()), note)
        digest = tensors_digest(model.state_dict())
        return self._confirmed("train.keep", dict.fromkeys(chosen, content), digest)

    def send_patch(
        self, patch: Patch, request: ForgetRequest | None, clients: Sequence[int] | None = None
    ) -> list[int]:
        """Have clients apply a patch and drop what it is about; returns those that did."""
        chosen = self.present() if clients is None else list(clients)
        tensors, note = replace(patch, note={}).packed()
        content = pack(tensors, {"patch": note, "request": None if request is None else asdict(request)})
        done = self._confirmed("train.patch", dict.fromkeys(chosen, content), patch.after)
        for client in done:
            self.clients[client]["left"] = request is not None and client in request.clients
        return done

    def _confirmed(self, kind: str, contents: Mapping[int, Any], digest: str) -> list[int]:
        done = []
        for client, _, note in self.line.ask(kind, contents):
            if note.get("model") == digest:
                done.append(client)
                self.clients[client]["model"] = digest
            else:
                self.line.log[-1].reject(client, _refusal(note, digest))
        return done

    def bring_up_to_date(
        self, model: nn.Module, patches: Sequence[tuple[Patch, ForgetRequest | None]], *, ledger: bool = True
    ) -> None:
        """Find clients with an older model by its digest and send what they missed; unknown ones get the model."""
        digest = tensors_digest(model.state_dict())
        for patch, request in patches:
            late = [c for c, note in self.clients.items() if note["model"] == patch.before and not note["left"]]
            if late:
                logger.warning("clients %s missed a patch: it is sent again", _few(late))
                self.send_patch(patch, request, late)
        strangers = [client for client in self.present() if self.clients[client]["model"] != digest]
        if strangers:
            gone = joined([request for _, request in patches if request is not None])
            self.send_model(model, strangers, ledger=ledger, gone=gone)


def _refusal(note: Note, digest: str) -> str:
    told = {"past": f"will not take {digest[:12]} back: it was patched away", "left": "has left"}
    return told.get(note.get("status", ""), f"has the model {str(note.get('model'))[:12]}, not {digest[:12]}")


def _with_note(shared: Any, note: Note) -> Any:
    """A record of its own note that shares the arrays, which are many bytes."""
    from flwr.app import RecordDict

    return RecordDict({"tensors": shared["tensors"], "note": pack({}, note)["note"]})


def _still(state: Mapping[str, Tensor], trainable: Mask | None) -> list[str]:
    """Tensors of which no coordinate may move: they need not travel back."""
    return [name for name in state if trainable and name in trainable and not bool(trainable[name].any())]


def _checked(state: dict[str, Tensor], wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A client's weights, if they are those of this model and finite."""
    if state.keys() != wanted.keys():
        raise BadReply("its model has other tensors")
    for name, value in state.items():
        if value.shape != wanted[name].shape or value.dtype != wanted[name].dtype:
            raise BadReply(f"its {name} has another shape or type")
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            raise BadReply(f"its {name} is not finite")
    return state


def _entry(turn: int, told: Sequence[Note], seconds: float) -> Epoch:
    """A round in the words of an epoch, weighted by images."""
    images = sum(note["images"] for note in told)
    loss, right = (sum(note["images"] * note[key] for note in told) / images for key in ("loss", "accuracy"))
    known = [note["ortho"] for note in told if note["ortho"] is not None]
    drift = sum(note["drift"] for note in told) / len(told)
    ortho = sum(known) / len(known) if known else None
    return Epoch(turn, loss, right, ortho, None, seconds, clients=len(told), drift=drift)


def _identity(
    model: nn.Module, group: Group, recipe: Recipe, federation: Federation, mask: Mask | None, local_epochs: int
) -> str:
    lasting = replace(federation, timeout=1.0, evaluate_every=0, quorum=0.0)
    parts = [tensors_digest(model.state_dict()), str(pack_group(group)), str(recipe), str(lasting), str(local_epochs)]
    return "|".join(parts + ([tensors_digest(mask)] if mask else []))


def _few(clients: Sequence[int]) -> str:
    return ", ".join(map(str, clients[:5])) + (" …" if len(clients) > 5 else "")
