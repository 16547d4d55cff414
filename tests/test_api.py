"""The public API: documented names that reach everything a command can do, and one walk through them."""

import importlib
import inspect
from pathlib import Path

import pytest
import torch
import typer.main

import fedortho as fo
from fedortho.cli.app import app
from fedortho.unlearning.calibrate import Refused

CALLS = {  # a name of fedortho, or, for what operates a deployment or lists files, of one of its modules
    "train": "train_run",
    "import": "import_run",
    "evaluate": "evaluate",
    "check": "check",
    "federate": "federate_run",
    "sync": "requests.federated_jobs.sync_run",
    "deploy": "federated.deploy.write_deployment",
    "forget": "forget_run",
    "undo": "undo_run",
    "judge": "judge_run",
    "audit": "audit_run",
    "qualify": "qualify_run",
    "compare": "compare",
    "tune": "tune",
    "reproduce": "experiments.runner.reproduce",
    "theory": "experiments.theory.measure_theory",
    "report": "write_report",
    "results": "reports.run_table.list_runs",
    "data ls": "list_images",
    "data find": "list_images",
    "data purge": "purge_run",
    "bundle make": "make_bundle",
    "bundle check": "check_bundle",
    "bundle key": "evidence.signature.make_key",
    "journal check": "storage.journal.check_journal",
    "journal show": "storage.journal.check_journal",
    "journal head": "evidence.published_head.publish_head",
}
QUICK = fo.TrainSettings(
    data="digits", model="small:QuickNet", epochs=3, valid=0.2, crop=0, flip=0.0, threads=1, device="cpu"
)


def commands() -> set[str]:
    """Every command of the app, those of groups with the name of their group."""
    found = set()
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]  # it is a group
        inner = getattr(command, "commands", None)
        found |= {name} if inner is None else {f"{name} {each}" for each in inner}
    return found


def test_no_public_name_hides_a_package() -> None:
    packages = {path.parent.name for path in Path(fo.__file__).parent.glob("*/__init__.py")}
    assert not packages & set(fo.__all__)


def test_the_names_are_sorted_few_and_documented() -> None:
    assert fo.__all__ == sorted(fo.__all__)
    assert 25 <= len(fo.__all__) <= 46
    for name in fo.__all__:
        found = getattr(fo, name)
        text = inspect.getdoc(found) or ""
        assert text, f"{name} has no docstring"
        assert not text.startswith(f"{name}("), f"{name} has only the docstring that dataclasses make"


def test_every_command_has_a_call() -> None:
    assert commands() == set(CALLS)
    for path in CALLS.values():
        module, _, name = f"fedortho.{path}".rpartition(".")
        call = getattr(importlib.import_module(module), name)
        assert callable(call)
        assert call.__doc__
        assert "." in path or path in fo.__all__


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> fo.Run:
    return fo.train_run(tmp_path_factory.mktemp("runs") / "first", QUICK)


def test_models_in_memory_take_data_and_requests_in_words(run: fo.Run) -> None:
    model = run.load_model()
    method = fo.make_method("paper", {"ratio": 0.2})
    before = {name: value.clone() for name, value in model.state_dict().items()}
    named = fo.forget(model, "digits", "class:3", method)
    given = fo.forget(model, fo.load_images("digits"), fo.ForgetRequest.parse("class:3"), method)
    assert named.patch.after == given.patch.after == fo.plan(model, "digits", "class:3", method).patch.after
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items()), "it stays as it was"
    verdict = fo.judge(named.model, "digits", "class:3", original=model, only=("C2",))
    assert [audit.name for audit in verdict.audits if audit.outcome != "NOT RUN"] == ["C2"]
    with pytest.raises(fo.FedOrthoError, match="finetune"):
        fo.plan(model, "digits", "class:3", "finetune")


def test_a_run_goes_through_all_calls_by_its_path(run: fo.Run, tmp_path: Path) -> None:
    forgot, undo = tmp_path / "forgot", tmp_path / "undo.safetensors"
    served = fo.forget_run(str(run.path), "class:3", fo.make_method("paper", {"ratio": 0.2}), out=forgot, undo=undo)
    assert served.run is not None
    assert served.record.method == "paper"
    assert fo.forget_run(run, fo.ForgetRequest.parse("class:3"), "logit-mask").run is None, "without out, nothing"
    verdict = fo.judge_run(fo.open_run(forgot), "class:3", fo.JudgeOptions(audit="none"), original=run.path)
    assert verdict.subject == "class 3"
    audited = fo.audit_run(served.run, None, fo.JudgeOptions(only=("C6",)), original=run)
    assert [audit.name for audit in audited.audits if audit.outcome != "NOT RUN"] == ["C6"]
    assert fo.write_report(forgot, original=run.path, images=False).name == "report.html"
    fo.make_bundle(forgot, "class:3", tmp_path / "evidence.zip", journal=run.path.parent)
    found = fo.check_bundle(str(tmp_path / "evidence.zip"), model=run.path / "model.safetensors", run=run.path)
    assert found.bundle.patch.after == served.result.patch.after
    assert fo.undo_run(forgot, undo, tmp_path / "back").record.model == run.record.model
    rows = fo.compare(run.path, "class:3", "paper,logit-mask", out=tmp_path / "compared", settings="short")
    assert [row.method for row in rows] == ["paper", "logit-mask"]


def test_a_refusal_carries_its_trials_and_says_what_to_do(run: fo.Run) -> None:
    strict = fo.make_method("hide", {"target": 0.0, "max_retain_drop": 0.0, "scrub": False, "layers": "features.6"})
    with pytest.raises(Refused, match="retrain") as refusal:
        fo.forget_run(run, "class:3", strict)
    assert refusal.value.frontier
