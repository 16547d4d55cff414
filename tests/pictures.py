"""Small image files for tests."""

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray
from PIL import Image

from fedortho.data import sources


def noise(row: int, shape: tuple[int, ...] = (6, 8, 3)) -> NDArray[np.uint8]:
    return np.random.default_rng(row).integers(0, 256, shape, np.uint8)


def encoded(array: NDArray[np.uint8], kind: str = "PNG") -> bytes:
    stream = io.BytesIO()
    Image.fromarray(array).save(stream, kind, **({"lossless": True} if kind == "WEBP" else {}))
    return stream.getvalue()


LABELS = [row % 3 for row in range(30)]
PICTURES = [encoded(noise(row)) for row in range(30)]


def write(
    file: Path,
    images: Sequence[bytes | None] = PICTURES,
    labels: Sequence[Any] = LABELS,
    *,
    names: Sequence[str] | None = None,
    split: Sequence[str | None] | None = None,
    columns: tuple[str, str] = ("image", "label"),
    plain: bool = False,
) -> Path:
    """A Parquet file in the hub's layout."""
    image, label = columns
    cells = images if plain else [{"bytes": blob, "path": None} for blob in images]
    kind = pa.binary() if plain else pa.struct({"bytes": pa.binary(), "path": pa.string()})
    data = {image: pa.array(cells, kind), label: pa.array(labels)}
    if split is not None:
        data["split"] = pa.array(split)
    table = pa.table(data)
    if names is not None:
        note = {"info": {"features": {label: {"names": list(names), "_type": "ClassLabel"}}}}
        table = table.replace_schema_metadata({"huggingface": json.dumps(note)})
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, file, row_group_size=7)
    return file


def forbid_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("decoded again")

    monkeypatch.setattr(sources, "decode_files", refuse)


def folder_of(root: Path, classes: Sequence[str], number: int = 5) -> None:
    for label, name in enumerate(classes):
        for index in range(number):
            kind = ("PNG", "JPEG", "WEBP")[index % 3]
            file = root / name / f"{index}.{kind.lower()}"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(encoded(noise(10 * label + index), kind))


CHILD = """
import sys
from fedortho.data.sources import load_images
early = {"pyarrow", "PIL", "sklearn", "datasets"} & set(sys.modules)
data = load_images(sys.argv[1])
sys.stdout.write(f"{data.digest} {data.train.pixels.sum()} {early or 'light'}")
"""
