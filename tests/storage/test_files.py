import errno
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

from fedortho.errors import BadCheckpoint, Busy, FedOrthoError
from fedortho.storage.files import (
    PRIVATE,
    check_writable,
    copy_file,
    file_digest,
    locked,
    parse_json,
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


def test_a_new_place_that_another_process_takes_for_a_left_over_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken, acquire = list[str](), FileLock.acquire

    def removed_at_first(lock: FileLock, *words: Any, **more: Any) -> Any:
        if not taken:
            taken.append(lock.lock_file)
            Path(lock.lock_file).parent.rmdir()
            os.open(lock.lock_file, os.O_CREAT)  # as filelock does, after it has made sure that the directory is there
        return acquire(lock, *words, **more)

    monkeypatch.setattr(FileLock, "acquire", removed_at_first)
    write_json(tmp_path / "x.json", [1])
    assert read_json(tmp_path / "x.json") == [1]
    assert taken
    assert os.listdir(tmp_path) == ["x.json"]


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


def test_a_lock_is_in_the_users_own_directory_and_leaves_no_file_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "shared"))
    monkeypatch.setenv("FEDORTHO_STATE", str(tmp_path / "state"))
    locks = tmp_path / "state" / "locks"
    with locked(tmp_path / "run"):
        assert len(os.listdir(locks)) == 1
        assert locks.stat().st_mode & 0o777 == 0o700
        with pytest.raises(Busy, match="run; wait for it"), locked(tmp_path / "run"):
            pass
    assert os.listdir(locks) == []
    with pytest.raises(KeyError), locked(tmp_path / "run"):
        raise KeyError
    assert os.listdir(locks) == []
    assert not (tmp_path / "shared").exists()
    monkeypatch.setenv("FEDORTHO_STATE", "/proc/none")
    with pytest.raises(FedOrthoError, match="set FEDORTHO_STATE to a writable directory"), locked(tmp_path / "run"):
        pass


def test_the_umask_is_respected_and_private_files_stay_private(tmp_path: Path) -> None:
    def mode(name: str) -> int:
        return (tmp_path / name).stat().st_mode & 0o777

    for umask, expected in ((0o077, 0o600), (0o022, 0o644), (0o002, 0o664)):
        before = os.umask(umask)
        try:
            write_json(tmp_path / "record.json", {})
            write_tensors(tmp_path / "weights", {"a": torch.zeros(2)})
            write_tensors(tmp_path / "undo", {"a": torch.zeros(2)}, mode=PRIVATE)
            copy_file(tmp_path / "undo", tmp_path / "copy")
        finally:
            os.umask(before)
        assert [mode(name) for name in ("record.json", "weights", "undo", "copy")] == [expected, expected, 0o600, 0o600]


def test_what_a_killed_process_left_is_removed_by_the_next_write_and_a_living_one_is_let_be(tmp_path: Path) -> None:
    left = tmp_path / ".x.json.tmp-killed"
    left.mkdir()
    (left / ".tmpAbCdEf").write_text("half of the weights")
    with replacing(tmp_path / "x.json") as first:
        assert not left.exists()
        with replacing(tmp_path / "x.json") as second:
            second.write_text("2")
        first.write_text("1")
    assert os.listdir(tmp_path) == ["x.json"]
    assert (tmp_path / "x.json").read_text() == "1"


@pytest.mark.parametrize(
    "text",
    [
        '{"a": NaN}',
        "[Infinity]",
        "[-1e999]",
        "1" * 5000,
        "[" * 100_000,
        '{"a":' * 100_000,
        '"\\ud800"',
        b'"\xff"',
        b"",
        b"\xff\xfe[\x00]\x00",
    ],
    ids=["nan", "infinity", "overflow", "digits", "nested", "deep", "surrogate", "latin", "empty", "utf-16"],
)
def test_json_that_is_none_is_refused(tmp_path: Path, text: str | bytes) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(BadCheckpoint, match="is not JSON") as refused:
        read_json(path)
    assert len(str(refused.value)) < 500


def test_only_regular_files_of_a_reasonable_size_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with (tmp_path / "large").open("wb") as stream:
        stream.truncate(1 << 40)
    for path in (tmp_path / "pipe", Path("/dev/zero"), tmp_path):
        with pytest.raises(BadCheckpoint, match=r"cannot be read: (it is a pipe or a device|Is a directory)"):
            read_json(path)
        with pytest.raises(BadCheckpoint, match=r"cannot be read: (it is a pipe or a device|Is a directory)"):
            file_digest(path)
        with pytest.raises(BadCheckpoint, match="is not a regular file"):
            read_tensors(path)
    with pytest.raises(BadCheckpoint, match="is larger than 64 MB"):
        read_json(tmp_path / "large")
    with pytest.raises(BadCheckpoint, match="null byte"):
        read_json(tmp_path / "zero\0byte")


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


@pytest.mark.parametrize("text", ['{"passes": true, "passes": false}', '[{"a": {"b": 1, "c": 2, "b": 1}}]'])
def test_a_key_that_stands_twice_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"has '(passes|b)' twice"):  # readers differ in which of them they take
        parse_json(text)
