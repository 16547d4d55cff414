import json
import logging
import os
import shutil
import time
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from threading import Timer

import pytest
from filelock import FileLock
from hypothesis import given, settings
from hypothesis import strategies as st
from journals import writer

import fedortho.storage.journal
from fedortho.errors import FedOrthoError
from fedortho.storage.files import canonical_json
from fedortho.storage.journal import (
    BadJournal,
    Head,
    JournalEntry,
    append_entry,
    check_journal,
    parse_entry,
    read_journal,
)


def lines_of(place: Path) -> list[bytes]:
    return (place / "journal.jsonl").read_bytes().splitlines(keepends=True)


def rewrite(place: Path, lines: list[bytes]) -> None:
    (place / "journal.jsonl").write_bytes(b"".join(lines))


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A journal of four entries."""
    append_entry(tmp_path, "received", "one", "class:3", before="a" * 64)
    append_entry(tmp_path, "executed", "one", "class:3", before="a" * 64, after="b" * 64, details={"seconds": 1.5})
    append_entry(tmp_path, "verified", "one", "class:3", details={"said": "ja, geht: é\n", "list": [1, None, True]})
    append_entry(tmp_path, "refused", "two", "client:0")
    return tmp_path


def test_entries_come_back_as_they_were_written_and_chained(place: Path) -> None:
    journal = check_journal(place)
    assert [entry.event for entry in journal.entries] == ["received", "executed", "verified", "refused"]
    assert [entry.number for entry in journal.entries] == [1, 2, 3, 4]
    assert journal.entries[1].details == {"seconds": 1.5}
    assert journal.entries[0].time.endswith("+00:00")
    for entry, line, next_ in zip(journal.entries, lines_of(place), journal.entries[1:], strict=False):
        body = json.loads(line)
        own, previous = body.pop("hash"), body.pop("previous")
        told = sha256(canonical_json(body).encode()).hexdigest()
        assert own == sha256(canonical_json([previous, told]).encode()).hexdigest() == entry.hash
        assert len(body["salt"]) == 32
        assert next_.previous == entry.hash
    assert journal.last == journal.head == Head(4, journal.entries[-1].hash)


def test_an_unknown_event_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FedOrthoError, match="no event 'done'; did you mean 'undone'"):
        append_entry(tmp_path, "done", "run", "class:3")
    assert os.listdir(tmp_path) == []


def test_an_old_journal_in_which_verified_meant_judged_is_whole_and_goes_on(tmp_path: Path) -> None:
    old = {"label": "FAILED C1; passed 3 of 6"}  # as it was written before there was an event of this name
    append_entry(tmp_path, "verified", "one", "class:3", details=old)
    append_entry(tmp_path, "judged", "one", "class:3", details=old | {"passes": False})
    journal = check_journal(tmp_path)
    assert [entry.event for entry in journal.entries] == ["verified", "judged"]
    assert "passes" not in journal.entries[0].details


def test_a_directory_without_a_journal_is_told(tmp_path: Path) -> None:
    with pytest.raises(BadJournal, match="there is no journal in"):
        check_journal(tmp_path)
    assert read_journal(tmp_path).entries == ()


def test_a_flip_of_every_third_byte_of_the_journal_and_its_head_is_found(place: Path) -> None:
    for name in ("journal.jsonl", "journal.head"):
        whole = (place / name).read_bytes()
        starts = [0, *(at + 1 for at, sign in enumerate(whole) if sign == 10)]
        for at in sorted({*range(0, len(whole), 3), *(start - 1 for start in starts[1:])}):
            (place / name).write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
            with pytest.raises(BadJournal) as told:
                check_journal(place)
            number = sum(start <= at for start in starts)
            is_joint = whole[at] == 10  # a line that lost its end
            assert name == "journal.head" or is_joint or f"entry {number} was changed" in str(told.value)
        (place / name).write_bytes(whole)
    check_journal(place)


def test_every_removal_repetition_and_exchange_of_lines_is_found_with_its_number(place: Path) -> None:
    lines = lines_of(place)
    for at in range(4):
        rewrite(place, lines[:at] + lines[at + 1 :])
        with pytest.raises(BadJournal, match=f"entry {at + 1} is missing"):
            check_journal(place)
        rewrite(place, lines[:at])
        with pytest.raises(BadJournal, match=f"entry {at + 1} is missing: the head names 4"):
            check_journal(place)
        for to in range(5):
            rewrite(place, [*lines[:to], lines[at], *lines[to:]])
            with pytest.raises(BadJournal, match=rf"(entry {to + 1} is missing|line {to + (at == to) + 1} repeats)"):
                check_journal(place)
        for other in range(at):
            swapped = lines.copy()
            swapped[at], swapped[other] = swapped[other], swapped[at]
            rewrite(place, swapped)
            with pytest.raises(BadJournal, match=f"entry {other + 1} is missing: entry {at + 1} stands in its place"):
                check_journal(place)
    (place / "journal.jsonl").unlink()
    with pytest.raises(BadJournal, match="entry 1 is missing"):
        check_journal(place)


def test_an_entry_that_was_rewritten_with_a_fitting_hash_breaks_the_chain_behind_it(place: Path) -> None:
    lines = lines_of(place)
    for at in range(4):
        value = json.loads(lines[at])
        forged = JournalEntry(**(value | {"request": "class:4", "hash": ""})).sealed()
        rewrite(place, [*lines[:at], f"{forged.line}\n".encode(), *lines[at + 1 :]])
        told = f"entry {at + 2} does not follow from entry {at + 1}" if at < 3 else "entry 4 was changed: the head"
        with pytest.raises(BadJournal, match=told):
            check_journal(place)


def test_an_entry_that_was_added_behind_the_head_is_found(place: Path) -> None:
    last = check_journal(place).entries[-1]
    forged = JournalEntry(5, last.time, "undone", "one", "class:3", None, None, {}, last.hash).sealed()
    rewrite(place, [*lines_of(place), f"{forged.line}\n".encode()])
    with pytest.raises(BadJournal, match="entry 5 was inserted: the head ends at entry 4"):
        check_journal(place)


@given(st.lists(st.integers(0, 3), max_size=7))
@settings(max_examples=150, deadline=None)
def test_only_the_lines_in_their_order_pass(order: list[int]) -> None:
    lines: list[bytes] = []
    previous = fedortho.storage.journal.START
    for number in range(1, 5):
        entry = JournalEntry(number, "now", "received", "run", f"class:{number}", None, None, {}, previous).sealed()
        lines.append(f"{entry.line}\n".encode())
        previous = entry.hash
    text, head = b"".join(lines[at] for at in order), Head(4, parse_entry(lines[3].strip()).hash)
    if order == [0, 1, 2, 3]:
        assert len(fedortho.storage.journal._examine(Path("j"), text, head).entries) == 4
    else:
        with pytest.raises(BadJournal, match=r"entry \d|line \d"):
            fedortho.storage.journal._examine(Path("j"), text, head)


def test_a_head_that_is_gone_is_told(place: Path) -> None:
    (place / "journal.head").unlink()
    with pytest.raises(BadJournal, match=r"journal\.head is missing"):
        check_journal(place)


def test_a_noted_hash_finds_what_rewriting_both_files_hides(
    place: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    noted = check_journal(place).last.hash
    append_entry(place, "undone", "one", "class:3")
    assert len(check_journal(place, noted).entries) == 5, "the journal may have grown since"
    forged = tmp_path_factory.mktemp("forged")
    for entry in check_journal(place).entries[:3]:
        append_entry(forged, entry.event, entry.run, entry.request)
    assert len(check_journal(forged).entries) == 3, "the chain alone cannot know"
    with pytest.raises(BadJournal, match=f"none of its 3 entries has the noted hash {noted[:16]}"):
        check_journal(forged, noted)


def test_a_line_torn_anywhere_is_moved_away_by_the_next_append(
    place: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    whole, head = lines_of(place), (place / "journal.head").read_bytes()
    written: list[bytes] = []

    def die(path: Path, text: bytes) -> None:
        written.append(text)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(fedortho.storage.journal, "_append", die)
        with pytest.raises(KeyboardInterrupt):
            append_entry(place, "undone", "one", "class:3")
    announced = (place / "journal.head").read_bytes()
    assert announced != head
    (line,) = written
    for torn in (line[:1], line[:100], line[:-1], b"\0" * 20, b'{"number":\n'):
        rewrite(place, [*whole, torn])
        (place / "journal.head").write_bytes(announced)
        assert len(check_journal(place).entries) == 4
        assert check_journal(place).torn == torn
        entry = append_entry(place, "verified", "one", "class:3")
        assert entry.number == 5
        assert len(check_journal(place).entries) == 5
        assert (place / "journal.torn").read_bytes().endswith(torn.rstrip(b"\n") + b"\n")
        assert "incomplete line after entry 4" in caplog.text
        caplog.clear()
    rewrite(place, [*whole, line[:50]])
    (place / "journal.head").write_bytes(head)
    with pytest.raises(BadJournal, match="entry 5 is an incomplete line"):
        append_entry(place, "verified", "one", "class:3")


def test_a_crash_between_the_line_and_the_head_loses_nothing(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = fedortho.storage.journal._write_head

    def die(directory: Path, head: Head) -> None:
        if head.announced is None:
            raise KeyboardInterrupt
        write(directory, head)

    with monkeypatch.context() as patched:
        patched.setattr(fedortho.storage.journal, "_write_head", die)
        with pytest.raises(KeyboardInterrupt):
            append_entry(place, "undone", "one", "class:3")
    assert [entry.event for entry in check_journal(place).entries][4:] == ["undone"]
    append_entry(place, "received", "one", "class:5")
    assert [entry.request for entry in check_journal(place).entries][4:] == ["class:3", "class:5"]


def test_a_broken_chain_is_not_extended(place: Path) -> None:
    rewrite(place, lines_of(place)[1:])
    before = (place / "journal.jsonl").read_bytes()
    with pytest.raises(BadJournal, match="entry 1 is missing"):
        append_entry(place, "received", "one", "class:5")
    assert (place / "journal.jsonl").read_bytes() == before


def test_processes_that_write_at_once_and_one_killed_among_them_leave_a_whole_journal(tmp_path: Path) -> None:
    steady = [writer(tmp_path, name, 10) for name in ("a", "b")]
    killed, told = writer(tmp_path, "killed", 10_000)
    for _ in range(4):
        told.recv()
    time.sleep(0.01)
    killed.kill()
    for process, _ in steady:
        process.join(timeout=60)
        assert process.exitcode == 0
    killed.join()
    journal = check_journal(tmp_path)
    for name in ("a", "b"):
        mine = [entry.request for entry in journal.entries if entry.run == name]
        assert mine == [f"samples:{at}" for at in range(10)], "each writer's entries are all there, in its order"
    assert sum(entry.run == "killed" for entry in journal.entries) >= 4, "what an append returned from is on disk"


def test_a_writer_waits_as_long_as_it_takes_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(fedortho.storage.journal, "NOTICE", 0.05)
    monkeypatch.setattr(fedortho.storage.journal.logger, "warning", lambda text, *given: told.append(text % given))
    lock = FileLock(tmp_path / ".journal.lock", is_singleton=False, thread_local=False)
    lock.acquire()
    Timer(0.4, lock.release).start()
    append_entry(tmp_path, "received", "run", "class:3")
    assert len(check_journal(tmp_path).entries) == 1
    assert len(told) > 2
    assert f"waiting for the journal in {tmp_path}" in told[0]


@pytest.mark.slow
def test_twenty_processes_that_write_at_once_lose_nothing(tmp_path: Path) -> None:
    writers = [writer(tmp_path, f"w{number}", 4) for number in range(20)]
    for process, _ in writers:
        process.join(timeout=100)
        assert process.exitcode == 0
    entries = check_journal(tmp_path).entries
    assert len(entries) == 80
    for number in range(20):
        mine = [entry.request for entry in entries if entry.run == f"w{number}"]
        assert mine == [f"samples:{at}" for at in range(4)], "all are there, in the order of the writer"


def test_a_reader_meets_a_whole_journal_while_others_write(tmp_path: Path) -> None:
    append_entry(tmp_path, "received", "first", "class:3")
    process, told = writer(tmp_path, "busy", 25)
    seen = 0
    while not told.poll() or process.is_alive():
        seen, before = len(check_journal(tmp_path).entries), seen
        assert seen >= before
    assert len(check_journal(tmp_path).entries) == 26


def test_a_journal_that_is_gone_does_not_begin_anew_in_silence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    append_entry(tmp_path, "received", "first", "class:3")
    head = check_journal(tmp_path).last
    for name, record in (("first", {"requests": []}), ("second", {"requests": [{"request": "class:3"}]}), ("odd", [])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text(json.dumps(record))
    (tmp_path / "journal.jsonl").unlink()
    (tmp_path / "journal.head").unlink()
    with pytest.raises(BadJournal, match=r"no journal in .*, but runs there have served requests \(second\)"):
        check_journal(tmp_path)
    with pytest.raises(BadJournal, match="but its entry 1 was published: it was removed"):
        check_journal(tmp_path, head)
    with caplog.at_level(logging.WARNING, "fedortho"):
        append_entry(tmp_path, "received", "second", "class:5")
    assert "a journal begins in" in caplog.text
    begun, received = check_journal(tmp_path).entries
    assert (begun.event, begun.details) == ("begun", {"runs": ["second"]})
    assert received.event == "received"
    append_entry(tmp_path, "received", "second", "class:6")
    assert [entry.event for entry in check_journal(tmp_path).entries] == ["begun", "received", "received"]


def test_whoever_has_seen_a_later_head_finds_a_rollback(place: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    older = tmp_path_factory.mktemp("older")
    shutil.copytree(place, older, dirs_exist_ok=True)
    append_entry(place, "undone", "one", "class:3")
    seen = check_journal(place).last
    assert check_journal(place, seen).last == seen
    check_journal(older)
    with pytest.raises(BadJournal, match="has 4 entries, but entry 5 was published: the last were removed"):
        check_journal(older, seen)
    append_entry(older, "received", "one", "class:7")
    with pytest.raises(BadJournal, match="entry 5 is not the published one"):
        check_journal(older, seen)


def test_a_clock_that_runs_backwards_is_noted(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock:
        @staticmethod
        def now(_: object) -> datetime:
            return datetime(2001, 1, 1, tzinfo=UTC)

    told: list[str] = []
    assert check_journal(place).backward == []
    monkeypatch.setattr(fedortho.storage.journal.logger, "warning", lambda text, *given: told.append(text % given))
    monkeypatch.setattr(fedortho.storage.journal, "datetime", Clock)
    append_entry(place, "undone", "one", "class:3")
    append_entry(place, "undone", "one", "class:3")
    assert [entry.number for entry in check_journal(place).backward] == [5]
    assert len(told) == 1
    assert told[0].startswith("the clock ran backwards: entry 4")


def test_a_place_that_cannot_be_written_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    with pytest.raises(BadJournal, match="cannot be written"):
        append_entry(tmp_path / "file", "received", "run", "class:3")


def test_a_journal_without_schema_numbers_is_whole_keeps_its_lines_and_goes_on(tmp_path: Path) -> None:
    for name in ("journal.jsonl", "journal.head"):  # as fedortho 0.1.0 wrote them
        shutil.copyfile(Path(__file__).parent / "schema1" / name, tmp_path / name)
    old = lines_of(tmp_path)
    assert [entry.schema for entry in check_journal(tmp_path).entries] == [1, 1]
    append_entry(tmp_path, "undone", "two", "class:3")
    assert [entry.schema for entry in check_journal(tmp_path).entries] == [1, 1, 3]
    assert lines_of(tmp_path)[:2] == old
    assert f"{check_journal(tmp_path).entries[0].line}\n".encode() == old[0]
    rewrite(tmp_path, [old[0].replace(b"class:3", b"class:4"), *lines_of(tmp_path)[1:]])
    with pytest.raises(BadJournal, match="entry 1 was changed"):
        check_journal(tmp_path)


@pytest.mark.parametrize(
    ("change", "error", "telling"),
    [
        ({"number": True}, ValueError, "number"),
        ({"before": 3}, ValueError, "before"),
        ({"colour": "blue"}, ValueError, "colour"),
        ({"schema": 4}, BadJournal, "schema 4"),
        ({"schema": True}, BadJournal, "schema True"),
        ({"schema": 0}, BadJournal, "schema 0"),
    ],
)
def test_an_entry_with_a_fitting_hash_and_other_keys_or_types_is_no_entry(
    place: Path, change: dict[str, object], error: type[Exception], telling: str
) -> None:
    value = json.loads(lines_of(place)[0]) | change
    value["hash"] = fedortho.storage.journal._hash(value)
    with pytest.raises(error, match=telling):
        parse_entry(canonical_json(value).encode())
