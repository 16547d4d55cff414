"""Atomic writes, locks, digests, safetensors and JSON; pickle is never read."""

import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fedortho.errors import BadCheckpoint, Busy, FedOrthoError


@contextmanager
def replacing(path: Path, mode: int = 0o644) -> Iterator[Path]:
    """Yield a temporary path in the same directory; on success it replaces `path` in one step.

    Readers see the old file or the new one, never a part; after a failure the old one remains.
    """
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        os.close(handle)
        temporary = Path(name)
        yield temporary
        with temporary.open("rb+") as stream:
            os.fsync(stream.fileno())
        temporary.chmod(mode)
        temporary.replace(path)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise FedOrthoError(f"the disk is full: {path} was not written; free some space and try again") from error
        raise FedOrthoError(f"{path} cannot be written: {error.strerror or error}") from error
    except SafetensorError as error:  # safetensors wraps the system's error in its own
        raise FedOrthoError(f"{path} was not written: {error}; is the disk full?") from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


@contextmanager
def locked(path: Path, timeout: float = 0.0) -> Iterator[None]:
    """Lock a path for this process; another one on this machine is refused after `timeout` seconds.

    The lock ends with the process.
    """
    name = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:32]
    file = Path(tempfile.gettempdir()) / f"fedortho-{name}.lock"
    try:
        lock = FileLock(file).acquire(timeout)
    except Timeout as error:
        raise Busy(f"another process is working on {path}; wait for it or choose another directory") from error
    except OSError as error:
        raise FedOrthoError(f"{path} cannot be locked by {file}: {error.strerror or error}") from error
    with lock:
        try:
            yield
        finally:
            with suppress(OSError):  # removed while it is locked: filelock takes no lock on a removed file
                file.unlink()


def check_writable(directory: Path) -> None:
    """Refuse a directory that cannot be written to, before long work whose result is written there."""
    try:
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        reason = error.strerror or error
        raise FedOrthoError(f"{directory} cannot be written: {reason}; copy it to a writable directory") from error


def sync_directory(directory: Path) -> None:
    """Have the names in a directory on disk, where the system can: a rename alone may not survive a power loss."""
    with suppress(OSError):  # some systems cannot open a directory
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def copy_file(source: Path, to: Path) -> None:
    with replacing(to) as temporary:
        shutil.copyfile(source, temporary)


def write_text(path: Path, text: str) -> None:
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2, sort_keys=True) + "\n")


def canonical_json(value: Any) -> str:
    """The canonical JSON of a value, for digests: sorted keys, no spaces, ASCII; NaN is refused.

    >>> canonical_json({"b": 1.0, "a": ["é", None]})
    '{"a":["\\\\u00e9",null],"b":1.0}'
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise BadCheckpoint(f"{path} does not exist") from error
    except OSError as error:
        raise BadCheckpoint(f"{path} cannot be read: {error.strerror}") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise BadCheckpoint(f"{path} is not JSON ({error})") from error


def savable(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors as safetensors takes them: on the CPU, contiguous, and without shared memory (tied weights)."""
    plain = {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}
    owned: dict[int, str] = {}
    for name, tensor in plain.items():
        if owned.setdefault(tensor.data_ptr(), name) != name and tensor.numel():
            plain[name] = tensor.clone()
    return plain


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], note: Mapping[str, Any] | None = None, *, mode: int = 0o644
) -> None:
    """Write tensors as safetensors, with a `note` (JSON) in the same file, so that the two cannot disagree.

    The same tensors and note give the same bytes.
    """
    with replacing(path, mode) as temporary:
        # one key: safetensors writes several in random order
        save_file(savable(tensors), temporary, metadata={"note": json.dumps(note or {}, sort_keys=True)})


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a safetensors file, memory-mapped, and its note (empty in files of other software)."""
    if not path.is_file():
        raise BadCheckpoint(f"{path} does not exist")
    try:
        with safe_open(path, framework="pt") as stream:
            note = json.loads((stream.metadata() or {}).get("note", "{}"))
            return {name: stream.get_tensor(name) for name in stream.keys()}, note  # noqa: SIM118  # no mapping
    except (SafetensorError, OSError, json.JSONDecodeError) as error:
        raise BadCheckpoint(f"{path} is not a complete safetensors file ({error})") from error


def file_digest(path: Path) -> str:
    """SHA-256 of a file's bytes, as `sha256sum` prints it."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, types, shapes and bytes: equal if and only if the tensors are equal bit for bit.

    >>> tensors_digest({"a": torch.zeros(2)}) == tensors_digest({"a": torch.zeros(2)})
    True
    >>> tensors_digest({"a": torch.zeros(2)}) == tensors_digest({"a": -torch.zeros(2)})
    False
    """
    total = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        total.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        if tensor.numel():
            total.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()
