"""The command line as a user meets it, for tests."""

import sys

import pytest
from typer.testing import CliRunner

from fedortho.cli import app as cli
from fedortho.cli.app import app

QUICK = ("--data", "digits", "--valid", "0.8", "--epochs", "1", "--batch-size", "256", "--lr", "0.05")  # a training


def told(*words: object) -> str:
    """What a command prints; what it raises goes on, for the command line to make one line of."""
    result = CliRunner().invoke(app, list(map(str, words)), catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def run(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    """The exit code of a command line."""
    monkeypatch.setattr(sys, "argv", ["fedortho", *map(str, words)])
    try:
        cli.main()
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0
