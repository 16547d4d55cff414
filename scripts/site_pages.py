"""What `make docs` adds to the pages in docs/: hooks of mkdocs (mkdocs.yml names this file).

- `<!-- commands -->` becomes the reference of the command line, read from the commands themselves.
- `<!-- include: ../FILE.md -->` becomes that page of the root.
- Files outside docs/ that a page links to are copied into the site; scripts become pages.
- Equations between dollar signs become MathML, so that no script is needed to show them.
- A public name without a docstring fails the build.
"""

import html
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import typer

import fedortho
from fedortho.cli.app import app

ROOT = Path(__file__).parent.parent
COMMANDS, INCLUDE = "<!-- commands -->", re.compile(r"<!-- include: \.\./(\S+) -->\n?")
OUTSIDE = re.compile(r"\]\(\.\./([\w./-]+)\)")
SHOWN_AS_PAGE = {".py": "python", ".toml": "toml", ".txt": "text", ".yml": "yaml", "": "text"}
NAME_IN_TABLE = re.compile(r"(?<=<code>)[\w.]+\.[\w.]+(?=</code>)")
PAGE_BY_FILE = re.compile(r"\[([\w-]+\.md)\]\((\1)(?=[)#])")
DEFAULT = re.compile(r" *\(default: (.*)\)$")
MATH = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


def undocumented() -> list[str]:
    """Public names, and public methods of public classes, that have no docstring of their own."""
    missing = []
    for name in fedortho.__all__:
        value = getattr(fedortho, name)
        if not has_docstring(value):
            missing.append(name)
        for part, member in vars(value).items() if inspect.isclass(value) else ():
            function = getattr(member, "__func__", member.fget if isinstance(member, property) else member)
            if inspect.isfunction(function) and not part.startswith("_") and not has_docstring(function):
                missing.append(f"{name}.{part}")
    return missing


def has_docstring(value: Any) -> bool:
    text = value.__doc__ or ""  # dataclasses without one get their signature
    return bool(text.strip()) and not text.startswith(f"{value.__name__}(")


def commands(group: click.Group, name: str) -> Iterator[tuple[str, click.Command]]:
    """Every command with its full name, in the order of the help."""
    for part, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, f"{name} {part}")
        elif not command.hidden:
            yield f"{name} {part}", command


def command_reference() -> str:
    """All commands with their arguments and options, as Markdown."""
    group = typer.main.get_command(app)
    assert isinstance(group, click.Group)
    sections = [options_table(group, "fedortho")]
    return "\n\n".join([*sections, *(command_section(name, each) for name, each in commands(group, "fedortho"))])


def command_section(name: str, command: click.Command) -> str:
    usage = command.get_usage(click.Context(command, info_name=name)).removeprefix("Usage: ")
    about = inspect.cleandoc(command.help or "")
    return f"## {name}\n\n{about}\n\n```\n{' '.join(usage.split())}\n```\n\n{options_table(command, name)}"


def options_table(command: click.Command, name: str) -> str:
    """Arguments, then options: how each is written, what it means, and its default."""
    rows = ["| argument or option | meaning | default |", "|---|---|---|"]
    context = click.Context(command, info_name=name)
    for param in command.params:
        about = (getattr(param, "help", None) or "").strip()
        if not about:
            raise ValueError(f"{name}: {param.name} has no help")
        told = DEFAULT.search(about)
        default = cell(told[1]) if told else "required" if param.required else spelled(param.get_default(context))
        rows.append(f"| `{written(param, context)}` | {cell(DEFAULT.sub('', about))} | {default} |")
    return "\n".join(rows)


def written(param: click.Parameter, context: click.Context) -> str:
    """An argument by its metavar, an option by its flags and what follows them."""
    if isinstance(param, click.Argument):
        return param.make_metavar(context)
    flags = ", ".join(param.opts) + "".join(f" / {flag}" for flag in param.secondary_opts)
    is_flag = isinstance(param, click.Option) and (param.is_flag or param.count)
    return flags if is_flag else f"{flags} {param.make_metavar(context)}"


def spelled(value: Any) -> str:
    """A default as a reader would give it; flags that are off, and what is empty, need no words."""
    if value in (None, "", (), [], False) or callable(value):
        return ""
    return "on" if value is True else cell(str(getattr(value, "value", value)))


