"""Work of a federation: with clients simulated in this process, on Ray, or on a SuperLink."""

import importlib.util
import json
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedortho.data.request import ForgetRequest
from fedortho.devices import MOST_THREADS
from fedortho.errors import FedOrthoError, unknown
from fedortho.federated import switch_off
from fedortho.federated.engine import Watch
from fedortho.federated.launch import need_flower, simulate, submit
from fedortho.federated.server import copied_clients, sync, train_federation
from fedortho.methods.method import Method
from fedortho.requests.rewind import plan_rewind
from fedortho.runs.run import Run, open_run
from fedortho.runs.settings import FederateSettings
from fedortho.storage.records import Scalar
from fedortho.storage.settings import as_mapping
from fedortho.storage.trusted_code import remember_code

logger = logging.getLogger(__name__)
Log = Callable[[str], None]
BACKENDS = ("inprocess", "ray", "superlink")
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
    _do_elsewhere(config, settings, path / "clients", deployment, log)
    return open_run(path) if (path / "run.json").exists() else None


def forget_elsewhere(
    run: Run, request: ForgetRequest, method: Method, *, out: Path, deployment: Path | None, log: Log = logger.info
) -> Run | None:
    """Serve a request on Ray or a SuperLink; the run that has forgotten, or None if it is not on this machine."""
    settings = _federation_of(run)
    config = app_config(settings) | {"do": "forget", "run": str(run.path.absolute()), "out": str(out.absolute())}
    config |= {"request": str(request), "method": method.name, "forget": json.dumps(as_mapping(method))}
    if deployment is not None:
        _do_elsewhere(config, settings, out, deployment, log)
        return open_run(out) if (out / "run.json").exists() else None
    with copied_clients(run) as store:
        _do_elsewhere(config, settings, store, None, log)
    return open_run(out)


def rewind_elsewhere(
    run: Run, request: ForgetRequest, *, out: Path, deployment: Path | None, log: Log = logger.info
) -> Run | None:
    """Serve a request exactly on Ray or a SuperLink, as `rewind_run`; None if the new run is not on this machine."""
    plan = plan_rewind(run, request)
    for line in plan.lines():
        log(line)
    where = {"do": "rewind", "run": str(run.path.absolute()), "out": str(out.absolute())}
    config = app_config(plan.settings) | where | {"request": str(plan.request)}
    _do_elsewhere(config, plan.settings, out / "clients", deployment, log)
    return open_run(out) if (out / "run.json").exists() else None


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
    config = {**app_config(settings), "do": "sync", "run": str(run.path.absolute())}
    _do_elsewhere(config, settings, run.path, Path(deployment), log)
    return []


def _federation_of(run: Run) -> FederateSettings:
    if not isinstance(run.settings, FederateSettings):
        raise FedOrthoError(f"{run.path} was not trained by a federation; it has no clients")
    return run.settings


def _do_elsewhere(
    config: dict[str, Any], settings: FederateSettings, store: Path, deployment: Path | None, log: Log
) -> None:
    """Do a job on the SuperLink of a deployment or, without one, on Ray with the clients' directories in `store`."""
    if deployment is not None:
        submit(deployment, config, say=log)
    else:
        run_ray(config, clients=settings.clients, store=store, threads=settings.threads or 1)


def run_ray(config: Mapping[str, Scalar], *, clients: int, store: Path, threads: int, workers: int = 2) -> None:
    """Run both apps in Flower's Ray simulation until the server app returns; its errors are raised here."""
    need_flower()
    if importlib.util.find_spec("ray") is None:
        raise FedOrthoError("Ray is not installed; run: pip install 'fedortho[simulation]', or use another --backend")
    switch_off(os.environ)
    from fedortho.federated.client import client_app
    from fedortho.requests.server_app import server_app

    settled = {**config, "store": str(store.absolute()), "run": str(config["run"] or config["out"])}
    simulate(server_app(settled), client_app(settled), clients=clients, threads=threads, workers=workers)
