import errno
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from fedortho.errors import BadCheckpoint, Busy, FedOrthoError
from fedortho.storage.files import (
    check_writable,
    file_digest,
    locked,
    read_json,
    read_tensors,
    replacing,
    tensors_digest,
    write_json,
    write_tensors,
)


def test_a_place_that_cannot_be_written_is_told_before_the_work(tmp_path: Path) -> None:
    check_writable(tmp_path)
    assert os.listdir(tmp_path) == [], "trying leaves nothing behind"
    for place in (tmp_path / "none", Path("/proc")):  # not even root writes there
        with pytest.raises(FedOrthoError, match=f"{place} cannot be written"):
            check_writable(place)


def test_tensors_and_their_note_survive_the_round_trip(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(2, 3), "b": torch.arange(4), "half": torch.ones(2, dtype=torch.bfloat16)}
    write_tensors(tmp_path / "x.safetensors", tensors, {"who": "me"})
    back, note = read_tensors(tmp_path / "x.safetensors")
    assert tensors_digest(back) == tensors_digest(tensors)
    assert note == {"who": "me"}


def test_the_same_tensors_and_note_give_the_same_bytes(tmp_path: Path) -> None:
    for number in range(8):
        note = {"one": 1, "two": [2], "three": "3", "four": None}
        write_tensors(tmp_path / str(number), {"a": torch.ones(2)}, note)
    assert len({file_digest(tmp_path / str(number)) for number in range(8)}) == 1


def test_tied_and_channels_last_weights_are_written_plainly(tmp_path: Path) -> None:
    weight = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    write_tensors(tmp_path / "x.safetensors", {"a": weight, "tied": weight})
    back, _ = read_tensors(tmp_path / "x.safetensors")
    assert torch.equal(back["a"], weight)
    assert torch.equal(back["tied"], weight)


def test_a_failed_write_leaves_the_old_file_and_no_litter(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_json(path, {"old": 1})
    with pytest.raises(FedOrthoError, match=r"x\.json cannot be written: Is a directory"), replacing(path) as temporary:
        temporary.write_text("half") and tmp_path.write_text("fails")
    assert read_json(path) == {"old": 1}
    assert os.listdir(tmp_path) == ["x.json"]


def test_a_full_disk_is_told_in_one_line_and_nothing_is_written(tmp_path: Path) -> None:
    with (
        pytest.raises(FedOrthoError, match=r"the disk is full: .*x\.json was not written"),
        replacing(tmp_path / "x.json"),
    ):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_really_full_device_fails_the_same_way(tmp_path: Path) -> None:
    with pytest.raises(FedOrthoError, match="disk is full"), replacing(tmp_path / "x"), open("/dev/full", "w") as full:
        full.write("x")


def test_a_place_that_cannot_be_written_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    for path in (tmp_path / "file" / "x.json", tmp_path / "file" / "deep" / "x.json", Path("/proc/none/x.json")):
        with pytest.raises(FedOrthoError, match=r"x\.json cannot be written: "):
            write_json(path, {})


def test_damaged_and_missing_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match="does not exist"):
        read_tensors(tmp_path / "none")
    write_tensors(tmp_path / "x", {"a": torch.zeros(100)})
    whole = (tmp_path / "x").read_bytes()
    (tmp_path / "x").write_bytes(whole[:-1])
    with pytest.raises(BadCheckpoint, match="not a complete safetensors file"):
        read_tensors(tmp_path / "x")
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(BadCheckpoint, match="not JSON"):
        read_json(tmp_path / "x.json")
    with pytest.raises(BadCheckpoint, match="cannot be read: Is a directory"):
        read_json(tmp_path)


def test_digests_see_names_types_shapes_and_every_bit(tmp_path: Path) -> None:
    base = {"a": torch.zeros(4)}
    others = [{"b": torch.zeros(4)}, {"a": torch.zeros(2, 2)}, {"a": torch.zeros(4, dtype=torch.int32)}, {}]
    others += [{"a": torch.tensor([0.0, 0.0, 0.0, -0.0])}, {"a": torch.zeros(4), "e": torch.zeros(0)}]
    digests = {tensors_digest(x) for x in [base, *others]}
    assert len(digests) == 1 + len(others)
    (tmp_path / "x").write_bytes(b"abc")
    assert file_digest(tmp_path / "x").startswith("ba7816bf")


def test_a_lock_leaves_no_file_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with locked(tmp_path / "run"):
        assert len(os.listdir(tmp_path)) == 1
        with pytest.raises(Busy, match="run; wait for it"), locked(tmp_path / "run"):
            pass
    assert os.listdir(tmp_path) == []
    with pytest.raises(KeyError), locked(tmp_path / "run"):
        raise KeyError
    assert os.listdir(tmp_path) == []


def test_a_lock_whose_file_is_removed_at_its_end_still_excludes_all_others(tmp_path: Path) -> None:
    path = tmp_path / "count"
    path.write_text("0")

    def count(_: int) -> None:
        for done in range(10_000):
            try:
                with locked(path):
                    path.write_text(str(int(path.read_text() or "-1000") + 1))  # empty while another one writes
                    return
            except Busy:
                assert done < 9_999, "the lock was never free"
                time.sleep(0.0005)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(count, range(100)))
    assert path.read_text() == "100"
