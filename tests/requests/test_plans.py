"""What the plan of a request tells: of erasing, of what cannot be served, and of a federation."""

from dataclasses import replace
from pathlib import Path

import pytest
from small import SETTINGS as FEDERATION

import fedortho as fo
from fedortho.data.request import ForgetRequest
from fedortho.methods.method import CannotServe
from fedortho.reports.summary import Report, facts_of
from fedortho.requests.judging import JudgeOptions
from fedortho.requests.levels import chosen_method, erasing_methods, level_method, plan_request
from fedortho.runs.record import Accuracies, ServedRecord
from fedortho.runs.run import Run
from fedortho.runs.settings import TrainSettings
from fedortho.runs.training import train_run

CLASS = ForgetRequest.parse("class:3")
SETTINGS = TrainSettings(data="digits", model="small:TinyNet", epochs=1, crop=0, threads=1, device="cpu")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train_run(tmp_path_factory.mktemp("plan") / "run", SETTINGS)


@pytest.mark.parametrize("flip", [0.5, 0.25, 0.0])
def test_where_the_training_is_not_known_it_is_told_that_images_are_flipped(
    run: Run, tmp_path: Path, flip: float
) -> None:
    imported = replace(run, settings=replace(run.settings, epochs=0, flip=0.5))
    method = chosen_method(imported, "regrow", changes={"flip": flip})
    for known, is_told in ((imported, flip > 0), (run, False)):
        plan = plan_request(known, CLASS, [("erase", method, tmp_path)], None, JudgeOptions("none"))
        told = f"10 passes, {flip:.0%} of the images flipped left to right; --set flip=0"
        assert (told in plan.lines()[1]) is is_told


def test_a_plan_that_trains_nothing_says_so(run: Run, tmp_path: Path) -> None:
    method = chosen_method(run, "regrow", changes={"epochs": 0})
    line = plan_request(run, CLASS, [("erase", method, tmp_path)], None, JudgeOptions("none")).lines()[1]
    assert "trained on the retain set) (0 epochs): cost not known" in line


def test_a_second_attempt_is_promised_only_where_a_stage_is_kept(run: Run, tmp_path: Path) -> None:
    assert erasing_methods(run, (1, 8, 8)) == [level_method(run, "erase")], "all of its stages are reset at once"
    steps = [("erase", level_method(run, "erase"), tmp_path)]
    line = plan_request(run, CLASS, steps, None, JudgeOptions("none"), until_passed=True).lines()[1]
    assert "all stages but the first, at least two, are reset" in line
    assert "if it fails and has kept a stage, once more with all stages reset" in line


def test_a_step_tells_the_stages_that_its_settings_reset_and_not_those_of_the_default(run: Run, tmp_path: Path) -> None:
    method = chosen_method(run, "regrow", changes={"stages": 2})
    line = plan_request(run, CLASS, [("erase", method, tmp_path)], None, JudgeOptions("none")).lines()[1]
    assert "the last 2 stages (all if there are no more) are reset, and the network is trained" in line
    assert "all stages but the first" not in line


def test_the_report_tells_the_stages_of_the_record_and_not_those_of_the_default(run: Run) -> None:
    shares = Accuracies(forget=0.0, retain=0.9, test=0.8)
    served = ServedRecord("class:3", "regrow", {"stages": 2, "frozen": False}, shares, shares, 0.0)
    page = Report(replace(run, record=replace(run.record, requests=(served,))), CLASS, None)
    assert facts_of(page)["Request"].startswith("class:3 at level erase: the last 2 stages (all if there are no more)")


def test_r2d_on_a_run_that_kept_nothing_is_refused_by_the_plan(run: Run, tmp_path: Path) -> None:
    steps = [("", chosen_method(run, "r2d"), tmp_path)]
    with pytest.raises(CannotServe, match=r"has none; train with --keep-epochs"):
        plan_request(run, CLASS, steps, None, JudgeOptions("none"))


def test_the_plan_of_a_federation_counts_passes_over_images_and_rounds(run: Run, tmp_path: Path) -> None:
    settings = replace(FEDERATION, rounds=100, fraction=0.1, epochs=2)
    assert (settings.image_passes, settings.passes.planned) == (20, 100)
    steps = [("hide", level_method(run, "hide"), tmp_path), ("", fo.make_method("finetune", {"epochs": 5}), tmp_path)]
    plan = plan_request(replace(run, settings=settings), CLASS, steps, None, JudgeOptions("none"))
    hide, finetune = (step.share_of_training for step in plan.steps)
    assert hide == pytest.approx(0.03 / 20), "a forward pass is over the images of all clients"
    assert finetune == pytest.approx(5 / 100), "a round of a method is a round of the training"
