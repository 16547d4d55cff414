import base64
import json
import os
import random
import shutil
import sys
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from small import SETTINGS
from test_report import data_pngs, embedded

from fedortho.archive import BadArchive, pack_files
from fedortho.bundle import BadBundle, _spelled, make_bundle, open_bundle, read_bundle
from fedortho.cli_report import report_command
from fedortho.errors import FedOrthoError
from fedortho.federated.server import forget_in_federation, train_federation
from fedortho.figures.activations import as_pictures
from fedortho.files import canonical_json, tensors_digest, write_tensors
from fedortho.illustrate import _thumbnail
from fedortho.journal import BadJournal, append_entry
from fedortho.markup import LEFT_OUT, MARKED
from fedortho.methods.fedortho import ForgetSettings
from fedortho.prune import load_patch
from fedortho.replay import reapply_patch, rerun_decision
from fedortho.request import ForgetRequest
from fedortho.runs import Run, TrainSettings, open_run, train_run
from fedortho.serve import serve_request, write_derived
from fedortho.signature import BadSignature, load_key, load_public, make_key

TRAINED = TrainSettings(data="digits", model="vgg-mini", epochs=2, batch=64, rate=0.05, threads=1, crop=0, flip=0.0)
HOW = ForgetSettings(ratio=0.25, statistics_images=200, trial_images=200, repair_images=200)
REQUEST = ForgetRequest.parse("class:3")
Runs = dict[str, Run]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """A model, the same without class 3, and without class 5 as well."""
    place = tmp_path_factory.mktemp("runs")
    first = train_run(place / "first", TRAINED)
    data, found = first.load_data(), {"first": first}
    for name, parent, words in (("second", "first", "class:3"), ("third", "second", "class:5")):
        request = ForgetRequest.parse(words)
        undo = place / f"{name}.undo"
        run = serve_request(found[parent], data, request, HOW, out=place / name, undo=undo).run
        assert run is not None
        found[name] = run
    about = {"schema": 1, "request": "class:3", "sentence": '3 is "gone".', "label": "none run"}
    about["digests"] = {"after": found["second"].record["model"]["digest"]}
    (place / "second" / "verdict.json").write_text(json.dumps(about))
    report_command(place / "second", device="cpu")
    return found


