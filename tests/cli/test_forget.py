"""`forget` on the command line."""

import json
from pathlib import Path

import pytest
from commands import QUICK, run

from fedortho.runs.run import open_run
from fedortho.statistics.ledger import load_ledger
from fedortho.storage.files import file_digest


def test_forget_writes_a_new_run_that_can_be_undone_and_forget_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    first, second, third = tmp_path / "first", tmp_path / "second", tmp_path / "third"
    flags = ("--data", "digits", "--model", "small:SmallNet", "--epochs", "6", "--batch-size", "32", "--lr", "0.1")
    flags += ("--flip", "0", "--crop", "0", "--threads", "1")
    assert run(monkeypatch, "train", *flags, "--out", first) == 0
    before = {path.name: file_digest(path) for path in first.iterdir()}
    undo = tmp_path / "undo.safetensors"
    budget = ("--level", "hide", "--max-retain-drop", "0.1")
    capsys.readouterr()
    words = ("forget", first, "class:3", *budget, "--out", second, "--keep-undo", undo, "--json")
    assert run(monkeypatch, *words) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["cost"]["images-read"] < 2000, "the ledger serves a class request"
    assert told["after"]["forget"] <= 0.06 < told["before"]["forget"]
    assert {path.name: file_digest(path) for path in first.iterdir()} == before
    assert open_run(second).record.parent == open_run(first).record.model.digest
    ledger = load_ledger(second / "ledger.safetensors", open_run(second).load_model())
    assert ledger is not None
    assert not ledger.stale, "its sums were moved with the edit"
    assert [label for label, number in enumerate(ledger.counts.tolist()) if not number] == [3], "its line is dropped"
    assert not any(bool(sums[3].any()) for sums in ledger.sums.values())
    assert run(monkeypatch, "forget", second, "class:5", *budget, "--audit", "none", "--out", third) == 0
    assert "forget accuracy of all requests: class:3" in capsys.readouterr().out
    assert run(monkeypatch, "forget", third, "class:3", *budget) == 2
    assert "has already forgotten class:3, by hide; for another level" in " ".join(capsys.readouterr().err.split())
    assert [served.request for served in open_run(third).record.requests] == ["class:3", "class:5"]
    assert run(monkeypatch, "undo", second, undo, "--out", tmp_path / "back") == 0
    assert open_run(tmp_path / "back").record.model == open_run(first).record.model
    assert run(monkeypatch, "undo", first, undo, "--out", tmp_path / "x") == 2
    assert "has forgotten nothing" in capsys.readouterr().err
    refused = ("class:3", "--level", "hide", "--target", "0", "--max-retain-drop", "0", "--no-scrub")
    refused = (*refused, "--layers", "features.6")
    assert run(monkeypatch, "forget", first, *refused, "--out", tmp_path / "y") == 2
    told = capsys.readouterr().err
    assert "target" in told
    assert "trials: forget" in told
    assert "or retrain (training took" in told
    assert not (tmp_path / "y").exists()


def test_a_dry_run_and_bad_requests_write_nothing(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    assert run(monkeypatch, "train", *QUICK, "--out", tmp_path / "run") == 0
    capsys.readouterr()
    assert run(monkeypatch, "forget", tmp_path / "run", "class:3", "--method", "paper", "--dry-run") == 0
    told = capsys.readouterr().out
    assert "1. by paper: about 33% of the training's computation" in told
    assert "dry run: nothing was done" in told
    for words, message in (
        (("class:33",), "no class '33'"),
        (("client:1", "--level", "hide"), "trained without clients"),
        (("class:3", "--level", "hide", "--layers", "layer9"), "no layer 'layer9'"),
        (("class:3", "--method", "rough"), "no method 'rough'"),
    ):
        assert run(monkeypatch, "forget", tmp_path / "run", *words, "--out", tmp_path / "new") == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
    (tmp_path / "file").write_text("no directory")
    assert (
        run(monkeypatch, "forget", tmp_path / "run", "class:3", "--method", "paper", "--out", tmp_path / "file/x") == 2
    )
    assert "cannot be written: Not a directory" in capsys.readouterr().err


def test_a_class_in_another_spelling_is_the_same_request(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    first = tmp_path / "first"
    sizes = ("--valid", "0.8", "--epochs", "1", "--batch-size", "256", "--image-size", "14")
    assert run(monkeypatch, "train", "--data", "fashion-mini", "--model", "small:QuickNet", *sizes, "--out", first) == 0
    for name in ("dress", "Dress", " DRESS"):
        assert run(monkeypatch, "forget", first, f"class:{name}", "--method", "logit-mask", "--audit", "none") == 0
    assert sorted(path.name for path in tmp_path.glob("first-*")) == ["first-class-Dress"]
    assert [served.request for served in open_run(tmp_path / "first-class-Dress").record.requests] == ["class:Dress"]
    capsys.readouterr()
    out = ("--out", tmp_path / "first-class-Dress")
    assert run(monkeypatch, "forget", first, "class:3", "--method", "logit-mask", "--audit", "none", *out) == 0
    assert run(monkeypatch, "forget", first, "class:dres") == 2
    assert "Dress" in capsys.readouterr().err


def test_every_method_forgets_with_hyper_parameters_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    first, undo = tmp_path / "run", tmp_path / "undo.safetensors"
    assert run(monkeypatch, "train", *QUICK, "--model", "small:TinyNet", "--out", first) == 0
    words = ("--method", "finetune", "--settings", "short", "--set", "lr=0.002", "--set", "batch-size=128")
    forget = ("forget", first, "class:3", *words, "--audit", "none")
    assert run(monkeypatch, *forget, "--out", tmp_path / "tuned", "--keep-undo", undo) == 0
    assert "tensors replaced" in capsys.readouterr().out
    served = open_run(tmp_path / "tuned").record.requests[-1]
    assert served.method == "finetune"
    assert (served.settings["epochs"], served.settings["lr"], served.settings["batch-size"]) == (2, 0.002, 128)
    assert served.settings["crop"] == open_run(first).settings.crop, "the run's own augmentation"
    assert run(monkeypatch, "undo", tmp_path / "tuned", undo, "--out", tmp_path / "back") == 0
    assert open_run(tmp_path / "back").record.model == open_run(first).record.model
    capsys.readouterr()
    for more, message in (
        (("--target", "0.1"), "finetune has no setting --target"),
        (("--set", "target=0.1"), "no setting 'target'"),
        (("--set", "lr"), "NAME=VALUE"),
        (("--set", "epochs=few"), "'few'"),
        (("--set", "epochs=0"), "epochs of finetune is 0; expected at least 1"),
        (("--settings", "fast"), "published, short, tuned"),
        (("--level", "erase"), "level erase and method finetune are both given"),
        (("--retrain",), "--retrain"),
        (("--backend", "ray"), "federation"),
    ):
        assert run(monkeypatch, *forget, *more, "--out", tmp_path / "new") == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
