"""Clients in worker processes on this machine, each of which serves one client after another over a pipe.

A frame is a JSON value (None: the client failed) and tensors as safetensors bytes.
"""

import json
import logging
import subprocess
import sys
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from safetensors.torch import load, save

from fedortho.federated.client import ClientFailed, client_reply, find_client
from fedortho.federated.messages import WorkerOrder
from fedortho.federated.wire import Json, Tensors
from fedortho.storage.files import savable
from fedortho.storage.records import from_json, to_json


class Worker:
    """A process that answers for clients; it starts with the first order, and again if it died."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self.is_busy = False

    def ask(self, order: WorkerOrder, tensors: Tensors) -> tuple[Tensors, Json]:
        """A client's reply, not yet validated; `ClientFailed` if there is none, whatever the reason."""
        self.is_busy = True
        try:
            if self._process is None:
                self._start()
            send(self._pipe, to_json(order), tensors)
            value, reply_tensors = receive(self._pipe)
        except (OSError, EOFError, ValueError) as error:
            self.close()
            raise ClientFailed("its process ended") from error
        finally:
            self.is_busy = False
        if value is None:
            raise ClientFailed("failed; its own log says why")
        return reply_tensors, value

    def _start(self) -> None:
        self._pipe, theirs = Pipe()
        command = [sys.executable, "-m", "fedortho.federated.workers", str(theirs.fileno())]
        with theirs:  # what a client prints goes to standard error
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=2, pass_fds=[theirs.fileno()])

    def kill(self) -> None:
        """End the process from another thread; the thread that waits for its reply finds the pipe closed."""
        if (process := self._process) is not None:
            process.kill()

    def close(self) -> None:
        """End the process; everything that it keeps is on disk."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            self._pipe.close()


def send(pipe: Connection, value: Json | None, tensors: Tensors) -> None:
    """Write one frame."""
    pipe.send_bytes(json.dumps(value).encode())
    pipe.send_bytes(save(savable(tensors)))


def receive(pipe: Connection) -> tuple[Any, Tensors]:
    """The next frame; `EOFError` when the other side has closed the pipe."""
    return json.loads(pipe.recv_bytes()), load(pipe.recv_bytes())


def run_worker(pipe: Connection) -> None:
    """Answer frame by frame until the pipe is closed."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if "" not in sys.path:
        sys.path.append("")  # --model package.module:function may lie in the working directory
    while True:
        try:
            value, tensors = receive(pipe)
        except (EOFError, OSError):
            return
        order = from_json(WorkerOrder, value, "a frame")
        try:
            find, client = partial(find_client, order.node, order.config), order.node.get("partition-id")
            reply_tensors, reply = client_reply(order.action, find, client, tensors, order.message)
        except ClientFailed:
            send(pipe, None, {})
        else:
            send(pipe, to_json(reply), reply_tensors)


if __name__ == "__main__":
    run_worker(Connection(int(sys.argv[1])))
