"""A request with a ticket is served once; the ticket of another request is refused."""

import json
from pathlib import Path

import pytest
from commands import told

from fedortho.audits.verdict import read_verdict
from fedortho.errors import FedOrthoError, UnknownName
from fedortho.requests import forgetting, transaction
from fedortho.requests.forgetting import forget_run
from fedortho.runs.run import Run, open_run
from fedortho.runs.settings import TrainSettings
from fedortho.runs.training import train_run
from fedortho.storage.files import read_json, write_json
from fedortho.storage.journal import check_journal

SETTINGS = TrainSettings(data="digits", model="small:TinyNet", epochs=1, threads=1, crop=0, flip=0.0, device="cpu")


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return train_run(tmp_path / "run", SETTINGS)


def events(directory: Path) -> list[tuple[str, str | None]]:
    return [(entry.event, entry.details.get("ticket")) for entry in check_journal(directory).entries]


def test_a_ticket_is_served_once_and_its_result_returned_without_any_work(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = forget_run(run, "class:3", "paper", out=tmp_path / "new", ticket="T-1")
    assert first.record.ticket == open_run(tmp_path / "new").record.requests[-1].ticket == "T-1"
    assert not first.was_finished
    written = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*") if file.is_file()}
    monkeypatch.setattr(Run, "load_data", lambda *_: pytest.fail("the data may be deleted by now"))
    again = forget_run(tmp_path / "run", "class:3", "hide", out=tmp_path / "new", ticket="T-1")
    assert again.was_finished
    assert (again.record, again.retain_paid) == (first.record, first.retain_paid)
    assert again.result.patch.after == first.result.patch.after
    assert events(tmp_path) == [("received", "T-1"), ("executed", "T-1")]
    assert {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*") if file.is_file()} == written


def test_a_ticket_of_another_request_run_or_directory_is_refused(run: Run, tmp_path: Path) -> None:
    new = forget_run(run, "class:3", "paper", out=tmp_path / "new", ticket="T-1").run
    assert new is not None
    for model, request, out in ((run, "class:5", "new"), (run, "class:3", "other"), (new, "class:3", "new")):
        with pytest.raises(FedOrthoError, match=r"ticket T-1 was served for class:3 on model \w{8}, written to new"):
            forget_run(model, request, "paper", out=tmp_path / out, ticket="T-1")
    with pytest.raises(FedOrthoError, match="new exists already"):
        forget_run(run, "class:3", "paper", out=tmp_path / "new", ticket="T-2")
    with pytest.raises(FedOrthoError, match="the ticket T-3 needs a directory to write to"):
        forget_run(run, "class:3", "paper", ticket="T-3")


def test_a_ticket_that_was_refused_or_interrupted_is_served_now(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(FedOrthoError, match="class-pruning serves"):
        forget_run(run, "samples:1", "class-pruning", out=tmp_path / "new", ticket="T-1")

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(forgetting, "unlearn", interrupt)
        with pytest.raises(KeyboardInterrupt):
            forget_run(run, "class:3", "paper", out=tmp_path / "new", ticket="T-1")
    assert not forget_run(run, "class:3", "paper", out=tmp_path / "new", ticket="T-1").was_finished
    told = ["received", "refused", "received", "interrupted", "received", "executed"]
    assert [event for event, _ in events(tmp_path)] == told
    assert {ticket for _, ticket in events(tmp_path)} == {"T-1"}


def test_a_crash_between_the_run_and_the_journal_is_mended(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = transaction.append_entry

    def crash(directory: Path, event: str, *words: str, **more: object) -> None:
        if event == "executed":
            raise KeyboardInterrupt
        append(directory, event, *words, **more)  # type: ignore[arg-type]  # passed on

    with monkeypatch.context() as patched:
        patched.setattr(transaction, "append_entry", crash)
        with pytest.raises(KeyboardInterrupt):
            forget_run(run, "class:3", "paper", out=tmp_path / "new", ticket="T-1")
    assert forget_run(run, "class:3", "paper", out=tmp_path / "new", ticket="T-1").was_finished
    (_, executed) = check_journal(tmp_path).entries
    assert (executed.event, executed.after) == ("executed", open_run(tmp_path / "new").record.model.digest)


def test_records_from_before_tickets_are_read(run: Run, tmp_path: Path) -> None:
    forget_run(run, "class:3", "paper", out=tmp_path / "new")
    value = read_json(tmp_path / "new" / "run.json")
    del value["requests"][0]["ticket"]
    write_json(tmp_path / "new" / "run.json", value)
    assert open_run(tmp_path / "new").record.requests[0].ticket is None


def test_the_command_takes_a_ticket_and_a_settings_file(run: Run, tmp_path: Path) -> None:
    (tmp_path / "how.toml").write_text('method = "paper"\nratio = 0.5\nalpha = 0.25\n')
    words = ("forget", run.path, "class:3", "--config", tmp_path / "how.toml", "--alpha", "0.75", "--id", "T-1")
    served = json.loads(told(*words, "--json"))
    assert (served["method"], served["settings"]["ratio"], served["settings"]["alpha"]) == ("paper", 0.5, 0.75)
    verdict = read_verdict(tmp_path / "run-class-3")
    assert verdict is not None
    assert json.loads(told(*words, "--json")) == served
    assert "the ticket T-1 was served before: class:3 by paper, in" in told(*words)
    assert verdict.sentence in " ".join(told(*words).split())
    (tmp_path / "run-class-3" / "verdict.json").unlink()
    assert "not judged yet: fedortho judge" in " ".join(told(*words).split())
    (tmp_path / "wrong.toml").write_text("ratios = 0.5\n")
    with pytest.raises(UnknownName, match="no setting 'ratios'; did you mean 'ratio'"):
        told("forget", run.path, "class:4", "--level", "hide", "--config", tmp_path / "wrong.toml")
    assert "dry run: nothing was done" in told("forget", run.path, "class:4", "--dry-run", "--id", "T-2")
    assert not (tmp_path / "run-class-4").exists()
