"""`load_images` on small files of its own making: layouts, decoding, the cache, and every way it can go wrong."""

import io
import json
import logging
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from fedortho import decode, sources
from fedortho.data import channel_statistics, split_stratified
from fedortho.errors import BadData, BadSetting, UnknownName
from fedortho.files import file_digest, write_tensors
from fedortho.sources import DATASETS, load_images

LABELS = [row % 3 for row in range(30)]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDORTHO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def noise(row: int, shape: tuple[int, ...] = (6, 8, 3)) -> NDArray[np.uint8]:
    return np.random.default_rng(row).integers(0, 256, shape, np.uint8)


def encoded(array: NDArray[np.uint8], kind: str = "PNG") -> bytes:
    stream = io.BytesIO()
    Image.fromarray(array).save(stream, kind, **({"lossless": True} if kind == "WEBP" else {}))
    return stream.getvalue()


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

    monkeypatch.setattr(sources, "decode_store", refuse)


def test_a_named_dataset_is_read_from_its_folder_row_by_row(tmp_path: Path) -> None:
    names = ["cat", "dog", "emu"]
    write(tmp_path / "cifar10/train.parquet", names=names, columns=("img", "label"))
    write(tmp_path / "cifar10/test.parquet", PICTURES[:9], LABELS[:9], names=names, columns=("img", "label"))
    data = load_images("cifar10", tmp_path, valid=0.2, seed=5)
    assert data.train.names == ("cat", "dog", "emu")
    assert data.train.shape == (3, 6, 8)
    assert (len(data.train), len(data.valid), len(data.test)) == (24, 6, 9)
    for row in (0, 13, 29):
        assert np.array_equal(data.train.pixels[row].permute(1, 2, 0), noise(row))
    assert data.train.store_labels.tolist() == LABELS
    assert data.train.pixels.data_ptr() == data.valid.pixels.data_ptr()
    kept, aside = split_stratified(torch.tensor(LABELS), 0.2, 5)
    assert torch.equal(data.train.rows, kept)
    assert torch.equal(data.valid.rows, aside)


