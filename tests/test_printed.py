"""Commands as README and docs print them: the command line reads each, and the runs and classes that it names exist.

`test_tutorials.py` runs them. Here they are followed: which run is made of which data, and which classes these have.
"""

import re
import shlex
from pathlib import Path
from typing import Any

import click
import pytest
from printed import DOCS, PLACEHOLDER, ROOT, commands, mentioned_commands, parsed

from fedortho.data.request import ForgetRequest
from fedortho.data.sources import load_images

PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
ROLES = [f"start-{role}.md" for role in ("engineer", "researcher", "flower")]
STORIES = ["levels.md", "networks.md", "own-model.md", "federation.md", "client-leaves.md", "audit.md", "extending.md"]
FOLLOWED = [ROOT / "README.md", *(DOCS / name for name in (*ROLES, *STORIES, "tutorial.md", "comparing.md"))]
GOES_ON_FROM = {"tutorial.md": ROOT / "Makefile", "comparing.md": DOCS / "networks.md"}
PHOTOS = ("Ankle boot", "Bag", "Dress", "Shirt", "Sneaker")  # of examples/own_photos
OWN_DATA = {"networks.md": ("Dress", "Pullover", "T-shirt-top", "Trouser"), "own-model.md": PHOTOS, "audit.md": PHOTOS}
Runs = dict[str, tuple[str, ...]]  # the classes of each run's data


def lines_of(page: Path) -> list[list[str]]:
    """The command lines of a page that have nothing to fill in; of the Makefile those of the demo."""
    text = page.read_text(encoding="utf-8")
    if page.name == "Makefile":
        values = dict(re.findall(r"^([A-Z]+) := (.*)$", text, re.MULTILINE)) | {"BIN": ".venv/bin"}
        text = re.sub(r"\$\((\w+)\)", lambda found: values.get(found[1], found[0]), text)
        text = "```\n" + "\n".join(line.strip() for line in text.splitlines() if line.startswith("\t")) + "\n```"
    return [words for words in commands(text) if not PLACEHOLDER.search(" ".join(words))]


def classes_of(page: Path, data: str) -> tuple[str, ...]:
    if data in ("fashion-mini", "digits"):
        return load_images(data).train.names
    return OWN_DATA.get(page.name, ())


def follow(page: Path, words: list[str], runs: Runs) -> None:
    """Check that what a line names is there, and note what it makes."""
    name, values = parsed(words)
    run, out = str(values.get("run_path") or ""), str(values.get("out_path") or "")
    if name in ("train", "federate", "import"):
        runs[out] = classes_of(page, values["data"] or "fashion-mini")
    elif run:
        made = run if run in runs else next((known for known in runs if run.startswith(f"{known}-compared-")), None)
        assert made, f"{page.name}: {shlex.join(words)} names {run}, which no line before it makes"
        request = " ".join(requests_of(values))
        for each in re.findall(r"class:([^ ]+(?: boot)?)", request):
            for wanted in each.strip("'").split(","):
                names = runs[made]
                assert not names or wanted in names or wanted.isdigit(), f"{page.name}: {run} has no class {wanted}"
        if name in ("forget", "undo"):
            place = out or f"{run}-{ForgetRequest.parse(request).word}"
            runs |= {place: runs[made], f"{place}-hidden": runs[made]}


def requests_of(values: dict[str, Any]) -> list[str]:
    given = values.get("request") or []
    return [given] if isinstance(given, str) else list(given)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_command_line_reads_every_line(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for words in [*commands(text), *mentioned_commands(text)]:
        try:
            parsed([word for word in words if word != "…"])
        except (click.MissingParameter, click.BadOptionUsage):
            assert words in list(mentioned_commands(text)), f"{page.name}: {shlex.join(words)} lacks something"
        except click.UsageError as error:
            if isinstance(error, click.BadParameter) and any(word.isupper() for word in words):
                continue  # a number that the reader has to fill in
            pytest.fail(f"{page.name}: {shlex.join(words)}: {error.format_message()}")


@pytest.mark.parametrize("page", FOLLOWED, ids=lambda page: page.name)
def test_runs_and_classes_that_a_line_names_are_there(page: Path) -> None:
    runs: Runs = {}
    if page.name in GOES_ON_FROM:
        before = GOES_ON_FROM[page.name]
        for words in lines_of(before):
            follow(before, words, runs)
    for words in lines_of(page):
        follow(page, words, runs)
    assert runs


def test_a_line_that_cannot_work_is_found() -> None:
    """The mistakes that pages had: a class that the data lack, a run that nobody made, a flag that went."""
    runs: Runs = {}
    page = ROOT / "README.md"
    follow(page, ["train", "--data", "fashion-mini", "--out", "runs/first"], runs)
    follow(page, ["forget", "runs/first", "class:Dress,7"], runs)
    follow(page, ["judge", "runs/first-class-Dress-7"], runs)
    with pytest.raises(AssertionError, match="runs/first has no class cat"):
        follow(page, ["compare", "runs/first", "class:cat"], runs)
    with pytest.raises(AssertionError, match="no line before it makes"):
        follow(page, ["judge", "runs/second"], runs)
    with pytest.raises(click.UsageError, match="--preset"):
        follow(page, ["forget", "runs/first", "class:Bag", "--preset", "paper"], runs)
