"""Names of classes, runs and files are shown as they are: no markup, no control characters, no line of their own."""

import logging
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import told
from pictures import encoded, noise, write
from rich.console import Console
from rich.table import Table

from fedortho.cli import app as cli
from fedortho.cli.console import bars, line_of, one_line, words_table
from fedortho.errors import FedOrthoError

SIGNED = "checked: signed by NIST"
NAMES = ["[/x]", f"dress\n{SIGNED}\x1b[2J", "\u202egnihton [bold]$\\frac", "\x9b31m\r\u2028z&<script>"]
HOSTILE = "".join(NAMES)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with data whose classes have hostile names, and a run that was trained on it."""
    place = tmp_path_factory.mktemp("foreign")
    images = [encoded(noise(row, (8, 8))) for row in range(64)]
    for split, number in (("train", 64), ("test", 32)):
        write(place / "data" / f"{split}.parquet", images[:number], [row % 4 for row in range(number)], names=NAMES)
    words = ("--epochs", 1, "--crop", 0, "--device", "cpu", "--threads", 1, "--valid", 0.25, "--ortho", 0)
    told("train", "--data", place / "data", "--model", "small:TinyNet", *words, "--out", place / "runs" / "[run]")
    return place


def check(text: str) -> None:
    assert all(sign.isprintable() or sign == "\n" for sign in text), "there is no control character"
    assert not [line for line in text.splitlines() if line.startswith(SIGNED)]


@pytest.mark.slow
def test_hostile_class_names_pass_through_every_command(place: Path) -> None:
    run, new, undo = place / "runs" / "[run]", place / "runs" / "[red]new", place / "undo"
    new.parent.mkdir(exist_ok=True)
    commands: list[tuple[object, ...]] = [
        ("evaluate", run),
        ("check", run),
        ("data", "ls", run),
        (
            "forget",
            run,
            "class:1",
            "--level",
            "hide",
            "--ratio",
            0.2,
            "--out",
            new,
            "--keep-undo",
            undo,
            "--audit",
            "none",
        ),
        ("judge", new, "--audit", "none"),
        ("results", place / "runs"),
        ("report", new),
        ("bundle", "make", new, "class:1", "--out", place / "[bundle].zip"),
        ("bundle", "check", place / "[bundle].zip"),
        ("journal", "check", place / "runs"),
        ("journal", "show", place / "runs"),
        ("compare", run, "class:1", "--methods", "logit-mask"),
        ("undo", new, undo, "--out", place / "runs" / "[b]undone"),
    ]
    every = []
    for command in commands:
        every.append(told(*command))
        check(every[-1])
    assert "[/x]" in every[0]
    assert SIGNED in every[0]


@pytest.mark.parametrize("raised", [FedOrthoError, OSError, ValueError])
def test_errors_and_messages_of_the_log_are_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], raised: Callable[[str], Exception]
) -> None:
    def fail(*_: object, **__: object) -> None:
        logging.getLogger("fedortho").warning("a client said %s", HOSTILE)
        raise raised(HOSTILE)

    monkeypatch.setattr(cli, "app", fail)
    monkeypatch.setattr(sys, "argv", ["fedortho", "results", "--debug"])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == (1 if raised is ValueError else 2)
    text = capsys.readouterr().err
    check(text)
    assert "Traceback" in text
    assert text.splitlines()[-1].startswith("error: ")


def test_a_line_spells_out_what_cannot_be_printed_and_keeps_all_else() -> None:
    assert one_line("Ankle boot, [/x], дім, 犬") == "Ankle boot, [/x], дім, 犬"
    assert one_line("a\nb\x1b[0m\u202e\udcff\t") == r"a\nb\x1b[0m\u202e\udcff\t"
    assert len(one_line("x" * 10**6)) < 10**5
    assert line_of(("[/x]", "bold"), "[/y]").plain == "[/x][/y]"


def test_tables_and_progress_bars_show_names_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    def shown(table: Table) -> str:
        console = Console(width=1000)
        console.print(table)
        return capsys.readouterr().out

    text = shown(words_table(("class", "images"), [(name, "1") for name in NAMES]))
    check(text)
    assert "[/x]" in text
    with bars() as progress:
        task = progress.add_task(HOSTILE, total=None, news=HOSTILE)
        progress.update(task, news=f"judging: {HOSTILE}")
        for column in progress.columns:
            check(str(column(progress.tasks[0])))
