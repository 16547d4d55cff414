"""The benchmark scripts start, and the networks that they use are those of the manifest."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from fedortho.errors import BadCheckpoint, UnknownName
from fedortho.runs.settings import TrainSettings
from fedortho.runs.training import train_run
from fedortho.storage.settings import make_settings

ROOT = Path(__file__).parents[2]
SCRIPTS = [path for path in sorted((ROOT / "benchmarks").glob("*.py")) if path.stem != "result_files"]
MANIFEST = json.loads((ROOT / "benchmarks" / "manifest.json").read_text(encoding="utf-8"))
SMALL = TrainSettings(data="digits", model="small:TinyNet", epochs=1, batch_size=64, threads=1, crop=0, flip=0.0)


def script(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A benchmark as a module, under a name that no module of the tests has."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", [path.stem for path in SCRIPTS])
def test_every_script_shows_its_help(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        script(name, monkeypatch).main(["--help"])
    assert ended.value.code == 0
    assert f"python benchmarks/{name}.py" in capsys.readouterr().out


def test_the_manifest_has_valid_settings_and_one_name_per_digest() -> None:
    digests = [entry["digest"] for entry in MANIFEST.values()]
    assert len(set(digests)) == len(digests) >= 25
    for name, entry in MANIFEST.items():
        settings = make_settings(TrainSettings, entry["settings"])
        assert name.startswith(f"{settings.data}-{settings.model}-")
        assert ("-without-" in name) == bool(settings.without)


def test_a_network_that_is_missing_is_trained_and_one_with_other_weights_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = script("manifest", monkeypatch)
    monkeypatch.setattr(manifest, "MANIFEST", tmp_path / "manifest.json")
    networks = tmp_path / "networks"
    train_run(networks / "tiny", SMALL)
    manifest.main(["--networks", str(networks), "--update"])
    listed = json.loads((tmp_path / "manifest.json").read_text())
    assert listed["tiny"]["settings"]["model"] == "small:TinyNet"

    elsewhere = tmp_path / "elsewhere"
    manifest.main(["--networks", str(elsewhere), "--data-dir", ""])
    assert manifest.open_network(elsewhere, "tiny", "").path == elsewhere / "tiny"

    listed["tiny"]["digest"] = "0" * 64
    (tmp_path / "manifest.json").write_text(json.dumps(listed))
    with pytest.raises(BadCheckpoint, match=r"elsewhere/tiny .*0000"):
        manifest.open_network(elsewhere, "tiny", "")
    with pytest.raises(UnknownName, match="no network 'tinny'; did you mean 'tiny'"):
        manifest.open_network(elsewhere, "tinny", "")


def test_no_weights_and_no_verdicts_are_in_the_repository() -> None:
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    assert {"/benchmarks/networks/", "/runs/"} <= set(ignored)
    kept = {path.suffix for path in (ROOT / "benchmarks").rglob("*") if "networks" not in path.parts and path.is_file()}
    assert kept <= {".py", ".json", ".png", ".txt", ".pyc"}
    assert not list((ROOT / "src").rglob("*.trials.json"))
