"""A small part of `make chaos`."""

import os
from pathlib import Path

import pytest
from chaos import build_base, kill_everywhere


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("chaos")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("FEDORTHO_CACHE", str(place / "world" / "cache"))
        patched.setattr(os, "fsync", lambda _: None)
        build_base(place / "world")
    return (place / "world").rename(place / "base")


@pytest.mark.parametrize(("name", "every"), [("key", 3), ("undo", 30), ("compare again", 30), ("bundle", 8)])
def test_a_command_that_is_killed_is_completed_by_the_same_command(
    base: Path, monkeypatch: pytest.MonkeyPatch, name: str, every: int
) -> None:
    at = base.with_name("world")
    monkeypatch.setenv("FEDORTHO_CACHE", str(at / "cache"))
    monkeypatch.setattr(os, "fsync", lambda _: None)
    tally = kill_everywhere(name, base, at, every)
    assert tally.kills >= 2
    assert tally.failures == []