@pytest.fixture(scope="module")
def made(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("made") / "evidence.zip"
    make_bundle(runs["second"], REQUEST, out)
    return out


@pytest.fixture(scope="module")
def signed(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("signed")
    make_key(place / "me.pem")
    make_bundle(runs["second"], REQUEST, place / "evidence.zip", sign=place / "me.pem")
    return place / "evidence.zip"


def forge(made: Path, files: Mapping[str, bytes]) -> bytes:
    """The bundle of somebody who knows how manifests are made: other files, and all digests anew."""
    bundle = open_bundle(made)
    changed = {name: data for name, data in (bundle.files | files).items() if name != "manifest.json"}
    return pack_files(changed | {"manifest.json": manifest(bundle.manifest, changed)})


def manifest(like: Mapping[str, Any], files: Mapping[str, bytes]) -> bytes:
    listed = {name: {"size": len(data), "sha256": sha256(data).hexdigest()} for name, data in files.items()}
    body = {key: value for key, value in like.items() if key != "digest"} | {"files": listed}
    return _spelled(body | {"digest": sha256(canonical_json(body).encode()).hexdigest()})


def edited(made: Path, name: str, change: Callable[[Any], Any]) -> bytes:
    return _spelled(change(json.loads(open_bundle(made).files[name])))


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
    assert bundle.request == {"request": "class:3", "run": "second", "number": 0, "earlier": []}
    assert bundle.entry == after.record["requests"][0]
    assert bundle.settings["training"] == after.record["settings"]
    assert bundle.digests["before"] == before.record["model"]["digest"]
    assert bundle.digests["after"] == bundle.digests["run-now"] == after.record["model"]["digest"]
    assert f"torch=={torch.__version__}".partition("+")[0] in " ".join(bundle.environment["packages"])
    lines = [json.loads(line) for line in bundle.files["journal.jsonl"].splitlines()]
    assert [(e["number"], e["event"], e["run"], e["request"]) for e in lines] == [
        (1, "received", "first", "class:3"),
        (2, "executed", "second", "class:3"),
        (3, "received", "second", "class:5"),
    ]
    text = bundle.files["README.txt"].decode()
    assert "A signature proves who made this file, not that what it says is true." in text


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
    pngs = [_thumbnail(picture) for picture in as_pictures(gone)]
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
        (page.replace("3 is &quot;gone&quot;.", "3 is not gone."), "about another model or an older verdict"),
        (page.replace(runs["second"].record["model"]["digest"], "0" * 64), "about another model or an older verdict"),
    ):
        assert wrong != page
        (copy / "report.html").write_text(wrong)
        with pytest.raises(FedOrthoError, match=f"{told}.*write it again: fedortho report"):
            make_bundle(open_run(copy), REQUEST, tmp_path / "x.zip")
    (copy / "report.html").unlink()
    assert "report.html" not in make_bundle(open_run(copy), REQUEST, tmp_path / "x.zip").files


def test_what_a_method_came_to_in_a_comparison_has_no_bundle(runs: Runs, tmp_path: Path) -> None:
    entry = {"request": "class:3", "method": "ssd", "settings": {}, "before": {}, "after": {}}
    made = write_derived(
        tmp_path / "ssd", runs["first"], runs["first"].load_model(), {"requests": [entry]}, patch=None, ledger=None
    )
    with pytest.raises(FedOrthoError, match=r"ssd is what ssd came to in a comparison, and has no patch; give a run"):
        make_bundle(made, REQUEST, tmp_path / "x.zip")


def test_the_same_run_gives_the_same_bytes_and_evidence_is_not_overwritten(
    made: Path, runs: Runs, tmp_path: Path
) -> None:
    make_bundle(runs["second"], ForgetRequest.parse("class:3"), tmp_path / "again.zip")
    assert (tmp_path / "again.zip").read_bytes() == made.read_bytes()
    with pytest.raises(FedOrthoError, match=r"again\.zip is there already; evidence is never overwritten"):
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
        inside = [place + header + draw.randrange(len(files[name])) for _ in range(10)]
        for at in (*range(place, place + header), *inside):
            flipped = archive[:at] + bytes([archive[at] ^ 1 << draw.randrange(8)]) + archive[at + 1 :]
            with pytest.raises(FedOrthoError) as told:
                read_bundle(flipped, "evidence.zip")
            assert name in str(told.value)
        place += header + len(files[name])
    for at in range(place, len(archive)):  # the directory and the end: some of the names, or what it is
        flipped = archive[:at] + bytes([archive[at] ^ 1 << draw.randrange(8)]) + archive[at + 1 :]
        with pytest.raises(FedOrthoError, match=r"evidence\.zip.*(directory|holds|lacks|packed|changed|bytes|end)"):
            read_bundle(flipped, "evidence.zip")


def test_every_byte_of_the_manifest_counts(signed: Path) -> None:
    files = open_bundle(signed).files
    for name in ("manifest.json", "manifest.sig"):
        for at in range(len(files[name])):
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
    with pytest.raises(BadBundle, match=r"none\.zip cannot be read: No such file"):
        open_bundle(tmp_path / "none.zip")


def test_files_that_contradict_each_other_are_refused_though_all_digests_fit(made: Path) -> None:
    read_bundle(forge(made, {}), "x.zip")
    for name, change, what in (
        ("digests.json", lambda v: v | {"after": "0" * 64}, "disagree about after"),
        ("entry.json", lambda v: v | {"digests": []}, "disagree about before"),
        ("entry.json", lambda v: v | {"settings": {}}, "disagree about settings"),
        ("request.json", lambda v: v | {"request": "class:4"}, "disagree about request: class:4, class:3"),
        ("digests.json", lambda v: v | {"patch": "0" * 64}, "disagree about patch"),
        ("request.json", lambda v: [v], r"request\.json holds no values by name"),
    ):
        with pytest.raises(BadBundle, match=what):
            read_bundle(forge(made, {name: edited(made, name, change)}), "x.zip")
    with pytest.raises(BadBundle, match=r"patch\.safetensors is no patch"):
        read_bundle(forge(made, {"patch.safetensors": b"\x08\0\0\0\0\0\0\0{}      "}), "x.zip")
    lines = open_bundle(made).files["journal.jsonl"].replace(b"executed", b"verified")
    with pytest.raises(BadBundle, match=r"line \d of journal\.jsonl was changed"):
        read_bundle(forge(made, {"journal.jsonl": lines}), "x.zip")


def test_a_digest_told_by_another_way_finds_a_forged_bundle(made: Path, tmp_path: Path) -> None:
    digest = open_bundle(made).digest
    assert open_bundle(made, digest=digest).digest == digest
    forged = edited(made, "entry.json", lambda v: v | {"retain-paid": 0.0, "seconds": {}})
    (tmp_path / "forged.zip").write_bytes(forge(made, {"entry.json": forged}))
    open_bundle(tmp_path / "forged.zip")
    with pytest.raises(BadBundle, match="it is another bundle"):
        open_bundle(tmp_path / "forged.zip", digest=digest)


def test_a_signature_is_of_one_key_and_cannot_be_taken_off(signed: Path, made: Path, tmp_path: Path) -> None:
    mine = signed.with_name("me.pub")
    assert open_bundle(signed, public=mine).signer == load_public(mine)
    other, _ = make_key(tmp_path / "other.pem")
    with pytest.raises(BadSignature, match="is signed by the key"):
        open_bundle(signed, public=other)
    with pytest.raises(BadSignature, match="is not signed"):
        open_bundle(made, public=mine)
    files = dict(open_bundle(signed).files)
    bare = {name: data for name, data in files.items() if name != "manifest.sig"}
    with pytest.raises(BadBundle, match=r"lacks manifest\.sig, though"):
        read_bundle(pack_files(bare), "x.zip")
    listed = {n: d for n, d in bare.items() if n != "manifest.json"} | {"verdict.json": b"{}"}
    anew = manifest(json.loads(files["manifest.json"]), listed)
    with pytest.raises(BadBundle, match=r"manifest\.sig does not fit"):
        read_bundle(pack_files(files | {"manifest.json": anew, "verdict.json": b"{}"}), "x.zip")


def test_a_private_key_is_its_owners_and_is_not_overwritten(tmp_path: Path) -> None:
    public, text = make_key(tmp_path / "me.pem")
    assert (tmp_path / "me.pem").stat().st_mode & 0o777 == 0o600
    assert load_public(public) == text
    with pytest.raises(FedOrthoError, match=r"me\.pem is there already"):
        make_key(tmp_path / "me.pem")
    with pytest.raises(BadSignature, match="no PEM key without a password"):
        load_key(public)
    (tmp_path / "note.txt").write_text("no key")
    with pytest.raises(BadSignature, match=r"note\.txt is no PEM key"):
        load_public(tmp_path / "note.txt")
    with pytest.raises(BadSignature, match="cannot be read: No such file"):
        load_key(tmp_path / "none.pem")


def test_the_patch_gives_the_model_after_bit_for_bit(made: Path, runs: Runs, tmp_path: Path) -> None:
    bundle, model = open_bundle(made), runs["first"].path / "model.safetensors"
    reapply_patch(bundle, model)
    with pytest.raises(BadBundle, match="begins with"):
        reapply_patch(bundle, runs["second"].path / "model.safetensors")
    state = runs["first"].load_model().state_dict()
    state["features.0.weight"].view(torch.int32)[0, 0, 0, 0] ^= 1
    write_tensors(tmp_path / "other.safetensors", state)
    with pytest.raises(BadBundle, match="begins with"):
        reapply_patch(bundle, tmp_path / "other.safetensors")


def test_a_forged_patch_does_not_give_the_model_after(made: Path, runs: Runs, tmp_path: Path) -> None:
    bundle, model = open_bundle(made), runs["first"].path / "model.safetensors"
    (tmp_path / "patch.safetensors").write_bytes(bundle.files["patch.safetensors"])
    patch = load_patch(tmp_path / "patch.safetensors")
    name = min(patch.scaled)
    for wrong, told in (
        ((patch.scaled[name][0], patch.scaled[name][1] + 0.5), "instead of"),
        ((patch.scaled[name][0] + 10_000, patch.scaled[name][1]), "cannot be applied"),
    ):
        patch.scaled[name] = wrong  # type: ignore[index]  # of a copy
        patch.save(tmp_path / "wrong.safetensors")
        raw = (tmp_path / "wrong.safetensors").read_bytes()
        digest = {"patch": sha256(raw).hexdigest()}
        digests = edited(made, "digests.json", lambda v, d=digest: v | d)
        forged = read_bundle(forge(made, {"patch.safetensors": raw, "digests.json": digests}), "x.zip")
        with pytest.raises(BadBundle, match=told):
            reapply_patch(forged, model)


def test_a_bundle_cannot_start_code_that_it_names(made: Path, runs: Runs, tmp_path: Path) -> None:
    (tmp_path / "evil_factory.py").write_text(f"open({str(tmp_path / 'harm')!r}, 'w')\ndef net(): ...\n")
    model = {"name": "evil_factory:net", "classes": 10, "channels": 1}
    settings = edited(made, "settings.json", lambda v: v | {"model": model})
    bundle = read_bundle(forge(made, {"settings.json": settings}), "x.zip")
    sys.path.append(str(tmp_path))
    try:
        reapply_patch(bundle, runs["first"].path / "model.safetensors")  # the weights suffice
    finally:
        sys.path.remove(str(tmp_path))
    assert not (tmp_path / "harm").exists()


def test_the_decision_made_again_gives_the_same_patch(made: Path, runs: Runs, tmp_path: Path) -> None:
    rerun_decision(open_bundle(made), runs["first"])
    make_bundle(runs["third"], ForgetRequest.parse("class:5"), tmp_path / "third.zip")
    bundle = open_bundle(tmp_path / "third.zip")
    assert bundle.request["earlier"] == ["class:3"]
    rerun_decision(bundle, runs["second"])
    with pytest.raises(FedOrthoError, match="give the run of before the request"):
        rerun_decision(bundle, runs["first"])


def test_the_decision_of_a_federation_that_is_simulated_here_is_made_again(tmp_path: Path) -> None:
    run = train_federation(tmp_path / "fed", SETTINGS)
    forget_in_federation(run, REQUEST, ForgetSettings(ratio=0.25), out=tmp_path / "forgot")
    bundle = make_bundle(open_run(tmp_path / "forgot"), REQUEST, tmp_path / "x.zip")
    reapply_patch(bundle, tmp_path / "fed" / "model.safetensors")
    rerun_decision(bundle, run)
    other = bundle.settings["forgetting"] | {"ratio": 0.5}
    settings = edited(tmp_path / "x.zip", "settings.json", lambda v: v | {"forgetting": other})
    entry = edited(tmp_path / "x.zip", "entry.json", lambda v: v | {"settings": other})
    forged = read_bundle(forge(tmp_path / "x.zip", {"settings.json": settings, "entry.json": entry}), "x.zip")
    with pytest.raises(BadBundle, match=r"patch\.safetensors is another one"):
        rerun_decision(forged, run)


def test_a_decision_told_falsely_is_found_by_making_it_again(made: Path, runs: Runs) -> None:
    other = {"forgetting": open_bundle(made).settings["forgetting"] | {"ratio": 0.5}}
    settings = edited(made, "settings.json", lambda v: v | other)
    entry = edited(made, "entry.json", lambda v: v | {"settings": other["forgetting"]})
    bundle = read_bundle(forge(made, {"settings.json": settings, "entry.json": entry}), "x.zip")
    with pytest.raises(BadBundle, match=r"patch\.safetensors is another one"):
        rerun_decision(bundle, runs["first"])


def test_a_verdict_on_another_request_or_model_is_no_evidence(made: Path, runs: Runs, tmp_path: Path) -> None:
    for change in ({"request": "class:5"}, {"digests": {"after": "0" * 64}}, {"digests": None}):
        verdict = edited(made, "verdict.json", lambda told, change=change: told | change)
        with pytest.raises(BadBundle, match="disagree about the verdict's"):
            read_bundle(forge(made, {"verdict.json": verdict}), "x")
    (runs["third"].path / "verdict.json").write_text('{"schema": 1, "request": "class:5"}')
    try:
        earlier = make_bundle(runs["third"], REQUEST, tmp_path / "x.zip")
    finally:
        (runs["third"].path / "verdict.json").unlink()
    assert "verdict.json" not in earlier.files, "it is about the last request, and this is the first"


def test_an_earlier_request_of_a_run_has_its_own_bundle(runs: Runs, tmp_path: Path) -> None:
    bundle = make_bundle(runs["third"], ForgetRequest.parse("class:3"), tmp_path / "x.zip")
    assert bundle.digests["after"] == runs["second"].record["model"]["digest"]
    assert bundle.digests["run-now"] == runs["third"].record["model"]["digest"]
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
    with pytest.raises(FedOrthoError, match=r"there is no .*0000\.safetensors"):
        make_bundle(open_run(copy), REQUEST, tmp_path / "b.zip")
    assert not (tmp_path / "b.zip").exists()


def test_another_ledger_or_a_federation_is_told(made: Path, runs: Runs, tmp_path: Path) -> None:
    copy = tmp_path / "first"
    shutil.copytree(runs["first"].path, copy)
    (copy / "ledger.safetensors").unlink()
    with pytest.raises(BadBundle, match=r"ledger of .* are not those"):
        rerun_decision(open_bundle(made), open_run(copy))
    record = json.loads((copy / "run.json").read_text())
    record["settings"] |= {"clients": 2, "rounds": 1}
    (copy / "run.json").write_text(json.dumps(record))
    with pytest.raises(FedOrthoError, match="trained by a federation: its clients decided"):
        rerun_decision(open_bundle(made), open_run(copy))
    assert tensors_digest(runs["first"].load_model().state_dict()) == open_bundle(made).digests["before"]
