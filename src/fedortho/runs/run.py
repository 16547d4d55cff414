"""A finished run: its settings, its record, its model and its data."""

import difflib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedortho.data.decoding import Report
from fedortho.data.images import Dataset, RowIds
from fedortho.data.request import Clients, ForgetRequest, union_of
from fedortho.data.sources import load_images
from fedortho.errors import BadCheckpoint, BadData, BadRecord, BadSetting, FedOrthoError, UnknownName
from fedortho.models.zoo import build_model
from fedortho.runs.deleted import check_deleted
from fedortho.runs.record import RunRecord, ServedRecord, SplitRecord, TrainingRecord, read_run_record
from fedortho.runs.rows import hash_key, read_rows
from fedortho.runs.settings import FederateSettings, TrainSettings, held_rows, relocated
from fedortho.storage.checkpoints import fold_weight_norm, load_weights
from fedortho.storage.files import read_json, read_tensors, tensors_digest
from fedortho.storage.records import from_json, read_record
from fedortho.storage.settings import make_settings
from fedortho.storage.trusted_code import check_trusted, remember_code
from fedortho.training.loop import Epoch
from fedortho.training.recipe import Recipe

FEW = 16  # channels that a network can have without a tensor of that size, such as one with groups


@dataclass(frozen=True)
class Run:
    """A finished run, as read from its directory."""

    path: Path
    settings: TrainSettings
    record: RunRecord

    def new_model(self, seed: int = 0) -> nn.Module:
        """The network of the run with new weights."""
        about = self.record.model
        return build_model(self.settings.model, num_classes=about.num_classes, channels=about.channels, seed=seed)

    def load_model(self) -> nn.Module:
        """The trained model, in eval mode; weights that the record does not describe are refused."""
        weights, _ = read_tensors(self.path / "model.safetensors")
        about, sizes = self.record.model, {size for tensor in weights.values() for size in tensor.shape}
        if about.num_classes not in sizes or (about.channels > FEW and about.channels not in sizes):
            raise BadCheckpoint(
                f"{self.path / 'run.json'} tells of {about.num_classes} classes and {about.channels} channels; "
                "no tensor of model.safetensors has so many"
            )
        model = self.new_model()
        load_weights(model, fold_weight_norm(weights), self.path / "model.safetensors")
        if tensors_digest(weights) != self.record.model.digest:
            raise BadCheckpoint(f"{self.path / 'model.safetensors'} is not the model that run.json describes")
        return model.eval()

    def load_data(self, data_dir: str = "", progress: Report | None = None) -> Dataset:
        """The data of the run, split as in training; rows of forgotten images that were deleted since are `gone`."""
        return load_recorded_data(self.path, self.record, relocated(self.settings, data_dir), progress)

    def clients(self, data: Dataset) -> Clients | None:
        """The rows of its data that each client of a federation holds or held; None if it has no clients."""
        settings = self.settings
        return held_rows(data, settings, settings.partition_seed) if isinstance(settings, FederateSettings) else None

    @property
    def excluded(self) -> ForgetRequest | None:
        """The images that the run has forgotten or was trained without, as one request; None: there are none."""
        return _excluded(self.record, self.settings)

    def request(self, request: ForgetRequest | str, data_dir: str = "", *, hashed: bool = False) -> ForgetRequest:
        """A request from its text, classes spelled as in the run's data, samples by row of it or hashed: `hashed`."""
        parsed = ForgetRequest.parse(request) if isinstance(request, str) else request
        parsed = parsed.spelled(self.record.data.class_names)
        parsed = parsed.resolved(self.load_data(data_dir)) if parsed.has_names else parsed
        return self.hashed(parsed, hashed)

    def hashed(self, request: ForgetRequest, hashed: bool = False) -> ForgetRequest:
        """The request with keyed hashes of its samples' words if `hashed`, or if the run has hashed earlier ones."""
        is_hashed = hashed or any("hmac:" in served.request for served in self.record.requests)
        if not request.samples or not is_hashed:
            return request
        if isinstance(self.settings, FederateSettings):
            raise BadSetting("ids are not hashed in a federation, whose clients look rows up; leave --hash-ids out")
        return request.hashed(RowIds(torch.zeros(0), key=hash_key(self.path, make=True)))

    def at(
        self, data_dir: str = "", device: str = "auto", recipe: Recipe | None = None, timeout: float = 0, sums: str = ""
    ) -> "Run":
        """The same run with its data in another directory, on another device, or with a recipe; nothing is written.

        The recipe of an imported run is not known unless it is given. `timeout` is how long a federation waits for
        its clients; 0: as its settings say. `sums` are open or masked, if not as its settings say.
        """
        settings = relocated(self.settings, data_dir)
        if isinstance(settings, FederateSettings):
            settings = replace(settings, timeout=timeout or settings.timeout, sums=sums or settings.sums)
        if recipe is not None:
            settings = replace(settings, **asdict(recipe), split_seed=settings.partition_seed)
        return replace(self, settings=settings if device == "auto" else replace(settings, device=device))

    def history(self) -> list[Epoch]:
        """The epochs of training, or the rounds of a federation."""
        path = self.path / "history.json"
        value = read_json(path)
        if not isinstance(value, list):
            raise BadRecord(f"{path} is not a list of epochs")
        return [from_json(Epoch, entry, path) for entry in value]


