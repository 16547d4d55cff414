"""Train a federation over any Flower grid, and bring its clients up to date."""

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor, nn

from fedortho.data.images import Dataset
from fedortho.data.request import ForgetRequest, union_of
from fedortho.engines.query import Selection
from fedortho.errors import Busy, FedOrthoError
from fedortho.federated import switch_off
from fedortho.federated.client import client_app
from fedortho.federated.engine import FederatedEngine, Watch
from fedortho.federated.launch import need_flower
from fedortho.federated.messages import TaskInfo
from fedortho.federated.roster import NODES, NodesRecord, ranges, read_bindings
from fedortho.federated.transport import append_wire_log, is_quorum
from fedortho.models.patch import Patch, load_patch
from fedortho.models.predictions import accuracy
from fedortho.models.zoo import build_model
from fedortho.runs.derived import copy_patches
from fedortho.runs.record import RunRecord, read_run_record
from fedortho.runs.rounds import LOG_FILE, RoundLog, StartRound, copy_rounds, keep_round
from fedortho.runs.run import Run, load_run_data, open_run, served_requests
from fedortho.runs.settings import FederateSettings, held_rows
from fedortho.runs.training import train_run
from fedortho.storage.files import locked
from fedortho.storage.journal import append_entry, read_journal
from fedortho.storage.records import write_record
from fedortho.storage.settings import as_mapping
from fedortho.training.loop import Epoch, Mask

if TYPE_CHECKING:
    from flwr.serverapp import Grid

# settings that a federation shares with the run that it continues: its data, model and client partition
FIXED_SETTINGS = ("data", "image-size", "valid", "seed", "split-seed", "model", "clients", "split", "least-images")


@contextmanager
def local_grid(
    settings: FederateSettings, store: Path, workers: int = 1, *, run: Path | None = None
) -> "Iterator[Grid]":
    """A grid whose clients run in this process, or in `workers` further ones, and keep their files under `store`.

    Their images are those that the run at `run` was trained on; without one, all that the settings name.
    """
    need_flower()
    switch_off(os.environ)
    from fedortho.federated.local_grid import LocalGrid, WorkerGrid

    config, node = as_mapping(settings), {"store": str(store), "run": str(run or "")}
    if workers <= 1:
        yield LocalGrid(client_app(config), settings.clients, node)
        return
    with closing(WorkerGrid(config, settings.clients, node, min(workers, settings.clients))) as grid:
        yield grid


def federated_engine(
    grid: "Grid",
    settings: FederateSettings,
    data: Dataset,
    requests: Sequence[ForgetRequest] = (),
    run: Path | None = None,
) -> FederatedEngine:
    """The engine of a federation, after greeting its clients; who left or is left out is not expected.

    The numbers of clients are bound to the nodes or stores that they had for `run`, if it is there.
    """
    train, left = data.train, [client for request in (*requests, settings.excluded) for client in request.clients]
    task = TaskInfo(train.names, train.shape, train.mean, train.std)
    build = partial(build_model, settings.model, num_classes=train.classes, channels=train.shape[0])
    engine = FederatedEngine(
        grid,
        settings.federation,
        task,
        left=left,
        build=lambda seed: build(seed=seed),
        local_epochs=settings.epochs,
        load_common=lambda: (data.with_gone(), held_rows(data, settings, settings.partition_seed)),
        known={} if run is None else read_bindings(run),
    )
    engine.hello()
    return engine


