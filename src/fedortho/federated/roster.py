"""The clients of a federation as the server knows them: which are connected, and which model each of them has."""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn

from fedortho.data.images import Images
from fedortho.data.request import Clients, EmptyGroup, ForgetRequest, union_of
from fedortho.engines.query import Selection
from fedortho.errors import FedOrthoError
from fedortho.federated import messages
from fedortho.federated.transport import Transport, is_quorum
from fedortho.federated.wire import pack
from fedortho.models.patch import Patch
from fedortho.runs.settings import Federation
from fedortho.storage.files import prefixed, tensors_digest
from fedortho.storage.records import Migration, read_record

if TYPE_CHECKING:
    from flwr.app import RecordDict
    from flwr.serverapp import Grid

logger = logging.getLogger(__name__)
NODES = "nodes.json"
Patches = Sequence[tuple[Patch, ForgetRequest | None]]  # oldest first, each with its request
Common = Callable[[], tuple[Images, Clients]]  # training images of a common dataset, and the rows of each client


@dataclass(frozen=True)
class Binding:
    """The node that a client was last seen on, the identity of its store and the digest of its images."""

    node: str  # a number up to 2**64, as Flower gives it
    identity: str
    data: str = ""


def _from_schema_1(body: dict[str, Any]) -> dict[str, Any]:
    """Nodes as text: half of Flower's numbers are beyond what a record has as a number."""
    return {"clients": {client: {**bound, "node": str(bound["node"])} for client, bound in body["clients"].items()}}


@dataclass(frozen=True)
class NodesRecord:
    """nodes.json of a run: its clients, each bound to a node and a store."""

    schema: ClassVar[int] = 2
    migrations: ClassVar[Mapping[int, Migration]] = {1: _from_schema_1}

    clients: Mapping[int, Binding]


def read_bindings(run: Path) -> Mapping[int, Binding]:
    """The clients of a run; none if it was written before they were bound."""
    return read_record(NodesRecord, run / NODES).clients if (run / NODES).exists() else {}


