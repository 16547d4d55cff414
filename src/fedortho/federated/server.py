"""Training a federation over any grid, and bringing its clients up to date."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor, nn

from fedortho.data.images import Dataset
from fedortho.data.request import ForgetRequest, union_of
from fedortho.errors import FedOrthoError
from fedortho.federated import switch_off
from fedortho.federated.client import client_app
from fedortho.federated.engine import FederatedEngine, RoundProgress
from fedortho.federated.messages import TaskInfo
from fedortho.federated.transport import append_wire_log
from fedortho.models.patch import Patch, load_patch
from fedortho.models.predictions import accuracy
from fedortho.models.zoo import build_model
from fedortho.runs.derived import check_output_paths, copy_patches
from fedortho.runs.federation import held_rows
from fedortho.runs.run import Run, load_run_data, open_run
from fedortho.runs.served import excluded_by, served_requests
from fedortho.runs.settings import FederateSettings
from fedortho.runs.training import train_run
from fedortho.statistics.query import Selection
from fedortho.storage.files import locked
from fedortho.storage.settings import as_mapping
from fedortho.training.loop import Epoch, Mask

if TYPE_CHECKING:
    from flwr.serverapp import Grid


Watch = Callable[[RoundProgress], None]
LASTING = ("data", "image-size", "valid", "seed", "split-seed", "model", "clients", "split", "least-images")


@contextmanager
def local_grid(settings: FederateSettings, store: Path, workers: int = 1) -> "Iterator[Grid]":
    """A grid whose clients run here, or in so many further processes, with what they keep under `store`."""
    switch_off(os.environ)
    from fedortho.federated.local_grid import LocalGrid, WorkerGrid

    config, node = as_mapping(settings), {"store": str(store)}
    if workers <= 1:
        yield LocalGrid(client_app(config), settings.clients, node)
        return
    with closing(WorkerGrid(config, settings.clients, node, min(workers, settings.clients))) as grid:
        yield grid


def federated_engine(
    grid: "Grid", settings: FederateSettings, data: Dataset, requests: Sequence[ForgetRequest] = ()
) -> FederatedEngine:
    """The federation that settings describe, without the clients that left by these requests."""
    train, left = data.train, [client for request in requests for client in request.clients]
    task = TaskInfo(train.names, train.shape, train.mean, train.std)
    build = partial(build_model, settings.model, num_classes=train.classes, channels=train.shape[0])
    engine = FederatedEngine(
        grid,
        settings.federation,
        task,
        seed=settings.seed,
        left=left,
        build=lambda seed: build(seed=seed),
        local_epochs=settings.epochs,
    )
    engine.hello()
    return engine


def train_federation(
    path: Path,
    settings: FederateSettings,
    grid: "Grid | None" = None,
    *,
    watch: Watch | None = None,
    updates: Path | None = None,
    workers: int = 1,
) -> Run:
    """Train a federation into a run directory; a killed one goes on after its last whole round.

    Clients take turns, or run in so many `workers` at once: processes, with the same bytes in the end. `updates` is
    where to keep every update of every client, for FedEraser; without it nobody keeps them.
    """
    if grid is None:
        _check(settings)
        with local_grid(settings, path / "clients", workers) as here:
            return train_federation(path, settings, here, watch=watch, updates=updates)
    start = _start(settings)
    updates = updates or (path / "updates" if settings.keep_updates else None)
    trainer = _Trainer(path, settings, grid, watch, start, updates)
    return train_run(path, settings, trainer=trainer, requests=start.record.requests if start else ())


def train_on(run: Run, rounds: int) -> Run:
    """A federation some ordinary rounds later, in a run beside it: at a tenth of its first rate, held to its masks."""
    assert isinstance(run.settings, FederateSettings), "the caller looked"
    lr = run.settings.lr / 10
    settings = replace(run.settings, start=str(run.path), rounds=rounds, without="", lr=lr, schedule="constant")
    return train_federation(run.path.with_name(f"{run.path.name}-after-{rounds}"), settings)


def _check(settings: FederateSettings) -> None:
    """Refuse a partition or a request that cannot be, before anything is written or any client asked."""
    data = load_run_data(settings)
    rows = held_rows(data, settings, settings.partition_seed)
    if settings.without:
        ForgetRequest.parse(settings.without).split(data.train, rows)
    _start(settings)


def _start(settings: FederateSettings) -> Run | None:
    """The run to go on from; other clients, or another share set aside, would mix up what was forgotten or unseen."""
    if not settings.start:
        return None
    run = open_run(settings.start)
    mine, theirs = as_mapping(settings), as_mapping(run.settings)
    if other := [key for key in LASTING if key in theirs and theirs[key] != mine[key]]:
        there, here = theirs[other[0]], mine[other[0]]
        raise FedOrthoError(f"--start {settings.start} has --{other[0]} {there}, not {here}; give --{other[0]} {there}")
    return run


@dataclass
class _Trainer:
    path: Path
    settings: FederateSettings
    grid: "Grid"
    watch: Watch | None
    start: Run | None
    updates: Path | None = None

    def __call__(self, model: nn.Module, data: Dataset, checkpoint: Path) -> tuple[nn.Module, Sequence[Epoch]]:
        settings, start = self.settings, self.start
        gone = [] if start is None else served_requests(start)
        engine = federated_engine(self.grid, settings, data, gone)
        without = union_of([ForgetRequest.parse(text) for text in [settings.without] if text])
        trainable: Mask = {}
        if start is not None:
            model = start.load_model()
            trainable = silenced(start, model)
            without = union_of([request for request in (excluded_by(start), without) if request is not None])
            copy_patches(start, self.path, len(gone))
        if settings.without:
            engine.check(ForgetRequest.parse(settings.without), None)
        trained = engine.fit(
            model,
            Selection("train", None, without),
            replace(settings.recipe, epochs=settings.rounds),
            trainable=trainable or None,
            checkpoint=checkpoint,
            score=lambda net: accuracy(net, data.valid) if len(data.valid) else 0.0,
            watch=self.watch,
            updates=self.updates,
        )
        engine.send_model(trained, forgotten=union_of(gone))
        append_wire_log(self.path / "wire.json", engine.transport.log)
        return trained, engine.history


def silenced(run: Run, model: nn.Module) -> dict[str, Tensor]:
    """Which coordinates may be trained after all requests that a run has served: not what they silenced."""
    masks: dict[str, Tensor] = {}
    for patch, _ in patches_of(run):
        for name, mask in patch.trainable(model).items():
            masks[name] = masks[name] & mask if name in masks else mask
    return masks


@contextmanager
def copied_clients(run: Run, out: Path | None) -> Iterator[tuple[Path, Path | None]]:
    """A copy of what the clients of a simulation keep, and where to write the run that goes with it.

    Both become `out` in one step, and only if all went well; the old run stays whole.
    """
    check_output_paths(out, None)
    _need_clients(run, "--engine superlink --deployment DIR")
    with locked(out or run.path):
        place = Path(tempfile.mkdtemp()) if out is None else out.parent / f".{out.name}.clients"
        try:
            shutil.rmtree(place, ignore_errors=True)  # of a process that was killed
            shutil.copytree(run.path / "clients", place / "clients")
            fresh = None if out is None else place / out.name
            yield place / "clients", fresh
            if out is not None and fresh is not None:
                (place / "clients").replace(fresh / "clients")
                fresh.replace(out)
        except OSError as error:
            raise FedOrthoError(f"{out or place} cannot be written: {error.strerror or error}") from error
        finally:
            shutil.rmtree(place, ignore_errors=True)


def _need_clients(run: Run, flags: str) -> None:
    if not (run.path / "clients").is_dir():
        raise FedOrthoError(f"{run.path} has no clients/: its clients are not simulated here; give {flags}")


def sync(run: Run, grid: "Grid | None" = None) -> list[int]:
    """Bring every client that is there to the run's model; returns the clients that have it."""
    settings = run.settings
    assert isinstance(settings, FederateSettings), "the caller looked"
    if grid is None:
        _need_clients(run, "--deployment DIR")
        with local_grid(settings, run.path / "clients") as here:
            return sync(run, here)
    engine = federated_engine(grid, settings, load_run_data(settings), served_requests(run))
    engine.bring_up_to_date(run.load_model(), patches_of(run))
    return [client for client in engine.present() if engine.clients[client].model == run.record.model.digest]


def patches_of(run: Run) -> list[tuple[Patch, ForgetRequest | None]]:
    """The patches that led to a run, oldest first, each with its request."""
    files, requests = sorted((run.path / "patches").glob("*.safetensors")), served_requests(run)
    if len(files) != len(requests):
        raise FedOrthoError(f"{run.path} has no patch for each of its requests: clients cannot follow it")
    return list(zip(map(load_patch, files), requests, strict=True))
