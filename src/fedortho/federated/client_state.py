"""What a client holds: its images, its model, its ledger, and the record of what it has forgotten.

A client keeps under its store: models/DIGEST.safetensors (clients of a simulation share them), and for itself
client-N/state.json, client-N/ledger.safetensors, client-N/answered.json (the groups of images that it has sent sums of)
and, for the time of a training, client-N/teachers.
"""

import os
import secrets
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fedortho.data.images import Dataset, Images
from fedortho.data.request import ForgetRequest, union_of
from fedortho.engines.query import Selection
from fedortho.errors import BadCheckpoint, BadData, BadRecord, FedOrthoError
from fedortho.federated.messages import TaskInfo
from fedortho.federated.node_policy import NodePolicy
from fedortho.models.patch import Patch
from fedortho.models.prepare import prepare_model
from fedortho.models.zoo import build_model
from fedortho.runs.record import read_run_record
from fedortho.runs.run import load_recorded_data, load_run_data
from fedortho.runs.settings import FederateSettings, held_rows
from fedortho.statistics.ledger import forget_lines, load_ledger, rebind_ledger
from fedortho.storage.checkpoints import load_weights
from fedortho.storage.files import PRIVATE, read_tensors, tensors_digest, write_tensors
from fedortho.storage.records import read_record, write_record


@dataclass(frozen=True)
class ClientRecord:
    """The record state.json of a client."""

    schema: ClassVar[int] = 1

    model: str = ""  # digest; "": none
    forgotten: tuple[ForgetRequest, ...] = ()
    has_left: bool = False
    patched_away: tuple[str, ...] = ()  # digests of models that a patch has replaced; they are not taken back
    task: TaskInfo | None = None  # as it was when the model came
    identity: str = ""  # of the store; random, so that the server knows it again


@dataclass(frozen=True)
class ExchangeKey:
    """key.json of a client: the private key of one exchange of masked sums, until it is answered."""

    schema: ClassVar[int] = 1

    exchange: str
    private: str


@dataclass(frozen=True)
class ClientImages:
    """A client's training and validation images without the forgotten ones."""

    train: Images
    valid: Images
    rows: dict[int, Tensor]  # its number → the rows that it was given, the forgotten ones included
    digest: str  # of the dataset that they are from

    def select(self, selection: Selection, num_clients: int = 1, least: int = 1) -> Images:
        """The client's images of a selection whose limit `num_clients` clients share."""
        (client,) = self.rows
        local = selection.on_client(client, num_clients, least)
        return local.select(self.valid if selection.split == "valid" else self.train, self.rows)