def _excluded(record: TrainingRecord, settings: TrainSettings) -> ForgetRequest | None:
    texts = [*(served.request for served in record.requests), settings.without]
    return union_of([ForgetRequest.parse(text) for text in texts if text])


def load_run_data(
    settings: TrainSettings, progress: Report | None = None, *, forgotten: bool = False, names: Sequence[str] = ()
) -> Dataset:
    """The dataset that settings name, with its validation split; with images that were purged only if `forgotten`.

    Classes with `names` have their numbers, those without images too.
    """
    how: dict[str, Any] = {"seed": settings.partition_seed, "size": settings.image_size, "forgotten": forgotten}
    how |= {"valid": settings.valid_dir or settings.valid, "valid_from_test": settings.valid_from_test, "names": names}
    how |= {"preprocessing": settings.preprocessing, "new_images": settings.new_sources, "progress": progress}
    return load_images(settings.data, settings.data_dir or None, **how)


def load_recorded_data(
    path: Path, record: TrainingRecord, settings: TrainSettings, progress: Report | None = None
) -> Dataset:
    """The data of the run in a directory, which may not be finished; see `Run.load_data`."""
    about, known = record.data, read_rows(path, settings)
    data = load_run_data(settings, progress, forgotten=True, names=about.class_names).with_key(hash_key(path))
    valid = read_record(SplitRecord, path / "split.json").valid
    is_same = data.digest == about.digest
    if is_same and data.valid_digest == about.valid_digest:
        data = data if known is None else data.without_rows(known.left_out)
        if list(valid) != data.valid.rows.tolist():
            raise BadCheckpoint(f"{path / 'split.json'} has other validation images than its seed and share give")
        return data
    refusal = f"{settings.valid_dir if is_same else data.name} here is not the data that {path} was trained on"
    if known is None or (about.valid_digest and "valid" not in known.stores):
        raise BadData(f"{refusal} (its digest differs)")
    try:
        restored = known.restored(data, about.class_names, valid, _excluded(record, settings))
    except BadData as error:
        raise BadData(f"{refusal}: {error}; restore them, or use the run that has forgotten them") from error
    return replace(restored.without_rows(known.left_out), digest=about.digest, valid_digest=about.valid_digest)


def _way_to_a_run(path: Path) -> str:
    """What to do about a path that is no run: weights are imported, a misspelt name has one that is near."""
    if path.is_file():
        return f"make one of weights with fedortho import {path} --model MODEL --data DATA --out RUN"
    if inside := sorted(each.parent for each in path.glob("*/run.json")):
        return f"it holds runs: give one of them, such as {inside[0]}"
    runs = [beside.parent.name for beside in path.parent.glob("*/run.json")]
    if near := difflib.get_close_matches(path.name, runs, n=1):
        return f"did you mean {path.with_name(near[0])}?"
    return f"make one with fedortho train --out {path}"


