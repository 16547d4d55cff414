"""An extension of griffe for `make docs`: doctests in docstrings are shown as code, not as quotations."""

import re
from typing import Any

from griffe import Extension, Object

DOCTEST = re.compile(r"^>>> .*(?:\n(?!\s*$).*)*", re.MULTILINE)  # from a prompt to the next empty line


def with_code(text: str) -> str:
    """The docstring with each doctest in a fence.

    >>> with_code("Adds.\\n\\n>>> 1 + 1\\n2")
    'Adds.\\n\\n```pycon\\n>>> 1 + 1\\n2\\n```'
    """
    return DOCTEST.sub(lambda found: f"```pycon\n{found[0]}\n```", text)


class Doctests(Extension):  # type: ignore[misc]  # griffe is installed for `make docs` only
    """Rewrites every docstring as it is read."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = with_code(obj.docstring.value)
