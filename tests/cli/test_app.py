import json
import runpy
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from commands import QUICK, run
from test_api import commands

from fedortho import __version__
from fedortho.cli import app as cli
from fedortho.errors import FedOrthoError
from fedortho.models.zoo import build_model
from fedortho.runs.run import open_run
from fedortho.runs.settings import TrainSettings
from fedortho.storage.settings import field_types, kebab


def test_the_version_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"fedortho {__version__}\n"


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
    torch.save(build_model("vgg-mini", num_classes=10, channels=1).state_dict(), tmp_path / "a.pt")
    words = ("import", tmp_path / "a.pt", "--model", "vgg-mini", "--data", "digits", "--out", tmp_path / "run")
    assert run(monkeypatch, *words) == 0
    assert (tmp_path / "run" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("train", "--data", "cifar1"), "did you mean 'cifar10'?"),
        (("train", "--model", "vgg-mni"), "did you mean 'vgg-mini'?"),
        (("train", "--ortho-layers", "layer9"), "no layer 'layer9'"),
        (("train", "--lr", "-1"), "lr"),
        (("train", "--data", "cifar10", "--data-dir", "/nowhere"), "/nowhere"),
        (("train", "--config", "/nowhere.toml"), "/nowhere.toml"),
        (("train", "--valid", "1.5"), "1.5"),
        (("evaluate", "/nowhere"), "/nowhere"),
        (("import", "/nowhere.pt"), "/nowhere.pt"),
        (("train", "--config", "/"), "Is a directory"),
        (("train", "--epoch", "3"), "No such option"),
        (("train", "--epochs", "three"), "'three'"),
        (("train", "--epochs", "0"), "at least 1"),
        (("train", "--lr", "nan"), "lr"),
        (("train", "--model", ":f"), "package.module:function"),
        (("train", "--device", "cpu:x"), "cpu:x"),
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


def test_debug_shows_the_traceback_wherever_it_stands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (("--debug", "evaluate", "/nowhere"), ("evaluate", "/nowhere", "--debug")):
        assert run(monkeypatch, *words) == 2
        shown = capsys.readouterr().err
        assert "Traceback" in shown
        assert "in open_run" in shown
        assert shown.splitlines()[-1].startswith("error: ")
    assert run(monkeypatch, "evaluate", "/nowhere") == 2
    assert "Traceback" not in capsys.readouterr().err


def test_a_wrong_key_in_the_settings_file_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "x.toml").write_text("epoch = 3\n")
    assert run(monkeypatch, "train", "--config", tmp_path / "x.toml", "--out", tmp_path / "run") == 2
    assert "did you mean 'epochs'?" in capsys.readouterr().err


def test_check_tells_by_its_exit_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "check", "resnet-mini") == 0
    text = capsys.readouterr().out
    assert "with 1 more" in text
    assert "hide: works" in text
    assert run(monkeypatch, "check", "small:Odd", "--shape", "1x8x8", "--classes", 4, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    found = {entry["layer"]["name"]: entry for entry in told["layers"]}
    assert "depthwise" in found["depthwise"]["channel"]
    assert told["is_served"]
    assert run(monkeypatch, "check", "small:Odd", "--shape", "1x8x8") == 2, "it has 4 classes, not 10"
    assert run(monkeypatch, "check", "vgg-mini", "--shape", "big") == 2
    assert run(monkeypatch, "check", "vgg-mini", "--shape", "0x0x0") == 2


def test_a_model_of_ones_own_may_lie_where_the_command_is_given(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    net = "nn.Sequential(nn.Conv2d(1, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))"
    (tmp_path / "nets_here.py").write_text(f"from torch import nn\ndef small(): return {net}\n")
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])  # as the installed script has it
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, "check", "nets_here:small", "--shape", "1x8x8") == 0
    del sys.modules["nets_here"]


