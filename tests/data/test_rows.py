"""Samples by file name, glob, digest, list and table; the images of a dataset listed with all of these."""

import hashlib
import logging
import os
from pathlib import Path

import pytest
import torch
from pictures import LABELS, PICTURES, encoded, noise, write

from fedortho.data.images import Dataset, images_from_tensors, make_dataset
from fedortho.data.listing import list_images
from fedortho.data.request import ForgetRequest, as_request
from fedortho.data.rows import find_rows
from fedortho.data.sources import load_images
from fedortho.errors import FedOrthoError, UnknownName

NAMES = ("0 first.png", "a,b.png", "Kätzchen.png", "0003.png", "0004.png", "[x].png", *(f"1{n}.png" for n in range(6)))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDORTHO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for label, folder in enumerate(("cat", "dog")):
        for number, name in enumerate(NAMES):
            file = tmp_path / "photos" / folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(encoded(noise(100 * label + number, (8, 8, 3))))
    return tmp_path / "photos"


@pytest.fixture
def data(photos: Path) -> Dataset:
    return load_images(photos, valid=0)


def rows_of(text: str, data: Dataset) -> list[str]:
    assert data.train.ids is not None
    return [data.train.ids.files[int(row)] for row in as_request(text, data).samples]


def named(data: Dataset) -> list[str]:
    return [row.file for row in list_images(data) if row.split == "train"]


def test_every_row_has_the_name_and_the_digest_of_its_file(photos: Path, data: Dataset) -> None:
    rows = list_images(data)
    assert len(rows) == 24
    for row in rows:
        assert row.digest == hashlib.sha256((photos / row.file).read_bytes()).hexdigest()
        assert row.file.startswith(f"{row.label}/")
    assert {row.split for row in rows} == {"train", "test"}
    again = load_images(photos, valid=0)  # from the cache
    assert list_images(again) == rows


def test_a_renamed_file_has_its_new_name_though_the_cache_has_its_pixels(photos: Path, data: Dataset) -> None:
    (photos / "cat/0003.png").rename(photos / "cat/0003b.png")
    assert [row.file for row in list_images(load_images(photos), ["cat/0003b.png"])] == ["cat/0003b.png"]


@pytest.mark.parametrize("name", NAMES)
def test_a_sample_is_named_by_its_file_whatever_signs_it_has(data: Dataset, name: str) -> None:
    if f"dog/{name}" in named(data):
        assert rows_of(f"'samples:dog/{name}'", data) == [f"dog/{name}"]
    else:
        with pytest.raises(FedOrthoError, match="is a validation or test image"):
            rows_of(f"'samples:dog/{name}'", data)


