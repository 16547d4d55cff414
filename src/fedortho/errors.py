"""What can go wrong at a door: one line that names the value, the choices and the fix."""

import difflib
from collections.abc import Iterable


class FedOrthoError(Exception):
    """Any mistake a user can mend; the command line prints it as one line and exits with code 2."""


class UnknownName(FedOrthoError):
    """A name that no table knows: a dataset, model, layer, setting."""


class BadData(FedOrthoError):
    """Images or labels that cannot be used as they are."""


class BadCheckpoint(FedOrthoError):
    """A weights or run file that is damaged, foreign, or of a kind that is never read."""


class BadRecord(BadCheckpoint):
    """A JSON record with missing, unknown or wrongly typed keys, or of a schema that cannot be read."""


class BadSetting(FedOrthoError):
    """A setting outside its range, or two settings that contradict each other."""


def unknown(kind: str, name: str, choices: Iterable[str]) -> UnknownName:
    """An error that names the wrong word, the nearest right one, and all the choices.

    >>> print(unknown("model", "vgg-min", ["resnet-mini", "vgg-mini"]))
    no model 'vgg-min'; did you mean 'vgg-mini'? choose from resnet-mini, vgg-mini
    """
    known = sorted(choices)
    near = difflib.get_close_matches(name, known, n=1)
    hint = f" did you mean {near[0]!r}?" if near else ""
    return UnknownName(f"no {kind} {name!r};{hint} choose from {', '.join(known) or 'none'}")


def first_line(error: Exception) -> str:
    """What an error of other software says, in one line.

    >>> first_line(ValueError("no such thing\\nlook there"))
    'no such thing'
    """
    return (str(error).splitlines() or [type(error).__name__])[0]


class Busy(FedOrthoError):
    """Another process is at work on the same thing."""
