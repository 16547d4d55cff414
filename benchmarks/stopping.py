"""Stop a process at its file operations, as a kill or a full disk does, or look at them; for tests and `chaos.py`."""

import errno
import io
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from safetensors.torch import save_file

from fedortho.storage import files

WRITING = ("replace", "rename", "link", "mkdir", "fsync", "write", "truncate", "chmod")
REMOVING = ("unlink", "rmdir")
Stop = Callable[[int, str], None]


class Killed(BaseException):
    """The process is gone: no handler mends anything, and no further file operation happens."""


@contextmanager
def counted(stop: Stop, torn: Callable[[], None] | None = None) -> Iterator[None]:
    """Call `stop` with the number and name of every file operation before it is done; what it raises stops it.

    A write that is stopped has written the first half. With `torn` nothing is stopped: it is called when half of a
    write is done, which then is completed.
    """
    number, os_truncate = 0, os.truncate

    def watched(name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
        def call(*words: Any, **more: Any) -> Any:
            nonlocal number
            mode = words[1] if len(words) > 1 else more.get("mode", more.get("flags", "r"))
            if name == "open" and not _is_writing(mode):
                return operation(*words, **more)
            number += 1
            try:
                stop(number, name)
            except BaseException:
                if name == "write":
                    operation(words[0], words[1][: len(words[1]) // 2])
                if name == "save_file":
                    operation(*words, **more)
                    os_truncate(words[1], Path(words[1]).stat().st_size // 2)
                raise
            if torn is not None and name == "write" and len(words[1]) > 1:
                half = operation(words[0], words[1][: len(words[1]) // 2])
                torn()
                return half + operation(words[0], words[1][half:])
            done = operation(*words, **more)
            if torn is not None and name == "save_file":
                os_truncate(words[1], Path(words[1]).stat().st_size // 2)
                torn()
                operation(*words, **more)
            return done

        return call

    with ExitStack() as patched:
        for name in (*WRITING, *REMOVING, "open"):
            patched.enter_context(patch.object(os, name, watched(name, getattr(os, name))))
        for module in ("builtins.open", "io.open"):
            patched.enter_context(patch(module, watched("open", io.open)))
        patched.enter_context(patch.object(files, "save_file", watched("save_file", save_file)))
        yield


def _is_writing(mode: object) -> bool:
    if isinstance(mode, int):
        return bool(mode & (os.O_WRONLY | os.O_RDWR))
    return bool(set(str(mode)) & set("wax+"))


def killed_at(place: int) -> Stop:
    """Stops at this operation and at all later ones."""

    def stop(number: int, name: str) -> None:
        if number >= place:
            raise Killed(name)

    return stop


def full_at(place: int) -> Stop:
    """A disk that is full from this operation on: removing works, writing does not."""

    def stop(number: int, name: str) -> None:
        if number >= place and name not in REMOVING:
            raise OSError(errno.ENOSPC, "No space left on device")

    return stop


def operations(work: Callable[[], object]) -> int:
    """How many file operations some work takes."""
    last = 0

    def count(number: int, _: str) -> None:
        nonlocal last
        last = number

    with counted(count):
        work()
    return last
