"""Settings of all methods together: as published, for a quick look, or as tuned for some data and network."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedortho.errors import FedOrthoError, unknown
from fedortho.methods import find_method
from fedortho.storage.files import read_json
from fedortho.storage.settings import make_settings

SOURCES = ("published", "short", "tuned")
TUNED = Path(__file__).parent / "tuned"  # DATA-MODEL.json; trials: benchmarks/results/tuning
# few steps, small batches: minutes on two cores for small data; rates set beforehand and not tuned
SHORT: Mapping[str, Mapping[str, Any]] = {
    **{name: {"epochs": 2} for name in ("class-pruning", "eu-k", "cf-k", "ct", "msg")},
    "finetune": {"epochs": 2, "lr": 0.01},
    "not": {"epochs": 2, "lr": 0.02},
    "fused": {"epochs": 2, "lr": 0.02},
    "salun": {"epochs": 2, "batch_size": 64},
    "unsir": {"lr": 0.002, "repair_lr": 0.001, "batch_size": 64, "noise_images": 64, "noise_copies": 4},
    "bad-teacher": {"lr": 1e-3, "batch_size": 64},
    "neggrad": {"epochs": 1},
    "scrub": {"epochs": 2, "max_epochs": 1, "lr": 0.002, "batch_size": 64, "forget_batch_size": 64},
}


def read_settings(data: str, model: str, source: str = "published") -> dict[str, dict[str, Any]]:
    """Hyper-parameters by method, as far as they differ from the published ones.

    `source` is `published`, `short` (few steps), `tuned` (for this data and network), or a file of `fedortho tune`.
    """
    path, tuned = Path(source), TUNED / f"{data}-{model}.json"
    if source == "short":
        return {name: dict(values) for name, values in SHORT.items()}
    if source == "published":
        return {}
    if source == "tuned" and not tuned.is_file():
        known = ", ".join(sorted(path.stem for path in TUNED.glob("*.json")))
        advice = "run fedortho tune all RUN REQUEST --out FILE.json, then give --settings FILE.json"
        raise FedOrthoError(f"there are no tuned settings for {tuned.stem}, only for {known}; {advice}")
    if source != "tuned" and path.suffix != ".json" and not path.is_file():
        raise unknown("settings", source, (*SOURCES, "FILE.json"))
    path = tuned if source == "tuned" else path
    if not isinstance(told := read_json(path), dict):
        raise FedOrthoError(f"{path} holds no settings by method; give a file that fedortho tune wrote")
    for name, values in told.items():
        kind = find_method(name)  # refuses an unknown one
        if not isinstance(values, dict):
            raise FedOrthoError(f"{path}: {name} must have a mapping of settings, not {type(values).__name__}")
        make_settings(kind, values)
    return told
