"""How a run's membership audit gets its shadows."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small import SETTINGS

from fedortho.audits.membership import MEMBERSHIP
from fedortho.audits.result import AuditResult
from fedortho.data.request import ForgetRequest
from fedortho.evaluation.case import Case
from fedortho.requests.judging import shadow_plan, shadow_recipe
from fedortho.runs.record import Accuracies, ServedRecord
from fedortho.runs.run import Run
from fedortho.runs.settings import TrainSettings
from fedortho.runs.training import train_run

HOW = TrainSettings(
    data="digits", model="small:TinyNet", epochs=1, batch_size=50, lr=0.1, split_seed=0, threads=1, crop=0, ortho=0.0
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train_run(tmp_path_factory.mktemp("runs") / "original", HOW)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shadows")


def audited(run: Run, place: Path, method: str, settings: dict[str, Any]) -> AuditResult:
    model, data = run.load_model(), run.load_data()
    case = Case(model, model, (), data, ForgetRequest.parse("class:3"))
    nothing = Accuracies(0.0, 0.0, 0.0)
    served = ServedRecord("class:3", method, settings, before=nothing, after=nothing, retain_paid=0.0)
    plan = shadow_plan(run, served, place, 8, torch.device("cpu"))
    return MEMBERSHIP(replace(case, shadows=plan), budget="full")


def test_shadows_forget_by_methods_that_need_new_networks(run: Run, place: Path) -> None:
    taught = audited(run, place, "bad-teacher", {"epochs": 1})
    assert 0 < taught.details["AUC"] < 1
    retrained = audited(run, place, "retrain", {"epochs": 1000, "batch_size": 50, "lr": 0.1, "crop": 0, "ortho": 0.0})
    assert retrained.details["shadows"] == taught.details["shadows"], "shadows are those of the run, not of a method"
    assert retrained.details["settings"]["recipe"]["epochs"] == 1, "or this test would take hours"


def test_shadows_are_trained_by_the_recipe_of_the_run_and_kept_apart_from_others(run: Run, place: Path) -> None:
    first = audited(run, place, "logit-mask", {}).details
    assert first["settings"]["recipe"] == vars(replace(HOW.recipe, seed=0))
    other = replace(run, settings=replace(run.settings, lr=0.02))
    assert audited(other, place, "logit-mask", {}).details["shadows"] != first["shadows"]
    again = replace(run, settings=replace(run.settings, seed=9))
    assert audited(again, place, "logit-mask", {}).details["shadows"] == first["shadows"]


def test_shadows_pass_over_the_images_as_often_as_the_run_did_but_at_most_six_times() -> None:
    assert shadow_recipe(replace(HOW, epochs=4)).epochs == 4
    assert shadow_recipe(replace(HOW, epochs=60)) == replace(HOW.recipe, epochs=6)
    assert shadow_recipe(replace(HOW, epochs=0)).epochs == 6, "of an imported model nothing is known"
    federated = replace(SETTINGS, rounds=3, epochs=1, lr=0.3)
    assert (shadow_recipe(federated).epochs, shadow_recipe(federated).lr) == (3, 0.3)
