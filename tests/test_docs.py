"""The docs are true to the code: links lead somewhere, functions that are named exist, public names are explained."""

import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from printed import DOCS, ROOT, commands
from site_pages import command_reference, expanded, undocumented
from test_layers import PACKAGES

import fedortho

PAGES = sorted(DOCS.glob("*.md"))
MODULES = {path.stem for path in (ROOT / "src" / "fedortho").iterdir() if path.suffix in (".py", "")}
FILES = (".md", ".json", ".jsonl", ".safetensors", ".py", ".toml", ".html", ".head", ".torn")
ACTIONS = ("train.local", "train.patch")  # of messages to clients


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


def anchors(page: Path) -> set[str]:
    """What a link may point to within a page, as GitHub makes it of headings; other files have none."""
    headings = re.findall(r"^#+ (.*)$", expanded(page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, *sorted(ROOT.glob("*.md"))], ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        place, _, anchor = target.partition("#")
        file = page.parent / place if place else page
        assert file.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(file), f"{page.name} links to {target}"


def test_every_page_has_its_place_in_the_navigation() -> None:
    """`make docs` says so too; here it takes no time."""
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    nav = text[text.index("\nnav:") :]
    placed = re.findall(r"([\w-]+\.md)", nav[: nav.index("\ntheme:")])
    assert sorted(placed) == [page.name for page in PAGES], "every page of docs/ has a line under nav in mkdocs.yml"


def test_every_public_name_has_a_docstring_and_a_place_in_the_reference() -> None:
    assert undocumented() == []
    page = (DOCS / "api.md").read_text(encoding="utf-8")
    shown = re.findall(r"^::: fedortho\.(?:\w+\.)*(\w+)$", page, re.MULTILINE)
    assert sorted(shown) == fedortho.__all__, "docs/api.md shows every public name once, as ::: fedortho.NAME"


def test_a_public_name_without_a_docstring_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Bare:
        def told(self) -> None: ...

    monkeypatch.setattr(fedortho, "__all__", ["Bare"])
    monkeypatch.setattr(fedortho, "Bare", Bare, raising=False)
    assert undocumented() == ["Bare", "Bare.told"]


def test_the_reference_of_the_command_line_is_read_from_the_commands() -> None:
    text = command_reference()
    assert "## fedortho bundle check" in text
    assert re.search(r"^\| `--max-retain-drop FLOAT` \| \S.* \| .*\|$", text, re.MULTILINE)
    assert not re.search(r"^\|[^|]*\|\s*\|", text, re.MULTILINE), "an option without a help"


def test_the_tutorials_use_every_command_that_a_reader_meets() -> None:
    pages = ("tutorial", "own-model", "federation", "client-leaves", "networks", "comparing")
    texts = [(DOCS / f"{name}.md").read_text(encoding="utf-8") for name in pages]
    told = {words[0] for text in texts for words in commands(text)}
    assert {"train", "forget", "judge", "audit", "report", "bundle", "journal", "results", "compare", "tune"} <= told
    assert {"check", "federate", "evaluate", "undo", "import", "data"} <= told


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
    tree = ARCHITECTURE.split("## The tree")[1].split("\n## ")[0]
    assert re.findall(r"^    (\w+)/  ", tree, re.MULTILINE) == PACKAGES


def test_every_module_of_the_root_is_in_the_tree() -> None:
    tree = ARCHITECTURE.split("## The tree")[1].split("\n## ")[0]
    for path in (ROOT / "src" / "fedortho").glob("*.py"):
        assert path.name in tree, f"{path.name} is missing in the tree"


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


def test_a_table_of_the_paper_that_was_run_is_not_called_mere_code() -> None:
    text = (DOCS / "reproduction.md").read_text(encoding="utf-8")
    status = dict(re.findall(r"^\| `(\w+)`[^|]*\|[^|]*\| (\w+) \|", text, re.MULTILINE))
    assert {"pruning", "layer_ortho", "unlearning_iid_non_iid"} <= status.keys()
    results = ROOT / "benchmarks" / "results" / "reproduce"
    run = {name for name in status for scale in ("small", "wide") if list(results.glob(f"{name}-{scale}*.json"))}
    assert run
    assert not {name for name in run if status[name] == "code"}
