"""Decoding and its cache: formats, colours, sizes, damaged files, several at once."""

import io
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from pictures import CHILD, LABELS, PICTURES, encoded, folder_of, forbid_decoding, noise, write
from PIL import Image

from fedortho.data import decoding as decode
from fedortho.data import sources
from fedortho.data.sources import load_images
from fedortho.errors import BadData
from fedortho.storage.files import file_digest, write_tensors


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDORTHO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_formats_are_told_by_their_bytes_and_columns_may_be_plain_binary(tmp_path: Path) -> None:
    kinds = ["PNG", "WEBP", "BMP", "JPEG"]
    blobs = [encoded(noise(row), kinds[row % 4]) for row in range(8)]
    file = write(tmp_path / "x.parquet", blobs, [0] * 8, plain=True, columns=("img", "target"))
    pixels = load_images(str(file)).train.pixels
    for row, blob in enumerate(blobs):
        expected = np.asarray(Image.open(io.BytesIO(blob)))
        assert np.array_equal(pixels[row].permute(1, 2, 0), expected)
        assert (row % 4 == 3) or np.array_equal(expected, noise(row))


@pytest.mark.parametrize("grey_rows", [{0, 1}, {5}, {29}, set(range(29))])
def test_one_coloured_image_makes_all_of_them_coloured(tmp_path: Path, grey_rows: set[int]) -> None:
    arrays = [noise(row, (5, 5)) if row in grey_rows else noise(row, (5, 5, 3)) for row in range(30)]
    data = load_images(str(write(tmp_path / "x.parquet", [encoded(array) for array in arrays])))
    assert data.train.shape == (3, 5, 5)
    for row, array in enumerate(arrays):
        expected = np.repeat(array[..., None], 3, 2) if array.ndim == 2 else array
        assert np.array_equal(data.train.pixels[row].permute(1, 2, 0), expected)


def test_grey_images_keep_one_channel_unless_training_images_are_coloured(tmp_path: Path) -> None:
    grey = [encoded(noise(row, (6, 8))) for row in range(30)]
    write(tmp_path / "train.parquet", grey)
    write(tmp_path / "test.parquet", grey[:3], LABELS[:3])
    assert load_images(str(tmp_path)).test.shape == (1, 6, 8)
    write(tmp_path / "train.parquet")
    data = load_images(str(tmp_path))
    assert data.train.shape == data.test.shape == (3, 6, 8)
    assert np.array_equal(data.test.pixels[1, 2], noise(1, (6, 8)))


def test_size_resizes_images_of_any_size_to_squares(tmp_path: Path) -> None:
    blobs = [encoded(noise(row, (5 + row % 3, 9, 3))) for row in range(30)]
    data = load_images(str(write(tmp_path / "x.parquet", blobs)), size=7)
    assert data.train.shape == (3, 7, 7)
    expected = Image.fromarray(noise(1, (6, 9, 3))).resize((7, 7), Image.Resampling.BILINEAR)
    assert np.array_equal(data.train.pixels[1].permute(1, 2, 0), np.asarray(expected))


def test_progress_is_told_until_all_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "BATCH", 8)
    told: list[tuple[int, int]] = []
    load_images(str(write(tmp_path / "x.parquet")), progress=lambda done, total: told.append((done, total)))
    assert told[-1] == (30, 30)
    assert len(told) > 2
    assert told == sorted(told)


def test_a_second_load_decodes_nothing_and_gives_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "x.parquet", names=["a", "b", "c"])
    first = load_images(str(file))
    forbid_decoding(monkeypatch)
    second = load_images(str(file))
    for old, new in ((first.train, second.train), (first.valid, second.valid), (first.test, second.test)):
        assert torch.equal(old.pixels, new.pixels)
        assert torch.equal(old.rows, new.rows)
        assert torch.equal(old.labels, new.labels)
        assert (old.names, old.mean, old.std) == (new.names, new.mean, new.std)
    assert first.digest == second.digest


def test_the_cache_follows_the_content_and_not_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "x.parquet")
    old = load_images(str(file))
    write(file, PICTURES[::-1])
    new = load_images(str(file))
    assert old.digest != new.digest
    assert np.array_equal(new.train.pixels[0].permute(1, 2, 0), noise(29))
    small = load_images(str(file), size=4)
    assert small.train.shape == (3, 4, 4)
    assert small.digest == new.digest
    forbid_decoding(monkeypatch)
    assert load_images(str(file.rename(tmp_path / "y.parquet"))).digest == new.digest


def cut_short(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-40])


def scribble(file: Path) -> None:
    file.write_bytes(b"\xff" * 100)


def write_something_else(file: Path) -> None:
    write_tensors(file, {"weights": torch.zeros(3)})


@pytest.mark.parametrize("damage", [cut_short, scribble, write_something_else])
def test_a_damaged_cache_file_is_rebuilt(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], None]
) -> None:
    file = write(tmp_path / "x.parquet")
    first = load_images(str(file)).train.pixels
    (stored,) = cache.iterdir()
    whole = file_digest(stored)
    damage(stored)
    assert torch.equal(load_images(str(file)).train.pixels, first)
    assert file_digest(stored) == whole
    forbid_decoding(monkeypatch)
    load_images(str(file))


def test_an_unwritable_cache_is_a_warning_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "blocked").write_text("a file where the directory should be")
    monkeypatch.setenv("FEDORTHO_CACHE", str(tmp_path / "blocked"))
    assert len(load_images(str(write(tmp_path / "x.parquet"))).test) == 6
    assert "not cached" in caplog.text
    assert "FEDORTHO_CACHE" in caplog.text


