"""The examples run, on toy data, and what they print is what they promise."""

import re
import runpy
import sys
import tomllib
from pathlib import Path

import pytest

import fedortho as fo

EXAMPLES = Path(__file__).parent.parent / "examples"
ACCURACIES = re.compile(r"^(\S+) +forget ([\d.]+)%  retain ([\d.]+)%", re.MULTILINE)


def told(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str, *words: object) -> str:
    """What an example prints."""
    path = EXAMPLES / f"{name}.py"
    monkeypatch.setattr(sys, "argv", [str(path), *map(str, words)])
    runpy.run_path(str(path), run_name="__main__")
    return capsys.readouterr().out


def numbers(text: str) -> dict[str, tuple[float, float]]:
    """Forget and retain accuracy in percent, by the name of the line."""
    return {name: (float(forget), float(retain)) for name, forget, retain in ACCURACIES.findall(text)}


def test_there_are_four_and_each_fits_on_a_page() -> None:
    scripts = sorted(EXAMPLES.glob("*.py"))
    assert len(scripts) == 4
    for script in scripts:
        assert len(script.read_text(encoding="utf-8").splitlines()) <= 60, script.name


@pytest.mark.slow  # quick: the five lines of the README
def test_a_class_is_forgotten_and_the_verdict_says_what_is_left(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = told(capsys, monkeypatch, "forget_a_class", "--data", "digits", "--forget", "class:3", "--epochs", 3)
    found = numbers(text)
    assert found["before"][0] > 80
    assert found["after"][0] < 10
    assert 80 < found["after"][1] <= 100
    assert found["retrained"][0] == 0
    assert "Class 3 is " in text
    assert re.search(
        r"A linear probe( at \S+)? still finds it in [\d.]+% of images, in one retrained model in [\d.]+%", text
    )
    assert re.findall(r"^(C\d) ", text, re.MULTILINE) == ["C1", "C2", "C3", "C4", "C5", "C6"]
    assert "C4 NOT RUN" in text


def test_an_own_network_on_own_tensors_forgets(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = told(capsys, monkeypatch, "own_model")
    found = numbers(text)
    assert found["before"][0] > 80
    assert found["after"][0] < 10
    assert 80 < found["after"][1] <= 100
    assert "hide: works; edited: body.6" in text
    assert "Net in, Net out" in text


@pytest.mark.slow
def test_a_client_leaves_an_own_federation(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    text = told(capsys, monkeypatch, "own_federation", tmp_path, "--clients", 4, "--rounds", 2)
    assert text.count(" of 2: clients ") == 2
    assert "first drawn in round " in text
    left, never = re.findall(r"^(?:left|never) +([0-9a-f]{64})$", text, re.MULTILINE)
    assert left == never, "the same bytes as a federation that never had the client"
    assert left != fo.open_run(tmp_path / "federation").record.model.digest


@pytest.mark.slow
def test_an_own_method_is_judged_like_the_others(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = told(capsys, monkeypatch, "compare_methods")
    found = numbers(text)
    assert list(found) == ["deafen", "hide", "finetune"]
    assert found["deafen"][0] == 0
    assert found["hide"][0] < 10
    assert min(retain for _, retain in found.values()) > 80
    assert text.count("a linear probe recalls") == 3


@pytest.mark.slow
def test_a_network_of_a_plain_script_is_imported_and_two_of_its_photos_are_deleted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The walk of docs/own-model.md, with fewer photos."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDORTHO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("FEDORTHO_STATE", str(tmp_path / "state"))
    monkeypatch.syspath_prepend(EXAMPLES / "own_photos")
    told(capsys, monkeypatch, "own_photos/make_photos", "photos")
    for split, number in (("train", 50), ("test", 20)):
        for folder in Path("photos", split).iterdir():
            for file in sorted(folder.iterdir())[number:]:
                file.unlink()
    told(capsys, monkeypatch, "own_photos/clothes", "photos/train", "clothes.pt")
    how = {"model": "clothes:Clothes", "data": "photos", "device": "cpu"}
    with pytest.raises(fo.FedOrthoError, match=r"by preprocessing: 0-1 .*--scale 0-1"):
        fo.import_run("runs/clothes", "clothes.pt", fo.ImportSettings(**how))
    fo.import_run("runs/clothes", "clothes.pt", fo.ImportSettings(**how, scale="0-1", valid_from_test=0.5))
    names = ["train/Ankle boot/0006.png", "train/Bag/0012.png"]
    fo.forget_run("runs/clothes", f"'samples:{','.join(names)}'", "neggrad", out="runs/no-two", device="cpu")
    for name in names:
        Path("photos", name).unlink()
    assert len(fo.open_run("runs/no-two").load_data().train) == 248
    with pytest.raises(fo.FedOrthoError, match=r"Ankle boot/0006.png, train/Bag/0012.png; restore them"):
        fo.open_run("runs/clothes").load_data()


@pytest.mark.slow
def test_flowers_quickstart_forgets_on_the_installed_flower(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from flwr.app import Context, RecordDict

    from fedortho.federated.local_grid import LocalGrid

    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(EXAMPLES / "flower_quickstart")
    from quickstart.client_app import app as client_app  # type: ignore[import-not-found]  # of the example
    from quickstart.server_app import app as server_app  # type: ignore[import-not-found]

    project = tomllib.loads((EXAMPLES / "flower_quickstart" / "pyproject.toml").read_text(encoding="utf-8"))
    config = project["tool"]["flwr"]["app"]["config"]
    grid = LocalGrid(client_app, 2, {"store": str(tmp_path / "store")}, run_config=config)
    server_app(grid, Context(1, 1, {}, RecordDict(), config))
    text = capsys.readouterr().out
    trained, forgotten = (
        list(map(int, re.findall(r"(\d+)%", line)))
        for line in text.splitlines()
        if line.startswith(("trained", "forg"))
    )
    assert trained[3] > 80
    assert forgotten[3] < 10
    assert sum(trained) - trained[3] - (sum(forgotten) - forgotten[3]) < 60, "at most some points of each other class"
    assert "2 clients have the model" in text
    added = [file.read_text(encoding="utf-8").count("(+)") for file in EXAMPLES.glob("flower_quickstart/**/*_app.py")]
    assert sum(added) <= 10 + 2, "ten lines, and the two docstrings that speak of them"