def train_federation(
    path: Path,
    settings: FederateSettings,
    grid: "Grid | None" = None,
    *,
    watch: Watch | None = None,
    workers: int = 1,
    data: Dataset | None = None,
    begin: StartRound | None = None,
) -> Run:
    """The run of a federation trained into `path`; a killed training goes on after its last finished round.

    Without a grid, clients run in this process, or in `workers` processes, to the same bytes. `data` is as for
    `train_run`. `begin` is a round of another run to go on from, before which nothing differs.
    """
    start = _start_run(settings)
    data = data or (None if start is None else start.load_data())
    if grid is None:
        whole = data or load_run_data(settings)  # an impossible partition or request is refused before any work
        rows = held_rows(whole, settings, settings.partition_seed)
        if settings.without:
            settings.excluded.split(whole.train, rows, gone=whole.gone)
        with local_grid(settings, path / "clients", workers, run=path) as own_grid:
            return train_federation(path, settings, own_grid, watch=watch, data=data, begin=begin)

    def trainer(model: nn.Module, data: Dataset, checkpoint: Path) -> tuple[nn.Module, Sequence[Epoch]]:
        left = [] if start is None else [*served_requests(start), start.settings.excluded]
        engine = federated_engine(grid, settings, data, left, path)
        engine.check_quorum()
        write_record(path / NODES, NodesRecord(engine.bindings()))
        without = settings.excluded if settings.without else None
        if (images := replace(settings.excluded, clients=())).kinds:
            engine.check(images, None)
        if begin is not None:
            copy_rounds(begin.run, path, len(begin.log))
        trainable: Mask = {}
        if start is not None:
            model = start.load_model()
            trainable = trainable_masks(start, model)
            without = union_of([request for request in (start.excluded, without) if request is not None])
            copy_patches(start, path, len(start.record.requests))
        engine.check_forgotten(without)
        trained = engine.fit(
            model,
            Selection("train", None, without),
            replace(settings.recipe, epochs=settings.rounds),
            trainable=trainable or None,
            checkpoint=checkpoint,
            score=lambda net: accuracy(net, data.valid) if len(data.valid) else 0.0,
            watch=watch,
            updates=path / "updates" if settings.keep_updates else None,
            keep=partial(keep_round, path, settings),
            begin=begin,
        )
        write_record(path / LOG_FILE, RoundLog(tuple(engine.log), engine.common is None))
        engine.send_model(trained, forgotten=without)
        write_record(path / NODES, NodesRecord(engine.bindings()))
        append_wire_log(path / "wire.json", engine.transport.log)
        return trained, engine.history

    return train_run(path, settings, trainer=trainer, requests=start.record.requests if start else (), data=data)


def train_on(run: Run, rounds: int) -> Run:
    """The run after `rounds` more rounds, beside the original: a tenth of the learning rate, silenced weights fixed."""
    assert isinstance(run.settings, FederateSettings), "callers check this"
    settings = replace(run.settings, start=str(run.path), rounds=rounds, without="", keep_rounds="")
    settings = replace(settings, lr=settings.lr / 10, schedule="constant")
    return train_federation(run.path.with_name(f"{run.path.name}-after-{rounds}"), settings)


def _start_run(settings: FederateSettings) -> Run | None:
    """The run to continue; another partition or validation split would return forgotten or held-out images."""
    if not settings.start:
        return None
    run = open_run(settings.start)
    given, expected = as_mapping(settings), as_mapping(run.settings)
    for key in FIXED_SETTINGS:
        if key in expected and given[key] != expected[key]:
            raise FedOrthoError(
                f"--{key} is {given[key]}; --start {settings.start} needs {expected[key]}: give --{key} {expected[key]}"
            )
    return replace(run, settings=replace(run.settings, data_dir=settings.data_dir))


def trainable_masks(run: Run, model: nn.Module) -> dict[str, Tensor]:
    """The coordinates that later training may change: all but those that the run's patches have silenced."""
    masks: dict[str, Tensor] = {}
    for patch, _ in patches_of(run):
        for name, mask in patch.trainable(model).items():
            masks[name] = masks[name] & mask if name in masks else mask
    return masks


@contextmanager
def federation_lock(run: Path) -> Iterator[None]:
    """One job at a time with the clients of the runs in a directory; another one is refused at once."""
    directory = run.absolute().parent
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(directory / "federation"))
        except Busy as error:
            raise Busy(f"another job with the clients of {directory} is under way; wait for its end") from error
        yield


