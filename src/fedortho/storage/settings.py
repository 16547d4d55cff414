"""Settings: flat frozen dataclasses of scalars, read from TOML and flags; an unknown key is refused by name.

The `Annotated` type of a field has its help text, and a `Range` or the words that it may be.
"""

import dataclasses
import math
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

from fedortho.errors import BadSetting, first_line, unknown
from fedortho.storage.files import read_limited

S = TypeVar("S")
MOST_TOML = 1 << 20  # bytes of a settings file


@dataclasses.dataclass(frozen=True)
class Range:
    """The numbers that a setting may be; `ends` says, as intervals do, whether the two ends are among them.

    >>> print(Range(0, 1, "(]"), 0 in Range(0, 1, "(]"))
    above 0 and at most 1 False
    """

    low: float = 0
    high: float = math.inf
    ends: str = "[]"

    def __contains__(self, value: float) -> bool:
        above = value >= self.low if self.ends[0] == "[" else value > self.low
        return above and (value <= self.high if self.ends[1] == "]" else value < self.high)

    def __str__(self) -> str:
        low = f"{'at least' if self.ends[0] == '[' else 'above'} {self.low:g}"
        high = f" and {'at most' if self.ends[1] == ']' else 'below'} {self.high:g}"
        return low + high * (self.high < math.inf)


Count = Annotated[int, Range()]
Number = Annotated[int, Range(1)]
Seed = Annotated[int, Range(0, 2**63, "[)")]
Weight = Annotated[float, Range()]
Positive = Annotated[float, Range(ends="(]")]
Share = Annotated[float, Range(0, 1)]
SomeShare = Annotated[float, Range(0, 1, "(]")]


def check_settings(settings: Any) -> None:
    """Refuse numbers outside their range, numbers that are not finite, and words that are none of those allowed."""
    for name, notes in _notes(type(settings)).items():
        value = getattr(settings, name)
        if isinstance(value, float) and not math.isfinite(value):
            raise BadSetting(f"{kebab(name)} must be a finite number, not {value}")
        for allowed in notes:
            if not isinstance(allowed, str) and value not in allowed:
                wrong = BadSetting(f"{kebab(name)} must be {allowed}, not {value}")
                raise wrong if isinstance(allowed, Range) else unknown(kebab(name), value, allowed)


@cache
def _hints(kind: Any, extras: bool) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=extras)


def _notes(kind: Any) -> dict[str, tuple[Any, ...]]:
    """What the `Annotated` type of each field has beside the type."""
    hints = _hints(kind, True)
    return {field.name: getattr(hints[field.name], "__metadata__", ()) for field in dataclasses.fields(kind)}


def kebab(name: str) -> str:
    """The name of a field in TOML, JSON and flags: `ortho-every` of `ortho_every`."""
    return name.replace("_", "-")


def field_types(kind: Any) -> dict[str, type[Any]]:
    """The fields of a settings dataclass and their types (bool, int, float or str)."""
    hints = _hints(kind, False)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def field_help(kind: type[Any]) -> dict[str, str]:
    """The help text of each field, from its `Annotated` type."""
    return {name: " ".join(note for note in notes if isinstance(note, str)) for name, notes in _notes(kind).items()}


def field_range(kind: type[Any], name: str) -> Range:
    """The numbers that a field may be; all of them if its type does not say."""
    return next((note for note in _notes(kind)[name] if isinstance(note, Range)), Range(-math.inf))


def make_settings(kind: type[S], *sources: Mapping[str, Any]) -> S:
    """Build settings from mappings with kebab-case or snake_case keys; later ones win."""
    types = field_types(kind)
    values: dict[str, Any] = {}
    for source in sources:
        for key, value in source.items():
            name = key.replace("-", "_")
            if name not in types and isinstance(value, dict):
                raise BadSetting(f"[{key}] is a table; settings are flat: move its keys to the top of the file")
            if name not in types:
                raise unknown("setting", key, map(kebab, types))
            values[name] = _as(types[name], key, value)
    missing = [f.name for f in dataclasses.fields(kind) if f.default is dataclasses.MISSING and f.name not in values]  # type: ignore[arg-type]  # S is a dataclass
    if missing:
        raise BadSetting(f"{', '.join('--' + kebab(name) for name in missing)} must be given")
    return kind(**values)


def _as(wanted: type[Any], key: str, value: Any) -> Any:
    if type(value) is int and abs(value) >= 2**63:
        raise BadSetting(f"{key} must be below 2**63, and it is not")
    if wanted is float and type(value) is int:
        return float(value)
    if type(value) is not wanted:
        raise BadSetting(f"{key} is {value!r} ({type(value).__name__}); expected {wanted.__name__}")
    if wanted is float and not math.isfinite(value):
        raise BadSetting(f"{key} must be a finite number, not {value}")
    return value


def read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(read_limited(path, MOST_TOML, BadSetting).decode())
    except (ValueError, RecursionError) as error:
        raise BadSetting(f"{path} is not TOML: {first_line(error)}") from error


def as_mapping(settings: Any) -> dict[str, Any]:
    """Settings as kebab-case keys, for JSON, TOML and run configs."""
    return {kebab(key): value for key, value in dataclasses.asdict(settings).items()}
