"""Forgotten images deleted for good: from the cache, from their folder, and from later trainings."""

import hashlib
import json
import logging
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from commands import told
from photos import SIZES, cache_bytes, draw, make_photos, pixels_of, settings

from fedortho.audits.verdict import read_verdict
from fedortho.data.listing import list_images
from fedortho.data.request import ForgetRequest
from fedortho.data.sources import load_images
from fedortho.errors import BadData, FedOrthoError
from fedortho.evidence.bundle import make_bundle
from fedortho.reports.page import write_report
from fedortho.requests.comparing import compare
from fedortho.requests.forgetting import forget_run
from fedortho.requests.judging import JudgeOptions, judge_run
from fedortho.requests.references import check_reference
from fedortho.requests.undoing import undo_run
from fedortho.runs.purge import known_copies, purge_run
from fedortho.runs.run import open_run
from fedortho.runs.training import train_run
from fedortho.storage.files import read_tensors


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An image folder with unbalanced classes; runs and caches join it."""
    return make_photos(tmp_path_factory.mktemp("deleting"))


@pytest.fixture
def home(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, as the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDORTHO_CACHE", str(made / "trained"))
    original = made / "runs/first"
    if not original.exists():
        monkeypatch.chdir(made)
        train_run("runs/first", settings(Path("photos")))
        monkeypatch.chdir(tmp_path)
    shutil.copytree(made / "photos", tmp_path / "photos")
    shutil.copytree(made / "runs", tmp_path / "runs")
    shutil.copytree(made / "trained", tmp_path / "cache")
    monkeypatch.setenv("FEDORTHO_CACHE", str(tmp_path / "cache"))
    return tmp_path


def two_names() -> list[str]:
    data = open_run("runs/first").load_data()
    assert data.train.ids is not None
    return [data.train.ids.files[row] for row in data.train.rows.tolist() if data.train.store_labels[row] == 0][3:5]


def served(names: list[str], **how: object) -> None:
    forget_run("runs/first", f"samples:{','.join(names)}", "neggrad", out="runs/second", undo="undo.safetensors", **how)  # type: ignore[arg-type]  # mixed


def test_two_photos_deleted_for_good_leave_every_command_usable(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    names = two_names()
    blobs = [pixels_of(name) for name in names]
    assert all(blob in cache_bytes() for blob in blobs)
    served(names)
    before = open_run("runs/second").load_data()
    assert not any(blob in cache_bytes() for blob in blobs), "the cache no longer has their pixels"
    assert (
        before.train.pixels[before.train.rows].shape
        == open_run("runs/first").load_data().train.pixels[before.train.rows].shape
    ), "while the files are there both runs read them"
    assert blobs[0] == pixels_of(names[0])
    verdict = judge_run("runs/second", options=JudgeOptions(device="cpu"))
    metric = verdict.metric("forget-accuracy")
    assert metric is not None
    assert metric.images == 2
    source, *decoded = verdict.copies
    assert (source.what, source.images) == ("source", 2)
    assert decoded
    assert all(copy.images == 0 and copy.removed == 2 for copy in decoded)

    for name in names:
        (Path("photos") / name).unlink()
    run = open_run("runs/second")
    data = run.load_data()
    assert len(data.gone) == 2
    assert torch.equal(data.train.rows, before.train.rows[~torch.isin(before.train.rows, data.gone)])
    for part in ("train", "valid", "test"):
        mine, theirs = getattr(data, part), getattr(before, part)
        assert torch.equal(mine.pixels[mine.rows], theirs.pixels[mine.rows])
        assert torch.equal(mine.labels, theirs.store_labels[mine.rows])
        assert (mine.mean, mine.std) == (theirs.mean, theirs.std)
    assert torch.equal(data.valid.rows, before.valid.rows)
    assert torch.equal(data.test.rows, before.test.rows)
    assert data.digest == before.digest

    with pytest.raises(BadData, match=f"not forgotten: {names[0]}, {names[1]}; restore them, or use the run"):
        open_run("runs/first").load_data()
    again = judge_run("runs/second", options=JudgeOptions(device="cpu", retrain=True))
    assert {audit.outcome for audit in again.audits} == {"NOT RUN"}
    assert not [metric for metric in again.metrics if metric.error], "what cannot be measured is no error"
    assert "were deleted" in again.audits[0].finding
    assert again.sentence.startswith("2 samples: its accuracy could not be measured.")
    assert again.has_reference, "a reference model can still be trained"
    assert again.copies[0].images == 0
    kept = read_verdict(Path("runs/second"))
    assert kept is not None
    assert kept.audits == verdict.audits, "what was measured before the deletion is kept"
    assert kept.copies == again.copies
    assert "Copies of the data" in write_report("runs/second", device="cpu").read_text()
    make_bundle("runs/second", str(run.record.requests[-1].request), "evidence.zip")
    told("evaluate", "runs/second")
    told("data", "ls", "runs/second")
    third = forget_run("runs/second", "class:emu", "neggrad", out="runs/third", device="cpu")
    assert third.run is not None
    assert list(third.record.all_forgotten) == ["class:emu"], "what was deleted is not measured"
    assert undo_run("runs/second", "undo.safetensors", "runs/back").record.model == open_run("runs/first").record.model
    assert json.loads(told("data", "purge", "runs/second", "--json"))[0]["images"] == 0


def test_later_trainings_never_see_what_was_forgotten(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    names = two_names()
    served(names)
    data = load_images("photos")
    assert "2 images that were forgotten are left out" in caplog.text
    assert data.train.ids is not None
    kept = [data.train.ids.files[row] for row in torch.cat([data.train.rows, data.valid.rows]).tolist()]
    assert not set(names) & set(kept)
    named = replace(settings(Path("photos")), without=f"samples:{names[0]}", epochs=1)
    (row,) = [row.row for row in list_images(open_run("runs/first").load_data(), names[:1])]
    assert train_run("runs/named", named).settings.without == f"samples:{row}"
    later = train_run("runs/later", settings(Path("photos")))
    assert later.record.data.train == open_run("runs/first").record.data.train - 2
    for _ in range(2):
        loaded = later.load_data()
        assert len(loaded.train) == later.record.data.train
        for name in names:
            (Path("photos") / name).unlink(missing_ok=True)  # the second time they are deleted
    shutil.copy(Path("photos/cat/0001.png"), Path("photos/dog/copied.png"))
    assert len(later.load_data().train) == later.record.data.train, "new images are not used"


def test_test_images_that_serve_for_validation_are_left_and_not_removed(home: Path) -> None:
    train_run("runs/held-out", replace(settings(Path("photos")), valid=0.0, valid_from_test=0.5, epochs=1))
    forget_run("runs/held-out", "class:cat", "neggrad", out="runs/forgot", device="cpu")
    run = open_run("runs/forgot")
    source, *_ = known_copies(run, ForgetRequest.parse("class:cat"), run.load_data())
    assert (source.images, source.removed) == (SIZES["cat"], 0)


def test_a_run_that_is_written_elsewhere_purges_the_one_before(home: Path) -> None:
    forget_run("runs/first", "class:cat", "neggrad", out="elsewhere/second", device="cpu", purge=True)
    after, _ = read_tensors(Path("runs/first/ledger.safetensors"))
    assert set(after["kept.labels"].tolist()) == {1, 2}


def test_a_deleted_class_keeps_the_runs_classes(home: Path) -> None:
    forget_run("runs/first", "class:cat", "neggrad", out="runs/second", device="cpu")
    with pytest.raises(FedOrthoError, match="has forgotten nothing"):
        purge_run("runs/first")
    blob = pixels_of("cat/0000.png")
    assert blob in cache_bytes(), "a class is purged only when asked"
    ledger = Path("runs/first/ledger.safetensors")
    before, note = read_tensors(ledger)
    assert 0 in before["kept.labels"].tolist()
    shutil.copytree("runs/first", "runs/references/another")  # one that a request for others was compared with
    copies = purge_run("runs/second")
    assert blob not in cache_bytes()
    assert copies[0].images == copies[1].removed == SIZES["cat"]
    after, same = read_tensors(ledger)
    assert set(after["kept.labels"].tolist()) == {1, 2}, "activations of forgotten images go from the run before too"
    assert torch.equal(
        read_tensors(Path("runs/references/another/ledger.safetensors"))[0]["kept.rows"], after["kept.rows"]
    )
    assert len({len(tensor) for name, tensor in after.items() if name.startswith("kept.")}) == 1
    assert (copies[-1].what, copies[-1].removed) == ("activations", int((before["kept.labels"] == 0).sum()))
    assert same == note, "the run before stays usable"
    assert all(torch.equal(after[name], value) for name, value in before.items() if not name.startswith("kept."))
    shutil.rmtree("photos/cat")
    data = open_run("runs/second").load_data()
    assert data.train.names == ("cat", "dog", "emu")
    assert set(data.train.labels.tolist()) == set(data.test.labels.tolist()) == {1, 2}
    verdict = judge_run("runs/second", options=JudgeOptions(device="cpu"))
    assert {audit.outcome for audit in verdict.audits} == {"NOT RUN"}
    assert "images of the forget set were deleted" in write_report("runs/second", device="cpu").read_text()
    with pytest.raises(BadData, match=r"not forgotten: cat/0000.png, cat/0001.png, cat/\d+.png and \d+ more"):
        open_run("runs/first").load_data()


def test_of_two_files_with_the_same_bytes_the_one_that_was_not_forgotten_is_kept(home: Path) -> None:
    one, other = two_names()
    shutil.copy(Path("photos") / one, Path("photos") / other)
    train_run("runs/twins", settings(Path("photos")))
    forget_run("runs/twins", f"samples:{one}", "neggrad", out="runs/second", device="cpu")
    (row,) = (int(word) for word in open_run("runs/second").record.requests[0].request.split(":")[1].split(","))
    for name in (other, one):  # whichever of the two files is deleted
        shutil.copytree("photos", "spare")
        (Path("spare") / name).unlink()
        assert open_run("runs/second").load_data("spare").gone.tolist() == [row]
        shutil.rmtree("spare")


def test_only_forgotten_images_may_be_missing_and_private_files_are_private(home: Path) -> None:
    names = two_names()
    served(names)
    for file in (*Path("cache").glob("*.*"), Path("runs/first/rows.safetensors"), Path("runs/second/rows.safetensors")):
        assert file.stat().st_mode & 0o777 == 0o600, file
    assert names[0].encode() in Path("runs/first/rows.safetensors").read_bytes()
    assert names[0].encode() not in Path("runs/second/rows.safetensors").read_bytes()
    innocent = next(file for file in sorted(Path("photos/dog").iterdir()))
    kept = innocent.read_bytes()
    innocent.unlink()
    with pytest.raises(
        BadData, match=f"not the data that runs/second was trained on: .* forgotten: dog/{innocent.name};"
    ):
        open_run("runs/second").load_data()
    innocent.write_bytes(kept)
    told("forget", "runs/first", f"samples:{names[0]}", "--level", "hide", "--out", "runs/kept", "--dry-run")
    assert not Path("runs/kept").exists()


def test_the_cache_is_kept_on_demand_and_a_damaged_list_of_forgotten_images_is_refused(home: Path) -> None:
    names = two_names()
    blob = pixels_of(names[0])
    served(names, purge=False)
    assert blob in cache_bytes()
    assert not Path("cache/forgotten.txt").exists()
    old, foreign = Path(f"cache/{'0' * 40}.safetensors"), Path("cache/weights.safetensors")
    for file in (old, foreign):
        file.write_bytes(b"of an earlier version, or of somebody else")
    purge_run("runs/second")
    assert blob not in cache_bytes()
    assert not old.exists()
    assert foreign.exists()
    Path("cache/forgotten.txt").write_text("no digest")
    with pytest.raises(BadData, match=r"forgotten.txt, the list of forgotten images, cannot be read"):
        load_images("photos")


def test_a_ticket_for_hashed_ids_tells_no_rows_and_is_served_once_after_its_files_were_deleted(home: Path) -> None:
    early = forget_run("runs/first", "class:dog", "paper", out="runs/early", ticket="T-0", device="cpu")
    words = ("forget", "runs/first", f"samples:{two_names()[0]}", "--method", "neggrad", "--audit", "none")
    words = (*words, "--hash-ids", "--id", "T-1", "--device", "cpu")
    told(*words)
    (made,) = Path("runs").glob("first-samples-hmac-*")
    (Path("photos") / two_names()[0]).unlink()
    assert "the ticket T-1 was served before" in told(*words)
    again = forget_run("runs/first", "class:dog", "paper", out="runs/early", ticket="T-0", device="cpu")
    assert again.record == early.record, "the key is younger than this ticket"
    word = f"samples:{int(open_run(made).load_data().train.rows[-1])}"
    how = {"ticket": "T-2", "device": "cpu", "purge": False}
    forget_run(made, word, "neggrad", out="runs/third", **how)  # type: ignore[arg-type]  # mixed
    assert forget_run(made, word, "neggrad", out="runs/third", **how).was_finished  # type: ignore[arg-type]  # mixed
    asked = [hashlib.sha256(text.encode()).hexdigest() for text in (word, words[2])]
    journal = b"".join(file.read_bytes() for file in Path("runs").glob("journal*"))
    assert not [digest for digest in asked if digest.encode() in journal]


@pytest.mark.parametrize("flags", [(), ("--hash-ids",)])
def test_a_sample_by_its_file_name_has_a_reference_trained(
    home: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...]
) -> None:
    def begin(*_: object, **__: object) -> None:
        raise FedOrthoError("begun")

    monkeypatch.setattr("fedortho.cli.forget.forget_run", begin)
    with pytest.raises(FedOrthoError, match="begun"):
        told("forget", "runs/first", f"samples:{two_names()[0]}", "--level", "exact", "--retrain", *flags)


def test_hashed_ids_are_in_all_records_and_the_key_in_none(home: Path) -> None:
    names = two_names()
    rows = [row.row for row in list_images(open_run("runs/first").load_data(), names)]
    how = {"out": "runs/second", "hash_ids": True, "ticket": "T-1", "device": "cpu"}
    done = forget_run("runs/first", f"samples:{','.join(names)}", "neggrad", **how)  # type: ignore[arg-type]  # mixed
    request = done.record.request
    assert re.fullmatch(r"samples:hmac:[0-9a-f]{32},hmac:[0-9a-f]{32}", request)
    assert forget_run("runs/first", f"samples:{','.join(names)}", "neggrad", **how).was_finished  # type: ignore[arg-type]  # mixed
    verdict = judge_run("runs/second", f"samples:{rows[0]},{rows[1]}", JudgeOptions(device="cpu", retrain=True))
    assert verdict.request == request
    assert verdict.has_reference
    bundle = make_bundle("runs/second", request, "evidence.zip")
    key = Path("runs/hash-ids.key")
    assert key.stat().st_mode & 0o777 == 0o600
    written = [*bundle.files.values(), *(file.read_bytes() for file in Path("runs").glob("journal*"))]
    written += [file.read_bytes() for file in Path("runs/second").rglob("*") if file.is_file()]
    plain = [*names, f"samples:{rows[0]}", key.read_text()]
    assert not [word for word in plain if any(word.encode() in each for each in written)]
    for name in names:
        (Path("photos") / name).unlink()
    data = open_run("runs/second").load_data()
    assert data.gone.tolist() == sorted(rows)
    word = f"samples:{int(data.train.rows[-1])}"
    later = forget_run("runs/second", word, "neggrad", out="runs/third", device="cpu", purge=False)
    assert later.record.request.startswith("samples:hmac:"), "a run that hashes ids goes on doing so"
    key.unlink()
    with pytest.raises(
        FedOrthoError, match=r"is a hashed id, and its key is not here; put hash-ids.key beside the run"
    ):
        open_run("runs/second").load_data()


def test_what_another_run_forgot_makes_no_crippled_reference_and_is_not_called_removed(home: Path) -> None:
    names = two_names()
    forget_run("runs/first", "class:dog", "neggrad", out="runs/second", device="cpu")
    before = train_run("runs/before", replace(settings(Path("photos")), without="class:dog"))
    forget_run("runs/first", f"samples:{','.join(names)}", "neggrad", out="runs/third", device="cpu")
    with pytest.raises(FedOrthoError, match="would lack 2 images that were forgotten and purged"):
        judge_run("runs/second", options=JudgeOptions(device="cpu", retrain=True, references=home / "others"))
    words = ("--method", "neggrad", "--out", "runs/fourth", "--retrain", "--references", home / "others")
    with pytest.raises(FedOrthoError, match="would lack 2 images that were forgotten and purged"):
        told("forget", "runs/first", "class:dog", *words)
    assert not Path("runs/fourth").exists(), "refused before the edit"
    crippled = train_run("runs/crippled", replace(settings(Path("photos")), without="class:dog"))
    request = ForgetRequest.parse("class:dog")
    check_reference(open_run("runs/second"), before, request)
    with pytest.raises(FedOrthoError, match="was trained without 2 images that runs/second knows"):
        check_reference(open_run("runs/second"), crippled, request)
    source, *_ = known_copies(crippled, ForgetRequest.parse("class:cat"), crippled.load_data())
    assert source.removed == 0, "the files are there"


def test_a_comparison_after_a_deletion_leaves_out_the_right_images(home: Path) -> None:
    names = two_names()
    served(names)
    for name in names:
        (Path("photos") / name).unlink()
    run = open_run("runs/second")
    row = int(run.load_data().train.rows[-1])
    compare("runs/second", f"samples:{row}", ["retrain"])
    (reference,) = [path for path in Path("runs/references").iterdir() if path.is_dir()]
    assert open_run(reference).record.data.train == run.record.data.train - 3


def test_a_forget_set_that_was_deleted_in_part_is_called_that(home: Path) -> None:
    names = two_names()
    served(names)
    (Path("photos") / names[0]).unlink()
    verdict = judge_run("runs/second", options=JudgeOptions(device="cpu"))
    measured = [audit.finding for audit in verdict.audits if audit.unlearned is not None]
    assert measured
    assert all("1 deleted images of the forget set are not measured" in finding for finding in measured)


def test_validation_images_of_their_own_may_be_missing_only_if_their_class_was_forgotten(home: Path) -> None:
    for label, name in enumerate(SIZES):
        (Path("held") / name).mkdir(parents=True)
        for n in range(4):
            (Path("held") / name / f"v{n}.png").write_bytes(draw(label, 100 + n))
    train_run("runs/held", replace(settings(Path("photos")), valid=0.0, valid_dir="held", epochs=1))
    forget_run("runs/held", "class:dog", "neggrad", out="runs/forgot", device="cpu")
    before = open_run("runs/forgot").load_data()
    assert json.loads(told("data", "purge", "runs/forgot", "--json"))[0]["images"] == SIZES["dog"] + 4
    assert draw(1, 100) not in cache_bytes()
    assert b"v0.png" in Path("runs/held/rows.safetensors").read_bytes()
    assert b"dog/v0.png" not in Path("runs/forgot/rows.safetensors").read_bytes()
    shutil.rmtree("held/dog")
    data = open_run("runs/forgot").load_data()
    assert data.valid.rows.tolist() == [
        row for row in before.valid.rows.tolist() if before.valid.store_labels[row] != 1
    ]
    assert torch.equal(data.valid.pixels[data.valid.rows], before.valid.pixels[data.valid.rows])
    told("judge", "runs/forgot")
    with pytest.raises(
        BadData, match=r"held here is not the data that runs/held was trained on: .*: dog/v0.png, dog/v1"
    ):
        open_run("runs/held").load_data()
    Path("held/cat/v3.png").unlink()
    with pytest.raises(BadData, match=r"that the run has not forgotten: cat/v3.png;"):
        open_run("runs/forgot").load_data()


def test_a_class_deleted_from_the_training_folder_alone_stays_measurable(home: Path) -> None:
    for label, name in enumerate(SIZES):
        shutil.move(Path("photos") / name, Path("split/train") / name)
        (Path("split/test") / name).mkdir(parents=True)
        for n in range(6):
            (Path("split/test") / name / f"t{n}.png").write_bytes(draw(label, 200 + n))
    train_run("runs/split", replace(settings(Path("split")), epochs=1))
    forget_run("runs/split", "class:cat", "neggrad", out="runs/forgot", device="cpu")
    shutil.rmtree("split/train/cat")
    data = open_run("runs/forgot").load_data()
    assert data.train.names == data.test.names == ("cat", "dog", "emu")
    assert set(data.train.labels.tolist()) == {1, 2}
    assert data.test.labels.bincount().tolist() == [6, 6, 6]
    verdict = judge_run("runs/forgot", options=JudgeOptions(device="cpu"))
    metric = verdict.metric("forget-accuracy")
    assert metric is not None
    assert metric.images == 6
    with pytest.raises(BadData, match=r"not forgotten: train/cat/0000.png"):
        open_run("runs/split").load_data()
