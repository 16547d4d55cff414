"""Atomic writes, locks, digests, safetensors and JSON; pickle is never read."""

import errno
import glob
import hashlib
import io
import json
import math
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fedortho.errors import BadCheckpoint, Busy, FedOrthoError, first_line

PRIVATE = 0o600  # mode of files that tell of single images: undo files, ledgers, caches
MOST_TEXT = 64 << 20  # bytes of a JSON file
TEMPORARY = ".tmp-"  # in the names of private directories beside the files that they become


@contextmanager
def replacing(path: Path, mode: int = 0o666) -> Iterator[Path]:
    """Yield a temporary path in the same file system; on success it replaces `path` in one step.

    Readers see the old file or the new one, never a part; after a failure the old one remains. The umask applies.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with private_place(path) as place:
            temporary = place / "file"
            os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode))
            mode = stat.S_IMODE(temporary.stat().st_mode)  # safetensors writes another file, with a mode of its own
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


@contextmanager
def private_place(path: Path) -> Iterator[Path]:
    """A directory beside `path` for this process alone, removed at the end; those of killed processes are removed."""
    for left in path.parent.glob(f".{glob.escape(path.name)}{TEMPORARY}*"):
        with suppress(Timeout, OSError), FileLock(left / "lock", timeout=0):  # a writer who lives has the lock
            shutil.rmtree(left, ignore_errors=True)
    place, lock = _locked_place(path)
    try:
        with lock:
            yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _locked_place(path: Path) -> tuple[Path, AbstractContextManager[object]]:
    """A new directory beside `path` and its lock; one that another process takes for a left-over first is given up."""
    while True:
        place = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}{TEMPORARY}"))
        with suppress(FileNotFoundError, FileExistsError):  # the latter: found by mkdir, and gone when it looked
            return place, FileLock(place / "lock").acquire()


def state_directory() -> Path:
    """The user's own directory of locks and of the list of trusted code."""
    own = os.environ.get("FEDORTHO_STATE")
    return Path(own or f"{os.environ.get('XDG_STATE_HOME') or '~/.local/state'}/fedortho").expanduser()


@contextmanager
def locked(path: Path, timeout: float = 0.0) -> Iterator[None]:
    """Lock a path until the process ends; another one of this user on this machine is refused after the timeout."""
    name = hashlib.sha256(os.fsencode(os.path.realpath(path))).hexdigest()[:32]
    try:
        file = state_directory() / "locks" / f"{name}.lock"
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = FileLock(file).acquire(timeout)
    except Timeout as error:
        raise Busy(f"another process is working on {path}; wait for it or choose another directory") from error
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home directory
        raise FedOrthoError(f"{path} cannot be locked: {error}; set FEDORTHO_STATE to a writable directory") from error
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
    with replacing(to, stat.S_IMODE(source.stat().st_mode)) as temporary:
        shutil.copyfile(source, temporary)


def write_text(path: Path, text: str, mode: int = 0o666) -> None:
    with replacing(path, mode) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any, mode: int = 0o666) -> None:
    write_text(path, json.dumps(value, indent=2, sort_keys=True) + "\n", mode)


def canonical_json(value: Any) -> str:
    """The canonical JSON of a value, for digests: sorted keys, no spaces, ASCII; NaN is refused.

    >>> canonical_json({"b": 1.0, "a": ["é", None]})
    '{"a":["\\\\u00e9",null],"b":1.0}'
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def read_limited(path: Path, most: int = MOST_TEXT, kind: type[FedOrthoError] = BadCheckpoint) -> bytes:
    """The bytes of a regular file; a larger one, a device or a pipe is refused, with this kind of error, unread."""
    with _regular_file(path, kind) as stream:
        size = os.fstat(stream.fileno()).st_size
        data = stream.read(most + 1) if size <= most else b""
    if max(len(data), size) > most:
        raise kind(f"{path} is larger than {most >> 20 or 1} MB; give another file")
    return data


@contextmanager
def _regular_file(path: Path, kind: type[FedOrthoError] = BadCheckpoint) -> Iterator[io.BufferedReader]:
    """A file that is open for reading; a pipe without a writer is not waited for."""
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        with open(handle, "rb") as stream:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise kind(f"{path} cannot be read: it is a pipe or a device; give a regular file")
            yield stream
    except FileNotFoundError as error:
        raise kind(f"{path} does not exist") from error
    except (OSError, ValueError) as error:  # ValueError: a name with a zero byte
        raise kind(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def parse_json(text: bytes | str) -> Any:
    """The value of a JSON text; ValueError for NaN, infinite numbers, keys twice, half characters and deep nesting too.

    >>> parse_json('{"accuracy": NaN}')
    Traceback (most recent call last):
    ...
    ValueError: NaN is not a number
    """
    text = text if isinstance(text, str) else text.decode()
    try:
        value = json.loads(text, parse_constant=_finite, parse_float=_finite, object_pairs_hook=_unique)
        if "\\ud" in text.lower():  # half of a pair cannot be written again
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The mapping; of a key that stands twice readers take the first or the last, so it tells two things."""
    value = dict(pairs)
    if len(value) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"it has {max(keys, key=keys.count)!r:.80} twice")
    return value


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text[:40]} is not a number")
    return value


def read_json(path: Path) -> Any:
    try:
        return parse_json(read_limited(path))
    except ValueError as error:
        raise BadCheckpoint(f"{path} is not JSON ({first_line(error)})") from error


def savable(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors as safetensors takes them: on the CPU, contiguous, and without shared memory (tied weights)."""
    plain = {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}
    owned: dict[int, str] = {}
    for name, tensor in plain.items():
        if owned.setdefault(tensor.data_ptr(), name) != name and tensor.numel():
            plain[name] = tensor.clone()
    return plain


def prefixed(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}{name}": tensor for name, tensor in tensors.items()}


def below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names start with `prefix`, without the prefix."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], note: Mapping[str, Any] | None = None, *, mode: int = 0o666
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
        raise BadCheckpoint(f"{path} {'is not a regular file' if path.exists() else 'does not exist'}")
    try:
        with safe_open(path, framework="pt") as stream:
            note = parse_json((stream.metadata() or {}).get("note", "{}"))
            tensors = {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118  # no mapping
    except (SafetensorError, OSError, ValueError, RuntimeError, AttributeError) as error:
        raise BadCheckpoint(f"{path} is not a complete safetensors file ({first_line(error)})") from error
    if not isinstance(note, dict):
        raise BadCheckpoint(f"{path} has a note that is no mapping; restore the file")
    return tensors, note


@contextmanager
def damage_named(source: Path | str) -> Iterator[None]:
    """Turn whatever the content of a damaged file leads to into one error that names the file."""
    try:
        yield
    except (AttributeError, LookupError, ArithmeticError, RuntimeError, TypeError, ValueError) as error:
        raise BadCheckpoint(f"{source} is damaged ({type(error).__name__}: {first_line(error)}); restore it") from error


def file_digest(path: Path, kind: type[FedOrthoError] = BadCheckpoint) -> str:
    """SHA-256 of a file's bytes, as `sha256sum` prints it."""
    with _regular_file(path, kind) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, types, shapes and bytes: equal if and only if the tensors are equal bit for bit."""
    total = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        total.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        if tensor.numel():
            total.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()
