"""`load_images` on small files of its own making: layouts, datasets by name, and every way that goes wrong."""

import logging
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from pictures import LABELS, PICTURES, encoded, folder_of, noise, write

from fedortho.data import sources
from fedortho.data.images import channel_statistics, split_stratified
from fedortho.data.sources import DATASETS, _digits_table, load_images
from fedortho.errors import BadData, BadSetting, UnknownName


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDORTHO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


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
    assert caplog.text.count("no test split: 20 % of each class") == 2
    assert first.test.labels.bincount().tolist() == [2, 2, 2]
    assert torch.equal(first.test.pixels, second.test.pixels)
    rows = torch.cat([first.train.rows, first.valid.rows])
    assert len(rows.unique()) == 24
    assert not any(torch.equal(first.train.pixels[row], image) for row in rows for image in first.test.pixels)


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


def test_two_folders_of_one_split_are_refused_and_those_of_no_use_are_not(tmp_path: Path) -> None:
    for folder in ("train", "test", "val", "validation"):
        folder_of(tmp_path / folder, ["ant", "bee"])
    assert len(load_images(tmp_path, valid=0.0).train) == 10
    folder_of(tmp_path / "train-old", ["ant", "bee"], 2)
    with pytest.raises(BadData, match="train and train-old"):
        load_images(tmp_path)


def test_an_image_folder_without_splits_may_have_a_class_called_train(tmp_path: Path) -> None:
    folder_of(tmp_path, ["bus", "train"])
    data = load_images(str(tmp_path))
    assert data.train.names == ("bus", "train")
    assert data.test.labels.tolist() == [0, 1]


def test_test_classes_are_matched_by_name_when_both_files_name_them(tmp_path: Path) -> None:
    write(tmp_path / "train.parquet", names=["ant", "bee", "cow"])
    write(tmp_path / "test.parquet", PICTURES[:3], [0, 1, 1], names=["cow", "ant"])
    assert load_images(str(tmp_path)).test.labels.tolist() == [2, 0, 0]


def test_the_embedded_fashion_mini_is_balanced_grey_and_small() -> None:
    data = load_images("fashion-mini")
    assert data.train.shape == (1, 28, 28)
    assert data.train.names[9] == "Ankle boot"
    assert data.train.labels.bincount().tolist() == [540] * 10
    assert data.valid.labels.bincount().tolist() == [60] * 10
    assert data.test.labels.bincount().tolist() == [200] * 10
    assert sorted(torch.cat([data.train.rows, data.valid.rows]).tolist()) == list(range(6000))
    assert data.train.mean[0] == pytest.approx(0.2860, abs=0.005)  # of all 60,000 images
    asset = Path(sources.__file__).parent / "fashion-mini/fashion-mini.parquet"
    assert asset.stat().st_size < 4_000_000
    assert "Zalando SE" in asset.with_name("LICENSE").read_text()


def test_digits_fill_the_whole_range_and_are_split_once() -> None:
    data, other = load_images("digits"), load_images("digits", seed=1)
    from sklearn.datasets import load_digits  # in a second, so not at the top

    assert np.array_equal(_digits_table(), np.column_stack(load_digits(return_X_y=True)))
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
    with pytest.raises(BadData, match=r"neither Parquet files nor images.*each class into a folder.*\.jpg"):
        load_images(str(tmp_path / "empty"))
    with pytest.raises(BadSetting, match=r"image-size must be 0 .* not -1"):
        load_images("digits", size=-1)
    with pytest.raises(BadSetting, match=r"at most 4096 pixels, not 999999"):
        load_images("digits", size=999_999)


def test_names_that_are_not_utf8_are_refused_by_name(tmp_path: Path) -> None:
    for number, path in enumerate((b"cat/caf\xe9.png", b"caf\xe9/1.png")):
        file = Path(os.fsdecode(bytes(tmp_path / str(number)) + b"/" + path))
        file.parent.mkdir(parents=True)
        file.write_bytes(PICTURES[0])
        with pytest.raises(BadData, match=r"caf\\udce9.* is a name that is not UTF-8; rename it"):
            load_images(tmp_path / str(number))


def test_classes_keep_given_numbers_and_new_ones_come_after_them(tmp_path: Path) -> None:
    for name in ("cat", "dog", "emu"):
        for split in ("train", "test"):
            (tmp_path / split / name).mkdir(parents=True)
            (tmp_path / split / name / "1.png").write_bytes(PICTURES[0])
    data = load_images(tmp_path, valid=0.0, names=("bee", "emu", "cat"))
    assert data.train.names == data.test.names == ("bee", "emu", "cat", "dog")
    assert data.train.labels.tolist() == data.test.labels.tolist() == [2, 3, 1]


def test_a_path_object_is_as_good_as_text_and_a_device_is_no_data(tmp_path: Path) -> None:
    assert len(load_images(write(tmp_path / "x.parquet")).train.pixels) == 30
    with pytest.raises(BadData, match="/dev/null cannot be read: Not a directory"):
        load_images("/dev/null")


def test_shards_must_agree_about_classes_and_splits(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", names="abc")
    write(tmp_path / "b.parquet", names="xyz")
    with pytest.raises(BadData, match=r"b\.parquet has other class names than .*a\.parquet"):
        load_images(str(tmp_path))
    write(tmp_path / "b.parquet", names="abc", split=["train"] * 30)
    with pytest.raises(BadData, match="lack the column 'split'"):
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
