"""Jobs of a federation: with clients simulated here, on Ray, or on a SuperLink; and the server app that does them."""

import importlib.util
import json
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedortho.data.request import ForgetRequest
from fedortho.devices import MOST_THREADS
from fedortho.errors import BadSetting, FedOrthoError, unknown
from fedortho.federated import switch_off
from fedortho.federated.client import client_app, federate_settings, settled
from fedortho.federated.engine import RoundProgress, Watch
from fedortho.federated.launch import need_flower, simulate, submit
from fedortho.federated.server import copied_clients, federation_lock, sync, train_federation
from fedortho.methods import make_method
from fedortho.methods.method import Method
from fedortho.requests.forgetting import forget_federated_run
from fedortho.requests.rewind import plan_rewind, rewind_run
from fedortho.requests.transaction import holds_result
from fedortho.runs.run import Run, open_run
from fedortho.runs.settings import FederateSettings
from fedortho.storage.records import Scalar, to_json
from fedortho.storage.settings import as_mapping
from fedortho.storage.trusted_code import remember_code

if TYPE_CHECKING:
    from flwr.app import Context
    from flwr.serverapp import Grid, ServerApp

logger = logging.getLogger(__name__)
remote = logging.getLogger("flwr")  # the log that a SuperLink hands to whoever submitted the job
Log = Callable[[str], None]
BACKENDS, JOBS = ("inprocess", "ray", "superlink"), ("train", "forget", "rewind", "sync")
JOB = {"do": "train", "out": "", "run": "", "request": "", "method": "hide", "forget": "", "store": ""}  # its own keys
# defaults of `flwr run app`: small enough for a first run, with as many clients as Flower simulates
SIMULATION = {"clients": 0, "rounds": 3, "fraction": 1.0, "data": "digits", "epochs": 2, "batch-size": 32, "threads": 1}


def app_config(settings: FederateSettings | None = None) -> dict[str, Any]:
    """Every key of a run configuration, with its value; without settings, those of the app in the repository."""
    return {**JOB, **as_mapping(settings or FederateSettings()), **({} if settings else SIMULATION)}


def check_backend(backend: str, deployment: Path | None) -> None:
    """Refuse an unknown backend, and a SuperLink without its deployment."""
    if backend not in BACKENDS:
        raise unknown("backend", backend, BACKENDS)
    if (backend == "superlink") != (deployment is not None):
        raise FedOrthoError("--backend superlink and --deployment DIR belong together; fedortho deploy writes DIR")


def federate_run(
    path: Path | str,
    settings: FederateSettings,
    *,
    backend: str = "inprocess",
    deployment: Path | str | None = None,
    workers: int = 1,
    watch: Watch | None = None,
    log: Log = logger.info,
) -> Run | None:
    """Train a federation into a run directory; an interrupted one continues after its last complete round.

    `backend` is `inprocess` (clients run here, in `workers` processes at a time, with the same result for any number),
    `ray`, or `superlink` with the directory that `write_deployment` wrote as `deployment`. `watch` receives the
    progress of rounds in process, `log` the lines of a SuperLink's log. Returns None if the run was written on the
    SuperLink's machine and is not on this one.
    """
    path, deployment = Path(path), None if deployment is None else Path(deployment)
    check_backend(backend, deployment)
    if not 1 <= workers <= (MOST_THREADS if backend == "inprocess" else 1):
        raise FedOrthoError(f"--workers is {workers} with --backend {backend}; expected 1, or more with inprocess only")
    if backend == "inprocess":
        return train_federation(path, settings, watch=watch, workers=workers)
    remember_code(*settings.code)
    config = {**app_config(settings), "do": "train", "out": str(path.absolute())}
    if settings.start:
        config["start"] = str(Path(settings.start).absolute())  # the server app has another working directory
    return _do_elsewhere(config, path / "clients", deployment, log)


def forget_elsewhere(
    run: Run, request: ForgetRequest, method: Method, *, out: Path, deployment: Path | None, log: Log = logger.info
) -> Run | None:
    """Serve a request on Ray or a SuperLink; the run that has forgotten, or None if it is not on this machine."""
    config = app_config(_federation_of(run)) | {"do": "forget", "run": str(run.path.absolute())}
    config |= {"out": str(out.absolute()), "request": str(request)}
    config |= {"method": method.name, "forget": json.dumps(as_mapping(method))}
    with copied_clients(run) if deployment is None else nullcontext(out) as store:
        return _do_elsewhere(config, store, deployment, log)


def rewind_elsewhere(
    run: Run, request: ForgetRequest, *, out: Path, deployment: Path | None, log: Log = logger.info
) -> Run | None:
    """Serve a request exactly on Ray or a SuperLink, as `rewind_run`; None if the new run is not on this machine."""
    plan = plan_rewind(run, request)
    if not isinstance(plan.settings, FederateSettings):
        raise FedOrthoError(f"{run.path} was trained on one machine; leave --backend out")
    for line in plan.lines():
        log(line)
    config = app_config(plan.settings) | {"do": "rewind", "run": str(run.path.absolute())}
    config |= {"out": str(out.absolute()), "request": str(plan.request)}
    return _do_elsewhere(config, out / "clients", deployment, log)


