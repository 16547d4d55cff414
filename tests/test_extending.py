"""The example in docs/extending.md runs, and what it makes is a method."""

import re
from pathlib import Path
from typing import Any

import pytest

from fedortho.storage.settings import field_help


def test_the_example_forgets_something_and_keeps_the_rest(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (Path(__file__).parent.parent / "docs" / "extending.md").read_text(encoding="utf-8")
    space: dict[str, Any] = {"__name__": "shake"}
    monkeypatch.setitem(__import__("sys").modules, "shake", type(pytest)("shake"))
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(block, space)
    assert all(field_help(space["Shake"]).values())
    verdict = re.search(r"forget=([\d.]+), retain=([\d.]+)", capsys.readouterr().out)
    assert verdict is not None
    assert float(verdict[1]) < 0.9
    assert 0.7 < float(verdict[2]) <= 1.0
