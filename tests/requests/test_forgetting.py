"""A request is served on a run by any method: patch, undo file, journal, derived run, accuracies, cost."""

from pathlib import Path

import pytest
from once import run_once

from fedortho.data.request import ForgetRequest
from fedortho.errors import FedOrthoError
from fedortho.evaluation.accuracies import accuracies_of
from fedortho.evidence.bundle import make_bundle, open_bundle
from fedortho.evidence.recheck import reapply_patch, rerun_decision
from fedortho.methods import make_method
from fedortho.models.patch import load_patch
from fedortho.requests.forgetting import serve_request
from fedortho.requests.undoing import undo_run
from fedortho.runs.run import Run, open_run
from fedortho.runs.settings import TrainSettings
from fedortho.storage.files import tensors_digest
from fedortho.storage.journal import check_journal

SETTINGS = TrainSettings(data="digits", model="vgg-mini", epochs=2, batch_size=64, lr=0.05, threads=1, crop=0, flip=0.0)
HOW = {
    "hide": {"max_retain_drop": 0.5, "target": 0.5},
    "directions": {"ratio": 0.1},
    "paper": {},
    "ssd": {},
    "finetune": {"epochs": 1},
    "retrain": {"epochs": 1},
    "logit-mask": {},
}
REQUEST = ForgetRequest.parse("class:3")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run_once(tmp_path_factory, tmp_path_factory.mktemp("runs") / "run", SETTINGS)


SLOW = ("directions", "finetune", "retrain", "ssd")


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in HOW])
def test_any_method_serves_a_request_and_can_be_undone_and_proven(run: Run, tmp_path: Path, name: str) -> None:
    data, method = run.load_data(), make_method(name, HOW[name])
    served = serve_request(run, data, "class:3", method, out=tmp_path / "forgot", undo=tmp_path / "undo")
    assert served.run is not None
    (record,) = served.run.record.requests
    assert (record.method, record.request, record.cost) == (name, "class:3", served.result.cost)
    assert make_method(record.method, record.settings) == method
    assert record.after == accuracies_of(served.run.load_model(), data, REQUEST)
    assert record.before == accuracies_of(run.load_model(), data, REQUEST)
    patched = load_patch(tmp_path / "forgot" / "patches" / "0000.safetensors").apply(run.load_model())
    assert tensors_digest(patched.state_dict()) == served.run.record.model.digest == record.model_after
    restored = undo_run(served.run, tmp_path / "undo", tmp_path / "back")
    assert restored.record.model == run.record.model
    assert restored.record.undone == ("class:3",)
    make_bundle(served.run, REQUEST, tmp_path / "evidence.zip")
    bundle = open_bundle(tmp_path / "evidence.zip")
    assert bundle.entry == record
    reapply_patch(bundle, run.path / "model.safetensors")
    rerun_decision(bundle, run)


def test_a_second_request_does_not_train_on_what_the_first_has_removed(run: Run, tmp_path: Path) -> None:
    data, method = run.load_data(), make_method("finetune", {"epochs": 1})
    first = serve_request(run, data, REQUEST, method, out=tmp_path / "first").run
    assert first is not None
    second = serve_request(first, data, "class:5", method, out=tmp_path / "second")
    number = int(((data.train.labels != 3) & (data.train.labels != 5)).sum())
    assert second.result.cost.images_trained == number
    assert set(second.record.all_forgotten) == {"class:3", "class:5"}
    paid = [served.retain_paid for served in open_run(tmp_path / "second").record.requests]
    assert second.retain_paid == pytest.approx(sum(paid))


def test_the_journal_tells_of_a_request_that_was_executed_and_of_one_that_was_refused(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    run = run_once(tmp_path_factory, tmp_path / "run", SETTINGS)
    data = run.load_data()
    serve_request(run, data, REQUEST, "paper", out=tmp_path / "forgot")
    with pytest.raises(FedOrthoError, match="class-pruning"):
        serve_request(run, data, "samples:1,2,3", "class-pruning", out=tmp_path / "none")
    assert not (tmp_path / "none").exists()
    serve_request(run, data, REQUEST, "paper", out=None)
    entries = check_journal(tmp_path).entries
    assert [entry.event for entry in entries] == ["received", "executed", "received", "refused"]
    assert entries[1].after == open_run(tmp_path / "forgot").record.model.digest
