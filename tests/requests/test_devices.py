"""The device that a command names is that of everything it trains, whatever device the run was trained on."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedortho.audits.qualification import ClassTrial
from fedortho.errors import BadSetting
from fedortho.requests import qualifying, shadowing
from fedortho.requests.climbing import forget_until_passed
from fedortho.requests.forgetting import forget_run
from fedortho.requests.judging import JudgeOptions, judge_run
from fedortho.requests.qualifying import QualifyOptions, qualify_run
from fedortho.requests.references import finished_runs
from fedortho.requests.run_context import RunContext
from fedortho.requests.tuning import tune
from fedortho.runs.run import Run
from fedortho.runs.settings import TrainSettings
from fedortho.runs.training import train_run

SETTINGS = TrainSettings(data="digits", model="small:TinyNet", epochs=1, threads=1, crop=0, flip=0.0, device="cpu")


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run that says it was trained on a device which no machine has."""
    trained = train_run(tmp_path / "run", SETTINGS)
    return replace(trained, settings=replace(trained.settings, device="cuda:99"))


def devices_of_references(run: Run) -> set[str]:
    return {each.settings.device for each in finished_runs(run.path.parent / "references")}


@pytest.mark.slow
def test_references_and_counterfactuals_are_trained_on_the_device_of_the_judging(run: Run, tmp_path: Path) -> None:
    forgot = forget_run(run, "class:3", "finetune", out=tmp_path / "forgot", device="cpu").run
    assert forgot is not None
    verdict = judge_run(forgot, options=JudgeOptions(device="cpu", retrain=True, only=("C6",)), original=run)
    assert devices_of_references(run) == {"cpu"}
    assert "counterfactual" in verdict.digests


def test_climbing_trains_its_reference_on_the_given_device(run: Run, tmp_path: Path) -> None:
    options = JudgeOptions(device="cpu", retrain=True, only=("C6",))
    served, _ = forget_until_passed(run, "class:3", options, out=tmp_path / "new")
    assert served.run is not None
    assert devices_of_references(run) == {"cpu"}


def test_a_qualification_computes_on_the_given_device(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[RunContext] = []

    def failed(context: RunContext, *words: Any) -> ClassTrial:
        seen.append(context)
        return ClassTrial(words[2], words[3], {"C1": "FAIL"}, "", (), 0.0, 0.0, 0.0, 1.0, 1.0)

    monkeypatch.setattr(qualifying, "_trial", failed)
    qualify_run(run, QualifyOptions(classes=1, device="cpu"))
    assert {(context.device, context.run.settings.device) for context in seen} == {(torch.device("cpu"), "cpu")}


def test_shadow_models_are_trained_on_the_given_device(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    named: list[str] = []

    def stop(name: str) -> None:
        named.append(name)
        raise BadSetting("no model is trained in this test")

    monkeypatch.setattr(shadowing, "choose_device", stop)
    for method in ("hide", "r2d"):
        with pytest.raises(BadSetting, match="in this test"):
            forget_run(run, "samples:1", method, shadows=8, device="cpu")
    with pytest.raises(BadSetting, match="in this test"):
        tune(run.at(device="cpu"), "samples:1", ["finetune"], on="samples:2", shadows=8)
    assert named == ["cpu"] * 3
