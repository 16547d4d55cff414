import base64
import json
import os
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from bundles import HOW, REQUEST, Runs, edited, forge, manifest, no_audits
from pages import data_pngs, embedded

from fedortho.audits.verdict import write_verdict
from fedortho.cli.show import report_command
from fedortho.data.request import ForgetRequest
from fedortho.errors import BadRecord, FedOrthoError
from fedortho.evidence.bundle import BadBundle, _spelled, make_bundle, open_bundle, read_bundle
from fedortho.evidence.canonical_zip import BadArchive, pack_files
from fedortho.evidence.contents import RequestFile
from fedortho.evidence.recheck import reapply_patch, rerun_decision
from fedortho.reports.page import LEFT_OUT, MARKED
from fedortho.reports.pictures import as_pictures, thumbnail
from fedortho.requests.forgetting import serve_request
from fedortho.runs.derived import build_derived
from fedortho.runs.record import Accuracies, ServedRecord
from fedortho.runs.run import open_run
from fedortho.storage.journal import BadJournal, append_entry


def test_a_bundle_holds_these_files_and_no_others(made: Path) -> None:
    assert sorted(open_bundle(made).files) == [
        "README.txt",
        "digests.json",
        "entry.json",
        "environment.json",
        "journal.jsonl",
        "manifest.json",
        "patch.safetensors",
        "report.html",
        "request.json",
        "settings.json",
        "verdict.json",
    ]


def test_a_bundle_tells_what_was_done(made: Path, runs: Runs) -> None:
    bundle, before, after = open_bundle(made), runs["first"], runs["second"]
    assert bundle.request == RequestFile("class:3", "second", 0, ())
    assert bundle.entry == after.record.requests[0]
    assert bundle.settings.training == after.record.settings
    assert bundle.digests.before == before.record.model.digest
    assert bundle.digests.after == bundle.digests.run_now == after.record.model.digest
    assert f"torch=={torch.__version__}".partition("+")[0] in " ".join(bundle.environment.packages)
    lines = [json.loads(line) for line in bundle.files["journal.jsonl"].splitlines()]
    assert [(e["number"], e["event"], e["run"], e["request"]) for e in lines[:-1]] == [
        (1, "received", "first", "class:3"),
        (2, "executed", "second", "class:3"),
        (3, "received", "second", "class:5"),
    ]
    assert sorted(lines[-1]) == ["body", "number"], "of other entries the digest"
    text = bundle.files["README.txt"].decode()
    assert "A signature proves who made this file, not that its contents are true." in text


def test_no_file_holds_removed_weights_or_images(made: Path, runs: Runs) -> None:
    bundle, data = open_bundle(made), runs["first"].load_data()
    before, after = (runs[name].load_model().state_dict() for name in ("first", "second"))
    silenced = 0
    for name, (channels, _) in bundle.patch.put.items():
        for channel in channels.tolist():
            values = before[name][channel].contiguous()
            if values.numel() >= 9:
                silenced += 1
                raw = values.numpy().tobytes()
                pieces = [raw[at : at + 36] for at in range(0, len(raw), 36)]
                assert not any(piece in file for file in bundle.files.values() for piece in pieces)
    assert silenced > 10, "there were kernels to look for"
    for name, value in bundle.patch.replaced.items():
        assert torch.equal(value, after[name]), "what took the place, not what was there"
    pictures = [image.numpy().tobytes() for image in data.train.pixels]
    assert not any(picture in file for file in bundle.files.values() for picture in pictures)
    shown, handed_out = (runs["second"].path / "report.html").read_text(), bundle.files["report.html"].decode()
    assert len(embedded(shown) & data_pngs(runs["second"])) > 12, "there were images to look for"
    assert "figure-grad-cam" in shown
    assert not embedded(handed_out) & data_pngs(runs["second"])
    assert "figure-grad-cam" not in handed_out
    assert LEFT_OUT in handed_out
    assert embedded(handed_out) < embedded(shown), "the figures of numbers stay"
    assert made.stat().st_size < (runs["first"].path / "model.safetensors").stat().st_size / 4


