"""One exchange with clients over a Flower grid: replies in the order of client numbers, failures, and bytes."""

import logging
import os
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Generic, TypeVar

from safetensors.torch import load, save
from torch import Tensor

from fedortho.errors import BadRecord, FedOrthoError
from fedortho.federated.messages import Hello, HelloReply, Order, Reply
from fedortho.federated.wire import BadReply, count_bytes, pack, unpack
from fedortho.storage.files import savable
from fedortho.storage.records import read_record, write_record

if TYPE_CHECKING:
    from flwr.app import Message, RecordDict
    from flwr.serverapp import Grid

logger = logging.getLogger(__name__)
R = TypeVar("R", bound=Reply)
Check = Callable[[int, HelloReply], str]
Contents = Mapping[int, "RecordDict"]  # by client
Progress = Callable[[int, int], None]  # receives how many of how many clients have answered
SHORTEST_PAUSE, LONGEST_PAUSE = 0.01, 3.0  # seconds between two looks for replies


@dataclass
class Exchange:
    """One exchange with some clients: its bytes, its failures and its time."""

    kind: str  # the action, such as train.local
    bytes_down: dict[int, int] = field(default_factory=dict)  # by client
    bytes_up: dict[int, int] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)  # client → why its reply does not count
    seconds: float = 0.0

    def reject(self, client: int, why: str) -> None:
        """Report a reply that does not count; the exchange goes on with the other clients."""
        self.failed[client] = why
        logger.warning("%s: %s (%s)", f"client {client}" if client >= 0 else "a node", why, self.kind)


@dataclass(frozen=True)
class WireLog:
    """The exchanges of a run, as wire.json keeps them."""

    schema: ClassVar[int] = 1

    exchanges: tuple[Exchange, ...] = ()


def read_wire_log(path: Path) -> tuple[Exchange, ...]:
    """The exchanges in a wire.json; none if there is no such file."""
    return read_record(WireLog, path).exchanges if path.exists() else ()


def append_wire_log(path: Path, exchanges: Sequence[Exchange]) -> None:
    """Add exchanges to a wire.json."""
    write_record(path, WireLog((*read_wire_log(path), *exchanges)))


def total_bytes(exchanges: Sequence[Exchange]) -> tuple[int, int]:
    """Bytes up and bytes down over exchanges and clients."""
    return sum(sum(e.bytes_up.values()) for e in exchanges), sum(sum(e.bytes_down.values()) for e in exchanges)


def is_quorum(share: float, answered: int, asked: int) -> bool:
    """Whether enough clients answered: a share of those asked, and always one.

    >>> is_quorum(0.5, 2, 4), is_quorum(0.5, 2, 5), is_quorum(0.0, 0, 4)
    (True, False, False)
    """
    return answered >= max(share * asked, 1)


@dataclass(frozen=True)
class ClientReply(Generic[R]):
    """The valid reply of one client."""

    client: int
    tensors: dict[str, Tensor]
    message: R


