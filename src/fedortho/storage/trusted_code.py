"""Functions that a file names as `package.module:function`, and the user's list of those that may run."""

import difflib
import importlib
import importlib.util
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from fedortho.errors import BadCheckpoint, FedOrthoError, UnknownName, first_line
from fedortho.storage.files import PRIVATE, locked, read_json, state_directory, write_json

logger = logging.getLogger(__name__)
TRUSTED = "FEDORTHO_TRUST_CODE"  # environment: names with commas between that may run in this process, or `all`


def load_function(name: str, what: str) -> Callable[..., Any]:
    """The function that a name means; its module is imported, which runs its code. `what` it is for is in errors."""
    place, _, function = name.partition(":")
    if not place or not function:  # before anything runs: only whole names are looked up in the list
        raise UnknownName(f"{name!r} names no {what}; write it as package.module:function")
    if place.endswith(".py"):
        raise UnknownName(f"{place!r} is a file; name its module: {Path(place).stem}:{function}, from its directory")
    refusal = f"cannot import {place!r} for the {what} {name!r}"
    with code_of_others(refusal):
        try:
            module = importlib.import_module(place)
        except ModuleNotFoundError as error:
            if error.name != (top := place.partition(".")[0]):
                raise  # what the module itself imports
            where = f"in {os.getcwd()} nor among installed packages"
            raise UnknownName(f"{refusal}: {top} is neither {where}; go to its directory, or install it") from error
    found = getattr(module, function, None)
    if not callable(found):
        near = difflib.get_close_matches(function, dir(module), n=1)
        hint = f" did you mean {near[0]!r}?" if near else ""
        raise UnknownName(f"{place!r} has no function {function!r};{hint} write the {what} as package.module:function")
    return found  # type: ignore[no-any-return]  # code of others


@contextmanager
def code_of_others(refusal: str, kind: type[FedOrthoError] = UnknownName) -> Iterator[None]:
    """Turn whatever the code of others raises, an exit too, into an error that begins with `refusal`."""
    try:
        yield
    except FedOrthoError:
        raise
    except (Exception, SystemExit) as error:
        raise kind(f"{refusal}: {type(error).__name__}: {first_line(error)}") from error


def remember_code(*names: str) -> None:
    """Add the functions among these names to the user's list; call it only with what the user has typed or trusts."""
    files = {name: file for name in names if (file := _file_of(name))}
    if not files or files.items() <= _trusted().items():
        return
    try:
        with locked(_list_path(), timeout=10):
            write_json(_list_path(), _trusted() | files, PRIVATE)
    except (FedOrthoError, OSError, RuntimeError) as error:  # RuntimeError: there is no home directory
        logger.warning("trusted only by this process (%s): set FEDORTHO_STATE to a writable directory", error)
        os.environ[TRUSTED] = ",".join([*filter(None, [os.environ.get(TRUSTED)]), *files])


def check_trusted(source: object, *names: str) -> None:
    """Refuse a source that names a function which the user has neither typed nor trusted, or which is in another file.

    Networks of this package and of timm are no functions of others.
    """
    allowed, known = os.environ.get(TRUSTED, "").split(","), _trusted()
    for name in names:
        file = _file_of(name)
        if not file or name in allowed or known.get(name) == file:
            continue
        if "all" not in allowed:
            how = f"add --trust-code to a command with {source} (in Python: open_run(…, trust_code=True))"
            what = f"{source} names {name}, which would run code of {file}"
            raise FedOrthoError(f"{what}; if you trust that file, {how}; it is then remembered")
        remember_code(name)


def _file_of(name: str) -> str:
    """The file of the module that a name means, found without running code; empty: none of others, or not found."""
    place, colon, _ = name.partition(":")
    if not colon or place in ("", "timm") or place.startswith("."):
        return ""
    top, *inner = place.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except ValueError:  # the script that runs has no spec
        return place
    file = "" if spec is None else spec.origin or ""
    for part in inner:
        spec = spec and PathFinder.find_spec(f"{spec.name}.{part}", spec.submodule_search_locations)
        file = (spec and spec.origin) or file
    return os.path.realpath(file) if file else ""


def _list_path() -> Path:
    return state_directory() / "trusted-code.json"


def _trusted() -> dict[str, str]:
    """The user's list: the file of each trusted name."""
    try:
        return dict(read_json(_list_path()))
    except (BadCheckpoint, TypeError, ValueError, RuntimeError):  # none yet, damaged, or no home directory
        return {}
