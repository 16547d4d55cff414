"""A Flower grid on this machine, no Ray, no socket: clients one after the other in this process, or in a few more."""

import copy
import logging
import uuid
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from queue import SimpleQueue
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from fedortho.federated.client import ClientFailed, client_app
from fedortho.federated.wire import pack, unpack
from fedortho.federated.workers import Worker

logger = logging.getLogger(__name__)
PATIENCE = 1.0  # seconds to wait for a reply; who asks again decides when it has been too long
FIRST = 100  # node ids are not client numbers; nobody shall rely on it


class LocalGrid(Grid):
    """Runs a client app here. A message is answered when its reply is asked for, so replies never pile up."""

    def __init__(self, app: ClientApp, clients: int, node_config: Mapping[str, Any] | None = None) -> None:
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1  # Message() reads them
        self._app, self._clients, self._extra = app, clients, dict(node_config or {})
        self._run = Run.create_empty(run_id=1)
        self._waiting: dict[str, Message] = {}
        self._states: dict[int, RecordDict] = {}
        self.silent: set[int] = set()  # clients that never answer, for tests

    def set_run(self, run: Run) -> None:
        self._run = run

    @property
    def run(self) -> Run:
        return self._run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> list[int]:
        return [FIRST + client for client in range(self._clients)]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        names = []
        for message in messages:
            names.append(str(uuid.uuid4()))
            message.metadata.__dict__["_message_id"] = names[-1]
            if message.metadata.dst_node_id - FIRST not in self.silent:
                self._waiting[names[-1]] = message
        return names

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """The reply to the first of these that waits; the others are answered when asked for again."""
        for name in message_ids:
            if name in self._waiting:
                return [self._answer(self._waiting.pop(name))]
        return []

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        return [reply for name in self.push_messages(messages) for reply in self.pull_messages([name])]

    def _answer(self, message: Message) -> Message:
        client = message.metadata.dst_node_id - FIRST
        config = {**self._extra, "partition-id": client, "num-partitions": self._clients}
        context = Context(1, message.metadata.dst_node_id, config, self._states.get(client, RecordDict()), {})
        try:
            # a broadcast shares one record among all messages: without the copies a client could change another's
            reply = copy.deepcopy(self._app(copy.deepcopy(message), context))
        except Exception as error:  # as in the other engines: an error reply, and the others go on
            logger.debug("client %d failed", client, exc_info=True)
            return Message(Error(code=2, reason=type(error).__name__), reply_to=message)
        if len(context.state):
            self._states[client] = context.state
        return reply


class WorkerGrid(LocalGrid):
    """The same with clients in several processes at once; what they compute does not depend on how many these are.

    No more than one message for each process is on its way, so that replies do not pile up here either.
    """

    def __init__(self, config: Mapping[str, Any], clients: int, node_config: Mapping[str, Any], workers: int) -> None:
        super().__init__(client_app(config), clients, node_config)
        self._free: SimpleQueue[Worker] = SimpleQueue()
        self._workers = [Worker(config, node_config) for _ in range(workers)]
        for worker in self._workers:
            self._free.put(worker)
        self._threads = ThreadPoolExecutor(workers)
        self._running: dict[str, Future[Message]] = {}

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Take new questions; a process that is still at an older one was given up and is ended."""
        for worker in self._workers:
            if self._running and worker.is_busy:
                worker.kill()
        self._running.clear()
        return super().push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Replies that are there; waits a while for the first if there is none yet."""
        names = list(message_ids)
        self._submit(names)
        mine = {name: self._running[name] for name in names if name in self._running}
        if not mine:
            return []
        wait(mine.values(), timeout=PATIENCE, return_when=FIRST_COMPLETED)
        done = [name for name, future in mine.items() if future.done()]
        self._submit([name for name in names if name not in done], less=len(done))
        return [self._running.pop(name).result() for name in done]

    def _submit(self, names: Sequence[str], less: int = 0) -> None:
        for name in names:
            if len(self._running) - less >= len(self._workers):
                return
            if name in self._waiting:
                self._running[name] = self._threads.submit(self._elsewhere, self._waiting.pop(name))

    def _elsewhere(self, message: Message) -> Message:
        worker = self._free.get()
        try:
            client, kind = message.metadata.dst_node_id - FIRST, message.metadata.message_type
            found, note = worker.ask(client, self._clients, kind, *unpack(message.content))
            return Message(pack(found, note), reply_to=message)
        except ClientFailed as error:
            return Message(Error(code=2, reason=type(error).__name__), reply_to=message)
        finally:
            self._free.put(worker)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.close()
