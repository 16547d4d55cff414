"""Records survive JSON; whatever else stands in a file is refused by name."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest

from fedortho.errors import BadRecord
from fedortho.storage.records import Migration, Scalar, from_json, read_record, to_json, write_record


@dataclass(frozen=True)
class Part:
    digest: str
    share: float = 1.0


def _renamed(value: dict[str, Any]) -> dict[str, Any]:
    return {("batch-size" if key == "batch" else key): each for key, each in value.items()}


@dataclass(frozen=True)
class Whole:
    schema: ClassVar[int] = 2
    migrations: ClassVar[Mapping[int, Migration]] = {1: _renamed}

    batch_size: int
    names: tuple[str, ...]
    part: Part
    parts: tuple[Part, ...] = ()
    is_done: bool = False
    parent: str | None = None
    settings: Mapping[str, Scalar] = field(default_factory=dict)
    sizes: Mapping[int, int] = field(default_factory=dict)
    status: Literal["training", "done"] = "done"
    pair: tuple[int, float] = (0, 0.0)
    rate: float | None = None


WHOLE = Whole(3, ("a", "é"), Part("f0"), (Part("f1", 0.5),), True, "f2", {"lr": 1, "on": True}, {7: 8}, pair=(1, 2.0))
LEAST = {"schema": 2, "batch-size": 3, "names": [], "part": {"digest": "f0"}}


def test_a_record_survives_its_file(tmp_path: Path) -> None:
    write_record(tmp_path / "a.json", WHOLE)
    assert read_record(Whole, tmp_path / "a.json") == WHOLE
    written = json.loads((tmp_path / "a.json").read_text())
    assert written["schema"] == 2
    assert written["batch-size"] == 3
    assert written["parts"] == [{"digest": "f1", "share": 0.5}]


def test_defaults_may_be_missing_and_a_whole_number_is_a_float_but_stays_one_where_both_fit() -> None:
    found = from_json(Whole, LEAST | {"part": {"digest": "f", "share": 1}, "rate": 2, "settings": {"n": 2}}, "a")
    assert found.parent is None
    assert type(found.part.share) is type(found.rate) is float
    assert type(found.settings["n"]) is int


@pytest.mark.parametrize(
    ("change", "telling"),
    [
        ({"batch-size": True}, "batch-size"),
        ({"batch-size": 3.0}, "batch-size"),
        ({"batch-size": None}, "batch-size"),
        ({"names": "abc"}, "names"),
        ({"names": ["a", 3]}, r"names\[1\]"),
        ({"part": ["f0"]}, "part"),
        ({"part": {"digest": "f0", "other": 1}}, "part has unknown keys: other"),
        ({"part": {}}, "part lacks digest"),
        ({"parts": [{"digest": 1}]}, r"parts\[0\].digest"),
        ({"is-done": 1}, "is-done"),
        ({"parent": 3}, "parent"),
        ({"settings": {"lr": [1]}}, r"settings\.lr"),
        ({"settings": []}, "settings"),
        ({"sizes": {"x": 1}}, "whole numbers"),
        ({"status": "lost"}, "status"),
        ({"pair": [1]}, "pair"),
        ({"batch_size": 3}, "batch_size"),
        ({"schema": 3}, "schema 3"),
        ({"schema": "2"}, "schema '2'"),
        ({"schema": None}, "schema None"),
    ],
)
def test_what_does_not_fit_is_refused_with_file_and_key(change: dict[str, Any], telling: str) -> None:
    with pytest.raises(BadRecord, match=telling) as error:
        from_json(Whole, LEAST | change, "some/run.json")
    assert str(error.value).startswith("some/run.json")


@pytest.mark.parametrize("value", [None, 3, [], "text"])
def test_only_a_mapping_is_a_record(value: Any) -> None:
    with pytest.raises(BadRecord, match="Whole"):
        from_json(Whole, value, "a")


def test_every_missing_key_is_named() -> None:
    with pytest.raises(BadRecord, match="batch-size, names, part"):
        from_json(Whole, {"schema": 2}, "a")


def test_an_older_schema_is_migrated_and_true_is_not_one() -> None:
    old = {"batch": 3, "names": [], "part": {"digest": "f0"}}
    assert from_json(Whole, old | {"schema": 1}, "a").batch_size == 3
    with pytest.raises(BadRecord, match="schema True"):
        from_json(Whole, old | {"schema": True}, "a")
    with pytest.raises(BadRecord, match="schema 0"):
        from_json(Whole, old | {"schema": 0}, "a")


def test_a_damaged_older_record_is_refused_where_its_migration_stumbles() -> None:
    @dataclass(frozen=True)
    class Moved:
        schema: ClassVar[int] = 2
        migrations: ClassVar[Mapping[int, Migration]] = {1: lambda value: {"name": value["title"]}}

        name: str

    assert from_json(Moved, {"schema": 1, "title": "a"}, "a") == Moved("a")
    with pytest.raises(BadRecord, match="title"):
        from_json(Moved, {"schema": 1}, "a")


def test_a_record_without_schema_has_no_such_key() -> None:
    assert to_json(Part("f")) == {"digest": "f", "share": 1.0}
    with pytest.raises(BadRecord, match="schema"):
        from_json(Part, {"schema": 1, "digest": "f"}, "a")
