"""A stand-in for `datasets.Dataset` of Hugging Face, which the tests do not install: what its documentation says."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image


@dataclass(frozen=True)
class ClassLabel:
    names: list[str]


class HubDataset:
    """Columns of images (PIL) and labels; rows are dicts, slices dicts of lists; formats and transforms are lazy."""

    def __init__(self, columns: Mapping[str, list[Any]], features: Mapping[str, Any], transform: Any = None) -> None:
        self.columns, self.features, self.transform = columns, features, transform

    @property
    def column_names(self) -> list[str]:
        return list(self.columns)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, key: int | slice | str) -> Any:
        if isinstance(key, str):
            return self.columns[key]
        rows = range(len(self))[key] if isinstance(key, slice) else [range(len(self))[key]]
        batch = {name: [column[row] for row in rows] for name, column in self.columns.items()}
        batch = self.transform(batch) if self.transform else batch  # a transform receives batches, also of one row
        return batch if isinstance(key, slice) else {name: column[0] for name, column in batch.items()}

    def __iter__(self) -> Iterator[Any]:
        return (self[row] for row in range(len(self)))

    def with_transform(self, transform: Callable[[dict[str, list[Any]]], dict[str, Any]]) -> "HubDataset":
        return HubDataset(self.columns, self.features, transform)

    def with_format(self, kind: str) -> "HubDataset":
        """`torch`: images as uint8 (channels, height, width), labels without dimension; `numpy`: (height, width)."""

        def formatted(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
            return {name: [_formatted(kind, value) for value in column] for name, column in batch.items()}

        return self.with_transform(formatted)


def _formatted(kind: str, value: Any) -> Any:
    array = np.array(value)
    if kind == "numpy" or array.dtype.kind not in "uif":
        return array if array.ndim else array[()]
    if isinstance(value, Image.Image):
        array = array[:, :, None] if array.ndim == 2 else array
        return torch.from_numpy(np.moveaxis(array, -1, 0).copy())
    return torch.tensor(value)
