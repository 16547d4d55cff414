"""Clients in further processes of this machine: questions come by one pipe, answers go by another.

A frame is two lengths, a JSON object and tensors as safetensors bytes. A process serves one client after the other.
"""

import json
import logging
import os
import struct
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import IO, Any

from safetensors.torch import load, save

from fedortho.federated.client import ClientFailed, answered
from fedortho.federated.wire import Note, Tensors
from fedortho.storage.files import savable

LENGTHS = struct.Struct(">QQ")


class Worker:
    """A process that answers for clients; one that dies is started again with the next question."""

    def __init__(self, config: Mapping[str, Any], node: Mapping[str, Any]) -> None:
        self._setup: Note = {"config": dict(config), "node": dict(node)}
        self._process: subprocess.Popen[bytes] | None = None
        self.is_busy = False

    def ask(self, client: int, clients: int, action: str, tensors: Tensors, note: Note) -> tuple[Tensors, Note]:
        """A client's answer; `ClientFailed` if it has none, whatever the reason."""
        self.is_busy = True
        try:
            pipe = self._started()
            assert pipe.stdin is not None
            assert pipe.stdout is not None
            send(pipe.stdin, {"client": client, "clients": clients, "action": action, "note": note}, tensors)
            told, found = receive(pipe.stdout)
        except (OSError, EOFError, ValueError) as error:
            self.close()
            raise ClientFailed("its process ended") from error
        finally:
            self.is_busy = False
        if "failed" in told:
            raise ClientFailed(told["failed"])
        return found, told["note"]

    def _started(self) -> "subprocess.Popen[bytes]":
        if self._process is None:
            command = [sys.executable, "-m", "fedortho.federated.workers"]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            assert self._process.stdin is not None
            send(self._process.stdin, self._setup, {})
        return self._process

    def kill(self) -> None:
        """End the process from another thread; who waits for its answer finds the pipe closed."""
        if (process := self._process) is not None:
            process.kill()

    def close(self) -> None:
        """End the process; there is nothing in it that is not on the disk."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in filter(None, (process.stdin, process.stdout)):
                with suppress(OSError):  # what was not yet written has no reader any more
                    pipe.close()


def send(pipe: IO[bytes], note: Note, tensors: Tensors) -> None:
    words, numbers = json.dumps(note).encode(), save(savable(tensors))
    for part in (LENGTHS.pack(len(words), len(numbers)), words, numbers):
        pipe.write(part)
    pipe.flush()


def receive(pipe: IO[bytes]) -> tuple[Note, Tensors]:
    """The next frame; `EOFError` when the other side is gone."""
    words, numbers = LENGTHS.unpack(_exactly(pipe, LENGTHS.size))
    note: Note = json.loads(_exactly(pipe, words))
    return note, load(_exactly(pipe, numbers))


def _exactly(pipe: IO[bytes], number: int) -> bytes:
    data = pipe.read(number)
    if len(data) < number:
        raise EOFError
    return data


def main() -> None:
    """Answer frame by frame until the pipe is closed."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if "" not in sys.path:
        sys.path.append("")  # --model package.module:function may lie where the user stands
    questions, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever is printed here must not become part of an answer
    setup, _ = receive(questions)
    while True:
        try:
            asked, tensors = receive(questions)
        except EOFError:
            return
        node = setup["node"] | {"partition-id": asked["client"], "num-partitions": asked["clients"]}
        try:
            found, note = answered(asked["action"], node, setup["config"], tensors, asked["note"])
        except ClientFailed as error:
            send(answers, {"failed": str(error)}, {})
        else:
            send(answers, {"note": note}, found)


if __name__ == "__main__":
    main()