def cell(text: str) -> str:
    """Text in a table: one line, and `|` and `<` as they are."""
    return html.escape(" ".join(text.split()), quote=False).replace("|", "\\|")


def included(name: str) -> str:
    """A page of the root without its title, its links as they are from docs/."""
    text = (ROOT / name).read_text(encoding="utf-8").split("\n", 1)[1]
    return re.sub(r"\]\((?!https?:|#|mailto:)(docs/)?", lambda found: "](" if found[1] else "](../", text)


def expanded(text: str) -> str:
    """A page with what is generated in its place."""
    text = INCLUDE.sub(lambda found: included(found[1]), text)
    return text.replace(COMMANDS, command_reference()) if COMMANDS in text else text


def place_of(path: str) -> str:
    """Where a file outside docs/ is in the site; what people read is a page."""
    return f"files/{path}.md" if Path(path).suffix in SHOWN_AS_PAGE else f"files/{path}"


def file_page(path: str) -> str:
    """A script, or the names of a directory's files, as a page."""
    source = ROOT / path
    if source.is_dir():
        names = sorted(file.relative_to(source) for file in source.rglob("*.py"))
        links = "\n".join(f"- [{name}]({source.name}/{name}.md)" for name in names)
        return f"# {path}\n\n{links}\n"
    return f"# {path}\n\n```{SHOWN_AS_PAGE[source.suffix]}\n{source.read_text(encoding='utf-8')}```\n"


def linked_files(pages: Iterator[str]) -> set[str]:
    """Paths outside docs/ that pages link to, and the scripts of a directory that is linked."""
    found = {path.rstrip("/") for text in pages for path in OUTSIDE.findall(text)}
    inside = {
        str(file.relative_to(ROOT)) for path in found if (ROOT / path).is_dir() for file in (ROOT / path).rglob("*.py")
    }
    return found | inside


def on_pre_build(config: Any) -> None:
    """Refuse a public name without a docstring."""
    from mkdocs.exceptions import PluginError

    if missing := undocumented():
        raise PluginError(f"no docstring: {', '.join(missing)}")


def on_files(files: Any, config: Any) -> Any:
    """Add the files outside docs/ that pages link to."""
    from mkdocs.structure.files import File, InclusionLevel

    pages = (expanded(Path(file.abs_src_path).read_text(encoding="utf-8")) for file in files.documentation_pages())
    for path in sorted(linked_files(pages)):
        source, place = ROOT / path, place_of(path)
        if not source.exists():
            continue  # the link stays as it is, and the strict build names the page
        if place.endswith(".md"):
            page = File.generated(config, place, content=file_page(path), inclusion=InclusionLevel.NOT_IN_NAV)
            files.append(page)
        else:
            files.append(File.generated(config, place, abs_src_path=str(source)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Generated parts in their places, links to files outside docs/, and pages by their titles, not their files."""
    text = OUTSIDE.sub(lambda found: f"]({place_of(found[1].rstrip('/'))})", expanded(markdown))
    titles = dict(titled(config["nav"]))
    return PAGE_BY_FILE.sub(lambda found: f"[{titles.get(found[1], found[1])}]({found[2]}", text)


def titled(nav: Any) -> Iterator[tuple[str, str]]:
    """Every page of the navigation that has a title there, with it."""
    for entry in nav:
        for title, value in entry.items() if isinstance(entry, dict) else ():
            yield from [(value, title)] if isinstance(value, str) else titled(value)


def on_page_content(output: str, page: Any, config: Any, files: Any) -> str:
    """Equations as MathML; long names in tables may break behind their dots."""
    output = NAME_IN_TABLE.sub(lambda found: found[0].replace(".", ".<wbr>"), output)
    return MATH.sub(lambda found: mathml(found[2], "block" if found[1] == "div" else "inline"), output)


def mathml(equation: str, display: str) -> str:
    from latex2mathml.converter import convert

    text: str = convert(html.unescape(equation), display=display)
    return text.replace("<mo>&#x02016;</mo>", '<mo stretchy="false">&#x02016;</mo>')  # bars of a norm stay equal
