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
from fedortho.federated.server import train_federation
from fedortho.methods.method import CannotServe
from fedortho.models.predictions import logits_of
from fedortho.requests import shadowing
from fedortho.requests.forgetting import forget_run
from fedortho.requests.shadowing import choose_back, estimate_limit, shadow_plan, shadow_settings
from fedortho.requests.tuning import tune
from fedortho.runs.record import Accuracies, ServedRecord
from fedortho.runs.run import Run, open_run
from fedortho.runs.settings import TrainSettings
from fedortho.runs.training import train_run
from fedortho.storage.files import read_tensors, tensors_digest
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


@pytest.mark.slow
def test_shadows_forget_by_methods_that_need_new_networks(run: Run, place: Path) -> None:
    taught = audited(run, place, "bad-teacher", {"epochs": 1})
    assert 0 < taught.details["AUC"] < 1
    retrained = audited(run, place, "retrain", {"epochs": 1000, "batch_size": 50, "lr": 0.1, "crop": 0, "ortho": 0.0})
    assert retrained.details["shadows"] == taught.details["shadows"], "shadows are those of the run, not of a method"
    assert retrained.details["settings"]["recipe"]["epochs"] == 1, "or this test would take hours"


@pytest.mark.slow
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


@pytest.mark.slow
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
    for flags, message in ((("--limit", "0.4"), "nothing to estimate"), (("--level", "exact"), "leave them out")):
        with pytest.raises(BadSetting, match=message):
            told(*words[:3], "--level", "hide", *flags, "--shadows", 8, "--out", tmp_path / "other")
    with pytest.raises(BadSetting, match="names classes"):
        estimate_limit(run, "class:3")
    with pytest.raises(BadSetting, match="choose nothing"):
        forget_run(run, f"samples:{rows}", level="exact", shadows=8, out=tmp_path / "other")
    with pytest.raises(BadSetting, match="shadow models are for clients and samples; class:3"):
        tune(run, "class:3", ["finetune"], shadows=8)


def test_a_method_that_refuses_leaves_a_shadow_model_as_it_is(run: Run, place: Path) -> None:
    nothing = Accuracies(0.0, 0.0, 0.0)
    served = ServedRecord("samples:1", "hide", {"limit": 1.0}, before=nothing, after=nothing, retain_paid=0.0)
    plan = shadow_plan(run, served, place, shadow_settings(run, 8), torch.device("cpu"))
    model, data = run.load_model(), run.load_data()
    assert plan.forget(model, data, ForgetRequest.parse(f"samples:{int(data.train.rows[0])}"), None) is model


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    settings = replace(HOW, valid=0.9, epochs=5, keep_epochs="all")
    return train_run(tmp_path_factory.mktemp("runs") / "long", settings)


def found(monkeypatch: pytest.MonkeyPatch, *areas: float) -> None:
    """What the attack finds, call by call: first on shadow models as trained."""
    told = iter(areas)
    monkeypatch.setattr(shadowing, "attack_samples", lambda *_: {"AUC": next(told)})


