"""Images of a simulated federation deleted for good."""

import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from commands import told
from photos import cache_bytes, make_photos, pixels_of, settings

from fedortho.errors import BadData
from fedortho.federated.server import train_federation, train_on
from fedortho.requests.comparing import compare
from fedortho.requests.forgetting import forget_run
from fedortho.requests.judging import JudgeOptions, judge_run
from fedortho.runs.purge import purge_run
from fedortho.runs.run import open_run
from fedortho.runs.settings import FederateSettings


@pytest.fixture(scope="module")
def federated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A simulated federation on the photos, with a cache of its own."""
    made = make_photos(tmp_path_factory.mktemp("federated"))
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(made)
        patched.setenv("FEDORTHO_CACHE", str(made / "federated-cache"))
        how = asdict(replace(settings(Path("photos")), epochs=1))
        sizes = {"clients": 4, "rounds": 2, "fraction": 1.0, "split": "dirichlet:0.5", "least_group": 1}
        train_federation(Path("federated/fed"), FederateSettings(**how, **sizes, least_images=6))
    return made


@pytest.fixture
def federation(federated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, as the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDORTHO_CACHE", str(tmp_path / "cache"))
    for here, there in (("photos", "photos"), ("federated", "runs"), ("federated-cache", "cache")):
        shutil.copytree(federated / here, tmp_path / there)
    return tmp_path


@pytest.mark.slow
def test_a_simulated_federation_goes_on_without_deleted_images(federation: Path) -> None:
    fed = open_run("runs/fed")
    before = fed.load_data()
    shares = fed.clients(before)
    assert shares is not None
    assert before.train.ids is not None
    held = [row for row in shares[1].tolist() if row in before.train.rows.tolist()]
    names = [before.train.ids.files[row] for row in held[:2]]
    assert pixels_of(names[0]) in cache_bytes()
    places = ",".join(f"1/{shares[1].tolist().index(row)}" for row in held[:2])
    told("forget", "runs/fed", f"samples:{places}", "--method", "neggrad", "--audit", "none", "--out", "runs/second")
    for name in names:
        assert pixels_of(name) not in cache_bytes(), "purged as in a central run"
        (Path("photos") / name).unlink()
    rows = Path("runs/second/rows.safetensors").read_bytes()
    assert not [name for name in names if name.encode() in rows]
    with pytest.raises(BadData, match=f"runs/fed was trained on: it lacks .* forgotten: {names[0]}, {names[1]};"):
        fed.load_data()
    second = open_run("runs/second")
    data = second.load_data()
    assert data.gone.tolist() == held[:2]
    now = second.clients(data)
    assert now is not None
    assert all(torch.equal(now[client], rows) for client, rows in shares.items()), "the partition does not move"
    assert torch.equal(data.train.pixels[data.train.rows], before.train.pixels[data.train.rows])
    assert "4 of 4 clients have the model" in told("sync", "runs/second")
    told("evaluate", "runs/second")
    verdict = judge_run("runs/second", options=JudgeOptions(device="cpu", retrain=True))
    assert verdict.has_reference, "a federation without them can still be trained"
    (reference,) = [open_run(path.parent) for path in Path("runs/references").glob("*/run.json")]
    assert reference.record.data.train == second.record.data.train - 2
    assert torch.equal(reference.load_data().train.rows, data.train.rows)

    third = forget_run("runs/second", "client:2", "neggrad", out="runs/third", device="cpu")
    assert list(third.record.all_forgotten) == ["client:2"]
    purge_run("runs/third")
    for row in shares[2].tolist():
        (Path("photos") / before.train.ids.files[row]).unlink()
    told("sync", "runs/third")
    with pytest.raises(BadData, match="lacks images that the run has not forgotten"):
        second.load_data()
    fourth = forget_run("runs/third", "class:emu", "neggrad", out="runs/fourth", device="cpu").run
    assert fourth is not None
    shutil.rmtree("photos/emu")
    data = fourth.load_data()
    assert data.train.names == ("cat", "dog", "emu")
    assert set(data.gone.tolist()) == {
        *held[:2],
        *shares[2].tolist(),
        *[r for r, n in enumerate(before.train.store_labels) if n == 2 and r in before.known_rows],
    }
    compare("runs/fourth", f"samples:{int(data.train.rows[0])}", ["finetune"], out=federation / "compared")
    on = train_on(fourth, 1)
    assert on.record.data.train == len(data.train)


def test_a_late_client_takes_the_patch_after_its_images_were_deleted(federation: Path) -> None:
    fed = open_run("runs/fed")
    before, shares = fed.load_data(), fed.clients(fed.load_data())
    assert shares is not None
    assert before.train.ids is not None
    row = next(row for row in shares[3].tolist() if row in before.train.rows.tolist())
    forget_run("runs/fed", f"samples:{row}", "neggrad", out="runs/second", device="cpu")
    shutil.rmtree("runs/second/clients/client-3")
    shutil.copytree("runs/fed/clients/client-3", "runs/second/clients/client-3")
    shutil.copytree("runs/fed/clients/models", "runs/second/clients/models", dirs_exist_ok=True)
    (Path("photos") / before.train.ids.files[row]).unlink()
    assert "4 of 4 clients have the model" in told("sync", "runs/second")
