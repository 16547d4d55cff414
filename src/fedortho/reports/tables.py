"""The tables, tiles and audits of a report as values; the template writes them."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedortho.engines.cost import Cost
from fedortho.evaluation.metrics import Metric

LONG = 40  # letters; a cell with more gets a least width
SIGNS = {"PASS": "✓", "FAIL": "✗", "ERROR": "!", "INCONCLUSIVE": "~", "NOT RUN": "–", "NO REFERENCE": "?"}
UNITS = {
    "seconds": ("time", "s"),
    "images_read": ("images read (forward passes)", ""),
    "images_trained": ("images trained on (forward and backward passes)", ""),
    "flops": ("computation, everything counted", "FLOPs"),
    "request_flops": ("computation, without statistics that everybody can keep", "FLOPs"),
    "exchanges": ("exchanges with clients", ""),
    "bytes_up": ("sent by all clients", "B"),
    "bytes_down": ("sent to all clients", "B"),
}
PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
NO_VALUE = (None, "", -1e30)  # settings that mean "none"


@dataclass(frozen=True)
class Cell:
    """Text of a table's cell; `value` is what the column is sorted by, where it is not the text."""

    text: str
    value: float | None = None
    is_number: bool = False
    badge: str = ""  # CSS class of an outcome

    @property
    def sort_key(self) -> str | None:
        """The attribute data-value: numbers sort by it, unknown ones (empty) come last; None: by the text."""
        return repr(self.value) if self.value is not None else "" if self.is_number else None

    @property
    def css(self) -> str | None:
        return "number" if self.is_number else "says" if len(self.text) > LONG else None


@dataclass(frozen=True)
class Table:
    """A table that can be sorted by each column; the first cell of a row is its heading."""

    caption: str
    header: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]

    @property
    def number_columns(self) -> set[int]:
        return {place for place, column in enumerate(zip(*self.rows, strict=True)) if all(c.is_number for c in column)}


def build_table(caption: str, header: Sequence[str], rows: Sequence[Sequence[str | Cell]]) -> Table:
    cells = [tuple(cell if isinstance(cell, Cell) else Cell(cell) for cell in row) for row in rows]
    return Table(caption, tuple(header), tuple(cells))


def number(value: float | None, low: float | None = None, high: float | None = None) -> str:
    """A number for people: a share of the range 0 to 1 in percent, None as a dash.

    >>> number(0.1234, 0, 1), number(0.1234), number(1234567.0), number(None)
    ('12.3 %', '0.123', '1,234,567', '–')
    """
    if value is None or math.isnan(value):
        return "–"
    if high == 1 and low in (0, -1):
        return f"{100 * value:.1f} %"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def number_cell(value: float | None, low: float | None = None, high: float | None = None) -> Cell:
    return Cell(number(value, low, high), value, is_number=True)


def amount(value: float, unit: str) -> str:
    """A quantity with its unit; large ones with a prefix.

    >>> amount(226_759_442_432, "FLOPs"), amount(19.06, "s"), amount(9720, ""), amount(0, "B")
    ('227 GFLOPs', '19.1 s', '9,720', '0 B')
    """
    if not unit:
        return f"{value:,.0f}"
    factor, prefix = next(((size, sign) for size, sign in PREFIXES if value >= size and unit != "s"), (1.0, ""))
    digits = "g" if value == 0 else ".1f" if unit == "s" else "#.3g"
    return f"{value / factor:{digits}}".removesuffix(".") + f" {prefix}{unit}"


def plain(text: str) -> str:
    """A sentence for people: numbers stay beside their percent sign, and flags are left to the folded part.

    >>> plain("recalls 5% of it (--audit full); lower --max-retain-drop")
    'recalls 5\\xa0% of it; lower max retain drop'
    """
    text = re.sub(r" \([^()]*--[^()]*\)|; use --[^;.]*", "", text)
    text = re.sub(r"--([a-z]+(?:-[a-z]+)*)", lambda flag: flag[1].replace("-", " "), text)
    return re.sub(r"(?<=\d) ?%", "\N{NO-BREAK SPACE}%", text)


def metrics_table(metrics: Sequence[Metric]) -> Table:
    header = ["metric", "value", "retrained", "ideal", "better is", "images", "source"]
    rows: list[list[str | Cell]] = []
    for metric in metrics:
        info, bounds = metric.info, (metric.info.low, metric.info.high)
        title, value, reference = info.title, number_cell(metric.value, *bounds), number_cell(metric.reference, *bounds)
        if metric.error is not None:
            title, value = f"{title}: {metric.error}", Cell("! ERROR", is_number=True, badge="ERROR")
        ideal = Cell("as retrained", is_number=True) if info.ideal is None else number_cell(info.ideal, *bounds)
        rows.append([title, value, reference, ideal, info.direction, number_cell(metric.images), info.source])
    return build_table("Metrics and their ideal values", header, rows)


def costs_table(cost: Cost | None) -> Table:
    """The cost by quantity; without a recorded cost it has no rows."""
    rows: list[list[str | Cell]] = []
    for name, (words, unit) in UNITS.items() if cost is not None else ():
        value = float(getattr(cost, name))
        rows.append([words, Cell(amount(value, unit), value, is_number=True)])
    return build_table("Cost of forgetting", ["quantity", "amount"], rows)


def settings_table(caption: str, settings: Mapping[str, Any]) -> Table:
    rows = [[str(key), "–" if value in NO_VALUE else str(value)] for key, value in flattened(settings).items()]
    return build_table(caption, ["setting", "value"], rows)


def flattened(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, with keys joined by dots.

    >>> flattened({"a": {"b": 1}, "c": 2})
    {'a.b': 1, 'c': 2}
    """
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        flat |= flattened(inner, f"{prefix}{key}.") if isinstance(inner, Mapping) else {f"{prefix}{key}": inner}
    return flat
