"""docs/extending.md is true: its method and its audit work, as objects and from an installed package."""

import configparser
import importlib
import io
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import told

from fedortho.audits import find_audit, known_audits
from fedortho.errors import FedOrthoError
from fedortho.methods import find_method, known_methods
from fedortho.storage.settings import field_help

TEXT = (Path(__file__).parent.parent / "docs" / "extending.md").read_text(encoding="utf-8")
PYTHON = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
FILES = {re.match(r"# (\w+\.py)\n", block)[1]: block for block in PYTHON if block.startswith("# ")}  # type: ignore[index]
PROJECT = tomllib.loads(re.findall(r"```toml\n(.*?)```", TEXT, re.DOTALL)[0])["project"]
COMMANDS = [shlex.split(line)[1:] for line in TEXT.splitlines() if line.startswith("fedortho ")]


def install(place: Path, entry_points: dict[str, dict[str, str]]) -> None:
    """The page's package as pip leaves it: its modules, and a dist-info directory that names the entry points."""
    for name, code in FILES.items():
        (place / name).write_text(code)
    about = place / f"{PROJECT['name']}-{PROJECT['version']}.dist-info"
    about.mkdir()
    metadata = f"Metadata-Version: 2.1\nName: {PROJECT['name']}\nVersion: {PROJECT['version']}\n"
    (about / "METADATA").write_text(metadata)
    table = configparser.ConfigParser()
    table.optionxform = str  # type: ignore[assignment,method-assign]  # names keep their case
    table.read_dict(entry_points)
    text = io.StringIO()
    table.write(text)
    (about / "entry_points.txt").write_text(text.getvalue())


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory on sys.path, from which a package can be installed; its modules are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    yield tmp_path
    for name in FILES:
        sys.modules.pop(name.removesuffix(".py"), None)


def test_the_python_on_the_page_runs(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    install(place, PROJECT["entry-points"])
    space: dict[str, Any] = {}
    for block in PYTHON:
        if block not in FILES.values():
            exec(block, space)
    assert all(field_help(space["Shake"]).values())
    shown = capsys.readouterr().out
    accuracies = re.search(r"forget=([\d.]+), retain=([\d.]+)", shown)
    assert accuracies is not None
    assert float(accuracies[1]) < 0.9
    assert 0.7 < float(accuracies[2]) <= 1.0
    assert "['C1', 'C2', 'C3', 'C4', 'C5', 'C6', 'X1']" in shown
    assert (space["forgot"].method, space["forgot"].plan) == ("shake", None)


@pytest.mark.slow
def test_an_installed_package_works_in_compare_forget_and_judge(place: Path) -> None:
    install(place, PROJECT["entry-points"])
    outputs = {words[0]: told(*words, *(["--threads", "1"] if words[0] == "train" else [])) for words in COMMANDS}
    assert list(outputs) == ["train", "compare", "forget", "judge"]
    assert re.search(r"^ *shake\b.* [\d.]+%", outputs["compare"], re.MULTILINE)
    assert (place / "runs" / "shaken" / "run.json").exists()
    assert re.search(r"(PASS|FAIL|INCONCLUSIVE) X1 probability of the own label", outputs["judge"])


def test_the_package_lists_all_of_its_files() -> None:
    """Setuptools refuses two modules that lie side by side, unless they are named."""
    modules = tomllib.loads(re.findall(r"```toml\n(.*?)```", TEXT, re.DOTALL)[0])["tool"]["setuptools"]["py-modules"]
    assert {f"{name}.py" for name in modules} == set(FILES)


def test_names_are_found_only_while_the_package_is_installed_and_may_not_clash(place: Path) -> None:
    assert "shake" not in known_methods()
    assert "X1" not in known_audits()
    install(place, PROJECT["entry-points"])
    importlib.invalidate_caches()
    assert "shake" in known_methods()
    assert find_method("shake").name == "shake"
    assert find_audit("X1").title == "probability of the own label"


@pytest.mark.parametrize(
    ("group", "name", "search"),
    [("fedortho.methods", "hide", lambda: find_method("shake")), ("fedortho.audits", "C1", lambda: find_audit("X1"))],
)
def test_a_name_that_exists_is_refused(place: Path, group: str, name: str, search: Any) -> None:
    install(place, {group: {name: "shake:Shake"}})
    with pytest.raises(FedOrthoError, match=f"{name!r}"):
        search()