@dataclass
class ClientState:
    """One client: its number, the run's settings, its store and, if it has images of its own, their directory."""

    client: int
    settings: FederateSettings
    store: Path
    own_data: str = ""
    load: Callable[[], Dataset] | None = None  # of an app that somebody else wrote: its images and its network
    network: Callable[[], nn.Module] | None = None
    run: str = ""  # of a simulation: the directory of the run that was trained on its images
    record: ClientRecord = field(default_factory=ClientRecord)
    policy: NodePolicy = field(default_factory=NodePolicy)

    @property
    def folder(self) -> Path:
        return self.store / f"client-{self.client}"

    @property
    def ledger_path(self) -> Path:
        return self.folder / "ledger.safetensors"

    def model_path(self, digest: str) -> Path:
        return self.store / "models" / f"{digest}.safetensors"

    def images(self, task: TaskInfo | None = None) -> ClientImages:
        """The client's images, without forgotten ones, with the labels of the task or of the one in its record."""
        if self.has_own_images:
            task, data = task or self.record.task, self._own_images
            train, valid = (relabelled(part, task) for part in (data.train, data.valid))
            rows = data.known_rows
        else:
            file = Path(self.run) / "run.json"
            written = file.stat().st_mtime_ns if self.run and file.exists() else 0
            data, shares = _shares(self.settings, self.run, written)
            if self.client not in shares:
                raise FedOrthoError(f"no client {self.client}; clients run 0 to {len(shares) - 1}")
            rows, *parts = shares[self.client]
            train, valid = (part.subset(own) for part, own in zip((data.train, data.valid), parts, strict=True))
        by_client = {self.client: rows}
        for request in (*self.record.forgotten, self.settings.excluded.on_client(self.client)):
            train, valid = (part.subset(~request.mask(part, by_client)) for part in (train, valid))
        return ClientImages(train, valid, by_client, data.digest)

    def identify(self) -> str:
        """The identity of this client's store, drawn now if it has none; a client that is left out keeps no file."""
        if not self.record.identity and self.client not in self.settings.excluded.clients:
            self._write(identity=secrets.token_hex(16))
        return self.record.identity

    @property
    def has_own_images(self) -> bool:
        """Whether its images are not a share of the common dataset."""
        return bool(self.own_data) or self.load is not None

    @cached_property
    def _own_images(self) -> Dataset:
        if self.load is not None:
            return self.load()
        return _own_dataset(replace(self.settings, data=self.own_data, data_dir=""))

    def new_model(self, num_classes: int, channels: int) -> nn.Module:
        """The federation's network, with weights of its own."""
        if self.network is not None:
            return prepare_model(self.network(), num_classes)
        return build_model(self.settings.model, num_classes=num_classes, channels=channels)

    def keep_key(self, exchange: str, private: str) -> None:
        """Keep the private key of one exchange of masked sums, in place of any other."""
        write_record(self.folder / "key.json", ExchangeKey(exchange, private), PRIVATE)

    def take_key(self, exchange: str) -> str:
        """The private key of this exchange; it is removed, because masks that serve twice do not hide."""
        path = self.folder / "key.json"
        kept = read_record(ExchangeKey, path) if path.exists() else ExchangeKey("", "")
        if kept.exchange != exchange:
            raise FedOrthoError("there is no key for this exchange of masked sums: each is answered once")
        path.unlink()
        return kept.private

    def load_model(self, digest: str) -> nn.Module:
        """The model with this digest from the store; a file with other weights is refused."""
        train = self.images().train
        model = self.new_model(train.classes, train.shape[0])
        load_weights(model, _read_model(self.model_path(digest)), self.model_path(digest))
        return model.eval()

    def teacher_weights(self, digest: str, sent: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A teacher as it was sent in this training, now or before, or the client's own model."""
        own = digest == self.record.model
        path = self.model_path(digest) if own else self.folder / "teachers" / f"{digest}.safetensors"
        if sent and not path.exists():
            if tensors_digest(sent) != digest:  # which is also the file's name: not any text of the server
                raise BadCheckpoint(f"the server's teacher {digest[:12]!r} is another model than its digest says")
            write_tensors(path, sent)
        return _read_model(path)

    def forget_teachers(self, keep: Collection[str] = ()) -> None:
        """Remove all teachers but those with these digests."""
        for path in (self.folder / "teachers").glob("*.safetensors"):
            if path.stem not in keep:
                path.unlink()

    def keep_model(self, model: nn.Module, **changes: Any) -> None:
        """Make this the client's model, with further changes to its record.

        The old model and its ledger are removed; the model stays on disk if another client of the store uses it.
        """
        self.ledger_path.unlink(missing_ok=True)  # before the record: a ledger of another model is refused
        tensors = model.state_dict()
        digest, old = tensors_digest(tensors), self.record.model
        if not self.model_path(digest).exists():
            write_tensors(self.model_path(digest), tensors)
        self._write(model=digest, **changes)
        self._remove_unused(old)

    def apply_patch(self, patch: Patch, request: ForgetRequest | None) -> None:
        """Replace the client's model by the edited one; its ledger and its images lose the forgotten ones.

        A client that has the edited model already, because another request led to it, stops using the images.
        """
        model = self.load_model(self.record.model)
        edited = patch.apply(model) if self.record.model == patch.before else model
        images, ledger = self.images(), load_ledger(self.ledger_path, model)
        if ledger is not None:
            ledger = rebind_ledger(ledger, model, edited, images.train) if len(images.train) else None
        if ledger is not None and request is not None:
            forget = request.on_client(self.client).mask(images.train, images.rows)
            ledger = forget_lines(ledger, images.train.subset(~forget))
        has_left = request is not None and self.client in request.clients
        patched_away = self.record.patched_away + ((patch.before,) if request is not None else ())
        self.keep_model(edited, forgotten=self.forgotten_with(request), has_left=has_left, patched_away=patched_away)
        if ledger is not None and not has_left:
            ledger.save(self.ledger_path)

    def forgotten_with(self, request: ForgetRequest | None) -> tuple[ForgetRequest, ...]:
        """The requests that this client has forgotten, with the part of a further one that names its images."""
        local = ForgetRequest() if request is None else request.on_client(self.client)
        forgotten = self.record.forgotten
        return forgotten if local == ForgetRequest() or local in forgotten else (*forgotten, local)

    def is_covered_by(self, declared: ForgetRequest | None, images: ClientImages) -> bool:
        """Whether a model that has forgotten what is declared has forgotten all that this client has."""
        own, known = union_of(self.record.forgotten), (declared or ForgetRequest()).on_client(self.client)
        if own is None:
            return True
        names, whole = images.train.names, replace(images.train, rows=images.rows[self.client])
        if not set(own.labels(names)) <= set(known.labels(names)):
            return False
        others = ForgetRequest(samples=tuple(word for word in own.samples if word not in known.samples))
        if any(word.startswith("hmac:") for word in (*others.samples, *known.samples)):
            return not others.samples  # nobody here can tell which rows they are
        return not bool((others.mask(whole, images.rows) & ~known.mask(whole, images.rows)).any())

    def clean_up(self) -> None:
        """Finish what a crash interrupted: leaving, or the removal of models that a patch has replaced."""
        if self.record.has_left:
            self.leave()
        for digest in self.record.patched_away:
            if self.model_path(digest).exists():
                self._remove_unused(digest)

    def leave(self) -> None:
        """Remove the ledger and the model of a client that has left; doing it twice is harmless."""
        self.ledger_path.unlink(missing_ok=True)
        if old := self.record.model:
            self._write(model="", patched_away=(*self.record.patched_away, old))
            self._remove_unused(old)

    def _remove_unused(self, digest: str) -> None:
        """Remove a model from the store unless some client there has it; the next one mostly has it still."""
        if not digest:
            return
        with os.scandir(self.store) as entries:
            others = (entry.name for entry in entries if entry.name.startswith("client-"))
            for name in chain([f"client-{self.client + 1}"], others):
                with suppress(BadCheckpoint, FileNotFoundError):  # the damaged record of another client, or none
                    if read_record(ClientRecord, self.store / name / "state.json").model == digest:
                        return
        self.model_path(digest).unlink(missing_ok=True)

    def _write(self, **changes: Any) -> None:
        self.record = replace(self.record, **changes)
        write_record(self.folder / "state.json", self.record)


def open_client(client: int, settings: FederateSettings, store: Path, own_data: str = "") -> ClientState:
    """A client with the record in its store, or with an empty one if it is new."""
    state = ClientState(client, settings, store, own_data)
    path = state.folder / "state.json"
    if not path.exists():
        return state
    try:
        return replace(state, record=read_record(ClientRecord, path))
    except BadRecord as error:
        raise BadRecord(f"{error}; remove it, and the server sends the model and what it forgot again") from error


@lru_cache(maxsize=2)
def _shares(settings: FederateSettings, run: str, written: int) -> tuple[Dataset, dict[int, tuple[Tensor, ...]]]:
    """The common dataset, as a run records it, and of each client its rows and their places in train and valid.

    `written` is when its record was, 0: there is none. No client looks through the images of all.
    """
    record = read_run_record(Path(run)) if written else None
    data = load_run_data(settings) if record is None else load_recorded_data(Path(run), record, settings)
    held = held_rows(data, settings, settings.partition_seed)
    owner = torch.full((len(data.train.pixels),), len(held))
    for client, rows in held.items():
        owner[rows] = client
    owners = [owner[part.rows] for part in (data.train, data.valid)]  # of each image; its places by owner, ascending
    sizes = [own.bincount(minlength=len(held) + 1).tolist() for own in owners]
    places = [own.argsort(stable=True).split(size) for own, size in zip(owners, sizes, strict=True)]
    return data, {client: (rows, *(part[client] for part in places)) for client, rows in held.items()}


_own_dataset = lru_cache(maxsize=1)(load_run_data)


def _read_model(path: Path) -> dict[str, Tensor]:
    """The weights in a file whose name is their digest."""
    weights = read_tensors(path)[0]
    if tensors_digest(weights) != path.stem:
        raise BadCheckpoint(f"{path} holds another model than its name says; remove it, and it is sent again")
    return weights


def relabelled(images: Images, task: TaskInfo | None) -> Images:
    """A client's own images with the labels and the normalisation of the task; classes are matched by name."""
    if task is None:
        return images
    if unknown := [name for name in images.names if name not in task.names]:
        raise BadData(f"class {unknown[0]!r} is unknown to the federation; its classes are {', '.join(task.names)}")
    if images.shape[0] != task.shape[0]:
        raise BadData(f"images have {images.shape[0]} channels; the federation's have {task.shape[0]}")
    label_of = torch.tensor([task.names.index(name) for name in images.names])
    return replace(images, store_labels=label_of[images.store_labels], names=task.names, mean=task.mean, std=task.std)
