import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from commands import told
from small import SETTINGS as FEDERATION
from typer.testing import CliRunner

import fedortho as fo
from fedortho.cli import forget as cli_forget
from fedortho.cli.app import app
from fedortho.errors import BadSetting, FedOrthoError, UnknownName
from fedortho.evaluation.metrics import METRICS
from fedortho.federated.server import train_federation
from fedortho.reports.run_table import list_runs
from fedortho.requests.judging import JudgeOptions, audit_run, check_judge_options, judge_run
from fedortho.requests.references import find_original
from fedortho.runs.run import open_run
from fedortho.runs.settings import ImportSettings, TrainSettings
from fedortho.runs.training import import_run, train_run
from fedortho.storage.files import read_json, write_json
from fedortho.storage.journal import check_journal
from fedortho.storage.records import to_json

SETTINGS = TrainSettings(data="digits", model="small:QuickNet", epochs=6, crop=0, flip=0.0, threads=1, device="cpu")
NAMES = ("C1", "C2", "C3", "C4", "C5", "C6")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An original, one that forgot class 3, and two that never saw it."""
    place = tmp_path_factory.mktemp("runs")
    train_run(place / "original", SETTINGS)
    for seed in (0, 1):
        train_run(place / "references" / f"seed{seed}", replace(SETTINGS, without="class:3", seed=seed, split_seed=0))
    told(
        "forget",
        place / "original",
        "class:3",
        "--level",
        "hide",
        "--max-retain-drop",
        "0.2",
        "--audit",
        "none",
        "--out",
        place / "forgot",
    )
    return place


def test_no_number_goes_out_without_what_is_needed_to_read_it(runs: Path) -> None:
    found = json.loads(told("judge", runs / "forgot", "--json"))
    assert found == read_json(runs / "forgot" / "verdict.json")
    for metric in found["metrics"]:
        assert metric["name"] in METRICS
        assert {"title", "source", "low", "high", "direction", "ideal", "value", "reference", "images"} <= metric.keys()
        assert metric["value"] is None or metric["reference"] is not None
    text = told("judge", runs / "forgot")
    for line in text.splitlines():
        words = line.split()
        if words and words[0] in METRICS:
            assert any(word in line for word in ("as retrain", "higher", "lower"))
            assert " to " in line
    assert [audit["name"] for audit in found["audits"]] == list(NAMES)
    assert found["label"] in text
    assert found["cost"]["images-read"] > 0
    (recorded,) = open_run(runs / "forgot").record.requests
    assert found["cost"] == to_json(recorded.cost)
    assert found["cost"]["flops"] > 0


def test_references_are_found_and_a_second_one_serves_the_distance(runs: Path) -> None:
    (runs / "forgot" / "verdict.json").unlink(missing_ok=True)
    found = json.loads(told("audit", runs / "forgot", "--attack", "C5", "--json"))
    by_name = {audit["name"]: audit for audit in found["audits"]}
    assert "CKA to 2 reference models" in by_name["C5"]["finding"], "where the features have room, its outcome follows"
    assert by_name["C1"]["outcome"] == "NOT RUN"
    assert not (runs / "forgot" / "verdict.json").exists(), "one audit is no verdict, and must not replace one"
    with pytest.raises(UnknownName, match="no audit 'C9'"):
        told("audit", runs / "forgot", "--attack", "C9")


def test_several_references_are_averaged_and_counted(runs: Path) -> None:
    both = [word for seed in (0, 1) for word in ("--reference", runs / "references" / f"seed{seed}")]
    found = json.loads(told("audit", runs / "forgot", "--attack", "C1", *both, "--json"))
    assert "mean of 2 reference models" in found["audits"][0]["finding"]
    stages = found["audits"][0]["details"]["stages"]
    means = [(stages["reference"]["fc"] + stages["second_reference"]["fc"]) / 2]
    assert found["audits"][0]["reference"] == pytest.approx(means[0])
    one = json.loads(told("audit", runs / "forgot", "--attack", "C1", *both[:2], "--json"))
    assert "one reference model" in one["audits"][0]["finding"]
    with pytest.raises(BadSetting, match="4 reference models are given; expected at most 3"):
        told("judge", runs / "forgot", *both, *both)


def test_an_imported_reference_is_called_so_and_its_past_is_its_makers_word(runs: Path, tmp_path: Path) -> None:
    weights = runs / "references" / "seed0" / "model.safetensors"
    settings = ImportSettings(data="digits", model="small:QuickNet", scale="data", without="class:3")
    imported = import_run(tmp_path / "imported", weights, settings)
    named = JudgeOptions(reference=imported.path, only=("C1",))
    told_of = audit_run(open_run(runs / "forgot"), options=named, original=str(runs / "original"))
    assert "in one imported model in" in told_of.sentence
    assert "(one imported model: " in told_of.sentence or "no longer predicted" in told_of.sentence
    assert any("its maker's word" in each for each in told_of.not_tested)
    trained = replace(named, reference=runs / "references" / "seed0")
    assert "in one retrained model in" in audit_run(runs / "forgot", options=trained).sentence


def test_python_judges_and_audits_without_the_command_line(runs: Path) -> None:
    steps: list[str] = []
    run = open_run(runs / "forgot")
    found = judge_run(run, "class:3", JudgeOptions(references=runs / "references"), on_step=steps.append)
    assert found.has_reference
    assert steps[:2] == ["metrics", "linear probe"]
    assert found.label == read_json(run.path / "verdict.json")["label"]
    only = audit_run(run.path, options=JudgeOptions(only=("C2",)), original=str(runs / "original"))
    assert [audit.name for audit in only.audits if audit.outcome != "NOT RUN"] == ["C2"]
    with pytest.raises(BadSetting, match="federation"):
        audit_run(run, after_rounds=1)


def test_a_wrong_audit_is_refused_before_a_reference_is_trained(runs: Path, tmp_path: Path) -> None:
    options = JudgeOptions(only=("C9",), references=tmp_path, retrain=True)
    with pytest.raises(UnknownName, match="C9"):
        audit_run(open_run(runs / "forgot"), options=options)
    assert not list(tmp_path.iterdir())


def test_so_many_reference_models_are_trained(runs: Path) -> None:
    run, found = open_run(runs / "original"), JudgeOptions(retrain=True, reference_models=3).trained_references
    assert (found, JudgeOptions(reference_models=0, retrain=True).trained_references) == (3, 1)
    for wrong, word in (
        (JudgeOptions(reference_models=4, retrain=True), "1 to 3"),
        (JudgeOptions(reference_models=2), "--retrain"),
    ):
        with pytest.raises(BadSetting, match=word):
            check_judge_options(run, fo.ForgetRequest.parse("class:3"), wrong)


def test_without_a_reference_nothing_passes(runs: Path, tmp_path: Path) -> None:
    found = json.loads(told("judge", runs / "forgot", "--references", tmp_path, "--json"))
    assert not found["passes"]
    assert not any(audit["outcome"] == "PASS" for audit in found["audits"])
    assert "without a retrained model" in found["sentence"]


def test_a_retrained_model_passes_what_is_run_against_another(runs: Path) -> None:
    original, first, second = (open_run(runs / name) for name in ("original", "references/seed0", "references/seed1"))
    data = original.load_data()
    models = {"original": original.load_model(), "reference": first.load_model()}
    found = fo.judge(second.load_model(), data, "class:3", **models)
    assert found.metric("forget-accuracy").value == 0.0  # type: ignore[union-attr]  # it is always measured
    assert {audit.name for audit in found.audits if audit.outcome == "PASS"} >= {"C2", "C6"}
    assert found.retention is not None
    assert found.retention.outcome == "PASS"
    assert "NOT RUN" in {audit.outcome for audit in fo.judge(second.load_model(), data, "class:3").audits}


def test_noise_on_the_weights_fails_retention(runs: Path) -> None:
    original = open_run(runs / "original")
    model, noisy = original.load_model(), original.load_model()
    with torch.no_grad():
        for parameter in noisy.parameters():
            parameter.add_(0.5 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    found = fo.judge(noisy, original.load_data(), "class:3", original=model)
    assert found.retention is not None
    assert found.retention.outcome == "FAIL"
    assert "retention" in found.label


def test_what_does_not_belong_together_is_refused(runs: Path, tmp_path: Path) -> None:
    with pytest.raises(FedOrthoError, match=r"has not forgotten .class:4.; choose from class:3"):
        told("judge", runs / "forgot", "class:4")
    with pytest.raises(FedOrthoError, match="trained with class:3"):
        told("judge", runs / "forgot", "--reference", runs / "original")
    with pytest.raises(FedOrthoError, match="has forgotten nothing; first: fedortho forget"):
        told("judge", runs / "original")
    with pytest.raises(FedOrthoError, match="was edited"):
        told("judge", runs / "forgot", "--reference", runs / "forgot")
    with pytest.raises(UnknownName, match="no audit budget 'fast'"):
        told("judge", runs / "forgot", "--audit", "fast")
    with pytest.raises(BadSetting, match="belongs to --audit full"):
        told("judge", runs / "forgot", "--shadows", "8")
    with pytest.raises(FedOrthoError, match="has forgotten class:3 before"):
        told("judge", runs / "forgot", "--original", runs / "forgot")


def test_no_run_is_judged_against_itself(runs: Path, tmp_path: Path) -> None:
    """Runs with the digest of another one stand for a method that edits nothing, and for one that retrains."""

    def twin(of: str, digest_of: str) -> Path:
        shutil.copytree(runs / of, tmp_path / of.replace("/", "-"))
        record = read_json(runs / of / "run.json")
        record["model"]["digest"] = open_run(runs / digest_of).record.model.digest
        write_json(tmp_path / of.replace("/", "-") / "run.json", record)
        return tmp_path / of.replace("/", "-")

    idle, itself = twin("forgot", "original"), twin("references/seed0", "forgot")
    with pytest.raises(BadSetting, match="same weights: nothing was edited"):
        told("judge", idle, "--original", runs / "original")
    for command in ("judge", "audit"):
        with pytest.raises(BadSetting, match="same weights; give a reference of another seed"):
            told(command, runs / "forgot", "--reference", itself)
    found = judge_run(runs / "forgot", options=JudgeOptions("none", references=tmp_path))
    assert not found.has_reference, "it is not taken for one where it is found"


def test_a_method_that_edits_nothing_is_told_and_not_judged(runs: Path) -> None:
    words = ("--method", "ssd", "--set", "alpha=100000", "--out", runs / "untouched")
    text = told("forget", runs / "original", "class:3", *words)
    assert "nothing was edited" in text
    assert "audits:" not in text
    with pytest.raises(BadSetting, match="same weights: nothing was edited"):
        judge_run(runs / "untouched")


def test_forgetting_audits_by_default_and_the_journal_tells_all_of_it(runs: Path, tmp_path: Path) -> None:
    words = ("--level", "hide", "--max-retain-drop", "0.04", "--out", runs / "again")
    text = told("forget", runs / "original", "class:3", *words)
    assert "audits: " in text
    assert "retention" in text
    assert (runs / "again" / "verdict.json").exists()
    events = [entry.event for entry in check_journal(runs).entries if entry.run in ("original", "again")]
    assert events[-3:] == ["received", "executed", "judged"]
    with pytest.raises(FedOrthoError, match="no training image has the id 99999"):
        told("forget", runs / "original", "samples:99999", "--level", "hide", "--out", tmp_path / "x")
    assert check_journal(runs).entries[-1].event == "refused"


def test_flags_that_would_have_no_effect_are_refused_before_anything_is_done(runs: Path, tmp_path: Path) -> None:
    first, out = runs / "original", tmp_path / "out"
    with pytest.raises(FedOrthoError, match="--retrain has no effect"):
        told("forget", first, "class:3", "--audit", "none", "--retrain", "--out", out)
    with pytest.raises(FedOrthoError, match="--level and --set has no effect with --until passed"):
        told("forget", first, "class:3", "--until", "passed", "--level", "hide", "--set", "ratio=0.1", "--out", out)
    (tmp_path / "wishes.toml").write_text("target = 0.05\n")
    for flag, value in (("--target", 0.0), ("--settings", "tuned"), ("--config", tmp_path / "wishes.toml")):
        with pytest.raises(FedOrthoError, match=f"{flag} has no effect with --until passed"):
            told("forget", first, "class:3", "--until", "passed", flag, value, "--out", out)
    with pytest.raises(FedOrthoError, match="cannot be written"):
        told("forget", first, "class:3", "--keep-undo", "/proc/undo.safetensors", "--out", out)
    apart = train_federation(tmp_path / "apart", replace(FEDERATION, clients=2, rounds=1))
    with pytest.raises(FedOrthoError, match="--retrain has no effect with --backend ray"):
        told("forget", apart.path, "class:3", "--backend", "ray", "--retrain", "--out", out)
    assert not out.exists()


def test_a_missed_target_is_told_and_a_limit_only_where_one_was_aimed_at(runs: Path, tmp_path: Path) -> None:
    original = runs / "original"
    weak = told(
        "forget",
        original,
        "class:3",
        "--level",
        "hide",
        "--ratio",
        "0.02",
        "--audit",
        "none",
        "--out",
        tmp_path / "weak",
    )
    assert "the target, 1.0%, is not met on test images" in weak
    rows = ",".join(map(str, open_run(original).load_data().train.rows[:20].tolist()))
    words = (
        "forget",
        original,
        f"samples:{rows}",
        "--level",
        "hide",
        "--max-retain-drop",
        "0.5",
        "--audit",
        "none",
        "--anyway",
    )
    assert "unseen images of the same labels" in told(*words, "--out", tmp_path / "samples")
    assert "limit:" not in told(*words, "--ratio", "0.1", "--out", tmp_path / "given")


def test_who_interrupts_the_judging_has_the_run_and_is_told_how_to_go_on(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli_forget, "judge_run", interrupted)
    words = ["forget", str(runs / "original"), "class:3", "--level", "hide", "--max-retain-drop", "0.2"]
    words += ["--out", str(tmp_path / "out")]
    found = CliRunner().invoke(app, words)
    assert found.exit_code != 0
    assert "before" in found.stdout, "what was done is shown"
    assert f"the run is written: fedortho judge {tmp_path / 'out'}" in " ".join(found.stdout.split())
    assert open_run(tmp_path / "out").record.requests


@pytest.mark.slow
def test_judging_without_audits_leaves_a_verdict_with_audits_alone(runs: Path) -> None:
    told("judge", runs / "forgot")
    before = (runs / "forgot" / "verdict.json").read_bytes()
    told("judge", runs / "forgot", "--audit", "none")
    assert (runs / "forgot" / "verdict.json").read_bytes() == before


def test_a_federation_that_trained_on_is_listed_and_judged_as_what_it_is_now(tmp_path: Path) -> None:
    settings = replace(FEDERATION, clients=2, rounds=1, split="iid")
    first = train_federation(tmp_path / "first", settings)
    told("forget", first.path, "class:3", "--method", "paper", "--audit", "none", "--out", tmp_path / "forgot")
    later = train_federation(tmp_path / "later", replace(settings, start=str(tmp_path / "forgot")))
    assert find_original(later) is not None
    assert find_original(later).path == first.path  # type: ignore[union-attr]  # just looked
    line = next(line for line in list_runs(tmp_path) if line.run == "later")
    assert (line.forget, line.retain, line.test) == (None, None, later.record.result.test_accuracy)
