"""HTML from plain values: whatever is not markup already is escaped, so a class may be named as it likes."""

import base64
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from fedortho.errors import FedOrthoError

VOID = ("img", "meta", "link", "br")
LONG = 40  # letters: a cell that needs room
MARKED = "<!-- images of data are marked in this page -->"
FROM, TO = "<!-- images of data from here -->", "<!-- to here -->"  # no text can say this: it would be escaped
LEFT_OUT = "Images of data were left out of this page on purpose: there are no examples and no Grad-CAM pictures."


class Html(str):
    """Text that is markup already."""

    __slots__ = ()


def tag(name: str, *inside: str, **attributes: str | int | None) -> Html:
    """An element; `class_` is written class, `aria_label` aria-label; what is None is left out.

    >>> tag("p", "a < b", tag("b", "!"), class_="note")
    '<p class="note">a &lt; b<b>!</b></p>'
    """
    given = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items() if value is not None}
    words = "".join(f' {key}="{escape(str(value))}"' for key, value in given.items())
    return Html(f"<{name}{words}>" if name in VOID else f"<{name}{words}>{together(inside)}</{name}>")


def together(parts: Iterable[str]) -> Html:
    return Html("".join(part if isinstance(part, Html) else escape(part) for part in parts))


@dataclass(frozen=True)
class Cell:
    """What a cell shows and what it is sorted by; without a value by what it shows."""

    shows: str
    value: float | None = None
    is_number: bool = False


def table(name: str, header: Sequence[str], rows: Sequence[Sequence[str | Cell]]) -> Html:
    """A table that can be sorted by every column; it scrolls in its own box where the page is narrow."""
    counted = [all(isinstance(cell, Cell) and cell.is_number for cell in column) for column in zip(*rows, strict=True)]
    heads = zip(header, counted or [False] * len(header), strict=True)
    head = tag("tr", *(tag("th", word, scope="col", class_="number" if right else None) for word, right in heads))
    body = [tag("tr", *(_cell(cell, place == 0) for place, cell in enumerate(row))) for row in rows]
    inner = tag("table", tag("caption", name), tag("thead", head), tag("tbody", *body), class_="sortable")
    return tag("div", inner, class_="scroll", role="region", aria_label=name, tabindex=0)


def _cell(cell: str | Cell, is_head: bool) -> Html:
    cell = cell if isinstance(cell, Cell) else Cell(cell)
    value = "" if cell.is_number and cell.value is None else None if cell.value is None else repr(cell.value)
    classes = "number" if cell.is_number or cell.value is not None else "says" if len(cell.shows) > LONG else None
    if is_head:
        return tag("th", cell.shows, scope="row", data_value=value, class_=classes)
    return tag("td", cell.shows, data_value=value, class_=classes)


def image(png: bytes, alt: str, *, size: tuple[int, int]) -> Html:
    """A picture inside the page; `size` is what it takes up, so that nothing jumps while it loads."""
    assert alt, "every picture has a text that stands for it"
    data = f"data:image/png;base64,{base64.b64encode(png).decode()}"
    return tag("img", src=data, alt=alt, width=size[0], height=size[1])


def showing_images(part: Html) -> Html:
    """Markup in which images of the data can be seen, marked so that `without_images` finds it."""
    return Html(f"{FROM}{part}{TO}")


def without_images(page: str) -> str:
    """A page without the parts in which images of the data can be seen; where each was, it says so."""
    if MARKED not in page:
        raise FedOrthoError("images of data are not marked in it, as this version of fedortho report does")
    return re.sub(f"{re.escape(FROM)}.*?{re.escape(TO)}", tag("p", LEFT_OUT, class_="soft"), page, flags=re.DOTALL)
