"""The server's two jobs, training and forgetting, over any grid; and the Flower server app that does them."""

import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from fedortho.data import Dataset
from fedortho.devices import choose_device
from fedortho.engine import CentralEngine, Group
from fedortho.errors import BadSetting, FedOrthoError
from fedortho.federated import switch_off
from fedortho.federated.client import client_app, federate_settings
from fedortho.federated.flower import FlowerEngine, News
from fedortho.federated.members import About
from fedortho.federation import held_rows
from fedortho.files import locked, read_json, write_json
from fedortho.models import build_model
from fedortho.plan import ForgetSettings
from fedortho.prune import Patch, load_patch
from fedortho.request import ForgetRequest
from fedortho.runs import FederateSettings, Run, load_run_data, open_run, relocated, train_run
from fedortho.scores import accuracy
from fedortho.serve import (
    Served,
    check_places,
    copy_patches,
    describe,
    earlier_requests,
    joined,
    kept_out,
    serve_request,
)
from fedortho.settings import as_mapping, make_settings
from fedortho.train import Epoch, Mask

if TYPE_CHECKING:
    from flwr.app import Context
    from flwr.serverapp import Grid, ServerApp

logger = logging.getLogger(__name__)
remote = logging.getLogger("flwr")  # the log that a SuperLink hands to whoever submitted the job
Watch = Callable[[News], None]
LASTING = ("data", "image-size", "valid", "seed", "split-seed", "model", "clients", "split", "least-images")


@contextmanager
def in_process(settings: FederateSettings, store: Path, workers: int = 1) -> "Iterator[Grid]":
    """A grid whose clients run here, or in so many further processes, with what they keep under `store`."""
    switch_off(os.environ)
    from fedortho.federated.inprocess import InProcessGrid, WorkerGrid

    config, node = as_mapping(settings), {"store": str(store)}
    if workers <= 1:
        yield InProcessGrid(client_app(config), settings.clients, node)
        return
    grid = WorkerGrid(config, settings.clients, node, min(workers, settings.clients))
    try:
        yield grid
    finally:
        grid.close()


def engine_for(
    grid: "Grid", settings: FederateSettings, data: Dataset, requests: Sequence[ForgetRequest] = ()
) -> FlowerEngine:
    """The federation that settings describe, without the clients that left by these requests."""
    train, left = data.train, [client for request in requests for client in request.clients]
    about = About(train.names, train.shape, train.mean, train.std)
    build = partial(build_model, settings.model, classes=train.classes, channels=train.shape[0])
    return FlowerEngine(
        grid,
        settings.federation,
        about,
        seed=settings.seed,
        left=left,
        build=lambda seed: build(seed=seed),
        local_epochs=settings.epochs,
    )


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
        with in_process(settings, path / "clients", workers) as here:
            return train_federation(path, settings, here, watch=watch, updates=updates)
    start = _start(settings)
    inherited = {"requests": start.record["requests"]} if start and "requests" in start.record else {}
    updates = updates or (path / "updates" if settings.keep_updates else None)
    trainer = _Trainer(path, settings, grid, watch, start, updates)
    return train_run(path, settings, trainer=trainer, inherited=inherited)


def train_on(run: Run, rounds: int) -> Run:
    """A federation some ordinary rounds later, in a run beside it: at a tenth of its first rate, held to its masks."""
    assert isinstance(run.settings, FederateSettings), "the caller looked"
    rate = run.settings.rate / 10
    settings = replace(run.settings, start=str(run.path), rounds=rounds, without="", rate=rate, schedule="constant")
    return train_federation(run.path.with_name(f"{run.path.name}-after-{rounds}"), settings)


def _check(settings: FederateSettings) -> None:
    """Refuse a partition or a request that cannot be, before anything is written or any client asked."""
    data = load_run_data(settings)
    rows = held_rows(data, settings, settings.dealt_by)
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
        gone = [] if start is None else earlier_requests(start)
        engine = engine_for(self.grid, settings, data, gone)
        without = joined([ForgetRequest.parse(text) for text in [settings.without] if text])
        trainable: Mask = {}
        if start is not None:
            model = start.load_model()
            trainable = silenced(start, model)
            without = joined([request for request in (kept_out(start), without) if request is not None])
            copy_patches(start, self.path, len(gone))
        if settings.without:
            engine.check(ForgetRequest.parse(settings.without), None)
        trained = engine.fit(
            model,
            Group("train", None, without),
            replace(settings.recipe, epochs=settings.rounds),
            trainable=trainable or None,
            checkpoint=checkpoint,
            score=lambda net: accuracy(net, data.valid) if len(data.valid) else 0.0,
            watch=self.watch,
            updates=self.updates,
        )
        engine.send_model(trained, gone=joined(gone))
        write_log(self.path / "wire.json", engine)
        return trained, engine.history


def silenced(run: Run, model: nn.Module) -> dict[str, Tensor]:
    """Which coordinates may be trained after all requests that a run has served: not what they silenced."""
    masks: dict[str, Tensor] = {}
    for patch, _ in patches_of(run):
        for name, mask in patch.trainable(model).items():
            masks[name] = masks[name] & mask if name in masks else mask
    return masks


def forget_in_federation(
    run: Run,
    request: ForgetRequest,
    settings: ForgetSettings,
    grid: "Grid | None" = None,
    *,
    out: Path | None,
    undo: Path | None = None,
    data: Dataset | None = None,
    data_dir: str = "",
    device: str = "auto",
) -> Served:
    """Serve a request in a federation: plan with its clients, write the new run, send the patch.

    Without a grid the clients of the run are simulated here, in a copy of what they keep. `out` None only tells
    what would be done.
    """
    check_places(out, undo)
    assert isinstance(run.settings, FederateSettings), "the caller looked"
    federated = relocated(run.settings, data_dir)
    federated = federated if device == "auto" else replace(federated, device=device)
    if grid is not None:
        return _forget(run, federated, request, settings, grid, out=out, undo=undo, data=data)
    with copied_clients(run, out) as (store, fresh), in_process(federated, store) as here:
        served = _forget(run, federated, request, settings, here, out=fresh, undo=undo, data=data)
    return served if out is None else replace(served, run=open_run(out))