def test_code_that_a_run_names_is_trusted_once_by_a_flag(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    assert run(monkeypatch, "train", *QUICK, "--model", "small:TinyNet", "--out", out) == 0
    assert "images: part of the training split)" in capsys.readouterr().out
    monkeypatch.setenv("FEDORTHO_STATE", str(tmp_path / "of another user"))
    monkeypatch.delenv("FEDORTHO_TRUST_CODE")
    assert run(monkeypatch, "evaluate", out) == 2
    assert "names small:TinyNet, which would run code of" in capsys.readouterr().err
    assert run(monkeypatch, "evaluate", out, "--trust-code") == 0
    assert run(monkeypatch, "evaluate", out) == 0, "remembered"


def test_the_flag_that_trusts_code_covers_only_runs_that_the_line_names(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(monkeypatch, "train", *QUICK, "--model", "small:TinyNet", "--out", tmp_path / "mine") == 0
    shutil.copytree(tmp_path / "mine", tmp_path / "another")
    record = tmp_path / "another/run.json"
    record.write_text(record.read_text().replace("small:TinyNet", "small:SmallNet"))
    monkeypatch.setenv("FEDORTHO_STATE", str(tmp_path / "of another user"))
    monkeypatch.delenv("FEDORTHO_TRUST_CODE")
    words = ("judge", tmp_path / "mine", "--trust-code")
    assert run(monkeypatch, *words) == 2
    assert "has forgotten nothing" in capsys.readouterr().err
    with pytest.raises(FedOrthoError, match=r"names small:SmallNet, .* to a command with .*another"):
        open_run(tmp_path / "another")
    assert run(monkeypatch, *words, f"--reference={tmp_path / 'another'}") == 2
    assert open_run(tmp_path / "another").settings.model == "small:SmallNet"


def test_brackets_in_names_are_shown_as_they_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "a[bold]b[" / "]c"
    assert run(monkeypatch, "train", *QUICK, "--epochs", "1", "--out", out) == 0
    assert f"{out}: vgg-mini" in capsys.readouterr().out
    assert run(monkeypatch, "evaluate", out) == 0
    assert f"{out}: test images of digits\n" in capsys.readouterr().out


@pytest.mark.slow
def test_an_interrupted_training_says_how_to_go_on(tmp_path: Path) -> None:
    listen = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"  # a background job ignores it
    start = [sys.executable, "-c", f"{listen}; from fedortho.cli.app import main; main()"]
    command = [*start, "train", *QUICK, "--epochs", "500", "--out", tmp_path / "run"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "run" / "checkpoint.safetensors").exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    told = process.communicate(timeout=60)[1]
    assert process.returncode == 130
    assert "interrupted; the same command continues after the last finished epoch" in told
    assert "Traceback" not in told


def test_every_setting_is_a_documented_flag(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["fedortho", "train", "--help"])
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "dumb")
    with pytest.raises(SystemExit) as stop:
        runpy.run_module("fedortho", run_name="__main__")  # as `python -m fedortho` does
    assert not stop.value.code
    text = capsys.readouterr().out
    for flag in ("--out", "--config", "--continue", *(f"--{kebab(name)}" for name in field_types(TrainSettings))):
        if flag == "--start":  # which is --continue here
            continue
        assert f" {flag} " in text


def test_importing_fedortho_is_light() -> None:
    """At most 2.5 times the time of torch alone, in the best of three tries, and no heavy library comes along.

    Nor does torch's compiler at the first step of a training, as it would with an optimiser of torch.
    """
    code = """
import sys, time
started = time.process_time()
import torch
torch_alone = time.process_time() - started
import fedortho
both = time.process_time() - started
assert not {"flwr", "matplotlib", "sklearn", "pyarrow", "torch_pruning"} & set(sys.modules)
images = fedortho.images_from_tensors(torch.zeros(8, 1, 8, 8, dtype=torch.uint8), torch.arange(8) % 2)
fedortho.fit(fedortho.build_model("vgg-mini", num_classes=2, channels=1), images, fedortho.Recipe(epochs=1))
assert "torch._dynamo" not in sys.modules
sys.stdout.write(str(both / torch_alone))
"""
    tries = (
        float(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)
        for _ in range(3)
    )
    assert any(ratio < 2.5 for ratio in tries)


FEDERATION = ("--data", "digits", "--model", "small:TinyNet", "--clients", "3", "--rounds", "1", "--fraction", "1")
FEDERATION += ("--threads", "1", "--flip", "0")


def test_a_federation_is_trained_asked_to_forget_and_judged(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    fed, forgot = tmp_path / "fed", tmp_path / "forgot"
    assert run(monkeypatch, "federate", *FEDERATION, "--out", fed) == 0
    told = capsys.readouterr()
    assert "round 1/1  3 clients" in told.err
    assert "MB down" in told.err
    words = ("--method", "paper", "--ratio", "0.2", "--out", forgot, "--audit", "none")
    assert run(monkeypatch, "forget", fed, "client:1", *words) == 0
    assert "1 exchange with clients" in capsys.readouterr().out
    assert run(monkeypatch, "judge", forgot, "--audit", "none", "--json") == 0
    verdict = json.loads(capsys.readouterr().out)
    assert verdict["subject"] == "client 1"
    assert {"client-change-min", "mia-confidence"} <= {metric["name"] for metric in verdict["metrics"]}
    digests = {open_run(path).record.model.digest for path in (fed, forgot)}
    assert set(verdict["digests"].values()) == digests
    words = ("--attack", "C2", "--after-rounds", "1", "--json")
    assert run(monkeypatch, "audit", forgot, *words) == 0
    later = json.loads(capsys.readouterr().out)
    assert set(later) == {"0", "1"}
    outcomes = {rounds: found["audits"][1]["outcome"] for rounds, found in later.items()}
    assert outcomes == {"0": "NO REFERENCE", "1": "NO REFERENCE"}
    assert open_run(tmp_path / "forgot-after-1").record.requests[-1].request == "client:1"
    assert run(monkeypatch, "audit", forgot, "--after-rounds", "0") == 2
    assert "--after-rounds" in capsys.readouterr().err
    assert run(monkeypatch, "sync", forgot) == 0
    assert "2 of 3 clients have the model" in capsys.readouterr().out, "one has left"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--split", "dirichlet"), "'dirichlet'"),
        (("--clients", "3000"), "3000"),
        (("--without", "client:7"), "0 to 2"),
        (("--backend", "cloud"), "inprocess, ray, superlink"),
        (("--backend", "superlink"), "--deployment"),
        (("--norms", "fedav"), "did you mean 'fedavg'"),
        (("--fraction", "0"), "fraction"),
        (("--start", "nowhere"), "nowhere"),
    ],
)
def test_a_federation_that_cannot_be_is_refused_before_anything_is_written(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    words: tuple[str, ...],
    message: str,
) -> None:
    assert run(monkeypatch, "federate", *FEDERATION, *words, "--out", tmp_path / "fed") == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "fed").exists()


