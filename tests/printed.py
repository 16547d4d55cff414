"""Pages as a reader meets them: their code, their commands, and what running them needs."""

import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import typer

from fedortho.cli.app import app

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PROGRAMS = ("fedortho", "python", "cp", "cmp", "rm", "make", "pip", ".")  # what a line of commands begins with
PLACEHOLDER = re.compile(r"…|(?<![\w-])[A-Z]{2,}(?![\w-])")  # RUN, DIR, FILE: for the reader to fill in
COMMAND = typer.main.get_command(app)


@dataclass(frozen=True)
class Block:
    """A fence of a page: its language, its text, and whether it is what a reader types."""

    language: str
    text: str

    @property
    def lines(self) -> list[str]:
        """Command lines, continued ones joined, without prompts and comments."""
        joined = re.sub(r"\\\n\s*", "", self.text).splitlines()
        return [re.sub(r"^\w*\$ ", "", line) for line in joined if line.strip() and not line.startswith("#")]

    @property
    def is_commands(self) -> bool:
        return not self.language and bool(self.lines) and self.lines[0].split()[0] in PROGRAMS

    @property
    def file_name(self) -> str | None:
        """The file that the code is to be written to: its first line is a comment with the name."""
        found = re.match(r"# (\w+\.py)\n", self.text)
        return found[1] if found else None


def blocks(text: str) -> list[Block]:
    """All fences of a page, in order."""
    return [Block(*found) for found in re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)]


def commands(text: str) -> Iterator[list[str]]:
    """Command lines of fedortho in fences, with or without a prompt and a path."""
    yield from _words(line for block in blocks(text) for line in block.lines)


def mentioned_commands(text: str) -> Iterator[list[str]]:
    """Commands in backticks, which may leave out what does not matter there."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    yield from _words(" ".join(line.split()) for line in re.findall(r"`(fedortho [^`]+)`", prose))


def _words(lines: Iterable[str]) -> Iterator[list[str]]:
    for line in lines:
        if found := re.match(r"(?:\.venv/bin/)?fedortho ([a-z].*)", line):
            yield shlex.split(found[1], comments=True)


def parsed(words: list[str]) -> tuple[str, dict[str, Any]]:
    """The command of a line and the values of its parameters, as the command line reads them; raises if it refuses."""
    command: click.Command = COMMAND
    name, rest = [], list(words)
    while isinstance(command, click.Group):
        if not rest or rest[0] not in command.commands:
            raise click.UsageError(f"no command {shlex.join(words[:2])}")
        name.append(rest[0])
        command = command.commands[rest.pop(0)]
    return " ".join(name), command.make_context(" ".join(name), rest).params
