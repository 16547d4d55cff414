"""Levels: which method serves each, what is refused, what is hidden first, the plan, and climbing until it passes."""

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from commands import told
from small import SETTINGS as FEDERATION

import fedortho as fo
from fedortho.audits import measurements
from fedortho.audits.result import AuditResult
from fedortho.data.images import Dataset
from fedortho.data.request import ForgetRequest
from fedortho.errors import BadSetting, FedOrthoError
from fedortho.federated.server import sync, train_federation
from fedortho.methods import LEVELS, MEANINGS, level_of
from fedortho.methods.method import CannotServe, ForgetResult
from fedortho.methods.regrow import Regrow
from fedortho.requests import climbing, forgetting, levels
from fedortho.requests.climbing import forget_until_passed
from fedortho.requests.forgetting import forget_run
from fedortho.requests.judging import JudgeOptions
from fedortho.requests.levels import erasing_methods, level_method, plan_request
from fedortho.requests.run_context import method_for_run
from fedortho.runs.run import Run, open_run
from fedortho.runs.settings import TrainSettings
from fedortho.runs.training import train_run
from fedortho.storage.journal import check_journal
from fedortho.unlearning.calibrate import Refused

SETTINGS = TrainSettings(data="digits", model="small:TinyNet", epochs=2, threads=1, crop=0, flip=0.0, device="cpu")
CLASS, CLIENT = ForgetRequest.parse("class:3"), ForgetRequest.parse("client:1")


@pytest.fixture(autouse=True)
def quick_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    """A network this small has no edit that meets target and budget: a ratio is given, and few epochs."""
    quick = {"hide": {"ratio": 0.2}, "regrow": {"epochs": 1}}
    monkeypatch.setattr(levels, "read_settings", lambda *_: quick)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run, and its reference beside it."""
    place = tmp_path_factory.mktemp("runs")
    train_run(place / "run", SETTINGS)
    train_run(place / "references" / "without-3", replace(SETTINGS, without="class:3"))
    return place


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Run:
    return open_run(shutil.copytree(trained / "run", tmp_path / "run"))


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of a network with three stages, and its reference beside it."""
    place, settings = tmp_path_factory.mktemp("deep"), replace(SETTINGS, model="small:DeepNet", epochs=1)
    train_run(place / "without-3", replace(settings, without="class:3"))
    return train_run(place / "run", settings)


@pytest.fixture
def reference(trained: Path) -> Path:
    return trained / "references" / "without-3"


def events(place: Path) -> list[str]:
    return [entry.event for entry in check_journal(place).entries]


def watched(monkeypatch: pytest.MonkeyPatch, act: Callable[[str], None]) -> list[str]:
    """The methods that unlearn from here on; `act` is called with the name of each before it does."""
    names, unlearn = [], forgetting.unlearn

    def watch(*words: Any, **more: Any) -> ForgetResult:
        names.append(words[3].name)
        act(words[3].name)
        return unlearn(*words, **more)

    monkeypatch.setattr(forgetting, "unlearn", watch)
    return names


def test_a_level_is_given_or_the_default_of_classes_and_excludes_a_method() -> None:
    assert [level_of(CLASS), level_of(CLASS, "hide"), level_of(CLIENT, "exact")] == ["erase", "hide", "exact"]
    assert [level_of(CLASS, "", "ssd"), level_of(CLIENT, "", Regrow())] == ["", ""]
    assert level_of(CLASS, "erase", Regrow(epochs=1)) == "erase", "the level's own method"
    for method in ("ssd", "regrow", fo.make_method("ssd")):
        with pytest.raises(BadSetting, match="level erase and method"):
            level_of(CLASS, "erase", method)
    with pytest.raises(FedOrthoError, match="no level 'erased'; did you mean 'erase'"):
        level_of(CLASS, "erased")


@pytest.mark.parametrize("request_", ["samples:0", "class:3 samples:0"])
def test_clients_and_samples_are_not_erased_and_have_no_default(run: Run, request_: str) -> None:
    by_cost = r"--level hide \(about .* of the training.*; --method ssd \(.*approximate.*; --level exact \(.*took"
    with pytest.raises(CannotServe, match=f"has no level by default; choose, in order of cost: {by_cost}"):
        forget_run(run, request_)
    shown = told("forget", run.path, *request_.split(), "--dry-run")
    assert "--method r2d" not in shown, "the run kept no epochs"
    assert [line.split()[1] for line in shown.splitlines() if line.startswith("  --level")] == ["hide", "exact"]
    assert shown.index("--level hide") < shown.index("--method ssd") < shown.index("--level exact")
    assert "--method finetune" not in shown, "five epochs, where retraining has two"
    with pytest.raises(
        CannotServe, match=r"cannot be erased yet; choose the level hide \(.* exact \(retraining .*took"
    ):
        told("forget", run.path, *request_.split(), "--level", "erase")
    with pytest.raises(CannotServe, match=r"has no level by default; choose the level hide"):
        fo.forget(run.load_model(), "digits", "samples:1,2")
    assert not (run.path.parent / "journal.jsonl").exists()


def test_a_model_in_memory_is_erased_by_default_and_hidden_on_demand(run: Run, digits: Dataset) -> None:
    model = run.load_model()
    erased = fo.forget(model, digits, "class:3", trained_epochs=2)
    assert (erased.method, erased.settings["epochs"]) == (LEVELS["erase"], 2)
    assert fo.forget(model, digits, "class:3", method=fo.make_method("hide", {"ratio": 0.2})).method == "hide"
    with pytest.raises(BadSetting, match="the recipe of a model in memory is not known"):
        fo.forget(model, digits, "class:3", level="exact")


def test_the_exact_level_retrains_by_the_recipe_of_the_run(run: Run, reference: Path, tmp_path: Path) -> None:
    served = forget_run(run, "class:3", level="exact", out=tmp_path / "new")
    assert served.record.settings["epochs"] == SETTINGS.epochs
    assert served.result.patch.after == open_run(reference).record.model.digest, "the bytes of train --without"
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["new", "run"], "nothing is hidden"


