"""What the campaign of forged bundles found; a small part of it is in tests/evidence/test_claims.py."""

from pathlib import Path

from forging import another, changed, values_of
from result_files import read_results

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def test_every_value_is_forged_once_and_nothing_else_changes() -> None:
    value = {"a": [1, {"b": None}], "c": "hide"}
    places = dict(values_of(value))
    assert places == {("a", 0): 1, ("a", 1, "b"): None, ("c",): "hide"}
    assert changed(value, ("a", 1, "b"), another(None)) == {"a": [1, {"b": 0.5}], "c": "hide"}
    assert changed(value, ("a", 0), remove=True) == {"a": [{"b": None}], "c": "hide"}
    assert value == {"a": [1, {"b": None}], "c": "hide"}, "the honest file stays"
    assert all(another(old) != old for old in (True, 0, -1e30, float("-inf"), 0.5, "x", "0" * 64, None))


def test_no_forgery_was_accepted() -> None:
    rows = read_results(RESULTS / "forging.json").rows
    assert {row["file"] for row in rows} == {
        *("request.json", "entry.json", "settings.json", "digests.json", "environment.json", "verdict.json")
    }
    assert [row["places"] for row in rows if row["accepted"] or row["places"]] == []
    assert all(row["cases"] == row["refused"] + row["told"] + row["same"] > 0 for row in rows)
