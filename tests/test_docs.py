"""The docs are true to the code: links lead somewhere, commands and functions that are named exist."""

import importlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import typer
from test_layers import PACKAGES

from fedortho.cli.app import app

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").glob("*.md"))
MODULES = {path.stem for path in (ROOT / "src" / "fedortho").iterdir() if path.suffix in (".py", "")}
FILES = (".md", ".json", ".jsonl", ".safetensors", ".py", ".toml", ".html", ".head", ".torn")
ACTIONS = ("train.local", "train.patch")  # of messages to clients
COMMAND = typer.main.get_command(app)


def commands(text: str) -> Iterator[list[str]]:
    """Command lines of fedortho: in fences, with or without a prompt and a path, and in backticks."""
    fenced, is_inside = [], False
    for line in re.sub(r"\\\n\s*", "", text).splitlines():
        if line.startswith("```"):
            is_inside = not is_inside
        elif is_inside:
            fenced.append(line)
    inline = re.findall(r"`(fedortho [^`]+)`", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))
    for line in [*fenced, *inline]:
        if found := re.match(r"(?:\w*\$ )?(?:\.venv/bin/)?fedortho ([a-z].*)", line):
            yield shlex.split(found[1], comments=True)


def resolved(name: str) -> object:
    """The thing that `module.function` or `package.module.Class.method` names, below fedortho."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(["fedortho", *parts[:length]]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            found = getattr(found, part)
        return found
    raise ModuleNotFoundError(name)


def named(text: str) -> list[str]:
    """All names in backticks that begin with one of our modules."""
    words = re.findall(r"`([a-z_]+(?:\.\w+)+)`", text)
    return [word for word in words if word.split(".")[0] in MODULES and not word.endswith((*FILES, *ACTIONS))]


def anchors(text: str) -> set[str]:
    """What a link may point to within a page, as GitHub makes it of headings."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if target.startswith(("http://", "https://")):
            continue
        place, _, anchor = target.partition("#")
        file = page.parent / place if place else page
        assert file.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(file.read_text(encoding="utf-8")), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda page: page.name)
def test_every_command_and_flag_exists(page: Path) -> None:
    for words in commands(page.read_text(encoding="utf-8")):
        command: click.Command = COMMAND
        rest = list(words)
        while isinstance(command, click.Group):
            assert rest, f"{page.name}: {shlex.join(words)} names no command"
            assert rest[0] in command.commands, f"{page.name}: there is no command {rest[0]}"
            command = command.commands[rest.pop(0)]
        flags = {flag for param in command.params for flag in (*param.opts, *param.secondary_opts)} | {"--help"}
        for word in rest:
            if word.startswith("-"):
                assert word.partition("=")[0] in flags, f"{page.name}: {command.name} has no {word}"