def test_the_cache_directory_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sources.cache_dir().name == "cache"
    monkeypatch.delenv("FEDORTHO_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert sources.cache_dir() == Path("/somewhere/fedortho")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert sources.cache_dir() == Path.home() / ".cache/fedortho"


def test_threads_that_load_at_once_agree_and_leave_one_file(tmp_path: Path, cache: Path) -> None:
    file = str(write(tmp_path / "x.parquet"))
    with ThreadPoolExecutor(4) as pool:
        loaded = list(pool.map(load_images, [file] * 4))
    assert all(torch.equal(data.train.pixels, loaded[0].train.pixels) for data in loaded)
    assert [path.suffix for path in cache.iterdir()] == [".safetensors"]


@pytest.mark.slow
def test_processes_that_start_at_once_agree_and_import_lightly(tmp_path: Path, cache: Path) -> None:
    file = str(write(tmp_path / "x.parquet"))
    command = [sys.executable, "-c", CHILD, file]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    told = {process.communicate(timeout=60)[0] for process in running}
    data = load_images(file)
    assert told == {f"{data.digest} {data.train.pixels.sum()} light"}
    assert [path.suffix for path in cache.iterdir()] == [".safetensors"]


def test_truncated_and_foreign_files_are_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "x.parquet")
    cut_short(file)
    with pytest.raises(BadData, match=r"x\.parquet is not a whole Parquet file"):
        load_images(str(file))
    file.write_text("image,label\n")
    with pytest.raises(BadData, match="not a whole Parquet file") as told:
        load_images(str(file))
    assert "\n" not in str(told.value)
    write(file)
    content = bytearray(file.read_bytes())
    content[4:3000] = bytes(2996)
    file.write_bytes(content)
    with pytest.raises(BadData, match=r"not a whole Parquet file|cannot be decoded"):
        load_images(str(file))


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "train.parquet").symlink_to(tmp_path / "gone.parquet")
    with pytest.raises(BadData, match=r"train\.parquet does not exist"):
        load_images(str(tmp_path))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"columns": ("photo", "label")},
            "no image column: looked for 'image' or 'img' .* are photo, label",
        ),
        ({"columns": ("image", "kind")}, "no label column: looked for 'label' .*its columns are image, kind"),
        ({"labels": [*LABELS[:-1], -1]}, "row 29: label -1 is out of range"),
        ({"labels": [*LABELS[:-1], 3], "names": "abc"}, "row 29: label 3 is out of range, labels run 0 to 2"),
        ({"labels": [*LABELS[:-1], 10**12]}, "label 1000000000000 is out of range for 30 images"),
        ({"labels": [*LABELS[:-1], None]}, "row 29: the label is missing"),
        ({"labels": [0.5] * 30}, "labels must be whole numbers, not double"),
        ({"labels": ["cat"] * 30}, "labels must be whole numbers, not string"),
        ({"images": [*PICTURES[:-1], b"junk"]}, "row 29: the image cannot be decoded"),
        ({"images": [*PICTURES[:-1], PICTURES[-1][:80]]}, "row 29: the image cannot be decoded"),
        ({"images": [*PICTURES[:-1], None]}, "row 29: the image is empty"),
        (
            {"images": [*PICTURES[:-1], encoded(noise(0, (4, 5, 3)))]},
            r"x.parquet, row 29: the image is 5x4 pixels, the first one .*row 0\) is 8x6; pass --image-size",
        ),
        ({"images": [encoded(noise(0, (4, 4)).astype(np.uint16))] * 30}, "row 0 \\(mode I;16\\) has more than 8 bits"),
        ({"images": [], "labels": pa.array([], pa.int64())}, "holds no images"),
        ({"split": ["train"] * 29 + ["later"]}, "row 29: split 'later'; choose from train, test, valid"),
        ({"split": ["test"] * 30}, "the training split is empty"),
        (
            {"labels": [0] * 29 + [1], "split": ["train"] * 29 + ["test"]},
            "class 1 of the test split is not",
        ),
        ({"images": PICTURES[:3], "labels": [0, 1, 2]}, "the test split is empty"),
    ],
)
def test_bad_content_is_named_with_its_file_and_row(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(BadData, match=message) as told:
        load_images(str(write(tmp_path / "x.parquet", **change)))
    assert "\n" not in str(told.value)
    assert "x.parquet" in str(told.value)


def test_an_image_column_of_text_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"image": ["a.png"], "label": [0]}), tmp_path / "x.parquet")
    with pytest.raises(BadData, match="column 'image' holds string, not encoded images"):
        load_images(str(tmp_path / "x.parquet"))


def test_a_broken_picture_in_a_folder_is_named(tmp_path: Path) -> None:
    folder_of(tmp_path, ["ant", "bee"])
    (tmp_path / "bee/9.png").write_bytes(b"<html>")
    with pytest.raises(BadData, match=r"bee/9\.png: the image cannot be decoded"):
        load_images(str(tmp_path))


@pytest.mark.parametrize("place", [0, 3])
def test_a_few_coloured_images_among_grey_ones_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, place: int
) -> None:
    blobs = [encoded(noise(row)[:, :, 0], "PNG") for row in range(8)]
    assert load_images(str(write(tmp_path / "grey.parquet", blobs, [0] * 8))).train.shape[0] == 1
    blobs[place] = encoded(noise(place), "PNG")
    assert not caplog.messages
    assert load_images(str(write(tmp_path / "mixed.parquet", blobs, [0] * 8))).train.shape[0] == 3
    (told,) = [message for message in caplog.messages if "colours" in message]
    assert "1 of 8 images" in told
    assert f"row {place}" in told
