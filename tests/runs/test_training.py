import json
import os
import pickle
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import fedortho.runs.training
from fedortho.data.request import ForgetRequest
from fedortho.data.sources import load_images
from fedortho.devices import choose_device
from fedortho.errors import BadCheckpoint, BadData, BadSetting, FedOrthoError, UnknownName
from fedortho.methods.hide import Hide
from fedortho.models.predictions import accuracy, evaluate
from fedortho.models.zoo import build_model
from fedortho.requests.forgetting import serve_request
from fedortho.runs.run import open_run
from fedortho.runs.settings import ImportSettings, TrainSettings
from fedortho.runs.training import import_run, train_run
from fedortho.storage.checkpoints import read_weights
from fedortho.storage.files import file_digest, locked, write_tensors
from fedortho.training import loop

KEPT = ["history.json", "ledger.safetensors", "model.safetensors", "run.json", "split.json"]
SMALL = TrainSettings(
    data="digits", valid=0.8, model="vgg-mini", epochs=1, batch_size=256, lr=0.05, threads=1, ortho_every=2
)


@pytest.fixture(scope="module")
def digits_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "digits"
    train_run(path, SMALL)
    return path


def test_a_run_keeps_all_that_is_needed_to_check_it(digits_run: Path) -> None:
    run = open_run(digits_run)
    assert sorted(os.listdir(digits_run)) == [
        "history.json",
        "ledger.safetensors",
        "model.safetensors",
        "run.json",
        "split.json",
    ]
    data = load_images("digits", valid=SMALL.valid)
    assert json.loads((digits_run / "split.json").read_text())["valid"] == data.valid.rows.tolist()
    assert not set(data.valid.rows.tolist()) & set(data.train.rows.tolist())
    record = run.record
    assert record.result.test_accuracy == accuracy(run.load_model(), run.load_data().test)
    assert record.environment.versions["torch"] == torch.__version__
    assert record.data.digest == data.digest
    assert len(run.history()) == 1


def test_training_again_into_a_finished_run_changes_nothing(digits_run: Path) -> None:
    before = {name: file_digest(digits_run / name) for name in os.listdir(digits_run)}
    train_run(digits_run, SMALL)
    assert {name: file_digest(digits_run / name) for name in os.listdir(digits_run)} == before


def test_a_directory_of_other_settings_or_other_files_is_refused(digits_run: Path, tmp_path: Path) -> None:
    with pytest.raises(FedOrthoError, match="epochs is 1, not 2"):
        train_run(digits_run, replace(SMALL, epochs=2))
    (tmp_path / "letter.txt").write_text("dear me")
    with pytest.raises(FedOrthoError, match="has other files in it"):
        train_run(tmp_path, SMALL)
    assert os.listdir(tmp_path) == ["letter.txt"]


def test_a_training_that_kept_nothing_may_be_deleted_for_one_with_other_settings(tmp_path: Path) -> None:
    def refused(*_: object) -> Any:
        raise FedOrthoError("this strategy cannot be served")

    with pytest.raises(FedOrthoError, match="cannot be served"):
        train_run(tmp_path / "run", SMALL, trainer=refused)
    told = r"\(epochs is 1, not 2\) began in .*run and kept nothing.* delete that directory"
    with pytest.raises(FedOrthoError, match=told):
        train_run(tmp_path / "run", replace(SMALL, epochs=2))


def test_going_on_with_other_threads_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    settings = replace(SMALL, threads=0)
    with monkeypatch.context() as patched:
        patched.setattr("fedortho.runs.training.fit", killed)
        with pytest.raises(KeyboardInterrupt):
            train_run(tmp_path / "run", settings)
    record = json.loads((tmp_path / "run/run.json").read_text())
    record["environment"]["threads"] = 99
    (tmp_path / "run/run.json").write_text(json.dumps(record))
    train_run(tmp_path / "run", settings)
    assert "began with 99 threads" in caplog.text


def test_two_processes_cannot_train_into_one_directory(tmp_path: Path) -> None:
    with locked(tmp_path / "run"), pytest.raises(FedOrthoError, match="another process is working on"):
        train_run(tmp_path / "run", SMALL)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("left", ["split.json", ".split.json.a1b2c3d_", ".run.json.a1b2c3d_"])
def test_a_run_killed_before_its_record_was_written_starts_again(tmp_path: Path, left: str) -> None:
    (tmp_path / left).write_text("[")
    train_run(str(tmp_path), replace(SMALL, epochs=1))
    assert sorted(os.listdir(tmp_path)) == KEPT