class Transport:
    """The connection to the clients: their nodes by client number, and a log of all exchanges."""

    def __init__(self, grid: "Grid", timeout: float, quorum: float) -> None:
        self.grid, self.timeout, self.quorum = grid, timeout, quorum
        self.nodes: dict[int, int] = {}  # client → node
        self.log: list[Exchange] = []
        self._greeted: set[int] = set()  # nodes that were asked who they are, whether they answered or not
        self.bytes_up = self.bytes_down = 0  # of all exchanges in the log

    def resume(self, exchanges: Sequence[Exchange]) -> None:
        """Add the exchanges of a training that was interrupted."""
        self.log += exchanges
        up, down = total_bytes(exchanges)
        self.bytes_up, self.bytes_down = self.bytes_up + up, self.bytes_down + down

    def greet(
        self, hello: Hello, expected: int | None = None, check: Check = lambda node, reply: ""
    ) -> dict[int, HelloReply]:
        """Ask every node who it is, after waiting for `expected` nodes; None: only those that have come since.

        `check` returns why a node is refused, or nothing. Of two nodes that call themselves one client both are
        refused. A node that did not answer is asked again once it was gone.
        """
        until = time.monotonic() + self.timeout
        while len(nodes := list(self.grid.get_node_ids())) < (expected or 0) and time.monotonic() <= until:
            time.sleep(1.0)
        if expected is not None:
            self.nodes, self._greeted = {}, set()
        self._greeted &= set(nodes)
        unnamed = {-1 - n: node for n, node in enumerate(nodes) if node not in self._greeted}  # no client numbers yet
        self._greeted |= set(nodes)
        found = self._greet(hello, unnamed, check) if unnamed else {}
        if expected is not None and not found:
            raise FedOrthoError(f"none of {len(nodes)} nodes answered within {self.timeout:g} s; see their logs")
        return found

    def _greet(self, hello: Hello, unnamed: Mapping[int, int], check: Check) -> dict[int, HelloReply]:
        exchange, claims = Exchange(hello.action), dict[int, list[ClientReply[HelloReply]]]()
        known, self.nodes = self.nodes, {**self.nodes, **unnamed}
        for reply in self._replies(exchange, HelloReply, dict.fromkeys(unnamed, pack({}, hello))):
            if reason := check(unnamed[reply.client], reply.message):
                exchange.reject(reply.client, f"node {unnamed[reply.client]} {reason}")
            else:
                claims.setdefault(reply.message.client, []).append(reply)
        exchange.failed.clear()  # of nobody whose number is known
        named = {claimed[0].client: client for client, claimed in sorted(claims.items()) if len(claimed) == 1}
        for client in sorted(claims.keys() - set(named.values())):
            exchange.reject(client, "is the name of two nodes: both are refused; give each its own partition-id")
        exchange.bytes_up = {client: exchange.bytes_up[place] for place, client in named.items()}
        exchange.bytes_down = {client: exchange.bytes_down[place] for place, client in named.items()}
        self.log.append(exchange)
        self.nodes = dict(sorted({**known, **{client: unnamed[place] for place, client in named.items()}}.items()))
        return {client: claims[client][0].message for client in named.values()}

    def ask(
        self, order: type[Order], kind: type[R], contents: Contents, *, progress: Progress | None = None
    ) -> Iterator[ClientReply[R]]:
        """Send each client its content; yields the valid replies in the order of client numbers.

        Errors, missing replies and invalid messages are reported and skipped; the quorum is checked after the last
        reply. `progress` is called with the number of replies so far and of clients asked.
        """
        exchange = Exchange(order.action)
        self.log.append(exchange)
        for number, reply in enumerate(self._replies(exchange, kind, contents), 1):
            yield reply
            if progress is not None:
                progress(number, len(contents))
        valid, asked = len(contents) - len(exchange.failed), len(contents)
        if not is_quorum(self.quorum, valid, asked):
            why = "; ".join(f"client {c}: {reason}" for c, reason in sorted(exchange.failed.items())[:3])
            raise FedOrthoError(f"only {valid} of {asked} clients answered {order.action} ({why}); see --quorum")

    def _replies(self, exchange: Exchange, kind: type[R], contents: Contents) -> Iterator[ClientReply[R]]:
        """Valid replies in the order of client numbers; a reply that arrives early waits on disk for its turn."""
        started, pause = time.monotonic(), SHORTEST_PAUSE
        order = deque(sorted(contents))
        pending = self._push(exchange, contents)
        with tempfile.TemporaryFile() as spool:  # it has no name: a killed server leaves nothing of clients behind
            early: dict[int, tuple[int, int, R]] = {}
            while order:
                client = order[0]
                if client in early:
                    start, length, reply_message = early.pop(client)
                    spool.seek(start)
                    yield ClientReply(client, load(spool.read(length)), reply_message)
                    order.popleft()
                    continue
                if client in exchange.failed:
                    order.popleft()
                    continue
                arrived = self._pull(pending)
                for sender, message in arrived:
                    reply = self._read(exchange, kind, sender, message)
                    if reply is not None and sender == order[0]:
                        yield reply
                        order.popleft()
                    elif reply is not None:
                        start, data = spool.seek(0, os.SEEK_END), save(savable(reply.tensors))
                        early[sender] = (start, spool.write(data), reply.message)
                pause = SHORTEST_PAUSE if arrived else min(pause * 2, LONGEST_PAUSE)
                if not arrived and pending and time.monotonic() - started > self.timeout:
                    for silent in pending.values():
                        exchange.reject(silent, f"silent for {self.timeout:g} s")
                    pending.clear()
                elif not arrived and pending:
                    time.sleep(pause)
        exchange.seconds = time.monotonic() - started

    def _push(self, exchange: Exchange, contents: Contents) -> dict[str, int]:
        """Send to all; returns message id → client. Flower gives no id for a node that is no longer connected."""
        from flwr.app import Message

        order, kind = sorted(contents), exchange.kind
        messages = [Message(contents[c], dst_node_id=self.nodes[c], message_type=kind) for c in order]
        records = {id(each): each for each in contents.values()}  # most clients share one
        sizes = {key: count_bytes(each) for key, each in records.items()}
        exchange.bytes_down = {client: sizes[id(contents[client])] for client in order}
        self.bytes_down += sum(exchange.bytes_down.values())
        ids = list(self.grid.push_messages(messages))
        if len(ids) != len(order):  # Flower's reply to messages that are too large
            most = max(sizes.values(), default=0)
            raise FedOrthoError(
                f"Flower did not take {len(order)} messages of up to {most:,} bytes ({kind}); see its log"
            )
        for client in [client for id_, client in zip(ids, order, strict=True) if not id_]:
            exchange.reject(client, "is no longer connected")
        return {id_: client for id_, client in zip(ids, order, strict=True) if id_}

    def _pull(self, pending: dict[str, int]) -> "list[tuple[int, Message]]":
        """New replies with their senders; one that is not pending, such as a second reply, is dropped."""
        if not pending:
            return []
        messages = self.grid.pull_messages(pending.keys())  # no copy: a grid may hand over one reply at a time
        senders = [(pending.pop(message.metadata.reply_to_message_id, None), message) for message in messages]
        return [(client, message) for client, message in senders if client is not None]

    def _read(self, exchange: Exchange, kind: type[R], client: int, message: "Message") -> ClientReply[R] | None:
        """The reply in a Flower message, validated; an invalid one is reported."""
        if message.has_error():  # its text is not read: it may describe somebody's images
            exchange.reject(client, f"failed (code {message.error.code}); its own log says why")
            return None
        try:
            exchange.bytes_up[client] = count_bytes(message.content)
            self.bytes_up += exchange.bytes_up[client]
            if message.metadata.src_node_id != self.nodes[client]:
                raise BadReply("its reply comes from another node")
            tensors, reply = unpack(message.content, kind, "its reply")
            if tensors and not kind.carries_tensors:
                raise BadReply(f"its reply has a tensor {next(iter(tensors))[:60]!r}; expected none")
            if reply.client != client and client >= 0:
                raise BadReply(f"it calls itself client {reply.client}")
        except (BadRecord, BadReply) as error:
            exchange.reject(client, str(error))
            return None
        return ClientReply(client, tensors, reply)