def test_r2d_goes_back_as_far_as_the_membership_attack_on_other_samples_wants(
    long_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, asked = iter((0.95, 0.9, 0.7, 0.45)), list[tuple[int, ...]]()

    def scripted(table: torch.Tensor, members: torch.Tensor, seed: int) -> dict[str, float]:
        assert table.shape == members.shape
        asked.append(tuple(table.shape))
        return {"AUC": next(found)}

    rows = long_run.load_data().train.rows[:10].tolist()
    words = ("forget", long_run.path, "samples:" + ",".join(map(str, rows)), "--method", "r2d", "--audit", "none")
    monkeypatch.setattr(shadowing, "attack_samples", scripted)
    shown = " ".join(told(*words, "--shadows", 8, "--out", tmp_path / "out").split())
    assert "back 4: AUC of the membership attack" in shown
    assert "1: 0.900, 2: 0.700, 4: 0.450 (0.5 ± 0.1 wanted; untouched 0.950)" in shown
    assert len(set(asked)) == 1, "the same images and models at each distance"
    assert asked[0][0] == 6, "two of eight shadow models choose the images"
    (served,) = open_run(tmp_path / "out").record.requests
    assert served.settings["back"] == 4
    with pytest.raises(BadSetting, match="nothing to choose"):
        told(*words, "--shadows", 8, "--set", "back=1", "--out", tmp_path / "other")
    monkeypatch.setattr(shadowing, "attack_samples", lambda *_: {"AUC": 0.8})
    with pytest.raises(CannotServe, match=r"at every distance.*retrain"):
        choose_back(long_run, words[2], shadows=8)
    monkeypatch.setattr(shadowing, "attack_samples", lambda *_: {"AUC": 0.55})
    with pytest.raises(CannotServe, match="the membership attack has no power here"):
        choose_back(long_run, words[2], shadows=8)


@pytest.mark.slow
def test_what_is_measured_for_r2d_is_kept_and_spares_the_samples_of_the_request(
    long_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found(monkeypatch, 0.9, 0.5, 0.9, 0.5, 0.9, 0.9)
    first = choose_back(long_run, "samples:7", shadows=8, images=40, directory=tmp_path)
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")}
    assert sum(path.parent.name == "epochs-05" for path in files) == 5
    assert choose_back(long_run, "samples:7", shadows=8, images=40, directory=tmp_path) == first
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")} == files
    shadows = next(tmp_path.glob("shadows-*"))
    kept, whole = (read_tensors(shadows / f"{name}.safetensors")[0] for name in ("epochs-05/00005", "original-05"))
    assert tensors_digest(kept) == tensors_digest(whole), "its epochs are those of the shadow model"
    seen = list[int]()

    def note(*given: Any) -> None:
        seen.extend(given[2].proxy.rows[given[3]].tolist())

    monkeypatch.setattr(shadowing, "_replayed_margins", note)
    with pytest.raises(TypeError):  # no margins to stack: the images are what is looked at
        choose_back(long_run, "samples:7", shadows=8, images=40, directory=tmp_path)
    again = list(seen)
    seen.clear()
    with pytest.raises(TypeError):
        choose_back(long_run, f"samples:{again[0]}", shadows=8, images=0, directory=tmp_path)
    assert again[0] not in seen


@pytest.mark.slow
def test_r2d_is_audited_on_shadow_models_that_replay_their_own_epochs(
    long_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found(monkeypatch, 0.9, 0.5)
    served = forget_run(long_run, "samples:7,1771", "r2d", shadows=8, out=tmp_path / "out").record
    assert served.settings["back"], "chosen"
    plan = shadow_plan(long_run, served, tmp_path, shadow_settings(long_run, 8, 60), torch.device("cpu"))
    model, data = long_run.load_model(), long_run.load_data()
    case = Case(model, model, (), data, ForgetRequest.parse("samples:7,1771"), shadows=plan)
    assert MEMBERSHIP(case, budget="full").details["settings"]["models"] == 8
    assert len(list(tmp_path.rglob("epochs-*/00005.safetensors"))) == 8


def test_a_run_without_epochs_has_nothing_to_choose(run: Run) -> None:
    with pytest.raises(CannotServe, match="kept no epochs"):
        choose_back(run, "samples:7")


@pytest.mark.slow
def test_rounds_of_a_federation_are_epochs_of_shadow_models_by_their_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = replace(SETTINGS, model="small:TinyNet", rounds=6, fraction=0.5, split="iid", keep_rounds="all")
    run = train_federation(tmp_path / "run", settings)
    assert shadow_settings(run, 8).recipe.epochs == 3
    found(monkeypatch, 0.9, 0.8, 0.8, 0.45)
    chosen = choose_back(run, "client:1", shadows=8, images=60)
    assert (chosen.back, list(chosen.tried)) == (4, [1, 2, 4]), "rounds, not epochs"