def sync_run(
    run: Run | Path | str,
    *,
    deployment: Path | str | None = None,
    data_dir: str = "",
    device: str = "auto",
    log: Log = logger.info,
) -> list[int]:
    """Send the clients of a federation the patches that they missed; returns the clients that have the run's model.

    With a `deployment` the clients are those of its SuperLink, which reports them in its log and not here.
    """
    run = open_run(run).at(data_dir, device)
    settings = _federation_of(run)
    if deployment is None:
        return sync(run)
    submit(Path(deployment), {**app_config(settings), "do": "sync", "run": str(run.path.absolute())}, say=log)
    return []


def _federation_of(run: Run) -> FederateSettings:
    if not isinstance(run.settings, FederateSettings):
        raise FedOrthoError(f"{run.path} was not trained by a federation; it has no clients")
    return run.settings


def _do_elsewhere(config: dict[str, Any], store: Path, deployment: Path | None, log: Log) -> Run | None:
    """The run of a job on the SuperLink of a deployment or, without one, on Ray with the clients' files in `store`."""
    if deployment is not None:
        submit(deployment, config, say=log)
    else:
        run_ray(config, clients=config["clients"], store=store, threads=config["threads"] or 1)
    out = Path(config["out"])
    return open_run(out) if (out / "run.json").exists() else None


def run_ray(config: Mapping[str, Scalar], *, clients: int, store: Path, threads: int, workers: int = 2) -> None:
    """Run both apps in Flower's Ray simulation until the server app returns; its errors are raised here."""
    need_flower()
    if importlib.util.find_spec("ray") is None:
        raise FedOrthoError("Ray is not installed; run: pip install 'fedortho[simulation]', or use another --backend")
    switch_off(os.environ)
    whole = {**config, "store": str(store.absolute()), "run": str(config["run"] or config["out"])}
    simulate(server_app(whole), client_app(whole), clients=clients, threads=threads, workers=workers)


def server_app(config: Mapping[str, Any] | None = None) -> "ServerApp":
    """The Flower server app; `config`, or the run configuration, describes its one job: `do`, `out`, …"""
    from flwr.serverapp import ServerApp

    app = ServerApp()

    @app.main()
    def main(grid: "Grid", context: "Context") -> None:
        given = config or settled(context.run_config, context.run_id, len(list(grid.get_node_ids())))
        try:
            do_job(grid, given)
        except FedOrthoError as error:
            remote.error("%s", error)  # on one line; Flower's traceback below it is short
            raise error.with_traceback(None) from None
        remote.info("done: %s", given.get("out") or given.get("run"))

    return app


def do_job(grid: "Grid", config: Mapping[str, Any]) -> None:
    """Do the job that a flat configuration describes."""
    job, place, store = config.get("do"), str(config.get("out") or ""), str(config.get("store") or "")
    if job not in JOBS:
        raise FedOrthoError(f"no job {job!r}; choose from {', '.join(JOBS)}")
    if job in ("train", "rewind") and not place:
        raise FedOrthoError("the job has no out; give the run directory to write")
    out = Path(place)
    if job == "train":
        with nullcontext() if store else federation_lock(out):  # simulated clients have directories of their own
            train_federation(out, federate_settings(config), grid, watch=_tell)
        return
    timeout, sums = float(config.get("timeout") or 0.0), str(config.get("sums") or "")
    run = open_run(Path(str(config["run"]))).at(timeout=timeout, sums=sums)
    _federation_of(run)  # refuses another run
    if job == "sync":
        remote.info("clients %s have the model of %s", sync(run, grid), run.path)
    elif job == "rewind":
        with nullcontext() if store else federation_lock(run.path):
            remote.info("%s", rewind_run(run, str(config["request"]), out, grid=grid, watch=_tell).plan)
    else:
        name, text = str(config.get("method") or "hide"), str(config.get("forget") or "{}")
        try:
            settings = json.loads(text)
        except ValueError:
            settings = None
        if not isinstance(settings, dict):
            raise BadSetting(f"forget must be settings as JSON, not {text!r}")
        request, where = ForgetRequest.parse(str(config["request"])), Path(store) if store else None
        new, chosen = out if place else None, make_method(name, settings)
        if new is not None and where is None and holds_result(run, request, chosen, new):  # the same command again
            finished = open_run(new).at(timeout=timeout)
            remote.info("%s is there; clients %s have its model", new, sync(finished, grid))
            return
        served = forget_federated_run(run, request, chosen, grid, out=new, store=where)
        remote.info("%s", json.dumps(to_json(served.record)))


def _tell(news: RoundProgress) -> None:
    if news.history and not news.asked:
        entry = news.history[-1]
        told = (entry.epoch + 1, news.rounds, entry.clients, entry.loss, news.bytes_down / 1e6, news.bytes_up / 1e6)
        remote.info("round %d/%d: %d clients, loss %.3f, %.1f MB down, %.1f MB up so far", *told)