def test_the_tutorial_uses_every_command_that_a_reader_meets() -> None:
    told = {words[0] for words in commands((ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8"))}
    assert {"train", "forget", "judge", "audit", "report", "bundle", "journal", "results", "compare", "tune"} <= told
    assert {"check", "federate", "evaluate", "undo"} <= told


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_function_that_is_named_exists(page: Path) -> None:
    for name in named(page.read_text(encoding="utf-8")):
        resolved(name)


def test_the_map_of_equations_names_a_function_in_every_line() -> None:
    text = (ROOT / "docs" / "method.md").read_text(encoding="utf-8")
    table = text.split("| paper | here | note |")[1].split("\n\n")[0]
    lines = [line.split(" | ") for line in table.splitlines()[2:]]
    assert len(lines) >= 15
    for line in lines:
        assert named(line[1]), f"no function for {line[0]}"


def test_a_name_that_does_not_exist_is_found() -> None:
    assert named("`unlearning.rank.rank_kernels` and `log.md`, `verdict.json`, `journal.jsonl`") == [
        "unlearning.rank.rank_kernels"
    ]
    with pytest.raises(AttributeError):
        resolved("unlearning.rank.no_such_function")


def test_files_that_reproduction_names_are_there() -> None:
    """But for those that it says are still being computed."""
    text = (ROOT / "docs" / "reproduction.md").read_text(encoding="utf-8")
    named_files = set(re.findall(r"`(benchmarks/[\w/.-]+\.(?:py|json|png))`", text))
    pending = set(re.findall(r"`(benchmarks/[\w/.-]+)` \(being measured\)", text))
    assert len(named_files) > 15
    for file in named_files - pending:
        assert (ROOT / file).exists(), file


ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
HOP = re.compile(r"^( *)\d+\. `([a-z]+)/(\w+)\.([\w.]+)`", re.MULTILINE)
WALKS = {section.splitlines()[0]: section for section in re.split(r"^## ", ARCHITECTURE, flags=re.MULTILINE)[1:]}
WALKS = {title: section for title, section in WALKS.items() if HOP.search(section)}


def hops(section: str) -> Iterator[tuple[int, str, str]]:
    """Depth, package and dotted name of every hop of a walk; a hop is called by the nearest less indented one above."""
    for indent, package, module, name in HOP.findall(section):
        yield len(indent) // 3, package, f"{package}.{name}" if module == "__init__" else f"{package}.{module}.{name}"


def calls(section: str) -> Iterator[tuple[tuple[str, str], tuple[str, str]]]:
    """Caller and callee of every hop but the first, each as package and dotted name."""
    above: list[tuple[str, str]] = []
    for depth, package, name in hops(section):
        del above[depth:]
        assert len(above) == depth, f"{name} is indented by more than one level"
        if above:
            yield above[-1], (package, name)
        above.append((package, name))


def module_source(name: str) -> str:
    """The text of the module in which `package.module.function` is defined."""
    path = ROOT / "src" / "fedortho" / Path(*name.split("."))
    while not path.with_suffix(".py").is_file():
        path = path / "__init__" if (path / "__init__.py").is_file() else path.parent
    return path.with_suffix(".py").read_text(encoding="utf-8")


def test_the_packages_of_picture_and_tables_are_those_of_the_layer_test_in_order() -> None:
    picture = (ROOT / "docs" / "architecture.svg").read_text(encoding="utf-8")
    assert re.findall(r'class="package"[^>]*>(\w+)<', picture) == PACKAGES
    assert re.findall(r"^\|[^|]*\| `(\w+)` \|", ARCHITECTURE, re.MULTILINE) == PACKAGES
    tree = (ROOT / "README.md").read_text(encoding="utf-8").split("## The tree")[1]
    assert re.findall(r"^    (\w+)/  ", tree, re.MULTILINE) == PACKAGES


def test_there_are_four_walks() -> None:
    assert [title.split(":")[0] for title in WALKS] == [
        "`fedortho forget RUN class",
        "A federated class request",
        "`fedortho compare` with SalUn",
        "`fo.forget` in Python",
    ]


@pytest.mark.parametrize("title", WALKS)
def test_every_hop_of_a_walk_exists(title: str) -> None:
    names = [name for _, _, name in hops(WALKS[title])]
    assert len(names) >= 8
    for name in names:
        resolved(name)


@pytest.mark.parametrize("title", WALKS)
def test_no_call_of_a_walk_goes_back_up(title: str) -> None:
    for (caller, above), (package, name) in calls(WALKS[title]):
        assert PACKAGES.index(package) <= PACKAGES.index(caller), f"{above} may not call {name}"


@pytest.mark.parametrize("title", WALKS)
def test_every_hop_of_a_walk_is_named_in_the_module_that_calls_it(title: str) -> None:
    for (_, above), (_, name) in calls(WALKS[title]):
        parts = name.split(".")
        names = {parts[-1], parts[-2]} if parts[-2][0].isupper() else {parts[-1]}  # a method, or its class
        assert names & set(re.findall(r"\w+", module_source(above))), f"{above} does not call {name}"
