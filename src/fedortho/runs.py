"""A run directory: settings, split, history and weights of one trained model, safe to kill and resume.

run.json            settings, data digests, environment, model digest, accuracies
split.json          row ids of the validation images, set aside before training
history.json        one entry per epoch
model.safetensors   the weights; same seed and threads, same bytes
ledger.safetensors  what the deep kernels answered to each label, for requests to come
clients/            of a federation simulated here: what each client would keep on its own disk
updates/            of a federation with --keep-updates: every model that a client sent
checkpoint.safetensors   only while training
"""

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
from torch import nn

from fedortho.data import Dataset
from fedortho.decode import Report
from fedortho.devices import DEVICES, choose_device, using_threads
from fedortho.errors import BadCheckpoint, BadData, BadSetting, FedOrthoError, unknown
from fedortho.federation import Federation
from fedortho.files import locked, read_json, read_tensors, tensors_digest, write_json, write_tensors
from fedortho.ledger import write_ledger
from fedortho.models import build_model, check_output
from fedortho.recipe import Recipe
from fedortho.request import ForgetRequest
from fedortho.results import SCHEMA, environment
from fedortho.scores import evaluate
from fedortho.settings import as_mapping, make_settings
from fedortho.sources import DATASETS, load_images
from fedortho.train import Epoch, Watch, check_fit, fit, ortho_layers
from fedortho.weights import load_weights, read_weights

logger = logging.getLogger(__name__)
S = TypeVar("S", bound="Subject")
GUESSING = 1.5  # accuracy below so many times that of a guess is nothing learnt
FREE = ("data-dir", "timeout", "quorum")  # settings that may differ when a run goes on


@dataclass(frozen=True)
class Subject:
    """Which model, on which data."""

    data: Annotated[str, "a dataset's name, a Parquet file or folder, or an image folder"] = "fashion-mini"
    data_dir: Annotated[str, "the directory that holds the named dataset's Parquet files"] = ""
    image_size: Annotated[int, "resize all images to this; 0: keep"] = 0
    valid: Annotated[float, "share of the training images set aside for every later choice"] = 0.1
    model: Annotated[str, "a model's name, or package.module:function"] = "vgg-mini"
    device: Annotated[str, "auto, cpu, cuda or mps"] = "auto"

    def __post_init__(self) -> None:
        if self.device.partition(":")[0] not in DEVICES:
            raise unknown("device", self.device, DEVICES)
        if self.image_size < 0:
            raise BadSetting(f"image-size must not be negative, not {self.image_size}")


@dataclass(frozen=True)
class ImportSettings(Subject):
    """What a model that was trained elsewhere is, and on which data it is to be judged."""

    seed: Annotated[int, "of the validation split"] = 0


@dataclass(frozen=True)
class TrainSettings(Recipe, Subject):
    """A recipe, and what it is applied to."""

    without: Annotated[
        str, "train without what this request names, such as class:3: what forgetting is measured by"
    ] = ""
    split_seed: Annotated[int, "of the images set aside and of who holds which; -1: the seed"] = -1
    threads: Annotated[int, "CPU threads; 0: torch's own choice"] = 0

    def __post_init__(self) -> None:
        Recipe.__post_init__(self)
        Subject.__post_init__(self)
        if self.threads < 0:
            raise BadSetting(f"threads must not be negative, not {self.threads}")
        if self.split_seed < -1:
            raise BadSetting(f"split-seed must be at least 0, or -1 for the seed, not {self.split_seed}")
        if self.without:
            ForgetRequest.parse(self.without)

    @property
    def dealt_by(self) -> int:
        """The seed by which images were set aside and dealt to clients."""
        return self.seed if self.split_seed < 0 else self.split_seed

    @property
    def recipe(self) -> Recipe:
        return Recipe(**{field.name: getattr(self, field.name) for field in fields(Recipe)})


