"""The rows of a run, recognised in data from which images were removed."""

import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from pictures import LABELS, PICTURES, write

from fedortho.data import cache as cache_module
from fedortho.data.request import ForgetRequest
from fedortho.data.sources import load_images
from fedortho.errors import BadCheckpoint, BadData
from fedortho.runs.rows import TrainedRows, hash_key, read_rows, rows_of
from fedortho.runs.settings import TrainSettings
from fedortho.storage.files import write_tensors

NAMES = ("0", "1", "2")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDORTHO_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def rows(tmp_path: Path) -> TrainedRows:
    write(tmp_path / "data/train.parquet")
    write(tmp_path / "data/test.parquet", PICTURES[:6], LABELS[:6])
    made = rows_of(load_images(tmp_path / "data"), torch.zeros(0, dtype=torch.int64))
    assert made is not None
    made.save(tmp_path)
    read = read_rows(tmp_path, TrainSettings())
    assert read is not None
    return read


def rewritten(tmp_path: Path, gone: set[int], labels: list[int] = LABELS) -> Path:
    kept = [row for row in range(30) if row not in gone]
    write(tmp_path / "data/train.parquet", [PICTURES[row] for row in kept], [labels[row] for row in kept])
    return tmp_path / "data"


def test_a_parquet_file_without_forgotten_rows_keeps_the_numbers_of_the_others(
    tmp_path: Path, rows: TrainedRows
) -> None:
    before = load_images(tmp_path / "data")
    whole = before.train.pixels.clone()
    data = load_images(rewritten(tmp_path, {4, 17}))
    valid = before.valid.rows.tolist()
    restored = rows.restored(data, NAMES, valid, ForgetRequest.parse("samples:4,17"))
    assert restored.gone.tolist() == [4, 17]
    assert restored.known_rows.tolist() == list(range(30))
    kept = torch.cat([restored.train.rows, restored.valid.rows])
    assert torch.equal(restored.train.pixels[kept], whole[kept])
    assert restored.valid.rows.tolist() == [row for row in valid if row not in (4, 17)]
    assert len(restored.test) == 6


def test_an_image_that_was_not_forgotten_or_has_another_class_now_is_missed(tmp_path: Path, rows: TrainedRows) -> None:
    data = load_images(rewritten(tmp_path, {4, 17}))
    with pytest.raises(BadData, match=r"has not forgotten: row 17 \(sha256:[0-9a-f]{12}\)$"):
        rows.restored(data, NAMES, (), ForgetRequest.parse("samples:4"))
    data = load_images(rewritten(tmp_path, set(), [2, *LABELS[1:]]))
    with pytest.raises(BadData, match="has not forgotten: row 0 "):
        rows.restored(data, NAMES, (), None)


def test_rows_that_were_left_out_of_training_may_be_missing(tmp_path: Path, rows: TrainedRows) -> None:
    data = load_images(rewritten(tmp_path, {9}))
    assert TrainedRows(**{**vars(rows), "left_out": torch.tensor([9])}).restored(data, NAMES, (), None).gone == 9


def test_a_file_of_other_tensors_is_refused(tmp_path: Path) -> None:
    write_tensors(tmp_path / "rows.safetensors", {"weight": torch.zeros(1)})
    with pytest.raises(BadCheckpoint, match=r"rows.safetensors is damaged \(KeyError: 'digests'\); restore it"):
        read_rows(tmp_path, TrainSettings())


def test_a_run_directly_below_the_root_has_no_key() -> None:
    assert hash_key(Path("/run")) == b""


def test_two_that_make_the_key_of_hashed_ids_at_once_get_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = secrets.token_hex
    monkeypatch.setattr(secrets, "token_hex", lambda size: (time.sleep(0.2), make(size))[1])
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: hash_key(tmp_path / "run", make=True), range(2))
    assert first == second == hash_key(tmp_path / "run")


def test_two_that_purge_at_once_are_both_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    read = cache_module._forgotten

    def read_slowly() -> torch.Tensor:
        found = read()
        time.sleep(0.2)
        return found

    monkeypatch.setattr(cache_module, "_forgotten", read_slowly)
    digests = torch.arange(64, dtype=torch.uint8).view(2, 32)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(cache_module.purge_images, digests.split(1)))
    assert torch.equal(read(), digests[:, :16])


def test_an_image_that_is_purged_while_it_is_being_cached_is_not_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "data/train.parquet")
    data, purges = load_images(str(tmp_path / "data"), valid=0.0), list[Any]()
    assert data.train.ids is not None
    digests = data.train.ids.digests[:1]
    next((tmp_path / "cache").glob("*.safetensors")).unlink()
    with ThreadPoolExecutor(1) as pool:

        def write_late(*arguments: Any, **named: Any) -> None:
            purges.append(pool.submit(cache_module.purge_images, digests))
            time.sleep(0.3)
            monkeypatch.setattr(cache_module, "write_tensors", write_tensors)
            write_tensors(*arguments, **named)

        monkeypatch.setattr(cache_module, "write_tensors", write_late)
        load_images(str(tmp_path / "data"), valid=0.0)
        purges[0].result()
    (copy,) = cache_module.decoded_copies(digests)
    assert (copy.images, copy.removed) == (0, 1)