@dataclass(eq=False)
class Roster:
    """Clients by number; empty until `hello` asks who is connected."""

    grid: "Grid"
    federation: Federation
    task: messages.TaskInfo
    left: Collection[int] = ()  # clients that left by earlier requests; the server does not wait for them
    load_common: Common | None = None
    known: Mapping[int, Binding] = field(default_factory=dict)  # from an earlier run
    clients: dict[int, messages.HelloReply] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.left = frozenset(self.left)
        self.transport = Transport(self.grid, self.federation.timeout, self.federation.quorum)

    def hello(self) -> dict[int, messages.HelloReply]:
        """Ask all nodes who they are; returns the connected clients by number."""
        number, expected = self.federation.clients, set(range(self.federation.clients)).difference(self.left)
        self.clients = self.transport.greet(messages.Hello(self.task), len(expected), self._stranger)
        if missing := sorted(expected - self.clients.keys()):
            logger.warning("%d of %d clients are not connected: %s", len(missing), number, ranges(missing, 5))
        total = sum(reply.images for reply in self.clients.values())
        for client, reply in self.clients.items() if len(self.clients) > 2 else ():
            if 2 * reply.images > total:  # nobody can count them from here
                told = "client %d says that it holds %d of all %d images: a weighted mean is mostly its model"
                logger.warning(told, client, reply.images, total)
        return self.clients

    def check_quorum(self) -> None:
        """Refuse to begin with fewer clients than the quorum of all that have not left."""
        expected, present = set(range(self.federation.clients)).difference(self.left), self.present()
        if not is_quorum(self.federation.quorum, len(present), len(expected)):
            missing = ranges(sorted(expected.difference(present)), 5)
            raise FedOrthoError(
                f"only {len(present)} of {len(expected)} clients are connected and answer (not {missing}); start their "
                "nodes again, or see --quorum"
            )

    def welcome(self) -> dict[int, messages.HelloReply]:
        """Greet nodes that have come since; returns their clients, which take part from now on."""
        returned = self.transport.greet(messages.Hello(self.task), check=self._stranger)
        if returned:
            logger.info("clients %s are connected again", ranges(list(returned), 5))
            self.clients = dict(sorted({**self.clients, **returned}.items()))
        return returned

    def _stranger(self, node: int, reply: messages.HelloReply) -> str:
        """Why a node is not the client that it calls itself: a number is bound to its node or to its store."""
        client, here = reply.client, version("fedortho")
        if client >= self.federation.clients:
            return f"calls itself client {client}; clients run 0 to {self.federation.clients - 1}"
        bound = self.known.get(client)
        if bound is not None and bound.node != str(node) and bound.identity != reply.identity:
            return f"calls itself client {client}, which was another node with another store; remove it from {NODES}"
        if bound is not None and bound.data and reply.data and bound.data != reply.data:
            logger.warning("client %d has other images than before", client)
        if reply.version != here:
            logger.warning("client %d has fedortho %s, this server %s", client, reply.version, here)
        return ""

    def bindings(self) -> dict[int, "Binding"]:
        """The node and the store of every client that is known, now or before."""
        nodes = self.transport.nodes
        now = {client: Binding(str(nodes[client]), info.identity, info.data) for client, info in self.clients.items()}
        return {**self.known, **now}

    def check_forgotten(self, declared: ForgetRequest | None) -> None:
        """Refuse a training of which clients would leave out more than is declared, since they have forgotten it."""
        names, missing = self.task.names, []
        known = (declared or ForgetRequest()).settled(names)
        for client in self.present():
            own = union_of(self.clients[client].forgotten)
            if own is not None and not known.on_client(client).covers(own.settled(names)):
                missing.append(own)
        if whole := union_of(missing):
            raise FedOrthoError(
                f"{len(missing)} clients have forgotten {whole}, and would train without it; "
                f"give --without '{whole}', or new stores"
            )

    def present(self) -> list[int]:
        """Clients that are connected and have not left."""
        return [client for client, info in self.clients.items() if not info.has_left and client not in self.left]

    @cached_property
    def common(self) -> tuple[Images, Clients] | None:
        """Training images of the common dataset and each client's rows; None if clients have images of their own."""
        has_own = any(info.has_own_images for info in self.clients.values())
        return None if has_own or self.load_common is None else self.load_common()

    def check(self, request: ForgetRequest, forgotten: ForgetRequest | None) -> None:
        """Refuse a request for classes, clients or samples that do not exist or were forgotten before."""
        request.labels(self.task.names)
        for client in request.clients:
            if not 0 <= client < self.federation.clients:
                raise FedOrthoError(f"no client {client}; clients run 0 to {self.federation.clients - 1}")
            if client in self.left or (client in self.clients and self.clients[client].has_left):
                raise EmptyGroup(f"client {client} has left already; there is nothing to forget")
            if client not in self.clients:
                raise FedOrthoError(
                    f"client {client} is not connected, and only its own disk knows what it contributed; "
                    "start its node, or retrain without it"
                )
        has_own = any(info.has_own_images for info in self.clients.values())
        if has_own and any("/" not in sample for sample in request.samples):
            raise FedOrthoError("clients have images of their own: name samples as client/row, such as 3/17")
        if again := [name for name in request.classes if forgotten is not None and name in forgotten.classes]:
            raise EmptyGroup(f"class:{again[0]} selects no images: it was forgotten before")
        if self.common is not None:
            images, clients = self.common
            request.split(Selection(exclude=forgotten).select(images, clients), clients)

    def send_model(
        self,
        model: nn.Module,
        clients: Sequence[int] | None = None,
        *,
        ledger: bool = True,
        forgotten: ForgetRequest | None = None,
    ) -> list[int]:
        """Send clients the model that later requests are about; returns those that keep it, with a `ledger` or not."""
        content = pack(prefixed("model.", model.state_dict()), messages.KeepModel(self.task, ledger, forgotten))
        return self._confirmed(messages.KeepModel, content, clients, tensors_digest(model.state_dict()))

    def send_patch(
        self, patch: Patch, request: ForgetRequest | None, clients: Sequence[int] | None = None
    ) -> list[int]:
        """Have clients apply a patch and stop using the forgotten images; returns those that did."""
        content = pack(patch.packed()[0], messages.ApplyPatch(messages.PatchInfo(patch.before, patch.after), request))
        done = self._confirmed(messages.ApplyPatch, content, clients, patch.after)
        for client in done:
            has_left = request is not None and client in request.clients
            self.clients[client] = replace(self.clients[client], has_left=has_left)
        return done

    def _confirmed(
        self, order: type[messages.Order], content: "RecordDict", clients: Sequence[int] | None, digest: str
    ) -> list[int]:
        """Send clients, or all, this content; those that report the model with this digest, others are rejected."""
        done, receivers = [], self.present() if clients is None else clients
        for reply in self.transport.ask(order, messages.ModelReply, dict.fromkeys(receivers, content)):
            if reply.message.status == "done" and reply.message.model == digest:
                done.append(reply.client)
                self.clients[reply.client] = replace(self.clients[reply.client], model=digest)
            else:
                self.transport.log[-1].reject(reply.client, self._refusal(reply.message, digest))
        return done

    def _refusal(self, reply: messages.ModelReply, digest: str) -> str:
        """Why a client has not taken the model with this digest."""
        if reply.status == "uncovered":
            forgotten = str(union_of(self.clients[reply.client].forgotten))
            return f"has forgotten {forgotten[:60]}, which the requests of {digest[:12]} do not cover"
        reasons = {"patched-away": f"refuses {digest[:12]}: a patch has replaced it", "left": "has left"}
        return reasons.get(reply.status, f"has the model {reply.model[:12]}, not {digest[:12]}")

    def bring_up_to_date(
        self, model: nn.Module, patches: Patches, forgotten: ForgetRequest | None = None, *, ledger: bool = True
    ) -> None:
        """Send clients with an older model the patches that they missed, and all others the model itself.

        `forgotten` is all that the model has forgotten or was trained without; None: the requests of the patches.
        """
        digest = tensors_digest(model.state_dict())
        for patch, request in patches:
            late = [client for client, info in self.clients.items() if info.model == patch.before and not info.has_left]
            if late:
                logger.warning("clients %s missed a patch: it is sent again", ranges(late, 5))
                self.send_patch(patch, request, late)
        outdated = [client for client in self.present() if self.clients[client].model != digest]
        if outdated:
            forgotten = forgotten or union_of([request for _, request in patches if request is not None])
            self.send_model(model, outdated, ledger=ledger, forgotten=forgotten)

    def answered(self) -> tuple[int, ...]:
        """Clients with a reply that counted, to a query or in training."""
        kinds = (messages.Observe.action, messages.TrainLocal.action)
        asked = [exchange for exchange in self.transport.log if exchange.kind in kinds]
        return tuple(sorted({client for each in asked for client in each.bytes_up if client not in each.failed}))

    def having(self, digest: str) -> tuple[int, ...]:
        """Clients that have confirmed the model with this digest."""
        return tuple(sorted(client for client, info in self.clients.items() if info.model == digest))


def ranges(clients: Sequence[int], most: int | None = None) -> str:
    """Client numbers in few words, of scattered ones only the first.

    >>> ranges([0, 1, 2, 3, 7, 9, 10]), ranges([0, 1, 2, 3, 7, 9, 10], most=2)
    ('0-3,7,9,10', '0-3,7 …')
    """
    spans: list[list[int]] = []
    for client in sorted(clients):
        if spans and client == spans[-1][-1] + 1:
            spans[-1].append(client)
        else:
            spans.append([client])
    words = [f"{span[0]}-{span[-1]}" if len(span) > 2 else ",".join(map(str, span)) for span in spans]
    return ",".join(words[:most]) + (" …" if most and len(words) > most else "")
