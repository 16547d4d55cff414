import contextlib
import errno
import json
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from typer.testing import CliRunner

from fedortho.cli.evidence import bundle_app, journal_app
from fedortho.data.request import ForgetRequest
from fedortho.errors import FedOrthoError
from fedortho.evidence.bundle import open_bundle
from fedortho.methods.hide import Hide
from fedortho.requests import judging
from fedortho.requests.forgetting import serve_request
from fedortho.requests.judging import JudgeOptions, judge_run
from fedortho.runs.run import open_run
from fedortho.runs.settings import TrainSettings
from fedortho.runs.training import train_run
from fedortho.storage.journal import append_entry, check_journal

app = typer.Typer()
app.add_typer(journal_app, name="journal")
app.add_typer(bundle_app, name="bundle")


def told(*words: object) -> str:
    """What a command prints; what it raises goes on, for the command line to make one line of."""
    result = CliRunner().invoke(app, list(map(str, words)), catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def results(text: str) -> list[str]:
    return [line.partition(":")[0] for line in text.splitlines()[3:]]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a run, the same without class 3, and their journal."""
    place = tmp_path_factory.mktemp("runs")
    settings = TrainSettings(data="digits", model="small:TinyNet", epochs=1, batch_size=64, threads=1, crop=0, flip=0.0)
    run = train_run(place / "first", settings)
    request = ForgetRequest.parse("class:3")
    serve_request(run, run.load_data(), request, Hide(ratio=0.2), out=place / "second")
    return place


def test_the_journal_is_checked_and_its_head_told(place: Path, tmp_path: Path) -> None:
    last = check_journal(place).last
    for where in (place, place / "first"):
        text = told("journal", "check", where)
        assert "2 entries, each following from the one before" in text
        assert f"head: 2 {last.hash}" in text
        assert "publish this head" in text
    assert "nothing up to there was changed" in told("journal", "check", place, "--head", last.hash)
    with pytest.raises(FedOrthoError, match="0000"):
        told("journal", "check", place, "--head", "0" * 64)
    with pytest.raises(FedOrthoError, match="journal"):
        told("journal", "check", tmp_path)


def test_a_published_head_finds_a_rollback_and_a_removed_journal(tmp_path: Path) -> None:
    runs, head = tmp_path / "runs", tmp_path / "head.json"
    append_entry(runs, "received", "one", "class:3")
    shutil.copytree(runs, tmp_path / "older")
    append_entry(runs, "undone", "one", "class:3")
    told("bundle", "key", "-o", tmp_path / "me.pem")
    assert "entry 2 " in told("journal", "head", runs, "-o", head, "--sign", tmp_path / "me.pem")
    text = told("journal", "check", runs, "--head", head, "--public", tmp_path / "me.pub")
    assert "entry 2, published at" in text
    assert "signed by the key" in text
    with pytest.raises(FedOrthoError, match="has 1 entries, but entry 2 was published"):
        told("journal", "check", tmp_path / "older", "--head", head)
    with pytest.raises(FedOrthoError, match=r"there is no journal in .* but its entry 2 was published"):
        told("journal", "check", tmp_path, "--head", head)
    with pytest.raises(FedOrthoError, match="--public is given without a published head"):
        told("journal", "check", runs, "--public", tmp_path / "me.pub")


def test_the_journal_is_shown(place: Path) -> None:
    assert "received" in told("journal", "show", place)
    assert [entry["event"] for entry in json.loads(told("journal", "show", place, "--json"))] == [
        "received",
        "executed",
    ]


def test_all_about_a_request_stands_in_the_journal_beside_the_run_it_was_asked_of(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "first", tmp_path / "runs" / "first")
    run, out = open_run(tmp_path / "runs" / "first"), tmp_path / "elsewhere" / "out"
    request = ForgetRequest.parse("class:3")
    made = serve_request(run, run.load_data(), request, Hide(ratio=0.2), out=out).run
    assert made is not None
    judge_run(made, request, JudgeOptions("none"), original=run)
    journal = check_journal(tmp_path / "runs")
    assert [(entry.event, entry.run) for entry in journal.entries] == [
        ("received", "first"),
        ("executed", "out"),
        ("judged", "out"),
    ]
    assert not (out.parent / "journal.jsonl").exists()
    assert "without journal.jsonl" in told("bundle", "make", out, "class:3", "-o", tmp_path / "bare.zip")
    told("bundle", "make", out, "class:3", "-o", tmp_path / "x.zip", "--journal", tmp_path / "runs")
    assert open_bundle(tmp_path / "x.zip").files["journal.jsonl"] == (tmp_path / "runs/journal.jsonl").read_bytes()


@pytest.mark.parametrize(("passes", "event"), [(True, "verified"), (False, "judged")])
def test_verified_means_that_every_audit_passed(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, passes: bool, event: str
) -> None:
    for name in ("first", "second"):
        shutil.copytree(place / name, tmp_path / name)
    digests = {"before": "a" * 64, "after": "b" * 64}
    verdict = SimpleNamespace(digests=digests, label="as it came out", passes=passes, audits=())
    monkeypatch.setattr(judging, "judge_case", lambda *_, **__: verdict)
    monkeypatch.setattr(judging, "write_verdict", lambda *_: None)
    first, second = open_run(tmp_path / "first"), open_run(tmp_path / "second")
    judge_run(second, "class:3", original=first)
    begun, entry = check_journal(tmp_path).entries
    assert begun.event == "begun", "the copied run has served a request, of which no journal tells here"
    assert (entry.event, entry.details) == (event, {"label": "as it came out", "passes": passes})


def test_where_no_verdict_can_be_written_none_is_worked_out(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(dir: Path) -> contextlib.nullcontext[None]:  # as tempfile names it
        assert dir in (place, place / "second")
        if dir == place / "second":
            raise OSError(errno.EROFS, "Read-only file system")
        return contextlib.nullcontext()

    def too_late(*_: object, **__: object) -> None:
        raise AssertionError("nothing may be judged yet")

    monkeypatch.setattr(judging, "judge_case", too_late)
    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    first, second = open_run(place / "first"), open_run(place / "second")
    with pytest.raises(FedOrthoError, match="second cannot be written: Read-only file system"):
        judge_run(second, "class:3", original=first)


def test_a_torn_line_is_told(tmp_path: Path) -> None:
    append_entry(tmp_path, "received", "run", "class:3")
    head = json.loads((tmp_path / "journal.head").read_text()) | {"announced": "0" * 64}
    (tmp_path / "journal.head").write_text(json.dumps(head, sort_keys=True, separators=(",", ":")) + "\n")
    with (tmp_path / "journal.jsonl").open("a") as stream:
        stream.write('{"after":nu')
    assert "incomplete line" in told("journal", "check", tmp_path)


def test_make_then_check_on_another_machine(place: Path, tmp_path: Path) -> None:
    text = told("bundle", "key", "-o", tmp_path / "me.pem")
    assert "readable by you only" in text
    file = tmp_path / "evidence.zip"
    text = told("bundle", "make", place / "second", "class:3", "-o", file, "--sign", tmp_path / "me.pem")
    digest = open_bundle(file).manifest.digest
    assert f"--digest: {digest}" in text
    assert "not that it is true" in text
    text = told("bundle", "check", file)
    assert results(text) == [
        "checked",
        *["absent"] * 2,
        *["not checked"] * 2,
        "checked",
        *["not checked"] * 5,
    ]
    assert "absent: verdict.json: no audit" in text
    model = place / "first" / "model.safetensors"
    keys = ("--public", tmp_path / "me.pub", "--digest", digest.upper())
    text = told("bundle", "check", file, "--model", model, "--run", place / "first", *keys)
    assert results(text) == [
        "checked",
        *["absent"] * 2,
        *["checked"] * 3,
        "not checked",
        *["checked"] * 4,
        "not checked",
    ]
    assert "bit for bit" in text
    assert "not checked: whether entry 2 was published: --head FILE" in text


def test_a_changed_bundle_fails_and_is_named(place: Path, tmp_path: Path) -> None:
    told("bundle", "make", place / "second", "class:3", "-o", tmp_path / "x.zip")
    assert "absent: signature" in told("bundle", "check", tmp_path / "x.zip")
    text = (tmp_path / "x.zip").read_bytes().replace(b"What it does not show", b"What it does nov show")
    (tmp_path / "x.zip").write_bytes(text)
    with pytest.raises(FedOrthoError, match=r"x\.zip: README\.txt was changed"):
        told("bundle", "check", tmp_path / "x.zip")
    with pytest.raises(FedOrthoError, match="--data-dir"):
        told("bundle", "check", tmp_path / "x.zip", "--data-dir", "there")


def test_what_was_checked_is_told_to_machines_too(place: Path, tmp_path: Path) -> None:
    last = check_journal(place).last
    journal = json.loads(told("journal", "check", place, "--json"))
    assert (journal["entries"], journal["head"]["hash"]) == (last.number, last.hash)
    told("bundle", "make", place / "second", "class:3", "-o", tmp_path / "b.zip")
    found = json.loads(told("bundle", "check", tmp_path / "b.zip", "--json"))
    assert (found["request"], found["run"]) == ("class:3", "second")
    assert found["after"] == open_run(place / "second").record.model.digest
    assert {claim["state"] for claim in found["claims"]} == {"checked", "not checked", "absent"}