@dataclass(frozen=True)
class FederateSettings(TrainSettings, Federation):
    """A recipe, what it is applied to, and the federation that applies it."""

    epochs: Annotated[int, "a client's passes over its images in a round"] = 1
    keep_updates: Annotated[bool, "keep what every client sends in every round, which FedEraser needs"] = False
    start: Annotated[str, "go on from this run instead of from new weights; what it has forgotten stays so"] = ""
    threads: Annotated[int, "CPU threads of every client; 0: torch's own choice"] = 0

    def __post_init__(self) -> None:
        TrainSettings.__post_init__(self)
        Federation.__post_init__(self)

    @property
    def federation(self) -> Federation:
        return Federation(**{field.name: getattr(self, field.name) for field in fields(Federation)})


@dataclass(frozen=True)
class Run:
    """A finished run, as read from its directory."""

    path: Path
    settings: TrainSettings
    record: dict[str, Any]

    def load_model(self) -> nn.Module:
        """The trained weights in a model of the recorded kind, in eval mode; other bytes are refused."""
        about = self.record["model"]
        model = build_model(self.settings.model, classes=about["classes"], channels=about["channels"])
        weights, _ = read_tensors(self.path / "model.safetensors")
        load_weights(model, weights, self.path / "model.safetensors")
        if tensors_digest(model.state_dict()) != about["digest"]:
            raise BadCheckpoint(f"{self.path / 'model.safetensors'} is not the model that run.json describes")
        return model.eval()

    def load_data(self, data_dir: str = "", progress: Report | None = None) -> Dataset:
        """The run's data, split as in training; data with other content is refused."""
        data = load_run_data(self.settings, data_dir, progress)
        if data.digest != self.record["data"]["digest"]:
            raise BadData(f"{data.name} here is not the data that {self.path} was trained on (its digest differs)")
        if read_json(self.path / "split.json").get("valid") != data.valid.rows.tolist():
            raise BadCheckpoint(f"{self.path / 'split.json'} names other validation images than seed and share give")
        return data

    def at(self, data_dir: str = "", device: str = "auto") -> "Run":
        """The same run with its data at another place, or for another device; on disk it stays as it is."""
        settings = relocated(self.settings, data_dir)
        return replace(self, settings=settings if device == "auto" else replace(settings, device=device))

    def history(self) -> list[Epoch]:
        try:
            return [Epoch(**entry) for entry in read_json(self.path / "history.json")]
        except TypeError as error:
            raise BadCheckpoint(f"{self.path / 'history.json'} is no history of epochs ({error})") from error


def relocated(settings: S, data_dir: str) -> S:
    """The settings with their data at another place; as they are if none is given."""
    if not data_dir:
        return settings
    named = settings.data in DATASETS
    return replace(settings, data_dir=data_dir) if named else replace(settings, data=data_dir, data_dir="")


def load_run_data(settings: TrainSettings, data_dir: str = "", progress: Report | None = None) -> Dataset:
    """The dataset that settings name, with its validation split."""
    at = relocated(settings, data_dir)
    return load_images(
        at.data, at.data_dir or None, valid=at.valid, seed=at.dealt_by, size=at.image_size, progress=progress
    )


def open_run(path: Path | str) -> Run:
    """Read a finished run."""
    path = Path(path)
    record = _read_record(path)
    if record is None:
        raise BadCheckpoint(
            f"{path} is not a run directory: it has no run.json; make one with fedortho train --out {path}"
        )
    if record["status"] != "done":
        raise BadCheckpoint(f"the training in {path} has not finished; run the same fedortho train again to go on")
    return Run(path, make_settings(_kind(record), record["settings"]), record)


def _kind(record: dict[str, Any]) -> type[TrainSettings]:
    return FederateSettings if "clients" in record["settings"] else TrainSettings


def _read_record(path: Path) -> dict[str, Any] | None:
    try:
        if not (path / "run.json").exists():
            return None
    except OSError as error:
        raise BadCheckpoint(f"{path} cannot be read: {error.strerror}") from error
    record = read_json(path / "run.json")
    if not isinstance(record, dict) or record.get("schema") != SCHEMA:
        raise BadCheckpoint(f"{path / 'run.json'} is not a run record of schema {SCHEMA}")
    wanted = {"status", "settings", "data"} | ({"model", "result"} if record.get("status") == "done" else set())
    if missing := sorted(wanted - record.keys()):
        raise BadCheckpoint(f"{path / 'run.json'} is damaged: it lacks {', '.join(missing)}")
    return record


