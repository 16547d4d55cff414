import json
import shutil
import sys
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from bundles import REQUEST, Runs, edited, forge
from small import SETTINGS

from fedortho.data.request import ForgetRequest
from fedortho.errors import FedOrthoError
from fedortho.evidence.bundle import BadBundle, make_bundle, open_bundle, read_bundle
from fedortho.evidence.recheck import check_bundle, reapply_patch, rerun_decision
from fedortho.federated.server import train_federation
from fedortho.methods.hide import Hide
from fedortho.models.patch import load_patch
from fedortho.requests.forgetting import forget_federated_run
from fedortho.runs.run import open_run
from fedortho.storage.files import tensors_digest, write_tensors
from fedortho.storage.journal import BadJournal


def test_the_patch_gives_the_model_after_bit_for_bit(made: Path, runs: Runs, tmp_path: Path) -> None:
    bundle, model = open_bundle(made), runs["first"].path / "model.safetensors"
    reapply_patch(bundle, model)
    with pytest.raises(BadBundle, match="has the patch of"):
        reapply_patch(bundle, runs["second"].path / "model.safetensors")
    state = runs["first"].load_model().state_dict()
    state["features.0.weight"].view(torch.int32)[0, 0, 0, 0] ^= 1
    write_tensors(tmp_path / "other.safetensors", state)
    with pytest.raises(BadBundle, match="has the patch of"):
        reapply_patch(bundle, tmp_path / "other.safetensors")


def test_a_forged_patch_does_not_give_the_model_after(made: Path, runs: Runs, tmp_path: Path) -> None:
    bundle, model = open_bundle(made), runs["first"].path / "model.safetensors"
    (tmp_path / "patch.safetensors").write_bytes(bundle.files["patch.safetensors"])
    patch = load_patch(tmp_path / "patch.safetensors")
    name = min(patch.scaled)
    for wrong, told in (
        ((patch.scaled[name][0], patch.scaled[name][1] + 0.5), "instead of"),
        ((patch.scaled[name][0] + 10_000, patch.scaled[name][1]), "is out of bounds"),
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
    model = {"name": "evil_factory:net", "num-classes": 10, "channels": 1}
    settings = edited(made, "settings.json", lambda v: v | {"model": model})
    bundle = read_bundle(forge(made, {"settings.json": settings}), "x.zip")
    sys.path.append(str(tmp_path))
    try:
        reapply_patch(bundle, runs["first"].path / "model.safetensors")  # the weights suffice
    finally:
        sys.path.remove(str(tmp_path))
    assert not (tmp_path / "harm").exists()


@pytest.mark.slow
def test_the_decision_made_again_gives_the_same_patch(made: Path, runs: Runs, tmp_path: Path) -> None:
    with pytest.raises(BadBundle, match=r"zip: verdict\.json: subject is 'class \"3\"'; here it is 'class 3'$"):
        check_bundle(made, run=runs["first"])  # no other lie: patch, accuracies, report without its images
    make_bundle(runs["third"], ForgetRequest.parse("class:5"), tmp_path / "third.zip")
    bundle = open_bundle(tmp_path / "third.zip")
    assert bundle.request.earlier == ("class:3",)
    rerun_decision(bundle, runs["second"])
    with pytest.raises(FedOrthoError, match="give the run of before the request"):
        rerun_decision(bundle, runs["first"])


def test_the_decision_of_a_federation_that_is_simulated_here_is_made_again(tmp_path: Path) -> None:
    run = train_federation(tmp_path / "fed", SETTINGS)
    forget_federated_run(run, REQUEST, Hide(ratio=0.25), out=tmp_path / "forgot")
    bundle = make_bundle(open_run(tmp_path / "forgot"), REQUEST, tmp_path / "x.zip")
    reapply_patch(bundle, tmp_path / "fed" / "model.safetensors")
    rerun_decision(bundle, run)
    other = dict(bundle.settings.forgetting) | {"ratio": 0.5}
    settings = edited(tmp_path / "x.zip", "settings.json", lambda v: v | {"forgetting": other})
    entry = edited(tmp_path / "x.zip", "entry.json", lambda v: v | {"settings": other})
    forged = read_bundle(forge(tmp_path / "x.zip", {"settings.json": settings, "entry.json": entry}), "x.zip")
    with pytest.raises(BadBundle, match=r"patch\.safetensors is another one"):
        rerun_decision(forged, run)


def test_a_decision_told_falsely_is_found_by_making_it_again(made: Path, runs: Runs) -> None:
    other = {"forgetting": dict(open_bundle(made).settings.forgetting) | {"ratio": 0.5}}
    settings = edited(made, "settings.json", lambda v: v | other)
    entry = edited(made, "entry.json", lambda v: v | {"settings": other["forgetting"]})
    bundle = read_bundle(forge(made, {"settings.json": settings, "entry.json": entry}), "x.zip")
    with pytest.raises(BadBundle, match=r"patch\.safetensors is another one"):
        rerun_decision(bundle, runs["first"])


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
    assert tensors_digest(runs["first"].load_model().state_dict()) == open_bundle(made).digests.before


def test_flags_without_effect_and_a_journal_that_is_not_there_are_refused(
    made: Path, runs: Runs, tmp_path: Path
) -> None:
    with pytest.raises(FedOrthoError, match="--audits is given without --run; expected the run before"):
        check_bundle(made, audits="C9")
    with pytest.raises(BadJournal, match=r"there is no journal in .*none; give the directory that holds the runs"):
        check_bundle(made, journal=tmp_path / "none")
    with pytest.raises(BadJournal, match=r"there is no journal in .*none; give the directory that holds the runs"):
        make_bundle(runs["second"], REQUEST, tmp_path / "x.zip", journal=tmp_path / "none")
    assert not (tmp_path / "x.zip").exists()