def test_no_file_holds_a_picture_of_a_sample_that_had_to_go(runs: Runs, tmp_path: Path) -> None:
    shutil.copytree(runs["first"].path, tmp_path / "first")
    before = open_run(tmp_path / "first")
    data = before.load_data()
    gone = data.train.subset(range(100))
    request = ForgetRequest.parse("samples:" + ",".join(map(str, gone.rows.tolist())))
    run = serve_request(before, data, request, HOW, out=tmp_path / "left").run
    assert run is not None
    report_command(run.path, device="cpu")
    files = make_bundle(run, request, tmp_path / "x.zip").files
    assert "report.html" in files
    pixels = [image.numpy().tobytes() for image in gone.pixels[gone.rows]]
    pngs = [thumbnail(picture) for picture in as_pictures(gone)]
    assert len({*pixels}) > 90
    assert not embedded(files["report.html"].decode()) & {*pngs}
    for raw in (*pixels, *pngs):
        for spelled in (raw, base64.b64encode(raw), raw.hex().encode()):
            assert not any(spelled in file for file in files.values())


def test_a_report_of_something_else_or_with_images_that_cannot_be_found_is_no_evidence(
    runs: Runs, tmp_path: Path
) -> None:
    copy = tmp_path / "second"
    shutil.copytree(runs["second"].path, copy)
    page = (copy / "report.html").read_text()
    for wrong, told in (
        (page.replace(MARKED, ""), "images of data are not marked in it"),
        (page.replace("Class &#34;3&#34;: its accuracy", "Its accuracy"), "about another model or an older verdict"),
        (page.replace(runs["second"].record.model.digest, "0" * 64), "about another model or an older verdict"),
    ):
        assert wrong != page
        (copy / "report.html").write_text(wrong)
        with pytest.raises(FedOrthoError, match=f"{told}.*write it again: fedortho report"):
            make_bundle(open_run(copy), REQUEST, tmp_path / "x.zip")
    (copy / "report.html").unlink()
    assert "report.html" not in make_bundle(open_run(copy), REQUEST, tmp_path / "x.zip").files


def test_what_a_method_came_to_in_a_comparison_has_no_bundle(runs: Runs, tmp_path: Path) -> None:
    accuracies, first = Accuracies(0.5, 0.5, 0.5), runs["first"]
    entry = ServedRecord("class:3", "ssd", {}, accuracies, accuracies, 0.0)
    record = replace(first.record, requests=(entry,))
    build_derived(tmp_path / "ssd", first, first.load_model(), record, patch=None, ledger=None)
    with pytest.raises(FedOrthoError, match=r"has no patch of class:3.*a comparison by ssd"):
        make_bundle(tmp_path / "ssd", REQUEST, tmp_path / "x.zip")


def test_the_same_run_gives_the_same_bytes_and_evidence_is_not_overwritten(
    made: Path, runs: Runs, tmp_path: Path
) -> None:
    make_bundle(runs["second"], ForgetRequest.parse("class:3"), tmp_path / "again.zip")
    assert (tmp_path / "again.zip").read_bytes() == made.read_bytes()
    with pytest.raises(FedOrthoError, match=r"again\.zip exists already"):
        make_bundle(runs["second"], REQUEST, tmp_path / "again.zip")


def test_a_thousand_random_flips_are_all_found(made: Path, signed: Path) -> None:
    draw = random.Random(0)
    for path in (made, signed):
        archive = path.read_bytes()
        for _ in range(1000):
            at, bit = draw.randrange(len(archive)), draw.randrange(8)
            flipped = archive[:at] + bytes([archive[at] ^ 1 << bit]) + archive[at + 1 :]
            with pytest.raises(FedOrthoError, match=r"evidence\.zip"):
                read_bundle(flipped, "evidence.zip")


def test_a_flip_names_its_file(made: Path) -> None:
    archive, files = made.read_bytes(), open_bundle(made).files
    draw, place = random.Random(1), 0
    for name in sorted(files):
        header = 30 + len(name)
        inside = [place + header + draw.randrange(len(files[name])) for _ in range(5)]
        for at in (*range(place, place + header, 3), *inside):
            flipped = archive[:at] + bytes([archive[at] ^ 1 << draw.randrange(8)]) + archive[at + 1 :]
            with pytest.raises(FedOrthoError) as told:
                read_bundle(flipped, "evidence.zip")
            assert name in str(told.value)
        place += header + len(files[name])
    for at in range(place, len(archive), 3):  # the directory and the end: some of the names, or what it is
        flipped = archive[:at] + bytes([archive[at] ^ 1 << draw.randrange(8)]) + archive[at + 1 :]
        with pytest.raises(FedOrthoError, match=r"evidence\.zip.*(directory|holds|lacks|packed|changed|damaged)"):
            read_bundle(flipped, "evidence.zip")