def test_the_help_of_a_command_tells_what_its_arguments_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "forget", "--help") == 0
    shown = capsys.readouterr().out
    assert "a run directory" in shown, "not with every version of click and typer"
    assert "client:3" in shown


def test_every_command_has_a_short_help_flag_and_the_exit_codes_are_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in ([], *(name.split() for name in sorted(commands()))):
        assert run(monkeypatch, *words, "-h") == 0, words
        shown = capsys.readouterr().out
        assert "Usage: fedortho" in shown
        assert ("130 interrupted" in shown) == (words == [])
    page = (Path(__file__).parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")
    assert all(f"| {code} |" in page for code in (0, 1, 2, cli.INTERRUPTED))


def test_quiet_leaves_errors_and_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("data", "ls", "digits", "--limit", "1")
    assert run(monkeypatch, *words, "--quiet") == 0
    assert capsys.readouterr() == ("", "")
    assert run(monkeypatch, *words, "--json", "--quiet") == 0
    assert len(json.loads(capsys.readouterr().out)) == 1
    assert run(monkeypatch, "--quiet", "evaluate", "/nowhere") == 2
    assert "/nowhere" in capsys.readouterr().err
    assert run(monkeypatch, *words) == 0
    assert "sha256" in capsys.readouterr().out, "only the line that asks for it is quiet"


def test_a_quiet_training_prints_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = ("--model", "small:TinyNet", "--out", tmp_path / "run")
    assert run(monkeypatch, "train", *QUICK, *out, "--quiet") == 0
    assert capsys.readouterr() == ("", "")


def test_a_shell_can_complete_commands(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("_FEDORTHO_COMPLETE", "complete_bash")
    monkeypatch.setenv("_TYPER_COMPLETE_ARGS", "fedortho fo")
    monkeypatch.setenv("COMP_WORDS", "fedortho fo")
    monkeypatch.setenv("COMP_CWORD", "1")
    assert run(monkeypatch) == 0
    assert capsys.readouterr().out.split() == ["forget"]
    monkeypatch.delenv("_FEDORTHO_COMPLETE")
    assert run(monkeypatch, "-h") == 0
    assert "--install-completion" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "called", "told"),
    [
        (("results", "."), "fedortho.cli.show.list_runs", "nothing was written"),
        (("judge", "run"), "fedortho.cli.verdict.open_run", "no verdict was written"),
        (("compare", "run", "class:3"), "fedortho.cli.methods.open_run", "finished parts are kept"),
        (("forget", "run", "class:3"), "fedortho.cli.forget.open_run", "does what is not written yet"),
    ],
)
def test_an_interruption_says_what_goes_on(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    called: str,
    told: str,
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(called, interrupt)
    assert run(monkeypatch, *words) == 130
    assert told in capsys.readouterr().err
