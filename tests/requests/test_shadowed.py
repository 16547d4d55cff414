"""How a run gets shadow models: for its membership audit, and for the limit of clients and samples."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import told
from small import SETTINGS

from fedortho.audits.membership import MEMBERSHIP
from fedortho.audits.result import AuditResult
from fedortho.data.request import ForgetRequest
from fedortho.errors import BadSetting
from fedortho.evaluation.case import Case
from fedortho.models.predictions import logits_of
from fedortho.requests.shadowing import estimate_limit, shadow_plan, shadow_settings
from fedortho.runs.record import Accuracies, ServedRecord
from fedortho.runs.run import Run, open_run
from fedortho.runs.settings import TrainSettings
from fedortho.runs.training import train_run
from fedortho.storage.journal import read_journal
from fedortho.training.recipe import Recipe
from fedortho.unlearning.calibrate import Unmeasured

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
    plan = shadow_plan(run, served, place, shadow_settings(run, 8), torch.device("cpu"))
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


def test_shadows_pass_over_the_images_as_often_as_the_run_did(run: Run) -> None:
    def recipe(settings: TrainSettings) -> Recipe:
        return shadow_settings(replace(run, settings=settings), 8).recipe

    assert recipe(replace(HOW, epochs=60)) == replace(HOW.recipe, epochs=60)
    assert recipe(replace(HOW, epochs=0)).epochs == 6, "of an imported model nothing is known"
    federated = replace(SETTINGS, rounds=30, epochs=2, fraction=0.1, lr=0.3)
    assert (recipe(federated).epochs, recipe(federated).lr) == (6, 0.3), "a client is drawn in every tenth round"
    assert recipe(replace(federated, rounds=1, epochs=1)).epochs == 1
    assert shadow_settings(run, 12, images=0).images == 0


def wrong_rows(run: Run, number: int = 12) -> str:
    """Samples that the model answers wrongly: no model without them could answer fewer."""
    train = run.load_data().train
    wrong = logits_of(run.load_model(), train).argmax(1) != train.labels
    return "samples:" + ",".join(map(str, train.rows[wrong][:number].tolist()))


def test_a_request_that_cannot_be_measured_changes_nothing_and_is_journalled_as_that(run: Run, tmp_path: Path) -> None:
    words = ("forget", run.path, wrong_rows(run), "--level", "hide", "--audit", "none")
    out = tmp_path / "out"
    with pytest.raises(Unmeasured, match="nothing that only the forget set taught can be measured"):
        told(*words, "--out", out)
    assert not out.exists()
    received, entry = read_journal(run.path.parent).entries[-2:]
    assert (received.event, entry.event, entry.run) == ("received", "unmeasured", run.path.name)
    assert "nothing was changed" in entry.details["reason"]
    assert not entry.after
    page = told("report", run.path, "--out", tmp_path / "report.html") and (tmp_path / "report.html").read_text()
    assert "12 samples: nothing that only the forget set taught can be measured" in page
    shown = told(*words, "--out", out, "--anyway", "--max-retain-drop", "1")
    assert "met before any edit: nothing that only they taught can be measured" in shown
    assert open_run(out).record.requests[-1].settings["anyway"]


def test_the_limit_of_samples_comes_from_shadow_models_that_did_not_see_them(run: Run, tmp_path: Path) -> None:
    rows = ",".join(map(str, run.load_data().train.rows[:20].tolist()))
    found = estimate_limit(run, f"samples:{rows}", shadows=8)
    assert (found.images, found.models) == (20, 8)
    assert 0 < found.limit < 1
    kept = run.path.parent / "references" / "shadows"
    assert len(list(kept.rglob("original-*.safetensors"))) == 8
    words = ("forget", run.path, f"samples:{rows}", "--level", "hide", "--audit", "none", "--max-retain-drop", "1")
    shown = told(*words, "--anyway", "--shadows", 8, "--out", tmp_path / "out")
    assert f"limit {found}" in " ".join(shown.split())
    (served,) = open_run(tmp_path / "out").record.requests
    assert served.settings["limit"] == found.limit
    for flags, message in ((("--limit", "0.4"), "nothing to estimate"), (("--level", "exact"), "leave it out here")):
        with pytest.raises(BadSetting, match=message):
            told(*words[:3], "--level", "hide", *flags, "--shadows", 8, "--out", tmp_path / "other")
    with pytest.raises(BadSetting, match="names classes"):
        estimate_limit(run, "class:3")


def test_a_method_that_refuses_leaves_a_shadow_model_as_it_is(run: Run, place: Path) -> None:
    nothing = Accuracies(0.0, 0.0, 0.0)
    served = ServedRecord("samples:1", "hide", {"limit": 1.0}, before=nothing, after=nothing, retain_paid=0.0)
    plan = shadow_plan(run, served, place, shadow_settings(run, 8), torch.device("cpu"))
    model, data = run.load_model(), run.load_data()
    assert plan.forget(model, data, ForgetRequest.parse(f"samples:{int(data.train.rows[0])}")) is model