Trainer = Callable[[nn.Module, Dataset, Path], tuple[nn.Module, Sequence[Epoch]]]


def train_run(
    path: Path | str,
    settings: TrainSettings,
    *,
    watch: Watch | None = None,
    progress: Report | None = None,
    observing: Report | None = None,
    trainer: Trainer | None = None,
    inherited: Mapping[str, Any] | None = None,
) -> Run:
    """Train into a directory, or go on where a killed run stopped, or return the finished run.

    A `trainer` takes the place of `fit`: it gets the fresh model, the data and a checkpoint file (a federation).
    What is `inherited` of a run that training starts from goes into run.json.
    """
    with locked(Path(path)), using_threads(settings.threads):
        return _train_run(Path(path), settings, watch, progress, observing, trainer, inherited or {})


def _train_run(
    path: Path,
    settings: TrainSettings,
    watch: Watch | None,
    progress: Report | None,
    observing: Report | None,
    trainer: Trainer | None,
    inherited: Mapping[str, Any],
) -> Run:
    record = _read_record(path)
    data = load_run_data(settings, progress=progress)
    _refuse_foreign(path, record, settings, data)
    if record is not None and record["status"] == "done":
        (path / "checkpoint.safetensors").unlink(missing_ok=True)  # killed just before it was removed
        return open_run(path)
    device = choose_device(settings.device)
    model = _fresh_model(settings, data)
    if trainer is None and settings.without:
        data = replace(data, train=ForgetRequest.parse(settings.without).split(data.train)[1])
    check_fit(model, data.train, settings)  # these two refuse before anything is written
    ortho_layers(model, data.train.shape, settings)
    if record is None:
        record = _new_record(settings, data, device) | dict(inherited)
        _write_split(path, settings, data)
        write_json(path / "run.json", record)
    elif record["environment"]["threads"] != torch.get_num_threads():
        began, now = record["environment"]["threads"], torch.get_num_threads()
        logger.warning("begun with %d threads, going on with %d: the bytes may differ; see --threads", began, now)
    checkpoint = path / "checkpoint.safetensors"
    if trainer is None:
        trained = _train_centrally(path, settings, model, data, device, watch)
    else:
        trained, history = trainer(model, data, checkpoint)
        write_json(path / "history.json", [asdict(entry) for entry in history])
    has_ledger = trainer is None  # those of a federation stay with its clients
    run = _finish(path, record, trained, data, device=device, observing=observing, has_ledger=has_ledger)
    checkpoint.unlink(missing_ok=True)
    return run


def _train_centrally(
    path: Path, settings: TrainSettings, model: nn.Module, data: Dataset, device: torch.device, watch: Watch | None
) -> nn.Module:
    checkpoint = path / "checkpoint.safetensors"
    history: tuple[Epoch, ...] = ()

    def keep(news: Any) -> None:
        nonlocal history
        history = news.history
        if watch is not None:
            watch(news)

    trained = fit(
        model, data.train, settings.recipe, valid=data.valid, device=device, checkpoint=checkpoint, watch=keep
    )
    if history or not checkpoint.exists():
        write_json(path / "history.json", [asdict(entry) for entry in history])
    else:  # killed between the last epoch and here
        write_json(path / "history.json", read_tensors(checkpoint)[1]["progress"]["history"])
    return trained


def _write_split(path: Path, settings: TrainSettings, data: Dataset) -> None:
    rows = data.valid.rows.tolist()
    write_json(path / "split.json", {"seed": settings.dealt_by, "share": settings.valid, "valid": rows})


def _fresh_model(settings: TrainSettings, data: Dataset) -> nn.Module:
    channels = data.train.shape[0]
    model = build_model(settings.model, classes=data.train.classes, channels=channels, seed=settings.seed)
    check_output(model, data.train.shape, data.train.classes)
    return model


