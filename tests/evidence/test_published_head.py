import json
import shutil
from pathlib import Path

import pytest

from fedortho.errors import BadRecord, FedOrthoError
from fedortho.evidence.published_head import publish_head, read_head
from fedortho.evidence.signature import BadSignature, make_key
from fedortho.storage.journal import BadJournal, append_entry, check_journal


@pytest.fixture
def place(tmp_path: Path) -> Path:
    for number in range(3):
        append_entry(tmp_path / "runs", "received", "one", f"class:{number}")
    return tmp_path


def test_a_head_is_published_signed_and_found_in_the_journal_that_grew(place: Path) -> None:
    mine, _ = make_key(place / "me.pem")
    head = publish_head(place / "runs", place / "head.json", place / "me.pem")
    assert read_head(place / "head.json", mine) == head
    assert head.head == check_journal(place / "runs").last
    append_entry(place / "runs", "undone", "one", "class:0")
    assert len(check_journal(place / "runs", read_head(place / "head.json").head).entries) == 4
    assert publish_head(place / "runs", place / "head.json").number == 4


def test_a_rollback_is_found_by_the_head_and_the_head_is_not_replaced_by_an_earlier_one(place: Path) -> None:
    shutil.copytree(place / "runs", place / "older")
    append_entry(place / "runs", "undone", "one", "class:0")
    publish_head(place / "runs", place / "head.json")
    before = (place / "head.json").read_bytes()
    with pytest.raises(BadJournal, match="has 3 entries, but entry 4 was published: the last were removed"):
        publish_head(place / "older", place / "head.json")
    assert (place / "head.json").read_bytes() == before


def test_a_changed_head_and_one_of_another_key_are_refused(place: Path) -> None:
    _, other = make_key(place / "me.pem"), make_key(place / "other.pem")[0]
    publish_head(place / "runs", place / "head.json", place / "me.pem")
    with pytest.raises(BadSignature, match="is signed by the key"):
        read_head(place / "head.json", other)
    whole = json.loads((place / "head.json").read_text())
    for change in ({"number": 2}, {"hash": "0" * 64}, {"time": "2001"}, {"signature": "00"}, {"signature": None}):
        (place / "head.json").write_text(json.dumps(whole | change))
        with pytest.raises(BadSignature, match=r"head\.json was changed"):
            read_head(place / "head.json")
    (place / "head.json").write_text(json.dumps(whole | {"signer": None, "signature": None}))
    with pytest.raises(BadSignature, match="is not signed"):
        read_head(place / "head.json", other)
    for change in ({"schema": True}, {"number": True}, {"number": 0}, {"hash": "0" * 63}, {"hash": "G" * 64}):
        (place / "head.json").write_text(json.dumps(whole | change))
        with pytest.raises(BadRecord, match=next(iter(change)) if "number" not in change else "number|entry 0"):
            read_head(place / "head.json")


def test_an_empty_place_has_no_head(tmp_path: Path) -> None:
    with pytest.raises(FedOrthoError, match="there is no journal in"):
        publish_head(tmp_path, tmp_path / "head.json")
