"""The server's two jobs, training and forgetting, over any grid; and the Flower server app that does them."""

import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from fedortho.data import Dataset
from fedortho.engine import Ask, Group
from fedortho.errors import FedOrthoError
from fedortho.federated import switch_off
from fedortho.federated.client import client_app, federate_settings
from fedortho.federated.flower import About, FlowerEngine, News
from fedortho.federation import held_rows
from fedortho.files import read_json, write_json
from fedortho.methods.fedortho import ForgetSettings
from fedortho.probe import Probe
from fedortho.prune import Patch, bind_patch, load_patch
from fedortho.request import ForgetRequest
from fedortho.runs import FederateSettings, Run, choose_device, load_run_data, open_run, relocated, train_run
from fedortho.serve import Served, check_places, describe, earlier_requests, joined, serve_request
from fedortho.settings import as_mapping, make_settings
from fedortho.train import Epoch, Mask, accuracy

if TYPE_CHECKING:
    from flwr.app import Context
    from flwr.serverapp import Grid, ServerApp

logger = logging.getLogger(__name__)
remote = logging.getLogger("flwr")  # the log that a SuperLink hands to whoever submitted the job
Watch = Callable[[News], None]


@contextmanager
def in_process(settings: FederateSettings, store: Path) -> "Iterator[Grid]":
    """A grid whose clients run here, with what they keep under `store`."""
    switch_off(os.environ)
    from fedortho.federated.inprocess import InProcessGrid

    yield InProcessGrid(client_app(as_mapping(settings)), settings.clients, {"store": str(store)})


def engine_for(grid: "Grid", settings: FederateSettings, data: Dataset) -> FlowerEngine:
    """The federation that settings describe."""
    train = data.train
    about = About(train.names, train.shape, train.mean, train.std)
    return FlowerEngine(grid, settings.federation, about, seed=settings.seed)


def train_federation(
    path: Path, settings: FederateSettings, grid: "Grid | None" = None, *, watch: Watch | None = None
) -> Run:
    """Train a federation into a run directory; a killed one goes on after its last whole round."""
    if grid is None:
        _check(settings)
        with in_process(settings, path / "clients") as here:
            return train_federation(path, settings, here, watch=watch)
    return train_run(path, settings, trainer=_Trainer(path, settings, grid, watch))


def _check(settings: FederateSettings) -> None:
    """Refuse a partition or a request that cannot be, before anything is written or any client asked."""
    data = load_run_data(settings)
    rows = held_rows(data, settings, settings.seed)
    if settings.without:
        ForgetRequest.parse(settings.without).split(data.train, rows)
    if settings.start:
        open_run(settings.start)


@dataclass
class _Trainer:
    path: Path
    settings: FederateSettings
    grid: "Grid"
    watch: Watch | None

    def __call__(self, model: nn.Module, data: Dataset, checkpoint: Path) -> tuple[nn.Module, Sequence[Epoch]]:
        settings = self.settings
        engine = engine_for(self.grid, settings, data)
        without = joined([ForgetRequest.parse(text) for text in [settings.without] if text])
        trainable: Mask = {}
        if settings.start:
            model, trainable, without = self._started(without)
        trained = engine.fit(
            model,
            Group("train", None, without),
            replace(settings.recipe, epochs=settings.rounds),
            trainable=trainable or None,
            local_epochs=settings.epochs,
            checkpoint=checkpoint,
            score=lambda net: accuracy(net, data.valid) if len(data.valid) else 0.0,
            watch=self.watch,
            without=without.clients if without is not None else (),
        )
        engine.send_model(trained)
        if settings.norms != "fedavg":
            trained = recalibrated(engine, trained, without)
        write_log(self.path / "wire.json", engine)
        return trained, engine.history

    def _started(self, without: ForgetRequest | None) -> tuple[nn.Module, Mask, ForgetRequest | None]:
        """Model, mask and what is forgotten of the run to go on from."""
        run = open_run(self.settings.start)
        model = run.load_model()
        gone = joined([*earlier_requests(run), *([without] if without else [])])
        return model, silenced(run, model), gone


def silenced(run: Run, model: nn.Module) -> dict[str, Tensor]:
    """Which coordinates may be trained after all requests that a run has served: not what they silenced."""
    masks: dict[str, Tensor] = {}
    for patch, _ in patches_of(run):
        for name, mask in patch.trainable(model).items():
            masks[name] = masks[name] & mask if name in masks else mask
    return masks


