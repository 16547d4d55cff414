"""What several commands ask for: their common flags, and one flag for each setting."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from fedortho.storage.settings import field_help, field_types, kebab

RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="a run directory")]
Asked = Annotated[str, typer.Argument(metavar="REQUEST", help="class:3, client:4, samples:FILE")]
OutPath = Annotated[Path, typer.Option("--out", help="the run directory to write")]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON for machines")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or mps")]
DataDir = Annotated[str, typer.Option("--data-dir", help="where the run's data lies on this machine")]
Config = Annotated[Path | None, typer.Option(help="a TOML file of settings; flags win over it")]
Board = Annotated[
    Path | None, typer.Option(metavar="DIR", help="also write loss, accuracy, rate and seconds for TensorBoard there")
]
EngineName = Annotated[str, typer.Option("--engine", help="where clients run: inprocess, ray or superlink")]
Deployment = Annotated[Path | None, typer.Option(help="for superlink: the folder that fedortho deploy wrote")]


def takes_settings(kind: type[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command one flag per field of `kind`; it receives the flags that were used as `given`."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        types, texts = field_types(kind), field_help(kind)
        defaults = kind()
        parameters = [p for p in inspect.signature(function).parameters.values() if p.name != "given"]
        for name, type_ in types.items():
            default = getattr(defaults, name)
            text = texts[name] if default in ("", -1e30) else f"{texts[name]} (default: {default})"
            flag = f"--{kebab(name)}/--no-{kebab(name)}" if type_ is bool else f"--{kebab(name)}"
            option = typer.Option(flag, help=text, show_default=False)
            annotation = Annotated[type_ | None, option]  # type: ignore[valid-type]  # made at run time
            parameters.append(
                inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
            )

        def command(**values: Any) -> None:
            flags = {name: values.pop(name) for name in types}
            function(given={name: value for name, value in flags.items() if value is not None}, **values)

        command.__doc__, command.__name__ = function.__doc__, function.__name__
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # as inspect documents
        command.__annotations__ = {p.name: p.annotation for p in parameters}
        return command

    return decorate
