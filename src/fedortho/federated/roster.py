"""The members of a federation: who is there, which model each has, and how they are brought to another."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import nn

from fedortho.data.request import EmptyGroup, ForgetRequest, union_of
from fedortho.errors import FedOrthoError
from fedortho.federated.transport import Transport
from fedortho.federated.wire import Note, pack, prefixed
from fedortho.models.patch import Patch
from fedortho.runs.federation import Federation
from fedortho.storage.files import tensors_digest

if TYPE_CHECKING:
    from flwr.serverapp import Grid


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TaskInfo:
    """What clients need to know of the common task."""

    names: tuple[str, ...]
    shape: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]


class Roster:
    """Clients as the server knows them, by number."""

    def __init__(self, grid: "Grid", federation: Federation, about: TaskInfo, left: Sequence[int] = ()) -> None:
        self.federation, self.about = federation, about
        self.left = frozenset(left)  # by earlier requests: nobody waits for them
        self.transport = Transport(grid, federation.timeout, federation.quorum)
        self.told = {"names": about.names, "mean": about.mean, "std": about.std}
        self.clients = self.hello()

    @property
    def names(self) -> tuple[str, ...]:
        return self.about.names

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.about.shape

    def hello(self) -> dict[int, Note]:
        """Who is there, by client number."""
        expected = set(range(self.federation.clients)) - self.left
        found = self.transport.gather("query.hello", pack({}, {"about": self.told}), len(expected))
        strange = [client for client in found if not 0 <= client < self.federation.clients]
        if strange:
            raise FedOrthoError(f"client {strange[0]} is none of the {self.federation.clients} of this federation")
        if missing := sorted(expected - found.keys()):
            logger.warning("%d of %d clients are not there: %s", len(missing), self.federation.clients, few(missing))
        return found

    def present(self) -> list[int]:
        """Clients that are there and have not left."""
        return [client for client, note in self.clients.items() if not note["left"] and client not in self.left]

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
        note = {"ledger": ledger, "about": self.told, "gone": None if gone is None else asdict(gone)}
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
        for client, _, note in self.transport.ask(kind, contents):
            if note.get("model") == digest:
                done.append(client)
                self.clients[client]["model"] = digest
            else:
                self.transport.log[-1].reject(client, _refusal(note, digest))
        return done

    def bring_up_to_date(self, model: nn.Module, patches: Sequence[tuple[Patch, ForgetRequest | None]]) -> None:
        """Find clients with an older model by its digest and send what they missed; unknown ones get the model."""
        digest = tensors_digest(model.state_dict())
        for patch, request in patches:
            late = [c for c, note in self.clients.items() if note["model"] == patch.before and not note["left"]]
            if late:
                logger.warning("clients %s missed a patch: it is sent again", few(late))
                self.send_patch(patch, request, late)
        strangers = [client for client in self.present() if self.clients[client]["model"] != digest]
        if strangers:
            gone = union_of([request for _, request in patches if request is not None])
            self.send_model(model, strangers, gone=gone)


def _refusal(note: Note, digest: str) -> str:
    told = {"past": f"will not take {digest[:12]} back: it was patched away", "left": "has left"}
    return told.get(note.get("status", ""), f"has the model {str(note.get('model'))[:12]}, not {digest[:12]}")


def few(clients: Sequence[int]) -> str:
    return ", ".join(map(str, clients[:5])) + (" …" if len(clients) > 5 else "")