def test_paths_from_here_and_below_the_directorys_name_are_names(
    photos: Path, data: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = named(data)[0]
    monkeypatch.chdir(photos.parent)
    for spelling in (f"photos/{name}", f"./{name}", str(photos / name), f"./photos/{name}"):
        assert rows_of(f"'samples:{spelling}'", data) == [name]
    assert rows_of("'samples:photos/cat/*'", data) == [n for n in named(data) if n.startswith("cat/")]


def test_a_glob_names_training_images_and_says_how_many_others_it_names(
    data: Dataset, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    found = rows_of("'samples:cat/*.png'", data)
    assert found == [name for name in named(data) if name.startswith("cat/")]
    assert f"also names {12 - len(found)} validation or test images" in caplog.text
    with pytest.raises(UnknownName, match=r"no image 'cat/x\*.png'.*fedortho data ls"):
        rows_of("'samples:cat/x*.png'", data)


def test_an_unknown_name_is_refused_with_near_ones(data: Dataset) -> None:
    with pytest.raises(UnknownName, match=r"no image 'cat/0004.jpg', and no file of ids; did you mean 'cat/0004.png'"):
        rows_of("samples:cat/0004.jpg", data)
    with pytest.raises(UnknownName, match=r"did you mean 'cat/0004.png', 'dog/0004.png'"):
        rows_of("samples:0004.png", data)
    with pytest.raises(UnknownName, match=r"no image ',', and no file of ids"):
        rows_of("samples:,", data)


def test_several_names_rows_and_digests_stand_with_commas(data: Dataset) -> None:
    first, second, third, *_ = rows = [row for row in list_images(data) if row.split == "train" and "," not in row.file]
    text = f"'samples:{first.file},{second.row},sha256:{third.digest[:9].upper()}'"
    assert rows_of(text, data) == [row.file for row in rows[:3]]


def test_a_digest_is_named_by_a_part_that_no_other_image_begins_with(data: Dataset) -> None:
    ids = data.train.ids
    assert ids is not None
    twins = ids.digests.clone()
    twins[1] = twins[0]
    twins[2, :8] = twins[0, :8]
    alike = type(ids)(twins, ids.files)
    digits = bytes(twins[0].numpy()).hex()
    assert find_rows(f"sha256:{digits}", alike) == [0, 1], "two files with the same bytes are one content"
    with pytest.raises(FedOrthoError, match="begins the digests of several images"):
        find_rows(f"sha256:{digits[:16]}", alike)
    with pytest.raises(FedOrthoError, match="7 digits; expected 8 to 64"):
        find_rows(f"sha256:{digits[:7]}", alike)
    with pytest.raises(UnknownName):
        rows_of(f"samples:sha256:{'0' * 64}", data)


def test_copies_that_a_name_does_not_cover_are_told(
    photos: Path, data: Dataset, caplog: pytest.LogCaptureFixture
) -> None:
    one, other, *_ = (name for name in named(data) if name.startswith("dog/"))
    (photos / other).write_bytes((photos / one).read_bytes())
    changed = load_images(photos, valid=0)
    assert rows_of(f"'samples:{one}'", changed) == [one]
    assert f"copies that the request does not name: {other}" in caplog.text
    digest = hashlib.sha256((photos / one).read_bytes()).hexdigest()
    assert rows_of(f"samples:sha256:{digest}", changed) == sorted([one, other])


def test_samples_are_listed_in_a_file_or_in_a_column_of_a_table(tmp_path: Path, data: Dataset) -> None:
    one, other, third = named(data)[:3]
    digest = list_images(data)[2].digest
    (tmp_path / "ids.txt").write_text(f"{one}\n\n  {other}\nsha256:{digest}\n")
    assert rows_of(f"samples:{tmp_path}/ids.txt", data) == [one, other, third]
    (tmp_path / "rows.txt").write_text("5 6\n7\n")
    assert ForgetRequest.parse(f"samples:{tmp_path}/rows.txt").samples == ("5", "6", "7")
    (tmp_path / "people.csv").write_text(f'\ufeffwho,photo\n"A, B","{one}"\nC,"{other}"\nD,\n', encoding="utf-8")
    assert rows_of(f"samples:{tmp_path}/people.csv:photo", data) == [one, other]
    with pytest.raises(UnknownName, match=r"no column of .*people.csv 'foto'; did you mean 'photo'"):
        rows_of(f"samples:{tmp_path}/people.csv:foto", data)
    with pytest.raises(FedOrthoError, match=r"none.csv cannot be read"):
        rows_of(f"samples:{tmp_path}/none.csv:photo", data)


def test_a_word_with_the_suffix_of_an_image_is_a_name_even_where_such_a_file_is_here(
    data: Dataset, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = named(data)[0]
    monkeypatch.chdir(photos)
    assert os.path.isfile(name)
    assert rows_of(f"'samples:{name}'", data) == [name]


def test_images_in_parquet_are_named_by_their_path_column(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    cells = [{"bytes": blob, "path": f"{row:04}.png"} for row, blob in enumerate(PICTURES)]
    pq.write_table(pa.table({"image": cells, "label": LABELS}), tmp_path / "own.parquet")
    for _ in range(2):  # decoded, then from the cache
        data = load_images(tmp_path / "own.parquet", valid=0)
        (row,) = list_images(data, ["0007.png"])
        assert row.digest == hashlib.sha256(PICTURES[7]).hexdigest()
    assert list_images(load_images(write(tmp_path / "p.parquet")), [f"sha256:{row.digest}"])[0].file == ""
    with pytest.raises(UnknownName, match="images have no file names here"):
        list_images(load_images(tmp_path / "p.parquet"), ["0007.png"])


def test_generated_images_have_digests_and_own_tensors_only_rows() -> None:
    data = load_images("digits")
    row = list_images(data, label="7", limit=3)[-1]
    assert row.label == "7"
    assert row in list_images(data, [f"sha256:{row.digest}"])
    own = make_dataset(images_from_tensors(torch.zeros(9, 1, 8, 8, dtype=torch.uint8), torch.arange(9) % 2))
    with pytest.raises(FedOrthoError, match="neither names nor digests; give rows"):
        as_request("samples:cat.png", own)
    assert list_images(own)[0].digest == ""
