"""Clients in worker processes on this machine: orders go in by one pipe, replies come out by another.

A frame is two lengths, a JSON value (None: the client failed) and tensors as safetensors bytes. A process serves one
client after another.
"""

import json
import logging
import os
import struct
import subprocess
import sys
from contextlib import suppress
from functools import partial
from typing import IO, Any

from safetensors.torch import load, save

from fedortho.federated.client import ClientFailed, client_reply, find_client
from fedortho.federated.messages import WorkerOrder
from fedortho.federated.wire import Json, Tensors
from fedortho.storage.files import savable
from fedortho.storage.records import from_json, to_json

LENGTHS = struct.Struct(">QQ")


class Worker:
    """A process that answers for clients; it starts with the first order, and again if it died."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self.is_busy = False

    def ask(self, order: WorkerOrder, tensors: Tensors) -> tuple[Tensors, Json]:
        """A client's reply, not yet validated; `ClientFailed` if there is none, whatever the reason."""
        self.is_busy = True
        try:
            process = self._process or self._start()
            assert process.stdin is not None
            assert process.stdout is not None
            send(process.stdin, to_json(order), tensors)
            value, reply_tensors = receive(process.stdout)
        except (OSError, EOFError, ValueError) as error:
            self.close()
            raise ClientFailed("its process ended") from error
        finally:
            self.is_busy = False
        if value is None:
            raise ClientFailed("failed; its own log says why")
        return reply_tensors, value

    def _start(self) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", "fedortho.federated.workers"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        return self._process

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
            for pipe in filter(None, (process.stdin, process.stdout)):
                with suppress(OSError):  # unwritten bytes have no reader any more
                    pipe.close()


def send(pipe: IO[bytes], value: Json | None, tensors: Tensors) -> None:
    """Write one frame."""
    text, arrays = json.dumps(value).encode(), save(savable(tensors))
    for part in (LENGTHS.pack(len(text), len(arrays)), text, arrays):
        pipe.write(part)
    pipe.flush()


def receive(pipe: IO[bytes]) -> tuple[Any, Tensors]:
    """The next frame; `EOFError` when the other side has closed the pipe."""
    text_length, arrays_length = LENGTHS.unpack(_read_exactly(pipe, LENGTHS.size))
    value = json.loads(_read_exactly(pipe, text_length))
    return value, load(_read_exactly(pipe, arrays_length))


def _read_exactly(pipe: IO[bytes], number: int) -> bytes:
    data = pipe.read(number)
    if len(data) < number:
        raise EOFError
    return data


def run_worker() -> None:
    """Answer frame by frame until the pipe is closed."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if "" not in sys.path:
        sys.path.append("")  # --model package.module:function may lie in the working directory
    orders, replies = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # printed text must not become part of a reply
    while True:
        try:
            value, tensors = receive(orders)
        except EOFError:
            return
        order = from_json(WorkerOrder, value, "a frame")
        try:
            find, client = partial(find_client, order.node, order.config), order.node.get("partition-id")
            reply_tensors, reply = client_reply(order.action, find, client, tensors, order.message)
        except ClientFailed:
            send(replies, None, {})
        else:
            send(replies, to_json(reply), reply_tensors)


if __name__ == "__main__":
    run_worker()