def _refuse_foreign(path: Path, record: dict[str, Any] | None, settings: TrainSettings, data: Dataset) -> None:
    if record is None:
        _refuse_occupied(path)
        return
    if made := next((key for key in ("imported-from", "parent") if key in record), None):
        raise FedOrthoError(f"{path} was not trained but made ({made} {record[made]}); choose another --out")
    mine, theirs = as_mapping(settings), as_mapping(make_settings(_kind(record), record["settings"]))
    both = [*mine, *(key for key in theirs if key not in mine)]
    other = [key for key in both if key not in FREE and mine.get(key) != theirs.get(key)]
    if other:
        difference = ", ".join(f"{key} is {theirs.get(key)!r}, not {mine.get(key)!r}" for key in other)
        raise FedOrthoError(f"{path} belongs to other settings ({difference}); choose another --out")
    if record["data"]["digest"] != data.digest:
        raise FedOrthoError(f"{path} was begun on other data of the same name; choose another --out")


def _refuse_occupied(path: Path) -> None:
    """Refuse a file and a directory of other things; what we left there when we were killed is no such thing."""
    if path.exists() and not path.is_dir():
        raise FedOrthoError(f"{path} is a file; choose a directory for --out")
    begun = {"split.json", "history.json", "ledger.safetensors", "clients", "updates"}  # of no use without run.json
    if path.is_dir() and not {file.name for file in path.iterdir() if not _is_left_over(file)} <= begun:
        raise FedOrthoError(f"{path} holds files of something else; choose a new directory for --out")


def _is_left_over(file: Path) -> bool:
    """Whether this is the temporary file of a write that was killed."""
    return re.fullmatch(r"\.[a-z]+\.(json|safetensors)\.\w{8}", file.name) is not None


def _new_record(settings: TrainSettings, data: Dataset, device: torch.device) -> dict[str, Any]:
    sizes = {"train": len(data.train), "valid": len(data.valid), "test": len(data.test)}
    return {
        "schema": SCHEMA,
        "status": "training",
        "settings": as_mapping(settings),
        "data": {"name": data.name, "digest": data.digest, "classes": list(data.train.names)} | sizes,
        "environment": environment(device),
    }


def _finish(
    path: Path,
    record: dict[str, Any],
    model: nn.Module,
    data: Dataset,
    *,
    device: torch.device,
    observing: Report | None,
    has_ledger: bool = True,
) -> Run:
    model = model.to(device)
    scores = {
        name: evaluate(model, part, device=device)
        for name, part in (("valid", data.valid), ("test", data.test))
        if len(part)
    }
    if has_ledger:
        write_ledger(path / "ledger.safetensors", model, data.train, device=device, progress=observing)
    state = model.cpu().state_dict()
    write_tensors(path / "model.safetensors", state)
    channels = data.train.shape[0]
    about = {"classes": data.train.classes, "channels": channels, "digest": tensors_digest(state)}
    about["weights"] = sum(parameter.numel() for parameter in model.parameters())
    result = {f"{name}-accuracy": score.accuracy for name, score in scores.items()}
    if scores and max(score.accuracy for score in scores.values()) < GUESSING / data.train.classes:
        logger.warning(
            "the model is no better than guessing (%s): it did not learn; train longer, or at a lower --rate",
            ", ".join(f"{name} {score.accuracy:.1%}" for name, score in scores.items()),
        )
    write_json(path / "run.json", record | {"status": "done", "model": about, "result": result})
    for file in filter(_is_left_over, list(path.iterdir())):
        file.unlink(missing_ok=True)
    return open_run(path)


def import_run(
    path: Path | str,
    weights: Path,
    settings: ImportSettings,
    *,
    progress: Report | None = None,
    observing: Report | None = None,
) -> Run:
    """Make a run of weights that were trained elsewhere; what those saw of our validation split is not known."""
    path = Path(path)
    if _read_record(path) is not None:
        raise FedOrthoError(f"{path} is there already; choose a new directory for --out")
    _refuse_occupied(path)
    state = read_weights(weights)
    known = TrainSettings(**asdict(settings), epochs=0)
    data = load_run_data(known, progress=progress)
    model = _fresh_model(known, data)
    load_weights(model, state, weights)
    device = choose_device(settings.device)
    record = _new_record(known, data, device) | {"imported-from": weights.name}
    _write_split(path, known, data)
    write_json(path / "history.json", [])
    return _finish(path, record, model.eval(), data, device=device, observing=observing)
