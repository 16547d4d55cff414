"""What a check of a bundle has found: claim by claim what was checked here, what was not, and what is not true."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from fedortho.audits.result import ROUNDING
from fedortho.evidence.contents import Bundle

SHOWN = 5  # contradictions of one file


@dataclass(frozen=True)
class Claim:
    """A claim of a bundle, and whether it was checked: only what was computed again here is."""

    state: Literal["checked", "not checked", "absent"]
    text: str

    def __str__(self) -> str:
        return f"{self.state}: {self.text}"


@dataclass(frozen=True)
class BundleCheck:
    """A bundle that was not refused, and what was checked of it."""

    bundle: Bundle
    claims: tuple[Claim, ...]


@dataclass(frozen=True)
class Findings:
    """Findings as they are made, and claims that turned out not to be true."""

    made: list[Claim] = field(default_factory=list)
    lies: list[str] = field(default_factory=list)

    def checked(self, text: str) -> None:
        self.made.append(Claim("checked", text))

    def unchecked(self, text: str) -> None:
        self.made.append(Claim("not checked", text))

    def absent(self, text: str) -> None:
        self.made.append(Claim("absent", text))

    def compare(self, place: str, told: Any, found: Any) -> bool:
        """Note every difference between what a file tells and what was found here; whether there is none."""
        different = [
            f"{place}{at} is {_short(mine)}; here it is {_short(other)}" for at, mine, other in _pairs(told, found)
        ]
        self.lies.extend(different[:SHOWN])
        return not different


def _pairs(told: Any, found: Any, at: str = "") -> Iterator[tuple[str, Any, Any]]:
    """The places at which two JSON values differ; numbers may differ by rounding."""
    if isinstance(told, Mapping) and isinstance(found, Mapping):
        for key in sorted({*told, *found}):
            yield from _pairs(told.get(key), found.get(key), f"{at}.{key}" if at else str(key))
    elif _is_list(told) and _is_list(found) and len(told) == len(found):
        for number, (mine, other) in enumerate(zip(told, found, strict=True)):
            yield from _pairs(mine, other, f"{at}[{number}]")
    elif _is_number(told) and _is_number(found):
        if not abs(told - found) <= ROUNDING * max(1.0, abs(found)):
            yield at, told, found
    elif told != found or isinstance(told, bool) != isinstance(found, bool):
        yield at, told, found


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _short(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"
