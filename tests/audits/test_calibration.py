"""Limits come from a calibration that one command repeats."""

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest

from fedortho.audits import AUDITS, copies, relearn
from fedortho.data.request import ForgetRequest
from fedortho.errors import BadCheckpoint
from fedortho.requests.references import reference_name, reference_settings, train_reference
from fedortho.runs.settings import TrainSettings
from fedortho.runs.training import train_run

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
CALIBRATION = BENCHMARKS / "results" / "calibration.json"


@pytest.fixture
def calibration(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("calibration")


def test_the_limits_are_those_of_the_calibration_or_else_the_proposals(calibration: ModuleType) -> None:
    saved = json.loads(CALIBRATION.read_text())
    seeds = set(saved["about"]["references"])
    assert len(seeds) >= 5
    assert len(saved["rows"]) == len(seeds) * (len(seeds) - 1)
    limits = {limit.name: limit.value for name in AUDITS if name != "C4" for limit in AUDITS[name].limits}
    assert limits == saved["limits"] == calibration.limits_of(saved["rows"])


def test_a_limit_is_the_proposal_unless_retrained_models_need_more(calibration: ModuleType) -> None:
    rows = [{"values": dict.fromkeys(calibration.PROPOSED) | {"probe": gap}} for gap in (0.01, 0.0601, -0.3)]
    rows[0]["values"]["speed-up"] = 1.2
    assert calibration.limits_of(rows) == {**calibration.PROPOSED, "probe": 0.061}


def test_one_command_calibrates_and_goes_on_where_it_was_stopped(
    calibration: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relearn, "STEPS", 2)
    monkeypatch.setattr(copies, "COPIES", {"fp16": copies.halved})  # exporting takes seconds
    settings = TrainSettings(data="digits", model="small:TinyNet", epochs=2, batch_size=64, threads=1, crop=0, flip=0.0)
    run, asked = train_run(tmp_path / "original", settings), ForgetRequest.parse("class:3")
    for seed in (0, 1, 2):
        wanted = reference_settings(run, asked, seed=seed)
        train_reference(tmp_path, reference_name(run, asked, wanted), wanted)
    out = tmp_path / "calibration.json"
    words = [
        "--data-dir",
        "",
        "--networks",
        str(tmp_path),
        "--run",
        "original",
        "--request",
        "class:3",
        "--out",
        str(out),
    ]
    calibration.main([*words, "--seeds", "0,1,2"])
    saved = json.loads(out.read_text())
    rows = saved["rows"]
    assert [(row["unlearned"], row["reference"], row["second"]) for row in rows] == [
        *((0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0))
    ]
    assert saved["limits"] == calibration.limits_of(rows)
    assert rows[0]["values"]["probe"] == pytest.approx(-rows[2]["values"]["probe"])  # the pair the other way round
    assert set(rows[0]["outcomes"].values()) <= {"PASS", "FAIL", "INCONCLUSIVE", "NOT RUN"}
    out.write_text(json.dumps(saved | {"rows": rows[:4]}))
    calibration.main([*words, "--seeds", "0,1,2"])
    again = json.loads(out.read_text())["rows"]
    assert [row["values"] for row in again] == [row["values"] for row in rows]
    with pytest.raises(BadCheckpoint, match="seed 7"):
        calibration.main([*words, "--seeds", "0,1,7"])