def test_statistics_of_the_training_store_serve_all_three_splits(tmp_path: Path) -> None:
    write(tmp_path / "train.parquet")
    write(tmp_path / "test.parquet", [encoded(noise(9) // 4)] * 3, [0, 1, 2])
    data = load_images(str(tmp_path))
    expected = channel_statistics(data.train.pixels)
    for images in (data.train, data.valid, data.test):
        assert (images.mean, images.std) == expected


def test_shards_count_on_and_the_data_directory_may_be_the_dataset_itself(tmp_path: Path) -> None:
    folder = tmp_path / "tinyimagenet20"
    write(folder / "data/train-00000-of-00002.parquet", PICTURES[:20], LABELS[:20])
    write(folder / "data/train-00001-of-00002.parquet", PICTURES[20:], LABELS[20:])
    write(folder / "data/valid-00000-of-00001.parquet", PICTURES[:3], LABELS[:3])
    data = load_images("tiny-imagenet", folder)
    assert data.train.store_labels.tolist() == LABELS
    assert np.array_equal(data.train.pixels[25].permute(1, 2, 0), noise(25))
    assert len(data.test) == 3
    assert torch.equal(load_images("tiny-imagenet", tmp_path).train.pixels, data.train.pixels)


def test_splits_are_told_by_names_inside_the_directory_and_not_by_its_own(tmp_path: Path) -> None:
    write(tmp_path / "testing/part-0.parquet")
    assert len(load_images(str(tmp_path / "testing")).train.pixels) == 30
    write(tmp_path / "data/train/part-0.parquet")
    write(tmp_path / "data/test/part-0.parquet", PICTURES[:3], LABELS[:3])
    assert len(load_images(str(tmp_path / "data")).test) == 3


def test_test_is_preferred_to_valid(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    write(tmp_path / "train.parquet")
    write(tmp_path / "validation.parquet", PICTURES[:3], LABELS[:3])
    assert len(load_images(str(tmp_path)).test) == 3
    write(tmp_path / "test.parquet", PICTURES[:6], LABELS[:6])
    assert len(load_images(str(tmp_path)).test) == 6
    assert "not used: valid" in caplog.text


@pytest.mark.parametrize("spelling", ["test", "validation", "val"])
def test_a_split_column_divides_one_file_and_rows_keep_their_numbers(tmp_path: Path, spelling: str) -> None:
    split = [spelling if row % 5 == 0 else "train" for row in range(30)]
    data = load_images(str(write(tmp_path / "all.parquet", split=split)), valid=0)
    assert data.train.rows.tolist() == [row for row in range(30) if row % 5]
    assert np.array_equal(data.train.pixels[11].permute(1, 2, 0), noise(11))
    assert data.test.rows.tolist() == list(range(6))
    assert np.array_equal(data.test.pixels[2].permute(1, 2, 0), noise(10))
    assert data.train.mean == channel_statistics(data.train.pixels[data.train.rows])[0]


def test_without_a_test_split_a_fifth_is_set_aside_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fedortho")
    file = write(tmp_path / "all.parquet")
    first, second = load_images(str(file), seed=0), load_images(str(file), seed=1)
    assert caplog.text.count("no test split: 20 % of each class was set aside") == 2
    assert first.test.labels.bincount().tolist() == [2, 2, 2]
    assert torch.equal(first.test.pixels, second.test.pixels)
    rows = torch.cat([first.train.rows, first.valid.rows])
    assert len(rows.unique()) == 24
    assert not any(torch.equal(first.train.pixels[row], image) for row in rows for image in first.test.pixels)


def folder_of(root: Path, classes: Sequence[str], number: int = 5) -> None:
    for label, name in enumerate(classes):
        for index in range(number):
            kind = ("PNG", "JPEG", "WEBP")[index % 3]
            file = root / name / f"{index}.{kind.lower()}"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(encoded(noise(10 * label + index), kind))


def test_an_image_folder_with_splits_names_its_classes_by_folder(tmp_path: Path) -> None:
    folder_of(tmp_path / "train", ["ant", "bee", "cow"])
    folder_of(tmp_path / "val", ["bee"], 2)
    (tmp_path / "notes").mkdir()
    (tmp_path / "train/ant/.hidden.png").write_bytes(b"resource fork")
    (tmp_path / "train/ant/readme.txt").write_text("not an image")
    data = load_images(str(tmp_path))
    assert data.train.names == data.test.names == ("ant", "bee", "cow")
    assert data.train.store_labels.bincount().tolist() == [5, 5, 5]
    assert data.test.labels.tolist() == [1, 1]
    assert np.array_equal(data.train.pixels[10].permute(1, 2, 0), noise(20))


def test_an_image_folder_without_splits_may_have_a_class_called_train(tmp_path: Path) -> None:
    folder_of(tmp_path, ["bus", "train"])
    data = load_images(str(tmp_path))
    assert data.train.names == ("bus", "train")
    assert data.test.labels.tolist() == [0, 1]


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


def test_test_classes_are_matched_by_name_when_both_files_name_them(tmp_path: Path) -> None:
    write(tmp_path / "train.parquet", names=["ant", "bee", "cow"])
    write(tmp_path / "test.parquet", PICTURES[:3], [0, 1, 1], names=["cow", "ant"])
    assert load_images(str(tmp_path)).test.labels.tolist() == [2, 0, 0]


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


CHILD = """
import sys
from fedortho.sources import load_images
early = {"pyarrow", "PIL", "sklearn", "datasets"} & set(sys.modules)
data = load_images(sys.argv[1])
sys.stdout.write(f"{data.digest} {data.train.pixels.sum()} {early or 'light'}")
"""


def test_processes_that_start_at_once_agree_and_import_lightly(tmp_path: Path, cache: Path) -> None:
    file = str(write(tmp_path / "x.parquet"))
    command = [sys.executable, "-c", CHILD, file]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    told = {process.communicate(timeout=60)[0] for process in running}
    data = load_images(file)
    assert told == {f"{data.digest} {data.train.pixels.sum()} light"}
    assert [path.suffix for path in cache.iterdir()] == [".safetensors"]


def test_the_embedded_fashion_mini_is_balanced_grey_and_small() -> None:
    data = load_images("fashion-mini")
    assert data.train.shape == (1, 28, 28)
    assert data.train.names[9] == "Ankle boot"
    assert data.train.labels.bincount().tolist() == [540] * 10
    assert data.valid.labels.bincount().tolist() == [60] * 10
    assert data.test.labels.bincount().tolist() == [200] * 10
    assert sorted(torch.cat([data.train.rows, data.valid.rows]).tolist()) == list(range(6000))
    assert data.train.mean[0] == pytest.approx(0.2860, abs=0.005)  # of all 60,000 images
    asset = Path(sources.__file__).parent / "assets/fashion-mini.parquet"
    assert asset.stat().st_size < 4_000_000
    assert "Zalando SE" in asset.with_suffix(".LICENSE").read_text()


def test_digits_fill_the_whole_range_and_are_split_once() -> None:
    data, other = load_images("digits"), load_images("digits", seed=1)
    assert (len(data.train) + len(data.valid), len(data.test)) == (1438, 359)
    assert data.train.shape == (1, 8, 8)
    assert (int(data.train.pixels.min()), int(data.train.pixels.max())) == (0, 255)
    assert torch.equal(data.test.pixels, other.test.pixels)
    assert not torch.equal(data.valid.rows, other.valid.rows)
    assert load_images("digits", size=12).test.shape == (1, 12, 12)


def test_every_dataset_states_its_terms_and_where_it_comes_from() -> None:
    for source in DATASETS.values():
        assert source.licence
        assert source.asset or source.build or (source.hub and source.folders and source.image and source.label)


def fake_datasets(folder: Path, calls: list[str]) -> SimpleNamespace:
    """What the `datasets` library gives: splits that can write themselves as Parquet."""

    def load_dataset(repository: str) -> dict[str, SimpleNamespace]:
        calls.append(repository)
        train = write(folder / "t.parquet", columns=("img", "fine_label"))
        test = write(folder / "e.parquet", PICTURES[:3], LABELS[:3], columns=("img", "fine_label"))
        splits = {"train": train, "test": test}
        return {
            name: SimpleNamespace(to_parquet=lambda path, file=file: path.write_bytes(file.read_bytes()))
            for name, file in splits.items()
        }

    return SimpleNamespace(load_dataset=load_dataset)


def test_the_hub_is_asked_once_and_afterwards_not_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setitem(sys.modules, "datasets", fake_datasets(tmp_path / "hub", calls))
    first = load_images("cifar100")
    assert calls == ["uoft-cs/cifar100"]
    monkeypatch.setitem(sys.modules, "datasets", None)
    second = load_images("cifar100")
    assert first.digest == second.digest
    assert len(second.test) == 3


def test_a_download_that_broke_off_is_started_again(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    monkeypatch.setitem(sys.modules, "datasets", fake_datasets(tmp_path / "hub", calls))
    write(cache / "hub/cifar100/test.parquet", PICTURES[:3], LABELS[:3], columns=("img", "fine_label"))
    load_images("cifar100")
    assert calls == ["uoft-cs/cifar100"]


def test_a_download_needs_a_writable_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", fake_datasets(tmp_path / "hub", []))
    (tmp_path / "blocked").write_text("a file where the directory should be")
    monkeypatch.setenv("FEDORTHO_CACHE", str(tmp_path / "blocked"))
    with pytest.raises(BadData, match="blocked/hub/cifar100 cannot be written"):
        load_images("cifar100")


def test_without_the_hub_library_the_error_offers_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(BadData, match=r"--data-dir DIR.*pip install 'fedortho\[hub\]'"):
        load_images("cifar10")


def test_a_hub_that_cannot_be_reached_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(_: str) -> None:
        raise ConnectionError("no route\nand a long story")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(BadData, match=r"uoft-cs/cifar10 could not be fetched .*no route\); check the network") as told:
        load_images("cifar10")
    assert "\n" not in str(told.value)


def test_unknown_names_are_met_with_the_nearest_one() -> None:
    with pytest.raises(UnknownName, match="no dataset 'cifar11'; did you mean 'cifar10'") as told:
        load_images("cifar11")
    assert "path" not in str(told.value)
    with pytest.raises(UnknownName, match=r"give a path: there is no file or directory .*photos"):
        load_images("./photos")


def test_a_missing_folder_or_split_names_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(BadData, match=r"there is no directory .*/tiny-imagenet or .*/tinyimagenet20; --data-dir must"):
        load_images("tiny-imagenet", tmp_path)
    write(tmp_path / "cifar10/test.parquet", columns=("img", "label"))
    with pytest.raises(BadData, match=r"no training split: looked for train\*.parquet, found test.parquet"):
        load_images("cifar10", tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadData, match="neither Parquet files nor images"):
        load_images(str(tmp_path / "empty"))
    with pytest.raises(BadSetting, match=r"image size must be 0 .* not -1"):
        load_images("digits", size=-1)


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


def test_a_path_object_is_as_good_as_text_and_a_device_is_no_data(tmp_path: Path) -> None:
    assert len(load_images(write(tmp_path / "x.parquet")).train.pixels) == 30
    with pytest.raises(BadData, match="/dev/null cannot be read: Not a directory"):
        load_images("/dev/null")


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "train.parquet").symlink_to(tmp_path / "gone.parquet")
    with pytest.raises(BadData, match=r"train\.parquet cannot be read: No such file"):
        load_images(str(tmp_path))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"columns": ("photo", "label")}, "no image column: looked for 'image' or 'img', its columns are photo, label"),
        ({"columns": ("image", "kind")}, "no label column: looked for 'label' .*its columns are image, kind"),
        ({"labels": [*LABELS[:-1], -1]}, "row 29: label -1 is out of range"),
        ({"labels": [*LABELS[:-1], 3], "names": "abc"}, "row 29: label 3 is out of range, labels run 0 to 2"),
        ({"labels": [*LABELS[:-1], 10**12]}, "label 1000000000000 is out of range: there are only 30 images"),
        ({"labels": [*LABELS[:-1], None]}, "row 29: the label is missing"),
        ({"labels": [0.5] * 30}, "labels must be whole numbers, not double"),
        ({"labels": ["cat"] * 30}, "labels must be whole numbers, not string"),
        ({"images": [*PICTURES[:-1], b"junk"]}, "row 29: the image cannot be decoded"),
        ({"images": [*PICTURES[:-1], PICTURES[-1][:80]]}, "row 29: the image cannot be decoded"),
        ({"images": [*PICTURES[:-1], None]}, "row 29: there are no image bytes"),
        (
            {"images": [*PICTURES[:-1], encoded(noise(0, (4, 5, 3)))]},
            r"x.parquet, row 29: the image is 5x4 pixels, the first one .*row 0\) is 8x6; pass --image-size",
        ),
        ({"images": [encoded(noise(0, (4, 4)).astype(np.uint16))] * 30}, "row 0: a I;16 image has more than 8 bits"),
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


def test_shards_must_agree_about_classes_and_splits(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", names="abc")
    write(tmp_path / "b.parquet", names="xyz")
    with pytest.raises(BadData, match=r"b\.parquet names other classes than .*a\.parquet"):
        load_images(str(tmp_path))
    write(tmp_path / "b.parquet", names="abc", split=["train"] * 30)
    with pytest.raises(BadData, match="some have none"):
        load_images(str(tmp_path))


def test_train_and_test_must_agree(tmp_path: Path) -> None:
    write(tmp_path / "train.parquet", names="abc")
    write(tmp_path / "test.parquet", PICTURES[:3], LABELS[:3], names="abx")
    with pytest.raises(BadData, match="class 'x' of the test split is not among the 3 classes"):
        load_images(str(tmp_path))
    write(tmp_path / "test.parquet", [encoded(noise(0, (5, 5, 3)))], [0], names="abc")
    with pytest.raises(BadData, match=r"training images are 3x6x8, test images 3x5x5; .*--image-size"):
        load_images(str(tmp_path))
    write(tmp_path / "test.parquet", PICTURES[:3], [0, 1, 7])
    with pytest.raises(BadData, match=r"class 7|label 7"):
        load_images(str(tmp_path))


def test_a_broken_picture_in_a_folder_is_named(tmp_path: Path) -> None:
    folder_of(tmp_path, ["ant", "bee"])
    (tmp_path / "bee/9.png").write_bytes(b"<html>")
    with pytest.raises(BadData, match=r"bee/9\.png: the image cannot be decoded"):
        load_images(str(tmp_path))
