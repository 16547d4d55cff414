"""One exchange with clients over a Flower grid: who answered, in a fixed order, who did not, and the bytes it took."""

import logging
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from fedortho.errors import FedOrthoError
from fedortho.federated.wire import BadReply, Note, count_bytes, unpack
from fedortho.storage.files import read_tensors, write_tensors

if TYPE_CHECKING:
    from flwr.app import Message, RecordDict
    from flwr.serverapp import Grid


logger = logging.getLogger(__name__)
ClientReply = tuple[int, dict[str, Tensor], Note]


@dataclass
class Exchange:
    """What an exchange took, per client."""

    kind: str
    down: dict[int, int] = field(default_factory=dict)  # client → bytes
    up: dict[int, int] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)  # client → why its answer does not count
    seconds: float = 0.0

    def reject(self, client: int, why: str) -> None:
        """An answer that does not count; it is reported, and the others go on."""
        self.failed[client] = why
        logger.warning("%s: %s (%s)", f"client {client}" if client >= 0 else "a node", why, self.kind)


class Transport:
    """The connection to the clients: their nodes by client number, and a log of all exchanges."""

    def __init__(self, grid: "Grid", timeout: float, quorum: float) -> None:
        self.grid, self.timeout, self.quorum = grid, timeout, quorum
        self.nodes: dict[int, int] = {}  # client → node
        self.log: list[Exchange] = []

    def gather(self, kind: str, content: "RecordDict", expected: int) -> dict[int, Note]:
        """Query every node who it is; waits until `expected` of them are there, as long as the timeout allows."""
        until = time.monotonic() + self.timeout
        while True:
            nodes = list(self.grid.get_node_ids())
            if len(nodes) >= expected or time.monotonic() > until:
                break
            time.sleep(1.0)
        unknown = {-1 - number: node for number, node in enumerate(nodes)}  # no client numbers yet
        self.nodes = dict(unknown)
        found: dict[int, tuple[int, Note]] = {}
        exchange = Exchange(kind)
        for place, _, note in self._answers(exchange, dict.fromkeys(unknown, content)):
            client = note["client"]
            if client in found:
                raise FedOrthoError(f"two nodes call themselves client {client}; give each its own partition-id")
            found[client] = (unknown[place], note)
            for counted in (exchange.up, exchange.down):
                counted[client] = counted.pop(place)
        self.log.append(exchange)
        self.nodes = {client: node for client, (node, _) in sorted(found.items())}
        if not self.nodes:
            raise FedOrthoError(f"none of {len(nodes)} nodes answered within {self.timeout:g} s; see their logs")
        return {client: found[client][1] for client in self.nodes}

    def ask(
        self,
        kind: str,
        contents: "Mapping[int, RecordDict]",
        *,
        progress: Callable[[int, int], None] | None = None,
    ) -> Iterator[ClientReply]:
        """Send to each client its content; yields (client, tensors, note) in the order of client numbers.

        An answer that comes before its turn waits on the disk. Errors, silence and bad records are reported and
        passed over; after the last one the quorum is checked.
        """
        exchange = Exchange(kind)
        self.log.append(exchange)
        for number, answer in enumerate(self._answers(exchange, contents), 1):
            yield answer
            if progress is not None:
                progress(number, len(contents))
        good = len(contents) - len(exchange.failed)
        if good < max(self.quorum * len(contents), 1):
            why = "; ".join(f"client {c}: {w}" for c, w in sorted(exchange.failed.items())[:3])
            raise FedOrthoError(f"only {good} of {len(contents)} clients answered {kind} ({why}); see --quorum")

    def _answers(self, exchange: Exchange, contents: "Mapping[int, RecordDict]") -> Iterator[ClientReply]:
        started = time.monotonic()
        order = sorted(contents)
        waiting = self._pushed(exchange, contents)
        with tempfile.TemporaryDirectory(prefix="fedortho-") as spool:
            early: dict[int, Note] = {}
            turn, pause = 0, 0.01
            while turn < len(order):
                client = order[turn]
                if client in early:
                    yield client, read_tensors(Path(spool) / f"{client}.safetensors")[0], early.pop(client)
                    (Path(spool) / f"{client}.safetensors").unlink()
                    turn += 1
                    continue
                if client in exchange.failed:
                    turn += 1
                    continue
                arrived = self._arrived(waiting)
                pause = 0.01 if arrived else min(pause * 2, 3.0)
                for sender, reply in arrived:
                    answer = self._read(exchange, sender, reply)
                    if answer is None:
                        continue
                    if sender == order[turn]:
                        yield sender, *answer
                        turn += 1
                    else:
                        write_tensors(Path(spool) / f"{sender}.safetensors", answer[0])
                        early[sender] = answer[1]
                if not arrived and waiting:
                    if time.monotonic() - started > self.timeout:
                        for client in list(waiting.values()):
                            exchange.reject(client, f"silent for {self.timeout:g} s")
                        waiting.clear()
                    else:
                        time.sleep(pause)
        exchange.seconds = time.monotonic() - started

    def _pushed(self, exchange: Exchange, contents: "Mapping[int, RecordDict]") -> dict[str, int]:
        """Message → client, of those that Flower took: it gives no name for a node that is gone."""
        from flwr.app import Message

        order, kind = sorted(contents), exchange.kind
        messages = [Message(contents[c], dst_node_id=self.nodes[c], message_type=kind) for c in order]
        exchange.down = {client: count_bytes(contents[client]) for client in order}
        names = list(self.grid.push_messages(messages))
        if len(names) != len(order):  # its answer to messages that are too large
            most = max(exchange.down.values(), default=0)
            raise FedOrthoError(
                f"Flower did not take {len(order)} messages of up to {most:,} bytes ({kind}); see its log"
            )
        for client in [client for name, client in zip(names, order, strict=True) if not name]:
            exchange.reject(client, "is no longer connected")
        return {name: client for name, client in zip(names, order, strict=True) if name}

    def _arrived(self, waiting: dict[str, int]) -> "list[tuple[int, Message]]":
        """New replies with their senders; one that nobody waits for, such as a second one, is dropped."""
        if not waiting:
            return []
        replies = [
            (waiting.pop(r.metadata.reply_to_message_id, None), r) for r in self.grid.pull_messages(list(waiting))
        ]
        return [(client, reply) for client, reply in replies if client is not None]

    def _read(self, exchange: Exchange, client: int, reply: "Message") -> tuple[dict[str, Tensor], Note] | None:
        if reply.has_error():  # its text stays unread: it may come from somebody's images
            exchange.reject(client, f"failed (code {reply.error.code}); its own log says why")
            return None
        exchange.up[client] = count_bytes(reply.content)
        try:
            tensors, note = unpack(reply.content)
            if type(note.get("client")) is not int or (note["client"] != client and client >= 0):
                raise BadReply(f"it calls itself client {note.get('client')}")
        except BadReply as error:
            exchange.reject(client, str(error))
            return None
        return tensors, note


def bytes_of(log: Sequence[Exchange]) -> tuple[int, int]:
    """Bytes up and down over exchanges and clients."""
    return sum(sum(e.up.values()) for e in log), sum(sum(e.down.values()) for e in log)


def exchange_of(entry: Note) -> Exchange:
    """An exchange as it was written to a file, where numbers of clients are words."""
    by_client = {key: {int(c): v for c, v in entry[key].items()} for key in ("down", "up", "failed")}
    return Exchange(kind=entry["kind"], seconds=entry["seconds"], **by_client)
