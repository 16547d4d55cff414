"""A folder of photos of unbalanced classes, and how runs are trained on it."""

from pathlib import Path

import numpy as np
from pictures import encoded

from fedortho.data.sources import load_images
from fedortho.runs.settings import TrainSettings

SIZES = {"cat": 40, "dog": 24, "emu": 16}


def draw(label: int, number: int) -> bytes:
    image = np.random.default_rng([label, number]).integers(0, 110, (8, 8, 3), np.uint8)
    image[:, 3 * label : 3 * label + 2, label] += 140
    return encoded(image)


def settings(photos: Path) -> TrainSettings:
    how = {"epochs": 2, "batch_size": 16, "crop": 0, "flip": 0.0, "threads": 1, "device": "cpu"}
    return TrainSettings(data=str(photos), model="small:SmallNet", valid=0.2, **how)  # type: ignore[arg-type]  # mixed


def make_photos(place: Path) -> Path:
    """The folder `photos` in `place`, which is returned."""
    for label, (name, number) in enumerate(SIZES.items()):
        (place / "photos" / name).mkdir(parents=True)
        for n in range(number):
            (place / "photos" / name / f"{n:04}.png").write_bytes(draw(label, n))
    return place


def pixels_of(name: str) -> bytes:
    data = load_images("photos", forgotten=True)
    assert data.train.ids is not None
    return data.train.pixels[data.train.ids.files.index(name)].numpy().tobytes()


def cache_bytes() -> bytes:
    return b"".join(file.read_bytes() for file in Path("cache").rglob("*") if file.is_file())