def test_a_run_killed_after_its_last_epoch_keeps_its_history(
    digits_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as killed:
        killed.setattr(fedortho.runs.training, "_finish", die)
        with pytest.raises(KeyboardInterrupt):
            train_run(tmp_path, SMALL)
    (tmp_path / "history.json").unlink()
    run = train_run(tmp_path, SMALL)
    assert [entry.epoch for entry in run.history()] == [0]
    assert run.record.model.digest == open_run(digits_run).record.model.digest


def test_the_data_of_a_run_may_move(tmp_path: Path) -> None:
    for row in range(20):
        picture = tmp_path / "here" / "ab"[row % 2] / f"{row}.png"
        picture.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (8, 8), 10 * row).save(picture)
    settings = replace(SMALL, data=str(tmp_path / "here"), valid=0.1, epochs=1, batch_size=4)
    run = train_run(tmp_path / "run", settings)
    (tmp_path / "here").rename(tmp_path / "there")
    with pytest.raises(UnknownName, match="there is no file or directory"):
        run.load_data()
    assert len(run.load_data(str(tmp_path / "there")).test) == 4


def test_a_checkpoint_that_outlived_its_run_is_removed(digits_run: Path, tmp_path: Path) -> None:
    shutil.copytree(digits_run, tmp_path / "copy")
    (tmp_path / "copy/checkpoint.safetensors").write_text("left")
    train_run(tmp_path / "copy", SMALL)
    assert not (tmp_path / "copy/checkpoint.safetensors").exists()


def test_an_output_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("a letter")
    with pytest.raises(FedOrthoError, match="x is a file; choose a directory"):
        train_run(tmp_path / "x", SMALL)


@pytest.mark.parametrize("key", ["settings", "data", "environment", "model", "result"])
def test_a_record_that_lacks_something_is_refused(digits_run: Path, tmp_path: Path, key: str) -> None:
    record = json.loads((digits_run / "run.json").read_text())
    del record[key]
    (tmp_path / "run.json").write_text(json.dumps(record))
    with pytest.raises(BadCheckpoint, match=f"lacks {key}"):
        open_run(str(tmp_path))


