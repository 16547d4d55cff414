"""The numbers that the paper prints, as rows with our names of methods."""

from pathlib import Path

from fedortho.experiments.relations import METRICS, TableRow
from fedortho.storage.files import read_json

PRINTED = Path(__file__).parent / "printed.json"
NUMBERS = {*METRICS, *(f"{metric}-sd" for metric in METRICS), "mia", "mia-sd", "seconds", "label"}


def printed_rows(table: str) -> list[TableRow]:
    """The rows of a table of the paper; standard deviations are metrics of their own (forget-sd)."""
    printed = read_json(PRINTED)
    rows = []
    for values in printed["tables"][table]["rows"]:
        cells = dict(zip(printed["tables"][table]["columns"], values, strict=True))
        known = {column: value for column, value in cells.items() if value is not None}
        known["method"] = printed["names"][known["method"]]
        numbers = {name: float(value) for name, value in known.items() if name in NUMBERS}
        rows.append(TableRow({name: value for name, value in known.items() if name not in NUMBERS}, {0: numbers}))
    return rows