def test_every_third_byte_of_the_manifest_counts(signed: Path) -> None:
    files = open_bundle(signed).files
    for name in ("manifest.json", "manifest.sig"):
        for at in range(0, len(files[name]), 3):
            flipped = files[name][:at] + bytes([files[name][at] ^ 1 << at % 8]) + files[name][at + 1 :]
            with pytest.raises(BadBundle, match=r"manifest\.(json|sig)"):
                read_bundle(pack_files(files | {name: flipped}), "evidence.zip")


def test_a_file_that_is_missing_added_or_cut_is_named(made: Path, tmp_path: Path) -> None:
    files = dict(open_bundle(made).files)
    for name in files:
        with pytest.raises(BadBundle, match=f"lacks {name}"):
            read_bundle(pack_files({n: d for n, d in files.items() if n != name}), "x.zip")
        with pytest.raises(BadBundle, match=f"{name} (was changed|is not JSON)"):
            read_bundle(pack_files(files | {name: files[name][:-1]}), "x.zip")
    with pytest.raises(BadBundle, match=r"holds extra\.txt, which does not belong there"):
        read_bundle(pack_files(files | {"extra.txt": b""}), "x.zip")
    with pytest.raises(BadBundle, match=r"holds undo\.safetensors, which does not belong there"):
        read_bundle(forge(made, {"undo.safetensors": b"weights"}), "x.zip")
    with pytest.raises(BadBundle, match=r"holds manifest\.sig, which does not belong there"):
        read_bundle(pack_files(files | {"manifest.sig": b"00\n"}), "x.zip")
    for length in (0, 10, 1000, len(made.read_bytes()) - 1):
        (tmp_path / "cut.zip").write_bytes(made.read_bytes()[:length])
        with pytest.raises(BadArchive, match=r"cut\.zip"):
            open_bundle(tmp_path / "cut.zip")
    with pytest.raises(BadBundle, match=r"none\.zip does not exist"):
        open_bundle(tmp_path / "none.zip")


def test_files_that_contradict_each_other_are_refused_though_all_digests_fit(made: Path) -> None:
    read_bundle(forge(made, {}), "x.zip")
    for name, change, what in (
        ("digests.json", lambda v: v | {"after": "0" * 64}, "disagree about after"),
        ("entry.json", lambda v: v | {"model-before": None}, "disagree about before"),
        ("entry.json", lambda v: v | {"settings": {}}, "disagree about settings"),
        ("request.json", lambda v: v | {"request": "class:4"}, "disagree about request: class:4, class:3"),
        ("digests.json", lambda v: v | {"patch": "0" * 64}, "disagree about patch"),
        ("request.json", lambda v: [v], r"request\.json is not a mapping"),
    ):
        with pytest.raises(BadBundle, match=what):
            read_bundle(forge(made, {name: edited(made, name, change)}), "x.zip")
    with pytest.raises(BadBundle, match=r"patch\.safetensors is not a patch"):
        read_bundle(forge(made, {"patch.safetensors": b"\x08\0\0\0\0\0\0\0{}      "}), "x.zip")
    lines = open_bundle(made).files["journal.jsonl"].replace(b"executed", b"verified")
    with pytest.raises(BadBundle, match=r"line \d of journal\.jsonl was changed"):
        read_bundle(forge(made, {"journal.jsonl": lines}), "x.zip")


def test_a_digest_told_by_another_way_finds_a_forged_bundle(made: Path, tmp_path: Path) -> None:
    digest = open_bundle(made).manifest.digest
    assert open_bundle(made, digest=digest).manifest.digest == digest
    forged = edited(made, "entry.json", lambda v: v | {"retain-paid": 0.0, "trials": []})
    (tmp_path / "forged.zip").write_bytes(forge(made, {"entry.json": forged}))
    open_bundle(tmp_path / "forged.zip")
    with pytest.raises(BadBundle, match="it is another bundle"):
        open_bundle(tmp_path / "forged.zip", digest=digest)


def test_a_verdict_on_another_request_or_model_is_no_evidence(made: Path, runs: Runs, tmp_path: Path) -> None:
    for change in ({"request": "class:5"}, {"digests": {"after": "0" * 64}}, {"digests": {}}):
        verdict = edited(made, "verdict.json", lambda told, change=change: told | change)
        with pytest.raises(BadBundle, match="disagree about the verdict's"):
            read_bundle(forge(made, {"verdict.json": verdict}), "x")
    write_verdict(runs["third"].path, no_audits("class:5", runs["third"].record.model.digest))
    try:
        earlier = make_bundle(runs["third"], REQUEST, tmp_path / "x.zip")
    finally:
        (runs["third"].path / "verdict.json").unlink()
    assert "verdict.json" not in earlier.files, "it is about the last request, and this is the first"


