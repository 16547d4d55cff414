"""What is released: one version everywhere, archives with all that the package reads and nothing else, extras alone."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

import fedortho as fo
from fedortho.errors import FedOrthoError
from fedortho.evidence.signature import make_key
from fedortho.reports.figures.style import new_figure

ROOT = Path(__file__).parent.parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
SOURCES = ROOT / "src" / "fedortho"
BUILD = "import sys; from setuptools import build_meta as b; to = sys.argv[1]; b.build_wheel(to); b.build_sdist(to)"
SETTINGS = fo.FederateSettings(data="digits", clients=2, rounds=1)
EXTRAS: dict[str, tuple[str, Callable[[], object]]] = {  # the library that is missing, and a call that needs it
    "hub": ("datasets", lambda: fo.load_images("cifar100")),
    "evidence": ("cryptography", lambda: make_key(Path("key.pem"))),
    "federated": ("flwr", lambda: fo.federate_run(Path("run"), SETTINGS)),
    "simulation": ("ray", lambda: fo.federate_run(Path("run"), SETTINGS, backend="ray")),
    "figures": ("matplotlib", lambda: new_figure(1, 1)),
}


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the wheel and the sdist, built from a copy of the sources, without the network."""
    place = tmp_path_factory.mktemp("release")
    copy, dist = place / "copy", place / "dist"
    left_out = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", copy / "src", ignore=left_out)
    shutil.copytree(ROOT / "tests" / "reports", copy / "tests", ignore=left_out)
    for name in ("pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, copy / name)
    subprocess.run([sys.executable, "-c", BUILD, dist], check=True, capture_output=True, cwd=copy)
    return dist


def test_one_version_is_told_everywhere() -> None:
    version = PROJECT["version"]
    assert tomllib.loads((ROOT / "app/pyproject.toml").read_text(encoding="utf-8"))["project"]["version"] == version
    cited = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    (released,) = re.findall(rf"^## {re.escape(version)} \((.*)\)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert f"\nversion: {version}\n" in cited
    assert f"\ndate-released: {released}\n" in cited


def test_click_is_held_back_only_for_flower() -> None:
    held = [name for name, wanted in PROJECT["optional-dependencies"].items() if "click<8.4" in wanted]
    assert held == ["federated"]
    assert not [wanted for wanted in PROJECT["dependencies"] if wanted.startswith("click<")]


@pytest.mark.slow
def test_the_wheel_has_every_file_that_the_package_reads_and_no_other(archives: Path) -> None:
    (wheel,) = archives.glob("*.whl")
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    wanted = {path.relative_to(SOURCES.parent).as_posix() for path in SOURCES.rglob("*") if path.is_file()}
    assert names == {name for name in wanted if "__pycache__" not in name}
    told = zipfile.ZipFile(wheel).read(f"fedortho-{PROJECT['version']}.dist-info/METADATA").decode()
    assert "License-Expression: Apache-2.0" in told
    assert "Programming Language :: Python :: 3.13" in told
    (source,) = archives.glob("*.tar.gz")
    with tarfile.open(source) as opened:
        inside = {name.partition("/")[2] for name in opened.getnames()}
    assert {f"src/{name}" for name in names} <= inside
    assert {"LICENSE", "NOTICE", "README.md", "pyproject.toml"} <= inside


def test_every_asset_has_a_stated_licence() -> None:
    notice = (ROOT / "NOTICE").read_text(encoding="utf-8")
    stated = re.findall(r"[\w./*-]+/[\w.*-]+|py\.typed", notice)
    for path in SOURCES.rglob("*"):
        name = path.relative_to(SOURCES).as_posix()
        if path.is_file() and path.suffix not in (".py", ".pyc"):
            assert any(fnmatch(name, pattern) for pattern in stated), name


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["*.whl", "*.tar.gz"])
def test_an_archive_works_in_a_fresh_environment(archives: Path, tmp_path: Path, kind: str) -> None:
    (archive,) = archives.glob(kind)
    venv.create(tmp_path / "fresh", with_pip=False)
    python = tmp_path / "fresh/bin/python"
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index"]
    place = tmp_path / "fresh/lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    (place / "dependencies.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    subprocess.run([*install, "--no-build-isolation", archive], check=True, capture_output=True)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    for words, told in (
        (["-c", "import fedortho as fo; print(fo.__file__)"], str(place)),
        (["-m", "fedortho", "--version"], f"fedortho {PROJECT['version']}"),
        (["-m", "fedortho", "data", "ls", "fashion-mini", "--class", "Bag", "--limit", "1"], "Bag"),
    ):
        command = [python, "-W", "ignore", *words]
        found = subprocess.run(command, check=True, capture_output=True, text=True, cwd=tmp_path, env=environment)
        assert told in found.stdout
    assert (tmp_path / "fresh/bin/fedortho").exists()


@pytest.mark.parametrize("extra", EXTRAS)
def test_without_an_extra_the_error_names_it(extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert extra in PROJECT["optional-dependencies"]
    library, call = EXTRAS[extra]
    for name in [name for name in sys.modules if name.startswith(f"{library}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.setenv("FEDORTHO_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FedOrthoError, match=rf"fedortho\[{extra}\]"):
        call()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_command_line_needs_no_extra() -> None:
    code = f"import sys; sys.modules.update(dict.fromkeys({[name for name, _ in EXTRAS.values()]})); "
    code += "sys.argv = ['fedortho', 'train', '--help']; from fedortho.cli.app import main; main()"
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "--epochs" in found.stdout