@dataclass(frozen=True)
class Confirmed:
    """Who took part in a request: clients whose replies counted, and those that have taken the patch or have not."""

    answered: tuple[int, ...]
    confirmed: tuple[int, ...]
    unconfirmed: tuple[int, ...]
    is_enough: bool  # by the federation's quorum

    @property
    def details(self) -> dict[str, str]:
        """What the journal notes of it."""
        told = {"answered": self.answered, "confirmed": self.confirmed, "unconfirmed": self.unconfirmed}
        return {name: ranges(clients) for name, clients in told.items() if clients}

    def write(self, run: Path) -> None:
        """Note it in the record of the run's last request; who answered an earlier job stays."""
        record = read_run_record(run)
        assert isinstance(record, RunRecord), "it is finished"
        *earlier, last = record.requests
        last = replace(last, answered=last.answered or self.answered, confirmed=self.confirmed)
        write_record(run / "run.json", replace(record, requests=(*earlier, last)))


def confirmed_by(engine: FederatedEngine, digest: str) -> Confirmed:
    """Who took part so far in a request that leads to the model with this digest."""
    expected = set(range(engine.federation.clients)).difference(engine.left)
    done = engine.having(digest)
    missing = tuple(sorted(expected - set(done) - {c for c, info in engine.clients.items() if info.has_left}))
    enough = is_quorum(engine.federation.quorum, len(done), len(expected))
    return Confirmed(engine.answered(), done, missing, enough)


@contextmanager
def copied_clients(run: Run, place: Path | None = None) -> Iterator[Path]:
    """A copy of the files of simulated clients in `place`, or in a directory that is removed at the end."""
    _require_clients(run, "--backend superlink --deployment DIR")
    with ExitStack() as stack:
        if place is None:
            place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fedortho-clients-")))
        yield Path(shutil.copytree(run.path / "clients", place / "clients"))


def _require_clients(run: Run, flags: str) -> None:
    if not (run.path / "clients").is_dir():
        raise FedOrthoError(f"{run.path} has no clients/: its clients are not simulated here; give {flags}")


def sync(run: Run, grid: "Grid | None" = None) -> list[int]:
    """Bring every connected client to the run's model; returns the clients that have it."""
    settings = run.settings
    assert isinstance(settings, FederateSettings), "callers check this"
    with ExitStack() as stack:
        if grid is None:
            _require_clients(run, "--deployment DIR")
            grid = stack.enter_context(local_grid(settings, run.path / "clients", run=run.path))
        else:
            stack.enter_context(federation_lock(run.path))
        engine = federated_engine(grid, settings, run.load_data(), served_requests(run), run.path)
        engine.bring_up_to_date(run.load_model(), patches_of(run), run.excluded)
        digest = run.record.model.digest
        if run.record.requests and (confirmed := confirmed_by(engine, digest)).is_enough:
            confirmed.write(run.path)
            directory, name = run.path.absolute().parent, run.path.name
            entries = [each for each in read_journal(directory).entries if each.details.get("out") == name]
            if entries and not any(entry.event in ("executed", "hidden") for entry in entries):
                request, before, details = entries[0].request, entries[0].before, {**entries[0].details}
                details |= confirmed.details  # the request's job ended before enough clients had confirmed it
                append_entry(directory, "executed", name, request, before=before, after=digest, details=details)
        return [client for client in engine.present() if engine.clients[client].model == digest]


def patches_of(run: Run) -> list[tuple[Patch, ForgetRequest | None]]:
    """The patches that led to a run, oldest first, each with its request."""
    files, requests = sorted((run.path / "patches").glob("*.safetensors")), served_requests(run)
    if len(files) != len(requests):
        raise FedOrthoError(
            f"{run.path} has {len(files)} patches for {len(requests)} requests: clients cannot be brought up to date"
        )
    return list(zip(map(load_patch, files), requests, strict=True))
