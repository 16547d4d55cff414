"""Result files say where their rows come from and are read as records."""

from pathlib import Path
from typing import Any

import pytest
from result_files import add_row, read_results, write_results

from fedortho.errors import BadRecord
from fedortho.storage.files import read_json, write_json
from fedortho.storage.provenance import environment

RESULTS = sorted((Path(__file__).parents[2] / "benchmarks" / "results").glob("*.json"))


def test_rows_come_back_with_their_origin_and_the_keys_of_their_benchmark(tmp_path: Path) -> None:
    rows = [{"model": "vgg-mini", "forget": 0.5}]
    write_results(tmp_path / "a.json", "a test", "python a.py", rows, limits={"C1": 0.1})
    results = read_results(tmp_path / "a.json")
    assert (results.what, results.command, list(results.rows)) == ("a test", "python a.py", rows)
    assert results.environment == environment()
    assert results.more == {"limits": {"C1": 0.1}}
    assert read_json(tmp_path / "a.json")["limits"] == {"C1": 0.1}


def test_a_row_takes_the_place_of_the_one_with_its_key(tmp_path: Path) -> None:
    def add(model: str, value: int) -> None:
        row = {"model": model, "value": value}
        add_row(tmp_path / "a.json", row, ("model",), lambda each: each["model"], "a test", "python a.py")

    for model, value in (("b", 1), ("a", 2), ("b", 3)):
        add(model, value)
    assert [(row["model"], row["value"]) for row in read_results(tmp_path / "a.json").rows] == [("a", 2), ("b", 3)]


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_every_result_file_of_the_benchmarks_is_readable(path: Path) -> None:
    assert read_results(path).rows


@pytest.mark.parametrize(
    ("change", "telling"), [({"schema": 7}, "schema 7"), ({"rows": {}}, "rows"), ({"command": None}, "command")]
)
def test_another_file_is_refused_by_name(tmp_path: Path, change: dict[str, Any], telling: str) -> None:
    write_results(tmp_path / "a.json", "a test", "python a.py", [])
    write_json(tmp_path / "a.json", read_json(tmp_path / "a.json") | change)
    with pytest.raises(BadRecord, match=telling):
        read_results(tmp_path / "a.json")
    write_json(tmp_path / "a.json", [])
    with pytest.raises(BadRecord, match="Results"):
        read_results(tmp_path / "a.json")
