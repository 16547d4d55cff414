"""Tables of the command line: words stay whole, and nothing is cut."""

import io

import pytest
from rich.console import Console

import fedortho.cli.console as console_module
from fedortho.cli.console import say_table, words_table
from fedortho.experiments.theory import HEADER as THEORY
from fedortho.experiments.theory import LayerTheory
from fedortho.requests.comparing import HEADER


def test_a_table_fits_eighty_columns_and_cuts_nothing() -> None:
    line = ("12", "2026-11-17 09:59:03", "executed", "a-run-of-a-long-name-hidden", "class:Ankle boot,Bag", "1f55f6ee")
    console = Console(width=80, file=io.StringIO())
    console.print(words_table(("", "time", "event", "run", "request", "after"), [line]))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    assert "2026-11-17 09:59:03" in text
    assert "…" not in text
    letters = "".join(text.split())
    assert all(letters.count(letter) >= "".join(line).count(letter) for letter in set("".join(line)) - {" "})


def test_names_of_methods_stay_whole_beside_many_numbers() -> None:
    numbers = ("97.3%", "88.2%", "89.1%", "51.0% *", "1296.4", "969.5", "969.5", "0.6", "0.6")
    for labels in (("class-pruning ×2", "bad-teacher", "ssd (model unchanged)"), ("retrain", "finetune ×2", "ssd")):
        console = Console(width=80, file=io.StringIO())
        console.print(words_table(HEADER, [(label, *numbers) for label in labels]))
        assert isinstance(console.file, io.StringIO)
        text = console.file.getvalue()
        assert max(map(len, text.splitlines())) <= 80
        assert all(word in text for label in labels for word in label.split())
        assert all(text.count(number) >= 3 for number in numbers)


def test_a_table_that_is_wider_than_the_terminal_is_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    text = io.StringIO()
    monkeypatch.setattr(console_module, "out", Console(width=80, file=text))
    maxima = {"1": 0.04, "4": 0.97, "16": 1.63}
    layers = [LayerTheory("features.15", 128, 0.4794, 0.0205, 0.0391, 3.131, 0.1434, 0.02912, maxima)] * 2
    say_table(words_table(THEORY, [layer.cells for layer in layers]))
    assert all(text.getvalue().count(number) >= 2 for number in ("0.479", "3.13", "0.0: 1", "1.0: 4", "1.6: 16"))
