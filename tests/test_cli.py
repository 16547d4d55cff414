import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from fedortho import cli
from fedortho.models import build_model


def run(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    """The exit code of a command line."""
    monkeypatch.setattr(sys, "argv", ["fedortho", *map(str, words)])
    try:
        cli.main()
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


QUICK = ("--data", "digits", "--epochs", "1", "--batch", "256", "--rate", "0.05")


def test_train_then_evaluate(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = tmp_path / "settings.toml"
    config.write_text('epochs = 7\northo-layers = "features.24"\n')
    out = tmp_path / "run"
    assert run(monkeypatch, "train", *QUICK, "--config", config, "--out", out) == 0
    record = json.loads((out / "run.json").read_text())
    assert record["settings"]["epochs"] == 1, "a flag wins over the file"
    assert record["settings"]["ortho-layers"] == "features.24"
    told = capsys.readouterr()
    assert "accuracy: test" in told.out
    assert "epoch 1/1" in told.err
    assert run(monkeypatch, "evaluate", out, "--json") == 0
    value = json.loads(capsys.readouterr().out)
    assert value["accuracy"] == record["result"]["test-accuracy"]
    assert len(value["per-class"]) == 10
    assert run(monkeypatch, "evaluate", out, "--split", "valid") == 0
    assert "valid images of digits" in capsys.readouterr().out


def test_import_makes_a_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    torch.save(build_model("vgg-mini", classes=10, channels=1).state_dict(), tmp_path / "a.pt")
    words = ("import", tmp_path / "a.pt", "--model", "vgg-mini", "--data", "digits", "--out", tmp_path / "run")
    assert run(monkeypatch, *words) == 0
    assert (tmp_path / "run" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("train", "--data", "cifar1"), "no dataset 'cifar1'; did you mean 'cifar10'?"),
        (("train", "--model", "vgg-mni"), "did you mean 'vgg-mini'?"),
        (("train", "--ortho-layers", "layer9"), "no layer 'layer9'"),
        (("train", "--rate", "-1"), "rate must not be negative"),
        (("train", "--data", "cifar10", "--data-dir", "/nowhere"), "/nowhere"),
        (("train", "--config", "/nowhere.toml"), "no settings file /nowhere.toml"),
        (("train", "--valid", "1.5"), "at least 0 and below 1"),
        (("evaluate", "/nowhere"), "is not a run directory"),
        (("import", "/nowhere.pt"), "there is no file /nowhere.pt"),
    ],
)
def test_bad_input_is_one_line_exit_2_and_nothing_written(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    words: tuple[str, ...],
    message: str,
) -> None:
    out = () if words[0] == "evaluate" else ("--out", tmp_path / "run")
    quick = ("--data", "digits") if words[0] == "train" and "--data" not in words else ()
    assert run(monkeypatch, *words, *quick, *out) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_wrong_key_in_the_settings_file_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "x.toml").write_text("epoch = 3\n")
    assert run(monkeypatch, "train", "--config", tmp_path / "x.toml", "--out", tmp_path / "run") == 2
    assert "no setting 'epoch'; did you mean 'epochs'?" in capsys.readouterr().err


def test_every_setting_is_a_documented_flag() -> None:
    text = subprocess.run(
        [sys.executable, "-m", "fedortho.cli", "train", "--help"],
        check=True,
        capture_output=True,
        text=True,
        env={"COLUMNS": "200", "TERM": "dumb"},
    ).stdout
    for flag in ("--ortho-every", "--data-dir", "--out", "--config", "--threads"):
        assert flag in text


def test_importing_fedortho_is_light() -> None:
    """Under 2.5 times the time of torch alone, the better of three tries each, and nothing heavy comes along."""

    def seconds(text: str) -> float:
        tries = []
        for _ in range(3):
            started = time.perf_counter()
            subprocess.run([sys.executable, "-c", text], check=True)
            tries.append(time.perf_counter() - started)
        return min(tries)

    heavy = "{'flwr', 'matplotlib', 'sklearn', 'pyarrow', 'torch_pruning'}"
    both = f"import sys, fedortho; assert not {heavy} & set(sys.modules)"
    assert seconds(both) < 2.5 * seconds("import torch")
