"""Errors that a user can fix: one line that names the value, the choices and the fix."""

import difflib
from collections.abc import Iterable, Sequence


class FedOrthoError(Exception):
    """Any error that a user can fix; the command line prints it as one line and exits with code 2."""


class UnknownName(FedOrthoError):
    """A name that is in no table: of a dataset, model, layer or setting."""


class BadData(FedOrthoError):
    """Images or labels that cannot be used as they are."""


class BadCheckpoint(FedOrthoError):
    """A file of weights or of a run that is damaged, belongs to something else, or is of a kind that is never read."""


class BadRecord(BadCheckpoint):
    """A JSON record with missing, unknown or wrongly typed keys, or of a schema that cannot be read."""


class BadSetting(FedOrthoError):
    """A setting outside its range, or two settings that contradict each other."""


class Busy(FedOrthoError):
    """Another process is working on the same directory or journal."""


def unknown(kind: str, name: str, choices: Iterable[str]) -> UnknownName:
    """An error that names the wrong word, the nearest right one and all choices.

    >>> print(unknown("model", "vgg-min", ["resnet-mini", "vgg-mini"]))
    no model 'vgg-min'; did you mean 'vgg-mini'? choose from resnet-mini, vgg-mini
    """
    known = sorted(choices)
    near = difflib.get_close_matches(name, known, n=1)
    hint = f" did you mean {near[0]!r}?" if near else ""
    return UnknownName(f"no {kind} {name!r};{hint} choose from {', '.join(known) or 'none'}")


def first_line(error: BaseException) -> str:
    """The first line of another library's error.

    >>> first_line(ValueError("no such thing\\nlook there"))
    'no such thing'
    """
    return (str(error).splitlines() or [type(error).__name__])[0]


def cannot_read(shape: Sequence[int], error: Exception) -> BadSetting:
    """The refusal of a model that fails on images of this shape, (channels, height, width)."""
    return BadSetting(f"the model cannot read images of {'x'.join(map(str, shape))}: {first_line(error)}")
