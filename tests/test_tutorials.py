"""The tutorials work as printed: their code is written to files and their commands are run, in order, in one directory.

A line whose error the page shows ends with exit code 2, every other one with 0. Installing is not tried.
"""

import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from commands import told
from printed import DOCS, PLACEHOLDER, ROOT, Block, blocks, commands
from typer.testing import CliRunner

from fedortho.cli.app import app
from fedortho.errors import FedOrthoError

TUTORIALS = {
    "client-leaves.md": ["first drawn in round 4", "the same as federate --without client:0"],
    "federation.md": ["Class 3 is no longer predicted", "exchanges with clients"],
    "audit.md": ["failed: C3", "FAIL C3"],
    "own-model.md": ["by preprocessing: 0-1", "restore them, or use the run that has forgotten them"],
    "networks.md": ["hide: works", "cannot both be had"],
    "start-flower.md": ["written to runs/fed-class-3"],
}


def is_skipped(line: str) -> bool:
    """Installing is not tried, nor what the reader has to fill in."""
    return line.split(maxsplit=1)[0] in ("pip", "make", ".") or bool(PLACEHOLDER.search(line))


class Reader:
    """Somebody who types what a page prints."""

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self.capsys, self.monkeypatch = capsys, monkeypatch

    def read(self, page: Path) -> str:
        """Everything that the lines of a page print."""
        parts = blocks(page.read_text(encoding="utf-8"))
        for block in parts:
            if block.file_name:
                Path(block.file_name).write_text(block.text)
        printed = []
        for block, after in zip(parts, [*parts[1:], Block("", "")], strict=True):
            lines = [line for line in block.lines if block.is_commands and not is_skipped(line)]
            for line in lines:
                fails = line == lines[-1] and not after.is_commands and "error: " in after.text
                printed += [self.type(part, fails=fails) for part in line.split(" && ")]
        return "\n".join(printed)

    def type(self, line: str, *, fails: bool) -> str:
        """What one line prints."""
        program, *words = shlex.split(line, comments=True)
        if program == "fedortho":
            return self.call(words, fails=fails)
        if program == "python":
            self.monkeypatch.setattr(sys, "argv", words)
            runpy.run_path(words[0], run_name="__main__")
            return self.capsys.readouterr().out
        line = line.replace("examples/", f"{ROOT}/examples/")
        return subprocess.run(line, shell=True, check=True, capture_output=True, text=True).stdout

    def call(self, words: list[str], *, fails: bool) -> str:
        result = CliRunner().invoke(app, words)
        if fails:
            assert isinstance(result.exception, FedOrthoError), f"{shlex.join(words)} does not fail"
            return f"{result.stdout}\nerror: {result.exception}"
        assert result.exit_code == 0, f"{shlex.join(words)}: {result.exception} {result.output}"
        return result.stdout


@pytest.fixture
def reader(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Reader:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("FEDORTHO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("FEDORTHO_STATE", str(tmp_path / "state"))
    return Reader(capsys, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("name", TUTORIALS)
def test_a_tutorial_works_as_printed(name: str, reader: Reader) -> None:
    printed = reader.read(DOCS / name)
    for words in TUTORIALS[name]:
        assert words in printed, f"{name}: no line prints {words!r}"


@pytest.mark.parametrize("number", [2, pytest.param(None, marks=pytest.mark.slow)], ids=["first", "all"])
def test_the_commands_of_the_readme_run_as_printed(
    number: int | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In order, with one epoch on small images; in `make test` the training and the plan."""
    monkeypatch.chdir(tmp_path)
    lines = list(commands((ROOT / "README.md").read_text(encoding="utf-8")))[:number]
    for words in lines:
        told(*words, *(["--epochs", 1, "--image-size", 8, "--threads", 1] if words[0] == "train" else []))
    assert (tmp_path / "runs" / "first" / "run.json").exists()
    assert (tmp_path / "runs" / "first-class-Dress" / "report.html").exists() is (number is None)


CHAINS = {  # pages that go on from another, or that a role begins with, and what the last of them prints
    ("networks.md", "comparing.md"): "logit-mask",
    ("start-engineer.md", "start-auditor.md"): "applying the patch to the model before gives the model after",
    ("start-researcher.md",): "logit-mask",
}


@pytest.mark.slow
@pytest.mark.parametrize("names", CHAINS, ids=" ".join)
def test_pages_that_go_on_from_others_work_as_printed(names: tuple[str, ...], reader: Reader) -> None:
    *before, last = names
    for name in before:
        reader.read(DOCS / name)
    assert CHAINS[names] in reader.read(DOCS / last)