def test_an_earlier_request_of_a_run_has_its_own_bundle(runs: Runs, tmp_path: Path) -> None:
    bundle = make_bundle(runs["third"], ForgetRequest.parse("class:3"), tmp_path / "x.zip")
    assert bundle.digests.after == runs["second"].record.model.digest
    assert bundle.digests.run_now == runs["third"].record.model.digest
    reapply_patch(bundle, runs["first"].path / "model.safetensors")
    rerun_decision(bundle, runs["first"])


def test_a_request_that_was_not_served_is_refused_with_those_that_were(runs: Runs, tmp_path: Path) -> None:
    with pytest.raises(FedOrthoError, match="has not forgotten 'class:7'; choose from class:3, class:5"):
        make_bundle(runs["third"], ForgetRequest.parse("class:7"), tmp_path / "x.zip")
    with pytest.raises(FedOrthoError, match="has forgotten nothing"):
        make_bundle(runs["first"], REQUEST, tmp_path / "x.zip")
    assert os.listdir(tmp_path) == []


def test_a_run_or_journal_that_is_not_whole_gives_no_evidence(runs: Runs, tmp_path: Path) -> None:
    copy = tmp_path / "second"
    shutil.copytree(runs["second"].path, copy)
    assert "journal.jsonl" not in make_bundle(open_run(copy), REQUEST, tmp_path / "a.zip").files
    append_entry(tmp_path, "received", "second", "class:3")
    (tmp_path / "journal.jsonl").write_text("")
    with pytest.raises(BadJournal, match="entry 1 is missing"):
        make_bundle(open_run(copy), REQUEST, tmp_path / "b.zip")
    (tmp_path / "journal.jsonl").unlink()
    (tmp_path / "journal.head").unlink()
    shutil.copyfile(runs["third"].path / "patches/0001.safetensors", copy / "patches/0000.safetensors")
    with pytest.raises(BadBundle, match="disagree about before"):
        make_bundle(open_run(copy), REQUEST, tmp_path / "b.zip")
    (copy / "patches/0000.safetensors").unlink()
    with pytest.raises(FedOrthoError, match=r"has no patch of class:3 \(0000\.safetensors\)"):
        make_bundle(open_run(copy), REQUEST, tmp_path / "b.zip")
    assert not (tmp_path / "b.zip").exists()


def test_a_bundle_of_another_schema_is_refused_with_the_version_that_made_it(made: Path) -> None:
    files = dict(open_bundle(made).files)
    for schema in (1, 3):
        like = json.loads(files["manifest.json"]) | {"schema": schema, "made-by": "fedortho 0.0.9"}
        others = {name: data for name, data in files.items() if name != "manifest.json"}
        with pytest.raises(BadBundle, match=rf"schema {schema}, made by fedortho 0\.0\.9"):
            read_bundle(pack_files(others | {"manifest.json": manifest(like, others)}), "x.zip")


def test_a_file_with_a_missing_unknown_or_wrongly_typed_key_is_refused_by_name(made: Path) -> None:
    for name, change, telling in (
        ("request.json", lambda v: v | {"number": "0"}, r"request\.json: number"),
        ("digests.json", lambda v: v | {"colour": "blue"}, r"digests\.json has unknown keys: colour"),
        ("environment.json", lambda v: {"here": v["here"]}, r"environment\.json lacks packages, run"),
        ("entry.json", lambda v: v | {"cost": {"seconds": 1}}, r"entry\.json: cost lacks"),
    ):
        with pytest.raises(BadBundle, match=telling):
            read_bundle(forge(made, {name: edited(made, name, change)}), "x.zip")


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999"])
def test_a_manifest_with_a_number_that_is_none_is_refused_in_one_line(number: str) -> None:
    text = _spelled({"schema": 2, "made-by": 0.25, "files": {}, "signer": None, "digest": ""})
    with pytest.raises(BadBundle, match=r"manifest\.json is not JSON"):
        read_bundle(pack_files({"manifest.json": text.replace(b"0.25", number.encode())}), "forged.zip")


@pytest.mark.parametrize("name", ["", ".", "..", "a/b"])
def test_the_name_of_a_run_is_that_of_a_directory_in_another(name: str) -> None:
    with pytest.raises(BadRecord, match="expected the plain name"):
        RequestFile("class:3", name, 0, ())
