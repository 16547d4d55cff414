"""Run records of schema 1, as fedortho 0.1 wrote them, in the keys of schema 2."""

from collections.abc import Mapping
from typing import Any

from fedortho.methods import METHODS
from fedortho.storage.settings import field_types, kebab

RENAMED = {
    "batch": "batch-size",
    "decay": "weight-decay",
    "noise-rate": "noise-lr",
    "rate": "lr",
    "repair-rate": "repair-lr",
}
OWN_METHODS = ("fedortho", "fedortho-erase", "fedortho-paper", None)  # None: only comparisons wrote a method
PRINTED = {"edit": "conv", "tap": "conv", "spread": "equal", "contrast": "retain", "repair": False, "scrub": False}


def from_schema_1(value: dict[str, Any]) -> dict[str, Any]:
    """A record of schema 1 in the keys of schema 2."""
    current = value | {"settings": _renamed(value["settings"], RENAMED)}
    current["data"] = _renamed(value["data"], {"classes": "class-names"})
    if "model" in value:
        current["model"] = _renamed(value["model"], {"classes": "num-classes"})
    if "requests" in value:
        current["requests"] = [_served_from_schema_1(served) for served in value["requests"]]
    return current


def _served_from_schema_1(value: dict[str, Any]) -> dict[str, Any]:
    settings = _renamed(value["settings"], RENAMED)
    method = value.get("method")
    if method in OWN_METHODS:
        method, settings = _own_method(settings)
    same = ("request", "before", "after", "retain-paid", "all-forgotten", "kernels", "directions", "opposed-kernels")
    current = {key: value[key] for key in (*same, "sample-correlation", "threads", "device", "ledger") if key in value}
    current |= {"settings": settings, "method": method}
    if "digests" in value:
        current |= {"model-before": value["digests"]["before"], "model-after": value["digests"]["after"]}
    if value.get("cost"):
        current["cost"] = {key.replace("_", "-"): each for key, each in value["cost"].items()}
    if "ratio" in value:
        chosen = {"ratio": value["ratio"], "scrub": value["scrub"]}
        current["chosen"] = chosen | {"forget": value["trial-forget"], "retain": value["trial-retain"]}
        current["trials"] = value.get("trials", [])
    return current


def _own_method(settings: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Which of our three methods these settings meant in schema 1, where all three had the same keys."""
    if settings.get("erase"):
        name = "directions"
    else:
        as_printed = all(settings.get(key, value) == value for key, value in PRINTED.items())
        name = "paper" if settings.get("edit") == "conv" and settings.get("ratio") and as_printed else "hide"
    known = {kebab(field) for field in field_types(METHODS[name])}
    return name, {key: value for key, value in settings.items() if key in known}


def _renamed(value: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {names.get(key, key): each for key, each in value.items()}