def test_a_changed_split_or_history_is_refused(digits_run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(digits_run, copy)
    (copy / "split.json").write_text('{"seed": 0, "share": 0.8, "valid": [1, 2, 3]}')
    with pytest.raises(BadCheckpoint, match="other validation images"):
        open_run(copy).load_data()
    (copy / "history.json").write_text('[{"a": 1}]')
    with pytest.raises(BadCheckpoint, match=r"history\.json lacks"):
        open_run(copy).history()


def test_a_changed_model_or_record_is_refused(digits_run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(digits_run, copy)
    weights = bytearray((copy / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (copy / "model.safetensors").write_bytes(bytes(weights))
    with pytest.raises(BadCheckpoint, match=r"not the model that run\.json describes"):
        open_run(copy).load_model()
    record = json.loads((copy / "run.json").read_text())
    begun = {key: record[key] for key in ("schema", "settings", "data", "environment")}
    (copy / "run.json").write_text(json.dumps(begun | {"status": "training"}))
    with pytest.raises(BadCheckpoint, match="has not finished"):
        open_run(copy)
    (copy / "run.json").write_text(json.dumps(record | {"schema": 99}))
    with pytest.raises(BadCheckpoint, match="schema 99"):
        open_run(copy)
    with pytest.raises(BadCheckpoint, match=r"no run\.json; it holds runs: give one of them, such as .*copy$"):
        open_run(tmp_path)


take_step = loop._take_step


def die_in_the_second_epoch(state: loop._State, *rest: Any) -> None:
    if state.history and state.step:
        os.kill(os.getpid(), signal.SIGKILL)
    take_step(state, *rest)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a process that can be killed is forked")
@pytest.mark.parametrize("kills", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_killed_process_ends_with_the_same_bytes_as_one_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kills: int
) -> None:
    settings = TrainSettings(data="digits", model="small:TinyNet", epochs=2, batch_size=64, lr=0.05, threads=1)
    train_run(tmp_path / "whole", settings)
    for _ in range(kills):
        child = os.fork()
        if not child:
            monkeypatch.setattr(loop, "_take_step", die_in_the_second_epoch)
            try:
                train_run(tmp_path / "killed", settings)
            finally:
                os._exit(1)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
        assert (tmp_path / "killed" / "checkpoint.safetensors").exists(), "killed while training"
    train_run(tmp_path / "killed", settings)
    for name in ("model.safetensors", "split.json"):
        assert file_digest(tmp_path / "whole" / name) == file_digest(tmp_path / "killed" / name)


def test_weights_from_elsewhere_become_a_run(tmp_path: Path) -> None:
    model = build_model("resnet-mini", num_classes=10, channels=1, seed=4)
    settings = ImportSettings(data="digits", model="resnet-mini")
    torch.save({"state_dict": {f"module.{k}": v for k, v in model.state_dict().items()}}, tmp_path / "a.pt")
    write_tensors(tmp_path / "b.safetensors", {f"module.{k}": v for k, v in model.state_dict().items()})
    runs = [
        import_run(tmp_path / name, tmp_path / file, settings) for name, file in (("x", "a.pt"), ("y", "b.safetensors"))
    ]
    digests = [run.record.model.digest for run in runs]
    assert digests[0] == digests[1]
    assert runs[0].record.imported_from == "a.pt"
    runs[0].load_model()
    with pytest.raises(FedOrthoError, match="exists already"):
        import_run(tmp_path / "x", tmp_path / "a.pt", settings)
    with pytest.raises(FedOrthoError, match=r"imported from a\.pt"):
        train_run(tmp_path / "x", SMALL)


class Evil:
    def __init__(self, harm: Path) -> None:
        self.harm = harm

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self.harm}",)


def test_a_pickle_is_refused_and_does_not_run(tmp_path: Path) -> None:
    harm = tmp_path / "harm"
    (tmp_path / "a.pkl").write_bytes(pickle.dumps(Evil(harm)))
    torch.save(Evil(harm), tmp_path / "b.pt")
    torch.save(build_model("vgg-mini", num_classes=10), tmp_path / "c.pt")
    for name in ("a.pkl", "b.pt", "c.pt"):
        with pytest.raises(BadCheckpoint, match="never loaded; save it with safetensors"):
            read_weights(tmp_path / name)
    assert not harm.exists()


def test_weights_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    settings = ImportSettings(data="digits", model="resnet-mini")
    write_tensors(tmp_path / "vgg.safetensors", build_model("vgg-mini", num_classes=10, channels=1).state_dict())
    with pytest.raises(BadCheckpoint, match=r"does not fit the model: it lacks conv1.* has unknown features"):
        import_run(tmp_path / "x", tmp_path / "vgg.safetensors", settings)
    write_tensors(tmp_path / "wide.safetensors", build_model("resnet-mini", num_classes=12, channels=1).state_dict())
    with pytest.raises(BadCheckpoint, match=r"has other shapes for fc\.weight"):
        import_run(tmp_path / "x", tmp_path / "wide.safetensors", settings)
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(BadCheckpoint, match="is not a state dict"):
        read_weights(tmp_path / "list.pt")
    assert not (tmp_path / "x").exists()


def test_a_run_on_other_data_is_refused(digits_run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(digits_run, copy)
    record = json.loads((copy / "run.json").read_text())
    record["data"]["digest"] = "0" * 64
    (copy / "run.json").write_text(json.dumps(record))
    with pytest.raises(BadData, match="is not the data that"):
        open_run(copy).load_data()


def test_devices_that_are_not_here_are_refused() -> None:
    for name in ("tpu", "cpu:x"):
        with pytest.raises(BadSetting, match=name):
            choose_device(name)
    assert choose_device("cpu").type == "cpu"
    with pytest.raises(UnknownName, match="choose from auto, cpu, cuda, mps"):
        TrainSettings(device="tpu")
    if not torch.cuda.is_available():
        with pytest.raises(BadSetting, match="cuda"):
            choose_device("cuda")


def test_a_model_that_learnt_nothing_is_told_of_and_so_is_a_class_that_it_never_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = TrainSettings(data="digits", model="small:TinyNet", epochs=1, lr=1e-6, batch_size=512, ortho=0.0)
    run = train_run(tmp_path / "run", settings)
    assert "no better than guessing" in caplog.text
    data = run.load_data()
    score = evaluate(run.load_model(), data.test)
    never = score.per_class.index(0.0)
    serve_request(run, data, ForgetRequest.parse(f"class:{never}"), Hide(ratio=0.1), out=None)
    assert "below the target" in caplog.text


def test_a_gpu_beyond_those_of_the_machine_is_refused_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("cuda:1").index == 1
    with pytest.raises(BadSetting, match="cuda:2 is not available; choose from cpu, cuda:0, cuda:1"):
        choose_device("cuda:2")