@contextmanager
def copied_clients(run: Run, out: Path | None) -> Iterator[tuple[Path, Path | None]]:
    """A copy of what the clients of a simulation keep, and where to write the run that goes with it.

    Both become `out` in one step, and only if all went well; the old run stays whole.
    """
    check_places(out, None)
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


def _forget(
    run: Run,
    federated: FederateSettings,
    request: ForgetRequest,
    settings: ForgetSettings,
    grid: "Grid",
    *,
    out: Path | None,
    undo: Path | None,
    data: Dataset | None,
) -> Served:
    data = data or load_run_data(federated)
    engine = engine_for(grid, federated, data, earlier_requests(run))
    model = run.load_model()
    engine.bring_up_to_date(model, patches_of(run))
    clients = (
        None if any(note["own"] for note in engine.clients.values()) else held_rows(data, federated, federated.dealt_by)
    )
    if clients is not None:  # every image is known here, so every id can be looked up before anybody is asked
        for holder in (engine, CentralEngine(data, clients=clients)):
            holder.check(request, kept_out(run))
    device = choose_device(federated.device)
    served = serve_request(
        run, data, request, settings, out=out, undo=undo, device=device, engine=engine, clients=clients
    )
    if out is not None:
        try:
            engine.send_patch(served.outcome.patch, request)
        except FedOrthoError as error:  # too few took it; the run is written all the same, and they can be sent it
            logger.warning("%s", error)
        have = {client for client, note in engine.clients.items() if note["model"] == served.outcome.patch.after}
        late = sorted(set(range(federated.clients)) - have - _left(engine))
        if late:
            word = f"fedortho sync {out.name} sends it again"
            logger.warning("clients %s have not confirmed the patch; %s", late[:5], word)
        write_log(out / "wire.json", engine)
    return served


def _left(engine: FlowerEngine) -> set[int]:
    return {client for client, note in engine.clients.items() if note["left"]} | engine.left


def sync(run: Run, grid: "Grid | None" = None) -> list[int]:
    """Bring every client that is there to the run's model; returns the clients that have it."""
    settings = run.settings
    assert isinstance(settings, FederateSettings), "the caller looked"
    if grid is None:
        _need_clients(run, "--deployment DIR")
        with in_process(settings, run.path / "clients") as here:
            return sync(run, here)
    engine = engine_for(grid, settings, load_run_data(settings), earlier_requests(run))
    engine.bring_up_to_date(run.load_model(), patches_of(run))
    return [client for client in engine.present() if engine.clients[client]["model"] == run.record["model"]["digest"]]


def patches_of(run: Run) -> list[tuple[Patch, ForgetRequest | None]]:
    """The patches that led to a run, oldest first, each with its request."""
    files, requests = sorted((run.path / "patches").glob("*.safetensors")), earlier_requests(run)
    if len(files) != len(requests):
        raise FedOrthoError(f"{run.path} has no patch for each of its requests: clients cannot follow it")
    return list(zip(map(load_patch, files), requests, strict=True))


def write_log(path: Path, engine: FlowerEngine) -> None:
    """Every exchange with its bytes per client, up and down, and who failed; added to what was there."""
    before = read_json(path) if path.exists() else []
    write_json(path, [*before, *(asdict(exchange) for exchange in engine.line.log)])


def server_app(config: Mapping[str, Any] | None = None) -> "ServerApp":
    """The app; its job comes from `config`, or from the run's configuration: `do` (train, forget or sync), `out`, …"""
    from flwr.serverapp import ServerApp

    app = ServerApp()

    @app.main()
    def main(grid: "Grid", context: "Context") -> None:
        do_job(grid, config or context.run_config)

    return app


def do_job(grid: "Grid", config: Mapping[str, Any]) -> None:
    """One job, as a flat configuration describes it."""
    out = Path(str(config.get("out") or "")) if config.get("out") else None
    job = config.get("do")
    if job == "train":
        if out is None:
            raise FedOrthoError("the job needs out, the run directory to write")
        train_federation(out, federate_settings(config), grid, watch=_tell)
    elif job in ("forget", "sync"):
        run = open_run(Path(str(config["run"])))
        if not isinstance(run.settings, FederateSettings):
            raise FedOrthoError(f"{run.path} was not trained by a federation")
        if job == "sync":
            remote.info("clients %s have the model of %s", sync(run, grid), run.path)
            return
        settings = _forget_settings(str(config.get("forget") or "{}"))
        served = forget_in_federation(run, ForgetRequest.parse(str(config["request"])), settings, grid, out=out)
        remote.info("%s", json.dumps(describe(served)))
    else:
        raise FedOrthoError(f"no job {job!r}; choose from train, forget, sync")


def _forget_settings(text: str) -> ForgetSettings:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise BadSetting(f"forget must be settings as JSON, not {text!r}") from error
    if not isinstance(value, dict):
        raise BadSetting(f"forget must be settings as JSON, not {text!r}")
    return make_settings(ForgetSettings, value)


def _tell(news: News) -> None:
    if news.history and not news.asked:
        entry = news.history[-1]
        told = (entry.epoch + 1, news.rounds, entry.clients, entry.loss, news.bytes_down / 1e6, news.bytes_up / 1e6)
        remote.info("round %d/%d: %d clients, loss %.3f, %.1f MB down, %.1f MB up so far", *told)
