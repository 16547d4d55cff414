"""Other processes that write to a journal; they are forked from one that has imported what they need."""

import multiprocessing
import os
import sys
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from unittest import mock

from fedortho.storage.journal import append_entry

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["journals"])


def writer(place: Path, name: str, number: int) -> tuple[BaseProcess, Connection]:
    """A process that appends so many entries, and a connection on which it tells of each."""
    told, telling = PROCESSES.Pipe(duplex=False)
    process = PROCESSES.Process(target=_write, args=(place, name, number, telling), daemon=True)
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):  # else it finds nothing to preload
        process.start()
    return process, told


def _write(place: Path, name: str, number: int, telling: Connection) -> None:
    for at in range(number):
        append_entry(place, "received", name, f"samples:{at}", details={"filler": "x" * 2000})
        telling.send(at)