def test_a_class_is_hidden_first_then_erased(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = watched(monkeypatch, lambda _: None)
    served = forget_run(run, "class:3", out=tmp_path / "new", undo=tmp_path / "undo", ticket="T-1")
    assert names == ["hide", "regrow"]
    assert events(tmp_path) == ["received", "hidden", "executed"]
    hidden = open_run(tmp_path / "new-hidden")
    assert hidden.record.parent == served.record.model_before == run.record.model.digest
    assert {entry.details["ticket"] for entry in check_journal(tmp_path).entries} == {"T-1"}
    assert forget_run(run, "class:3", out=tmp_path / "new", ticket="T-1").was_finished
    forget_run(run, "class:3", Regrow(epochs=1), level="erase", out=tmp_path / "other", hide_first=False)
    assert not (tmp_path / "other-hidden").exists()
    assert names == ["hide", "regrow", "regrow"]


def test_an_interruption_keeps_the_hidden_run_and_the_same_command_goes_on(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from fedortho.cli.app import main

    def interrupt(name: str) -> None:
        if name == "regrow":
            raise KeyboardInterrupt

    words = ["fedortho", "forget", str(run.path), "class:3", "--out", str(tmp_path / "a b"), "--audit", "none"]
    monkeypatch.setattr(sys, "argv", words)
    with monkeypatch.context() as patched:
        names = watched(patched, interrupt)
        with pytest.raises(SystemExit, match="130"):
            main()
    shown = capsys.readouterr().out
    assert f"{tmp_path / 'a b-hidden'} has hidden class-3 and can be used; go on: fedortho forget" in shown
    assert f"--out '{tmp_path / 'a b'}' --audit none\n" in shown
    assert not (tmp_path / "a b").exists()
    names = watched(monkeypatch, lambda _: None)
    with pytest.raises(SystemExit) as stop:
        main()
    assert not stop.value.code
    assert names == ["regrow"], "it is not hidden twice"
    assert events(tmp_path) == ["received", "hidden", "interrupted", "received", "executed"]


@pytest.mark.parametrize("why", [Refused("no edit does it", ()), BadSetting("no edit does it: no layer has one")])
def test_what_cannot_be_hidden_is_erased_all_the_same(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, why: Exception
) -> None:
    def refuse(name: str) -> None:
        if name == "hide":
            raise why

    watched(monkeypatch, refuse)
    assert forget_run(run, "class:3", out=tmp_path / "new").record.method == "regrow"
    assert "not hidden first, erasing goes on: no edit does it" in caplog.text
    assert events(tmp_path) == ["received", "executed"]
    assert not (tmp_path / "new-hidden").exists()


def test_a_run_without_validation_images_is_erased(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(levels, "read_settings", lambda *_: {"regrow": {"epochs": 1}})
    run = train_run(tmp_path / "run", replace(SETTINGS, epochs=1, valid=0.0))
    assert forget_run(run, "class:3", out=tmp_path / "new").record.method == "regrow", "hide needs them, erase does not"


def test_nothing_is_hidden_if_the_result_cannot_be_written(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = watched(monkeypatch, lambda _: None)
    (tmp_path / "undo").write_text("of another request")
    with pytest.raises(FedOrthoError, match="an undo file is never overwritten"):
        forget_run(run, "class:3", out=tmp_path / "new", undo=tmp_path / "undo")
    assert not names


def test_the_plan_tells_steps_costs_and_references(run: Run, reference: Path, tmp_path: Path) -> None:
    plan = json.loads(told("forget", run.path, "class:3", "--dry-run", "--json", "--keep-undo", tmp_path / "undo"))
    assert [(step["level"], step["method"]) for step in plan["steps"]] == [("hide", "hide"), ("erase", "regrow")]
    assert [Path(step["out"]).name for step in plan["steps"]] == ["run-class-3-hidden", "run-class-3"]
    hide, erase = (step["share-of-training"] for step in plan["steps"])
    assert hide == pytest.approx(0.03 / SETTINGS.epochs)
    assert erase == pytest.approx(1 / SETTINGS.epochs)
    assert plan["steps"][1]["seconds"] == pytest.approx(erase * sum(entry.seconds for entry in run.history()))
    assert (plan["references"], plan["undo"]) == ([], str(tmp_path / "undo"))
    text = told("forget", run.path, "class:3", "--level", "exact", "--dry-run", "--reference", reference)
    assert (
        "1. exact, by retrain (retraining without the forget set): about 100% of the training's computation (" in text
    )
    assert f"then quick audits on test images against {reference}" in text
    assert "dry run: nothing was done" in text
    text = told("forget", run.path, "class:3", "--no-hide-first", "--dry-run", "--retrain")
    assert "1. erase, by regrow" in text
    assert "against a reference model that is trained for it, about" in text
    assert text.splitlines()[-2].endswith(", and what the method makes of them")
    text = told("forget", run.path, "class:3", "--level", "hide", "--dry-run", "--retrain", "--audit", "full")
    assert "full audits on test images against two reference models that are trained for it, about" in text
    more = ("--references", reference.parent, "--retrain", "--audit", "full", "--json")
    plan = json.loads(told("forget", run.path, "class:3", "--dry-run", *more))
    assert (plan["references"], plan["trains-references"], plan["treats-references"]) == ([str(reference)], 1, True)
    text = told("forget", run.path, "class:3", "--method", "ssd", "--dry-run")
    assert "1. by ssd: cost not known; writes" in text
    assert "so they cannot pass; --retrain trains one" in text
    assert [path.name for path in tmp_path.iterdir()] == ["run"], "nothing was written"


def test_where_the_training_is_not_known_costs_are_passes(run: Run, tmp_path: Path) -> None:
    imported = replace(run, settings=replace(run.settings, epochs=0))
    plan = plan_request(imported, CLASS, [("hide", level_method(run, "hide"), tmp_path)], None, JudgeOptions("none"))
    assert plan.lines()[1:] == [
        f"1. hide, by hide ({MEANINGS['hide']}): 0.03 passes over the training images; writes {tmp_path}",
        "then nothing is audited (--audit none)",
    ]
    methods = [fo.make_method("paper"), fo.make_method("bad-teacher"), fo.make_method("finetune", {"epochs": 150})]
    plan = plan_request(imported, CLASS, [("", each, tmp_path) for each in methods], None, JudgeOptions("none"))
    assert [step.cost.partition(" over")[0] for step in plan.steps] == ["0.33 passes", "1 pass", "150 passes"]
    plan = plan_request(imported, CLASS, [("exact", level_method(imported, "exact"), tmp_path)], None, JudgeOptions())
    assert plan.steps[0].cost == "cost not known", "retraining would need a recipe"


def test_a_setting_of_the_other_level_is_refused_with_its_name(run: Run, tmp_path: Path) -> None:
    with pytest.raises(
        BadSetting, match=r"no setting --max-retain-drop.*the default level is erase: --level hide has it"
    ):
        told("forget", run.path, "class:3", "--max-retain-drop", "0.03")
    (tmp_path / "how.toml").write_text('level = "hide"\nratio = 0.2\n')
    told("forget", run.path, "class:3", "--config", tmp_path / "how.toml", "--audit", "none", "--out", tmp_path / "new")
    assert open_run(tmp_path / "new").record.requests[-1].settings["ratio"] == 0.2


@pytest.mark.parametrize(("passing", "tried"), [("erase", ["hide", "erase"]), ("none", ["hide", "erase", "exact"])])
def test_climbing_ends_at_the_first_level_that_passes_on_validation_images(
    run: Run, reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, passing: str, tried: list[str]
) -> None:
    judged: list[Any] = []

    def judge(case: Any, *_: object, **__: object) -> SimpleNamespace:
        judged.append(case)
        outcome = "PASS" if passing == "erase" and len(judged) == 2 else "INCONCLUSIVE"
        audits = (AuditResult(outcome, "", name="C1"), AuditResult("NOT RUN", "", name="C4"))
        return SimpleNamespace(audits=audits, results=audits)

    monkeypatch.setattr(climbing, "judge_case", judge)
    words = (run, "class:3", JudgeOptions(reference=reference))
    served, attempts = forget_until_passed(*words, out=tmp_path / "new", undo=tmp_path / "undo")
    assert [attempt.level for attempt in attempts] == tried
    assert str(attempts[0]) == "hide, by hide: left: on validation images C1 INCONCLUSIVE"
    assert str(attempts[-1]).endswith(": taken")
    assert served.record.method == LEVELS[tried[-1]]
    assert len(judged) == 2
    assert all(case.data.test is case.data.valid and case.original is not case.unlearned for case in judged)
    assert events(tmp_path) == [*["received", "refused"] * (len(tried) - 1), "received", "executed"]
    again, found = forget_until_passed(*words, out=tmp_path / "new", undo=tmp_path / "undo")
    assert (again.was_finished, [attempt.level for attempt in found], len(judged)) == (True, tried[-1:], 2)


@pytest.mark.parametrize("passing", [3, 9])
def test_a_class_that_is_not_erased_is_erased_once_more_with_all_stages_reset_also_where_no_probe_can_read_it(
    deep: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, passing: int
) -> None:
    judged: list[Any] = []

    def judge(case: Any, *_: object, **__: object) -> SimpleNamespace:
        judged.append(case)
        audits = (AuditResult("PASS" if len(judged) == passing else "FAIL", "", name="C1"),)
        return SimpleNamespace(audits=audits, results=audits)

    monkeypatch.setattr(climbing, "judge_case", judge)
    monkeypatch.setattr(measurements, "find_classifier", lambda *_: None)  # it does not end in a linear layer
    words = (deep, "class:3", JudgeOptions(reference=deep.path.parent / "without-3"))
    served, attempts = forget_until_passed(*words, out=tmp_path / "new")
    tried = ["hide", "erase", "erase", "exact"][: 3 if passing == 3 else 4]
    assert [attempt.level for attempt in attempts] == tried
    assert str(attempts[2]).startswith("erase, by regrow of 3 stages: ")
    if passing == 3:
        assert served.record.settings["stages"] == 3
        assert served.record.method == "regrow"
    again, found = forget_until_passed(*words, out=tmp_path / "new")
    assert (again.was_finished, str(found[0]), len(judged)) == (True, str(attempts[-1]), 3)


def test_where_only_retention_failed_nothing_is_erased_deeper(
    deep: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = AuditResult("FAIL", "", name="retention")
    judged = SimpleNamespace(audits=(AuditResult("PASS", "", name="C1"),), results=(lost,))
    monkeypatch.setattr(climbing, "judge_case", lambda *_, **__: judged)
    options = JudgeOptions(reference=deep.path.parent / "without-3")
    _, attempts = forget_until_passed(deep, "class:3", options, out=tmp_path / "new")
    assert [attempt.level for attempt in attempts] == ["hide", "erase", "exact"]
    assert attempts[1].reason == "on validation images retention FAIL"


def test_the_stages_of_the_method_rise_from_its_own_to_all(run: Run, deep: Run) -> None:
    assert [method.stages for method in erasing_methods(deep, (1, 8, 8))] == [0, 3]  # type: ignore[attr-defined]
    assert erasing_methods(run, (1, 8, 8)) == [level_method(run, "erase")], "it has no more stages"


def test_climbing_decides_by_real_audits_and_reads_test_images_once(
    run: Run, reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured, record = [], forgetting.measured_record
    monkeypatch.setattr(forgetting, "measured_record", lambda *w: measured.append(w[2].method) or record(*w))
    options = JudgeOptions(only=("C2",), reference=reference)
    served, attempts = forget_until_passed(run, "class:3", options, out=tmp_path / "new")
    assert measured == [served.record.method] == [LEVELS[attempts[-1].level]]
    assert all(attempt.reason.startswith("on validation images ") for attempt in attempts[:-1])


def test_climbing_serves_samples_that_are_named_by_hashes(run: Run, tmp_path: Path) -> None:
    rows = run.load_data().train.rows[:3].tolist()
    samples = ForgetRequest(samples=tuple(map(str, rows)))
    options = JudgeOptions(only=("C6",), retrain=True)
    served, _ = forget_until_passed(run, samples, options, out=tmp_path / "new", data=run.load_data(), hash_ids=True)
    assert served.record.request.count("hmac:") == 3


def test_climbing_says_why_the_last_level_refused(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, level: str, **__: object) -> None:
        raise BadSetting("nothing can be edited") if level == "hide" else Refused(f"{level} cannot hold the budget", ())

    monkeypatch.setattr(climbing, "forget_run", refuse)
    monkeypatch.setattr(climbing, "_validation", lambda *_: SimpleNamespace(check=None))
    told: list[str] = []
    with pytest.raises(Refused, match="exact cannot hold the budget"):
        forget_until_passed(run, "class:3", out=tmp_path / "new", on_attempt=lambda each: told.append(each.level))
    assert told == ["hide", "erase"]


def test_climbing_needs_a_reference_and_audits(run: Run, tmp_path: Path) -> None:
    words = ("forget", run.path, "class:3", "--until", "passed", "--out", tmp_path / "new")
    with pytest.raises(FedOrthoError, match=r"there is none; give --reference RUN, or --retrain \(training took"):
        told(*words)
    with pytest.raises(FedOrthoError, match="--until passed decides by audits; give --audit quick or full"):
        told(*words, "--audit", "none")
    with pytest.raises(BadSetting, match="--until is 'paid'; expected passed"):
        told("forget", run.path, "class:3", "--until", "paid")
    text = told(*words, "--dry-run")
    assert "until one passes the audits on validation images" in text
    assert [f"{number}. {level}, by" in text for number, level in enumerate(LEVELS, start=1)] == [True] * 3
    assert not (tmp_path / "new").exists()


def test_where_much_is_lost_the_advice_is_more_passes_and_for_several_requests_retraining(run: Run) -> None:
    served = forget_run(run, "class:3", Regrow(epochs=1), level="erase")
    lost = replace(served, retain_paid=0.05, record=replace(served.record, retain_paid=0.05))
    assert "5.0% of retain accuracy; more passes keep more: --set epochs=3;" in lost.advice
    several = replace(lost, record=replace(lost.record, retain_paid=0.01))
    assert "retrain before the next one" in several.advice
    assert not replace(served, retain_paid=0.01).advice


def test_a_federation_erases_a_class_and_its_clients_have_the_patch(tmp_path: Path) -> None:
    run = train_federation(tmp_path / "run", replace(FEDERATION, clients=2, rounds=1))
    erase = method_for_run(run, "regrow")  # without the quick settings of this file
    assert isinstance(erase, Regrow)
    assert (erase.batch_size, erase.epochs) == (FEDERATION.batch_size, 4), "as it was trained; clients take few steps"
    served = forget_run(run, "class:3", Regrow(epochs=1, crop=0, flip=0.0), level="erase", out=tmp_path / "new")
    assert served.run is not None
    assert served.record.after.forget == 0
    assert sync(served.run) == sync(open_run(tmp_path / "new-hidden")) == [0, 1]
    assert events(tmp_path) == ["received", "hidden", "executed"]