def open_run(path: "Run | Path | str", *, trust_code: bool = False) -> Run:
    """The finished run in a directory; a `Run` is returned as it is.

    A run that names a function of others (`package.module:function`) would run its code: it is refused unless the user
    has trained or imported with that name before, or says `trust_code`, which is remembered.
    """
    if isinstance(path, Run):
        return path
    path = Path(path)
    record = read_run_record(path)
    if record is None:
        raise BadCheckpoint(f"{path} is not a run directory: it has no run.json; {_way_to_a_run(path)}")
    if not isinstance(record, RunRecord):
        raise BadCheckpoint(f"the training in {path} has not finished; run the same fedortho train again to go on")
    settings = settings_of(record, path)
    if trust_code:
        remember_code(*settings.code)
    check_trusted(path, *settings.code)
    return Run(path, settings, record)


def settings_of(record: TrainingRecord, path: Path) -> TrainSettings:
    """The settings that a record holds: those of a federation if they name clients; early ones had another draw."""
    is_federation = "clients" in record.settings
    kind, before = (FederateSettings, {"draw": 1}) if is_federation else (TrainSettings, {})
    try:
        return make_settings(kind, before, record.settings)
    except (BadSetting, UnknownName) as error:
        raise BadRecord(f"{path / 'run.json'}: {error}") from error


def served_requests(run: Run) -> list[ForgetRequest]:
    """The requests that a run has served, oldest first."""
    return [ForgetRequest.parse(served.request) for served in run.record.requests]


def excluded_besides(run: Run, request: ForgetRequest) -> ForgetRequest | None:
    """The images that a run has forgotten or was trained without, except for this request."""
    names, every = run.record.data.class_names, [*served_requests(run), run.settings.excluded]
    return union_of([other for other in every if other.kinds and other.settled(names) != request.settled(names)])


def check_unserved(run: Run, request: ForgetRequest) -> None:
    """Refuse a request that a run has served, whose data it was trained without, or for which it is deleted."""
    names = run.record.data.class_names
    check_deleted(run.path, request if run.excluded is None else run.excluded + request, names)
    for served in run.record.requests:
        if ForgetRequest.parse(served.request).settled(names) == request.settled(names):
            other = "for another level or method give the run before that request"
            raise FedOrthoError(f"{run.path} has already forgotten {request}, by {served.method}; {other}")
    if run.settings.without and run.settings.excluded.settled(names) == request.settled(names):
        raise FedOrthoError(f"{run.path} was trained without {request}; there is nothing to forget")


def index_of_request(run: Run, request: ForgetRequest) -> int:
    """The index of a request among those that a run has served; the last of equal ones."""
    last_request(run)  # refuses a run that has none
    names, served = run.record.data.class_names, served_requests(run)
    same = [place for place, other in enumerate(served) if other.settled(names) == request.settled(names)]
    if not same:
        choices = ", ".join(map(str, served))
        raise FedOrthoError(f"{run.path} has not forgotten {str(request)[:60]!r}; choose from {choices[:300]}")
    return same[-1]


def served_record(run: Run, request: ForgetRequest) -> ServedRecord:
    """The record of a request that a run has served."""
    return run.record.requests[index_of_request(run, request)]


def last_request(run: Run) -> ForgetRequest:
    """The last request that a run has served."""
    if not run.record.requests and run.settings.without:
        check = "it is checked by its digest, which anybody with the data can train (docs/exact.md)"
        raise FedOrthoError(f"{run.path} was trained without {run.settings.without}, and not edited since; {check}")
    if not run.record.requests:
        raise FedOrthoError(f"{run.path} has forgotten nothing; first: fedortho forget {run.path} REQUEST --out NEW")
    return served_requests(run)[-1]