def recalibrated(engine: FlowerEngine, model: nn.Module, without: ForgetRequest | None) -> nn.Module:
    """The model with batch-norm statistics pooled from all clients in one exchange; they are given it as a patch."""
    norms = tuple(name for name, module in model.named_modules() if isinstance(module, nn.BatchNorm2d))
    probe = Probe("moments", layers="all", edit="conv", tap="conv", norms=norms)
    ((pooled,),) = engine.measure(model, [Ask((Group("train", None, without),), probe)])
    buffers: dict[str, Tensor] = {}
    for norm in norms:
        mean, square = (pooled.mean(f"0:{norm}:{kind}") for kind in ("mean", "square"))
        buffers[f"{norm}.running_mean"] = mean.float()
        buffers[f"{norm}.running_var"] = (square - mean.square()).clamp_min(0).float()
    patch = bind_patch(Patch("", "", replaced=buffers), model, method="recalibrate")
    engine.send_patch(patch, None)
    return patch.apply(model)


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
) -> Served:
    """Serve a request in a federation: plan with its clients, write the new run, send the patch.

    Without a grid the clients of the run are simulated here, in a copy of what they keep, so that the old run
    stays whole. `out` None only tells what would be done.
    """
    check_places(out, undo)
    assert isinstance(run.settings, FederateSettings), "the caller looked"
    federated = relocated(run.settings, data_dir)
    if grid is not None:
        return _forget(run, federated, request, settings, grid, out=out, undo=undo, data=data)
    with tempfile.TemporaryDirectory(dir=(out or run.path).parent, prefix=".clients-") as place:
        store = Path(place) / "clients"
        shutil.copytree(run.path / "clients", store)
        with in_process(federated, store) as here:
            served = _forget(run, federated, request, settings, here, out=out, undo=undo, data=data)
        if out is not None:
            store.replace(out / "clients")
    return served


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
    engine = engine_for(grid, federated, data)
    model = run.load_model()
    engine.bring_up_to_date(model, patches_of(run))
    clients = (
        None if any(note["own"] for note in engine.clients.values()) else held_rows(data, federated, federated.seed)
    )
    device = choose_device(federated.device)
    served = serve_request(
        run, data, request, settings, out=out, undo=undo, device=device, engine=engine, clients=clients
    )
    if out is not None:
        done = engine.send_patch(served.outcome.patch, request)
        late = sorted(set(range(federated.clients)) - set(done) - _left(engine, request))
        if late:
            logger.warning("clients %s have not confirmed the patch; fedortho sync %s sends it again", late[:5], out)
        write_log(out / "wire.json", engine)
    return served


def _left(engine: FlowerEngine, request: ForgetRequest) -> set[int]:
    return {client for client, note in engine.clients.items() if note["left"]} | set(request.clients)


def sync(run: Run, grid: "Grid | None" = None) -> list[int]:
    """Bring every client that is there to the run's model; returns the clients that have it."""
    settings = run.settings
    assert isinstance(settings, FederateSettings), "the caller looked"
    if grid is None:
        with in_process(settings, run.path / "clients") as here:
            return sync(run, here)
    engine = engine_for(grid, settings, load_run_data(settings))
    engine.bring_up_to_date(run.load_model(), patches_of(run))
    return [client for client in engine.present() if engine.clients[client]["model"] == run.record["model"]["digest"]]


def patches_of(run: Run) -> list[tuple[Patch, ForgetRequest | None]]:
    """The patches that led to a run, oldest first, each with its request."""
    files = sorted((run.path / "patches").glob("*.safetensors"))
    return list(zip(map(load_patch, files), earlier_requests(run), strict=True))


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
        settings = make_settings(ForgetSettings, json.loads(str(config.get("forget") or "{}")))
        served = forget_in_federation(run, ForgetRequest.parse(str(config["request"])), settings, grid, out=out)
        remote.info("%s", json.dumps(describe(served)))
    else:
        raise FedOrthoError(f"no job {job!r}; choose from train, forget, sync")


def _tell(news: News) -> None:
    if news.history and not news.asked:
        entry = news.history[-1]
        told = (entry.epoch + 1, news.rounds, entry.clients, entry.loss, news.bytes_down / 1e6, news.bytes_up / 1e6)
        remote.info("round %d/%d: %d clients, loss %.3f, %.1f MB down, %.1f MB up so far", *told)
