"""Flags that several commands share, and one flag per field of a settings dataclass."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from fedortho.errors import BadSetting, unknown
from fedortho.storage.settings import field_help, field_types, kebab, make_settings, read_toml
from fedortho.training.recipe import Recipe

RunPath = Annotated[Path, Argument(metavar="RUN", help="a run directory")]
Request = Annotated[str, Argument(metavar="REQUEST", help="the forget set: class:3, client:4 or samples:FILE")]
OutPath = Annotated[Path, Option("--out", help="the run directory to write")]
AsJson = Annotated[bool, Option("--json", help="JSON instead of tables")]
Device = Annotated[str, Option(help="auto, cpu, cuda or mps")]
DataDir = Annotated[str, Option("--data-dir", help="the directory of the run's data on this machine")]
Config = Annotated[Path | None, Option(help="a TOML file of settings; flags override it")]
RecipeFile = Annotated[
    Path | None, Option("--recipe", help="a TOML file: how an imported model was trained (epochs, …)")
]
Backend = Annotated[str, Option(help="where clients run: inprocess, ray or superlink")]
Deployment = Annotated[Path | None, Option(help="for superlink: the directory that fedortho deploy wrote")]
Timeout = Annotated[
    float,
    Option(help="seconds to wait for clients, and for a SuperLink to begin; 0: the run's own", show_default=False),
]
Settings = Annotated[
    str, Option(help="hyper-parameters: published, short, tuned (for this data and model) or FILE.json")
]
NO_DEFAULT = ("", -1e30)  # defaults that mean "none" and are not shown


def takes_settings(*kinds: type[Any], **flags: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command one flag per field of the dataclasses; it receives the flags in use as the mapping `given`.

    `flags` are fields whose flag has another name.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        types: dict[str, type[Any]] = {}
        for kind in kinds:
            types |= field_types(kind)
        parameters = [p for p in inspect.signature(function).parameters.values() if p.name != "given"]
        for name, type_ in types.items():
            flag = flags.get(name) or (f"--{kebab(name)}/--no-{kebab(name)}" if type_ is bool else f"--{kebab(name)}")
            option = Option(flag, help=_flag_help(name, kinds), show_default=False)
            annotation = Annotated[type_ | None, option]  # type: ignore[valid-type]  # made at run time
            parameters.append(
                inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
            )

        def command(**values: Any) -> None:
            found = {name: values.pop(name) for name in types}
            function(given={name: value for name, value in found.items() if value is not None}, **values)

        command.__doc__, command.__name__ = function.__doc__, function.__name__
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # as inspect documents
        command.__annotations__ = {p.name: p.annotation for p in parameters}
        return command

    return decorate


def _flag_help(name: str, kinds: Sequence[type[Any]]) -> str:
    """The field's text, the dataclasses that have it unless all do, and its default in each where they differ."""
    having = [kind for kind in kinds if name in field_types(kind)]
    text, defaults = field_help(having[0])[name], [getattr(kind(), name) for kind in having]
    owners = "" if len(having) == len(kinds) else ", ".join(kind.name for kind in having)
    if len(set(defaults)) == 1:
        shown = "" if defaults[0] in NO_DEFAULT else f"default: {defaults[0]}"
    else:
        shown = "default: " + ", ".join(f"{kind.name} {value}" for kind, value in zip(having, defaults, strict=True))
    notes = "; ".join(note for note in (owners, shown) if note)
    return f"{text} ({notes})" if notes else text


def read_recipe(path: Path | None) -> Recipe | None:
    """The recipe in a TOML file."""
    return None if path is None else make_settings(Recipe, read_toml(path))


def method_changes(kind: type[Any], given: Mapping[str, Any], assignments: Sequence[str]) -> dict[str, Any]:
    """The hyper-parameters of a method that flags and `--set` give; a flag that the method does not have is refused."""
    types = field_types(kind)
    if strange := [f"--{kebab(name)}" for name in given if name not in types]:
        known = ", ".join(map(kebab, types))
        raise BadSetting(f"{kind.name} has no setting {strange[0]}; leave it out, or choose from {known}")
    return {**given, **parse_assignments(kind, assignments)}


def parse_assignments(kind: type[Any], words: Sequence[str]) -> dict[str, Any]:
    """The fields that `--set NAME=VALUE` flags name, with values of the fields' types.

    >>> from fedortho.training.recipe import Recipe
    >>> parse_assignments(Recipe, ["lr=0.01", "ortho-every=2"])
    {'lr': 0.01, 'ortho_every': 2}
    """
    types, values = field_types(kind), dict[str, Any]()
    for word in words:
        key, equals, text = map(str.strip, word.partition("="))
        if not equals:
            raise BadSetting(f"--set {word} has no value; write --set NAME=VALUE")
        name = key.replace("-", "_")
        if name not in types:
            raise unknown("setting", key, map(kebab, types))
        try:
            values[name] = {"true": True, "false": False}[text] if types[name] is bool else types[name](text)
        except (KeyError, ValueError) as error:
            wanted = "true or false" if types[name] is bool else f"a value of type {types[name].__name__}"
            raise BadSetting(f"{key} is {text!r}; expected {wanted}") from error
    return values
