"""Records: frozen dataclasses that are written as JSON and validated where they are read.

Keys are kebab-case. A kind with a class variable `schema` writes that number and accepts no other, except numbers that
its `migrations` lead up from: `{1: from_1_to_2}` maps an older number to a function over the JSON value.
"""

import dataclasses
import re
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from fedortho.errors import BadRecord
from fedortho.storage.files import read_json, write_json
from fedortho.storage.settings import field_types, kebab

R = TypeVar("R")
Migration = Callable[[dict[str, Any]], dict[str, Any]]
Scalar = bool | int | float | str


def to_json(record: Any) -> dict[str, Any]:
    """The record as a mapping for JSON: kebab-case keys, the schema number if its kind has one."""
    schema = _schema_of(type(record))
    values = {kebab(field.name): _plain(getattr(record, field.name)) for field in dataclasses.fields(record)}
    return values if schema is None else {"schema": schema, **values}


def from_json(kind: type[R], value: Any, source: Path | str) -> R:
    """The record of this kind in a JSON value; `source` names the file or message in errors.

    >>> from fedortho.engines.cost import Cost
    >>> from_json(Cost, {"seconds": 1}, "cost.json")
    Traceback (most recent call last):
    ...
    fedortho.errors.BadRecord: cost.json lacks bytes-down, bytes-up, exchanges, flops, images-read, images-trained
    """
    return _record(kind, value, str(source), "")


def read_record(kind: type[R], path: Path) -> R:
    return from_json(kind, read_json(path), path)


def write_record(path: Path, record: Any, mode: int = 0o666) -> None:
    write_json(path, to_json(record), mode)


def is_digest(text: object) -> bool:
    """Whether a text is a SHA-256 as it is written here: 64 digits of lower-case hex.

    >>> is_digest("0" * 64), is_digest("A" * 64), is_digest("0" * 63)
    (True, False, False)
    """
    return isinstance(text, str) and re.fullmatch("[0-9a-f]{64}", text) is not None


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return to_json(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value


def _record(kind: type[R], value: Any, source: str, at: str) -> R:
    place = f"{source}: {at}" if at else source
    if not isinstance(value, dict):
        raise BadRecord(f"{place} is {_short(value)}; expected a mapping of {kind.__name__}")
    value = _current(kind, value, place)
    keys = {kebab(name): (name, wanted) for name, wanted in field_types(kind).items()}
    required = [f for f in dataclasses.fields(kind) if f.default is f.default_factory is dataclasses.MISSING]  # type: ignore[arg-type]  # R is a dataclass
    if missing := sorted({kebab(field.name) for field in required} - value.keys()):
        raise BadRecord(f"{place} lacks {', '.join(missing)}")
    if extra := sorted(str(key) for key in value.keys() - keys.keys()):
        raise BadRecord(f"{place} has unknown keys: {', '.join(extra)}; expected {', '.join(sorted(keys))}")
    inner = f"{at}." if at else ""
    return kind(**{keys[key][0]: _value(keys[key][1], each, source, inner + key) for key, each in value.items()})


def _schema_of(kind: type[Any]) -> int | None:
    """The schema of a kind; None if it has none, or has it as a field because instances differ in it."""
    is_field = any(field.name == "schema" for field in dataclasses.fields(kind))
    return None if is_field else getattr(kind, "schema", None)


def _current(kind: type[Any], value: dict[str, Any], place: str) -> dict[str, Any]:
    """The value in the schema of today, without its number; a number that nothing leads up from is refused."""
    wanted = _schema_of(kind)
    if wanted is None:
        return value
    schema, body = value.get("schema"), {key: each for key, each in value.items() if key != "schema"}
    migrations: Mapping[int, Migration] = getattr(kind, "migrations", {})
    while type(schema) is int and schema != wanted and schema in migrations:  # True is not 1
        try:
            body = migrations[schema](body)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise BadRecord(f"{place} is damaged: it is no {kind.__name__} of schema {schema} ({error!r})") from error
        schema += 1
    if type(schema) is not int or schema != wanted:
        readable = " or ".join(str(number) for number in sorted({*migrations, wanted}))
        raise BadRecord(f"{place} has schema {_short(value.get('schema'))}; expected a {kind.__name__} of {readable}")
    return body


def _value(wanted: Any, value: Any, source: str, at: str) -> Any:
    """The value as the wanted type, or an error that names the key."""
    origin, inner = get_origin(wanted), get_args(wanted)
    if type(value) is int and abs(value) >= 2**63:
        raise BadRecord(f"{source}: {at} must be below 2**63, and it is not")
    if wanted is Any or (wanted in (bool, int, float, str) and type(value) is wanted):
        return value
    if wanted is float and type(value) is int:
        return float(value)
    if origin in (Union, types.UnionType):
        return _one_of(inner, value, source, at)
    if origin is Literal and any(type(value) is type(each) and value == each for each in inner):
        return value
    if dataclasses.is_dataclass(wanted) and isinstance(wanted, type):
        return _record(wanted, value, source, at)
    if origin in (tuple, list, Sequence) and isinstance(value, list):
        many = origin is not tuple or inner[-1] is Ellipsis
        if many or len(inner) == len(value):
            kinds = [inner[0]] * len(value) if many else inner
            each = [_value(k, v, source, f"{at}[{n}]") for n, (k, v) in enumerate(zip(kinds, value, strict=True))]
            return each if origin is list else tuple(each)
    if origin in (Mapping, dict) and isinstance(value, dict):
        if inner[0] is int and (odd := [key for key in value if not key.isdecimal() or len(key) > 18]):
            raise BadRecord(f"{source}: {at} has the key {odd[0][:40]!r}; expected whole numbers")
        return {inner[0](key): _value(inner[1], v, source, f"{at}.{key}") for key, v in value.items()}
    raise BadRecord(f"{source}: {at} is {_short(value)}; expected {_named(wanted)}")


def _one_of(kinds: Sequence[Any], value: Any, source: str, at: str) -> Any:
    """The value as one of several types; exact scalars first, so that an int stays one where both are allowed."""
    if value is None and type(None) in kinds:
        return None
    if type(value) in kinds:
        return _value(type(value), value, source, at)
    others = [kind for kind in kinds if kind is not type(None)]
    for kind in others[:-1]:
        try:
            return _value(kind, value, source, at)
        except BadRecord:
            continue
    return _value(others[-1], value, source, at)


def _named(wanted: Any) -> str:
    return wanted.__name__ if isinstance(wanted, type) and not get_args(wanted) else str(wanted).replace("typing.", "")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
