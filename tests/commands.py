"""The command line as a user meets it, for tests."""

from typer.testing import CliRunner

from fedortho.cli.app import app


def told(*words: object) -> str:
    """What a command prints; what it raises goes on, for the command line to make one line of."""
    result = CliRunner().invoke(app, list(map(str, words)), catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout
