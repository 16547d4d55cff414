"""A small part of `make chaos`."""

from pathlib import Path

import pytest
from chaos import COMMANDS, FAILURES, build_base, kill_everywhere
from result_files import read_results

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("chaos")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("FEDORTHO_CACHE", str(place / "world" / "cache"))
        build_base(place / "world")
    return (place / "world").rename(place / "base")


@pytest.mark.slow  # kills of `forget` at every file operation are in requests/test_transaction.py
@pytest.mark.parametrize(("name", "every"), [("bundle", 2), ("key", 2), ("undo", 6), ("compare again", 4)])
def test_a_command_that_is_killed_is_completed_by_the_same_command(
    base: Path, monkeypatch: pytest.MonkeyPatch, name: str, every: int
) -> None:
    at = base.with_name("world")
    monkeypatch.setenv("FEDORTHO_CACHE", str(at / "cache"))
    tally = kill_everywhere(name, base, at, every)
    assert tally.completed >= 2
    assert tally.failures == []


def test_the_campaign_found_nothing() -> None:
    results = read_results(RESULTS / "chaos.json")
    assert {row["command"] for row in results.rows} == set(COMMANDS)
    assert all(row["completed"] == row["states"] <= 2 * row["operations"] for row in results.rows)
    assert [row["command"] for row in results.rows if any(row[kind] for kind in FAILURES)] == []
