"""Limits come from a calibration that one command repeats."""

import importlib
import json
from itertools import permutations
from pathlib import Path
from types import ModuleType

import pytest

from fedortho.audits import AUDITS, copies, relearn
from fedortho.data.request import ForgetRequest
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
    originals = [row["original"] for row in saved["rows"]]
    assert max(originals.count(name) for name in originals) >= 20, "all pairs of five networks"
    limits = {limit.name: limit.value for name in AUDITS if name != "C4" for limit in AUDITS[name].limits}
    assert limits == saved["limits"] == calibration.limits_of(saved["rows"])


def test_a_limit_is_the_proposal_unless_retrained_models_need_more(calibration: ModuleType) -> None:
    rows = [{"values": dict.fromkeys(calibration.PROPOSED) | {"probe": gap}} for gap in (0.01, 0.0601, -0.3)]
    rows[0]["values"]["speed-up"] = 1.2
    assert calibration.limits_of(rows) == {**calibration.PROPOSED, "probe": 0.061}


@pytest.mark.slow
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
    words = ["--data-dir", "", "--networks", str(tmp_path), "--runs", "original", "--request", "class:3"]
    calibration.main([*words, "--out", str(out), "--relearning"])
    saved = json.loads(out.read_text())
    rows, models = saved["rows"], saved["models"]
    names = {model["name"]: model for model in models.values()}
    assert [(row["unlearned"], row["reference"]) for row in rows] == list(permutations(sorted(names), 2))
    assert saved["limits"] == calibration.limits_of(rows)
    first, back = rows[0], next(row for row in rows if row["unlearned"] == rows[0]["reference"])
    assert first["values"]["probe"] == pytest.approx(-back["values"]["probe"])  # the pair the other way round
    depth, recall = names[first["unlearned"]]["probe"][-1]
    assert depth == "fc"
    assert first["values"]["probe"] == pytest.approx(recall - names[first["reference"]]["probe"][-1][1])
    assert None not in (first["values"]["speed-up"], first["values"]["norms"])
    assert "distance" in first["values"], "None where the original is as close as references are to each other"
    pair = (first["unlearned"], first["reference"])
    kept = {digest: model for digest, model in models.items() if model["name"] in pair}
    out.write_text(json.dumps(saved | {"models": kept, "rows": []}))
    calibration.main([*words, "--out", str(out)])
    again = json.loads(out.read_text())["rows"]
    assert [row["values"]["probe"] for row in again] == [row["values"]["probe"] for row in rows]
    assert again[0]["values"]["speed-up"] is not None, "what was measured before is kept"


def test_pairs_are_compared_at_each_depth_and_behind_each_reset_tail(calibration: ModuleType) -> None:
    def measured(shift: float) -> dict[str, object]:
        probe = [["a", 0.5 + shift], ["b", 0.5], ["c", 0.5 - shift], ["fc", 0.5 - 2 * shift]]
        tails = {"b": {"50": {"unlearned": 0.6 + shift}}, "c": {"50": {"unlearned": 0.6 + 3 * shift}}}
        return {"probe": probe, "norms": {"n": 0.0}, "prototype": 0.1, "reset tail": tails, "copies": 0.0}

    values = calibration.gaps(measured(0.1), measured(0.0))
    named = {"entry probe": 0.1, "last entry probe": -0.1, "probe": -0.2}
    named |= {"reset tail": 0.1, "last reset tail": 0.3}
    assert {name: pytest.approx(values[name]) for name in named} == named
    assert values["speed-up"] is None
