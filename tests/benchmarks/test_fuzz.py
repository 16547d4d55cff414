"""A small part of `make fuzz`."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from doors import World, build_world
from fuzz import campaign
from result_files import read_results

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    place = tmp_path_factory.mktemp("fuzz")
    before = os.getcwd()
    os.chdir(place)
    logging.disable(logging.CRITICAL)
    yield build_world(place / "world")
    logging.disable(logging.NOTSET)
    os.chdir(before)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # hostile values make torch warn
def test_no_door_can_be_forced(world: World) -> None:
    counts = campaign(world, 400, seed=20261117)
    assert len(counts) > 30
    assert sum(count.cases for count in counts.values()) > 380
    assert {name: count.failures for name, count in counts.items() if count.failures} == {}


def test_the_campaign_found_nothing() -> None:
    total = read_results(RESULTS / "fuzz.json").more["total"]
    assert total["cases"] >= 20_000
    assert total["refused"] + total["accepted"] == total["cases"]
    assert [total[name] for name in ("tracebacks", "hangs", "forgeries")] == [0, 0, 0]
