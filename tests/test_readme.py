"""The README is short and true: its code runs, its numbers come from files; `test_tutorials.py` runs its commands."""

import re
import runpy
import sys
from dataclasses import replace

import pytest
import torch
from printed import ROOT

import fedortho

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_it_fits_on_a_screen_and_a_half() -> None:
    lines = README.splitlines()
    assert len(lines) <= 160
    assert [line for line in lines if len(line) > 120] == []


def test_tables_are_those_of_the_result_files(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["tables.py", "--check"])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(ROOT / "scripts" / "tables.py"), run_name="__main__")
    assert not stop.value.code, capsys.readouterr().out


def test_the_five_lines_run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Word for word, on an eighth of the images and on 14x14 pixels: `make demo` does the same on whole ones."""
    code = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert code is not None
    images = fedortho.load_images("fashion-mini", size=14)
    images = replace(images, train=images.train.subset(torch.arange(0, len(images.train), 8)))
    monkeypatch.setattr(fedortho, "load_images", lambda name: images)
    exec(code[1], {})
    printed = capsys.readouterr().out
    assert "Class Dress is no longer predicted" in printed
    assert "retrained model to compare with" in printed
    assert "no reference, 4 of 6 measured, 2 not run" in printed


def test_every_make_target_that_it_names_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"demo", "test", "docs"} <= set(re.findall(r"\bmake ([a-z-]+)", README)) <= targets
