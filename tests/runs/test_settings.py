"""Who trains in a round, and which rounds are kept."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small import SETTINGS

from fedortho.errors import BadCheckpoint, FedOrthoError
from fedortho.runs.record import DataRecord, TrainingRecord
from fedortho.runs.run import open_run, settings_of
from fedortho.runs.settings import FederateSettings, Federation, is_kept, sample_clients
from fedortho.storage.provenance import environment
from fedortho.storage.settings import as_mapping


@given(st.integers(1, 40), st.floats(0.02, 1), st.integers(0, 10**6), st.integers(0, 99), st.data())
def test_whoever_would_not_be_drawn_may_be_absent(
    clients: int, fraction: float, seed: int, turn: int, data: st.DataObject
) -> None:
    federation = Federation(clients=clients, fraction=fraction)
    drawn = sample_clients(range(clients), federation, seed, turn)
    assert len(drawn) == max(round(fraction * clients), 1)
    others = sorted(set(range(clients)) - set(drawn))
    absent = data.draw(st.sets(st.sampled_from(others)) if others else st.just(set()))
    present = [client for client in range(clients) if client not in absent]
    assert sample_clients(present, federation, seed, turn) == drawn


def test_a_client_that_leaves_is_replaced_by_one_other() -> None:
    federation = Federation(clients=20, fraction=0.2)
    drawn = sample_clients(range(20), federation, 0, 0)
    without = sample_clients([client for client in range(20) if client != drawn[0]], federation, 0, 0)
    assert set(drawn) - set(without) == {drawn[0]}
    assert len(without) == len(drawn)


def test_records_of_before_keep_the_draw_that_they_had() -> None:
    settings = {key: value for key, value in as_mapping(SETTINGS).items() if key not in ("draw", "keep-rounds")}
    data = DataRecord("digits", "", ("0", "1"), 1, 1, 1)
    before = settings_of(TrainingRecord(settings=settings, data=data, environment=environment("cpu")), Path())
    assert before == replace(SETTINGS, draw=1)
    old = Federation(clients=10, fraction=0.3, draw=1)
    assert [sample_clients(range(10), old, 0, turn) for turn in range(2)] == [[0, 3, 7], [1, 3, 4]]


@pytest.mark.parametrize(
    "changes", [{"draw": 3}, {"keep_rounds": "some"}, {"keep_rounds": "0"}, {"without": "client:4"}, {"epochs": -1}]
)
def test_settings_that_say_nothing_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(
        FedOrthoError, match=r"draw|keep-rounds|no client 4; clients run 0 to 3|epochs must be at least 0"
    ):
        replace(SETTINGS, **changes)  # type: ignore[arg-type]


def test_no_round_is_kept_unless_asked_for() -> None:
    assert not FederateSettings().keep_rounds
    assert not any(is_kept("", number) for number in range(9))
    assert all(is_kept("all", number) for number in range(1, 9))


def test_a_path_that_is_no_run_is_refused_with_what_it_may_be(tmp_path: Path) -> None:
    (tmp_path / "plain.pt").write_bytes(b"weights")
    (tmp_path / "clothes").mkdir()
    (tmp_path / "clothes" / "run.json").write_text("{}")
    for name, advice in {
        "plain.pt": "fedortho import .*plain.pt --model MODEL",
        "cloths": r"did you mean .*clothes\?",
        "zzz": "fedortho train --out .*zzz",
    }.items():
        with pytest.raises(BadCheckpoint, match=advice):
            open_run(tmp_path / name)
