"""Jobs of a federation outside this process: on Ray, or on a SuperLink."""

import importlib.util
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedortho.data.request import ForgetRequest
from fedortho.errors import FedOrthoError, unknown
from fedortho.federated import switch_off
from fedortho.federated.launch import Scalar, need_flower, simulate, submit
from fedortho.methods.method import Method
from fedortho.runs.run import Run, open_run
from fedortho.runs.settings import FederateSettings
from fedortho.storage.settings import as_mapping

ENGINES = ("inprocess", "ray", "superlink")
JOB = {  # keys besides the settings
    **{"do": "train", "out": "", "run": "", "request": "", "method": "hide"},
    **{"forget": "", "store": ""},
}


def app_config(settings: FederateSettings | None = None) -> dict[str, Any]:
    """Every key of a run configuration, with its value or default."""
    return {**JOB, **as_mapping(settings or FederateSettings())}


def check_engine(engine: str, deployment: Path | None) -> None:
    """Refuse an unknown engine, and a SuperLink without its deployment."""
    if engine not in ENGINES:
        raise unknown("engine", engine, ENGINES)
    if (engine == "superlink") != (deployment is not None):
        raise FedOrthoError("--engine superlink and --deployment DIR belong together; fedortho deploy writes DIR")


def train_elsewhere(
    path: Path, settings: FederateSettings, deployment: Path | None, say: Callable[[str], None]
) -> None:
    """Train into `path` on this machine (Ray) or on the SuperLink's."""
    config = {**app_config(settings), "do": "train", "out": str(path.absolute())}
    if settings.start:
        config["start"] = str(Path(settings.start).absolute())  # the server app has another working directory
    if deployment is not None:
        submit(deployment, config, say=say)
    else:
        _on_ray(config, settings, path / "clients")


def forget_elsewhere(
    run: Run,
    request: ForgetRequest,
    method: Method,
    *,
    out: Path,
    deployment: Path | None,
    say: Callable[[str], None],
) -> Run | None:
    """Serve a request on Ray or a SuperLink; the run that has forgotten, or None if it is not on this machine."""
    federated = run.settings
    if not isinstance(federated, FederateSettings):
        raise FedOrthoError(f"{run.path} was not trained by a federation; leave --engine out")
    job = {"do": "forget", "run": str(run.path.absolute()), "out": str(out.absolute())}
    job |= {"request": str(request), "method": method.name, "forget": json.dumps(as_mapping(method))}
    config = app_config(federated) | job
    if deployment is not None:
        submit(deployment, config, say=say)
        return open_run(out) if (out / "run.json").exists() else None
    from fedortho.federated.server import copied_clients

    with copied_clients(run, out.absolute()) as (store, fresh):
        _on_ray(config | {"out": str(fresh)}, federated, store)
    return open_run(out)


def sync_elsewhere(run: Run, deployment: Path, say: Callable[[str], None]) -> None:
    """Send the clients of a SuperLink the patches that they missed."""
    assert isinstance(run.settings, FederateSettings), "the caller looked"
    submit(deployment, {**app_config(run.settings), "do": "sync", "run": str(run.path.absolute())}, say=say)


def _on_ray(config: dict[str, Any], settings: FederateSettings, store: Path) -> None:
    run_ray(config, clients=settings.clients, store=store, threads=settings.threads or 1)


def run_ray(config: Mapping[str, Scalar], *, clients: int, store: Path, threads: int, workers: int = 2) -> None:
    """Run both apps in Flower's Ray simulation until the server app returns; its errors are raised here."""
    need_flower()
    if importlib.util.find_spec("ray") is None:
        raise FedOrthoError("Ray is not installed; run: pip install 'fedortho[simulation]', or use another --engine")
    switch_off(os.environ)
    from fedortho.federated.client import client_app
    from fedortho.requests.server_app import server_app

    settled = {**config, "store": str(store.absolute())}
    simulate(server_app(settled), client_app(settled), clients=clients, threads=threads, workers=workers)
