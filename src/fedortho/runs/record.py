"""The record of a run, `run.json`: data, model, environment, result, and the requests that it has served."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from fedortho.engines.cost import Cost
from fedortho.errors import BadCheckpoint
from fedortho.methods import METHODS
from fedortho.storage.files import read_json
from fedortho.storage.provenance import Environment
from fedortho.storage.records import Migration, Scalar, from_json
from fedortho.storage.settings import field_types, kebab
from fedortho.unlearning.plan import Effect

# keys and values of schema 1, as fedortho 0.1 wrote them
RENAMED = {"batch": "batch-size", "decay": "weight-decay", "rate": "lr", "noise-rate": "noise-lr"}
RENAMED |= {"repair-rate": "repair-lr"}
OWN_METHODS = ("fedortho", "fedortho-erase", "fedortho-paper", None)  # None: only comparisons wrote a method
PRINTED = {"edit": "conv", "tap": "conv", "spread": "equal", "contrast": "retain", "repair": False, "scrub": False}


@dataclass(frozen=True)
class DataRecord:
    """The dataset and how many images each split has."""

    name: str
    digest: str
    class_names: tuple[str, ...]
    train: int
    valid: int
    test: int
    valid_source: str = ""  # what the validation images are; runs before this was recorded: part of the training split
    valid_digest: str = ""  # of validation images with a directory of their own
    first_new: int | None = None  # the row of the first image that joined with this run; those before it were there


@dataclass(frozen=True)
class SplitRecord:
    """split.json: the rows of the validation images, and how they were drawn."""

    seed: int
    share: float
    valid: tuple[int, ...]


@dataclass(frozen=True)
class ModelRecord:
    """The network that was trained; its architecture's name is among the settings."""

    digest: str
    num_classes: int
    channels: int
    weights: int  # number of trainable values


@dataclass(frozen=True)
class ResultRecord:
    """Accuracies, 0 to 1; None where a split has no images or was not measured again."""

    test_accuracy: float | None = None
    valid_accuracy: float | None = None


@dataclass(frozen=True)
class Accuracies:
    """Accuracies as shares, 0 to 1.

    Class requests: test images of the forgotten classes, and of the others. Client and sample requests: the training
    images of the forget set, and the whole test set.
    """

    forget: float
    retain: float
    test: float  # all test images


@dataclass(frozen=True)
class TrialRecord:
    """An edit that was tried, and its accuracies on the images that trials are measured on."""

    ratio: float
    scrub: float  # strength, 0: none
    forget: float
    retain: float


@dataclass(frozen=True)
class ServedRecord:
    """A request that a run has served: by which method, with which outcome, at which cost."""

    request: str
    method: str
    settings: Mapping[str, Scalar]
    before: Accuracies
    after: Accuracies
    retain_paid: float  # retain accuracy lost by this request
    cost: Cost | None = None  # None: run records of schema 1 did not measure it
    model_before: str | None = None  # digests; None: comparisons did not record them in schema 1
    model_after: str | None = None
    all_forgotten: Mapping[str, float] = field(default_factory=dict)  # forget accuracy of every request so far
    kernels: Mapping[str, int] = field(default_factory=dict)  # edited, by site
    directions: Mapping[str, int] = field(default_factory=dict)  # removed, by site
    opposed_kernels: int = 0
    sample_correlation: float | None = None
    chosen: TrialRecord | None = None  # None: nothing was tried
    effect: Effect | None = None  # of pruning and of the classifier edit; None: not measured
    trials: tuple[TrialRecord, ...] = ()
    threads: int | None = None  # float sums depend on threads and device
    device: str = "cpu"
    ledger: str | None = None  # digest of the ledger that the statistics came from
    ticket: str | None = None  # the id under which the request was served, if it had one
    answered: tuple[int, ...] | None = None  # of a federation: clients whose replies counted; None: not recorded
    confirmed: tuple[int, ...] | None = None  # clients that have taken the patch


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


@dataclass(frozen=True, kw_only=True)
class TrainingRecord:
    """What is written when training begins."""

    schema: ClassVar[int] = 2
    migrations: ClassVar[Mapping[int, Migration]] = {1: from_schema_1}

    status: Literal["training", "done"] = "training"
    settings: Mapping[str, Scalar]
    data: DataRecord
    environment: Environment
    requests: tuple[ServedRecord, ...] = ()  # oldest first
    imported_from: str | None = None  # the file of weights that were trained elsewhere
    began_with: str | None = None  # digest of the model of the run that was continued


@dataclass(frozen=True, kw_only=True)
class RunRecord(TrainingRecord):
    """What is written when a run is finished: by training, or by a request that was served or undone."""

    status: Literal["done"] = "done"
    model: ModelRecord
    result: ResultRecord
    parent: str | None = None  # digest of the model that this one was edited from
    undone: tuple[str, ...] = ()  # requests that were served and restored

    @property
    def is_edited(self) -> bool:
        """Whether the model is not as training left it."""
        return bool(self.requests) or self.parent is not None


def read_run_record(path: Path) -> TrainingRecord | RunRecord | None:
    """The record of a run directory, a `RunRecord` if it is finished; None if there is none."""
    try:
        if not (path / "run.json").exists():
            return None
    except OSError as error:
        raise BadCheckpoint(f"{path} cannot be read: {error.strerror}") from error
    value = read_json(path / "run.json")
    is_done = isinstance(value, dict) and value.get("status") == "done"
    return from_json(RunRecord if is_done else TrainingRecord, value, path / "run.json")
