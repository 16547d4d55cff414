"""A Flower grid on this machine without Ray or sockets: clients in this process, one after another, or in workers."""

import copy
import logging
import uuid
from collections import deque
from collections.abc import Iterable, Mapping, Set
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from fedortho.federated.client import ClientFailed, client_app
from fedortho.federated.messages import WorkerOrder
from fedortho.federated.wire import pack_json, unpack_json
from fedortho.federated.workers import Worker

logger = logging.getLogger(__name__)
PULL_SECONDS = 1.0  # how long one pull waits for a reply; the caller pulls again until its own timeout
FIRST_NODE = 100  # node ids differ from client numbers, so that nobody relies on them


class LocalGrid(Grid):
    """Runs a client app in this process; a message is answered when its reply is pulled, so replies never pile up."""

    def __init__(
        self,
        app: ClientApp,
        clients: int,
        node_config: Mapping[str, Any] | None = None,
        *,
        run_config: Mapping[str, Any] | None = None,
    ) -> None:
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1  # Message() reads them
        self._app, self._clients, self._node_config = app, clients, dict(node_config or {})
        self._run_config = dict(run_config or {})
        self._run = Run.create_empty(run_id=1)
        self._pending: dict[str, Message] = {}
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
        return [FIRST_NODE + client for client in range(self._clients)]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        ids = []
        for message in messages:
            ids.append(str(uuid.uuid4()))
            message.metadata.__dict__["_message_id"] = ids[-1]
            if message.metadata.dst_node_id - FIRST_NODE not in self.silent:
                self._pending[ids[-1]] = message
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """The reply to the first of these messages that is pending; the next pull answers the next one."""
        for id_ in message_ids:
            if id_ in self._pending:
                return [self._answer(self._pending.pop(id_))]
        return []

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        return [reply for id_ in self.push_messages(messages) for reply in self.pull_messages([id_])]

    def _node(self, client: int) -> dict[str, Any]:
        """The configuration of a client's node."""
        return {**self._node_config, "partition-id": client, "num-partitions": self._clients}

    def _answer(self, message: Message) -> Message:
        client = (node := message.metadata.dst_node_id) - FIRST_NODE
        state = self._states.get(client, RecordDict())
        context = Context(1, node, self._node(client), state, self._run_config)
        try:
            # a broadcast shares one record among all messages; the copies keep clients from changing each other's
            reply = copy.deepcopy(self._app(copy.deepcopy(message), context))
        except Exception as error:  # as in the other engines: an error reply, and the others go on
            logger.debug("client %d failed", client, exc_info=True)
            return Message(Error(code=2, reason=type(error).__name__), reply_to=message)
        if len(context.state):
            self._states[client] = context.state
        return reply


class WorkerGrid(LocalGrid):
    """The same with clients in several worker processes; their number does not change what clients compute.

    At most one message per process is under way, so replies do not pile up here either.
    """

    def __init__(self, config: Mapping[str, Any], clients: int, node_config: Mapping[str, Any], workers: int) -> None:
        super().__init__(client_app(config), clients, node_config)
        self._config = config
        self._workers = [Worker() for _ in range(workers)]
        self._idle = deque(self._workers)
        self._threads = ThreadPoolExecutor(workers)
        self._running: dict[str, Future[Message]] = {}

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Take new messages; a process that still works on an older one is ended, for its reply came too late."""
        for worker in self._workers:
            if self._running and worker.is_busy:
                worker.kill()
        self._running.clear()
        return super().push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """The replies so far; waits up to `PULL_SECONDS` for the first if there is none yet."""
        ids = message_ids if isinstance(message_ids, Set) else dict.fromkeys(message_ids).keys()
        self._submit(ids)
        running = {id_: future for id_, future in self._running.items() if id_ in ids}
        if not running:
            return []
        wait(running.values(), timeout=PULL_SECONDS, return_when=FIRST_COMPLETED)
        done = [id_ for id_, future in running.items() if future.done()]
        self._submit(ids, num_done=len(done))
        return [self._running.pop(id_).result() for id_ in done]

    def _submit(self, ids: Set[str], num_done: int = 0) -> None:
        """Hand pending messages to idle workers."""
        for id_ in ids:
            if len(self._running) - num_done >= len(self._workers):
                return
            if id_ in self._pending:
                self._running[id_] = self._threads.submit(self._answer_in_worker, self._pending.pop(id_))

    def _answer_in_worker(self, message: Message) -> Message:
        worker = self._idle.popleft()  # there are as many threads as workers
        try:
            tensors, value = unpack_json(message.content)
            node = self._node(message.metadata.dst_node_id - FIRST_NODE)
            order = WorkerOrder(message.metadata.message_type, node, self._config, value)
            return Message(pack_json(*worker.ask(order, tensors)), reply_to=message)
        except ClientFailed as error:
            return Message(Error(code=2, reason=type(error).__name__), reply_to=message)
        finally:
            self._idle.append(worker)

    def close(self) -> None:
        """End all worker processes."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.close()
