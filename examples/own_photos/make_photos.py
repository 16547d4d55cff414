"""A folder of photos to play with, taken from the images that the package brings: python make_photos.py photos"""

import sys
from pathlib import Path

from PIL import Image

import fedortho as fo

WANTED = {"Sneaker": 500, "Bag": 400, "Dress": 250, "Shirt": 120, "Ankle boot": 60}  # as unbalanced as life


def main() -> None:
    data = fo.load_images("fashion-mini", valid=0.0)
    for split, images, share in (("train", data.train, 1.0), ("test", data.test, 0.4)):
        for name, number in WANTED.items():
            place = Path(sys.argv[1]) / split / name
            place.mkdir(parents=True, exist_ok=True)
            rows = images.rows[images.labels == images.names.index(name)]
            for count, row in enumerate(rows[: round(share * number)].tolist()):
                Image.fromarray(images.pixels[row, 0].numpy()).save(place / f"{count:04}.png")
    print(f"{len(list(Path(sys.argv[1]).rglob('*.png')))} photos of {len(WANTED)} classes in {sys.argv[1]}")


if __name__ == "__main__":
    main()
