"""The Flower server app: it does one job, which a flat configuration describes."""

import json
import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedortho.data.request import ForgetRequest
from fedortho.errors import BadSetting, FedOrthoError
from fedortho.federated.client import federate_settings, settled
from fedortho.federated.engine import RoundProgress
from fedortho.methods import make_method
from fedortho.methods.method import Method
from fedortho.runs.run import open_run
from fedortho.runs.settings import FederateSettings
from fedortho.storage.records import to_json

if TYPE_CHECKING:
    from flwr.app import Context
    from flwr.serverapp import Grid, ServerApp

from fedortho.federated.server import federation_lock, sync, train_federation
from fedortho.requests.forgetting import forget_federated_run
from fedortho.requests.rewind import rewind_run

remote = logging.getLogger("flwr")  # the log that a SuperLink hands to whoever submitted the job


def server_app(config: Mapping[str, Any] | None = None) -> "ServerApp":
    """The server app; `config`, or the run configuration, describes its job: `do`, `out`, …"""
    from flwr.serverapp import ServerApp

    app = ServerApp()

    @app.main()
    def main(grid: "Grid", context: "Context") -> None:
        given = config or settled(context.run_config, context.run_id, len(list(grid.get_node_ids())))
        try:
            do_job(grid, given)
        except FedOrthoError as error:
            remote.error("%s", error)  # on one line, before Flower's traceback
            raise
        remote.info("done: %s", given.get("out") or given.get("run"))

    return app


def do_job(grid: "Grid", config: Mapping[str, Any]) -> None:
    """Do the job that a flat configuration describes."""
    out = Path(str(config.get("out") or "")) if config.get("out") else None
    job = config.get("do")
    if job == "train":
        if out is None:
            raise FedOrthoError("the job has no out; give the run directory to write")
        with _lock(config, out):
            train_federation(out, federate_settings(config), grid, watch=_tell)
    elif job in ("forget", "rewind", "sync"):
        run = open_run(Path(str(config["run"]))).at(
            timeout=float(config.get("timeout") or 0.0), sums=str(config.get("sums") or "")
        )
        if not isinstance(run.settings, FederateSettings):
            raise FedOrthoError(f"{run.path} was not trained by a federation")
        if job == "sync":
            remote.info("clients %s have the model of %s", sync(run, grid), run.path)
            return
        if job == "rewind":
            if out is None:
                raise FedOrthoError("the job has no out; give the run directory to write")
            with _lock(config, run.path):
                remote.info("%s", rewind_run(run, str(config["request"]), out, grid=grid, watch=_tell).plan)
            return
        method = _method(str(config.get("method") or "hide"), str(config.get("forget") or "{}"))
        request, store = ForgetRequest.parse(str(config["request"])), str(config.get("store") or "")
        where = Path(store) if store else None  # on Ray, the directories of the clients
        served = forget_federated_run(run, request, method, grid, out=out, store=where)
        remote.info("%s", json.dumps(to_json(served.record)))
    else:
        raise FedOrthoError(f"no job {job!r}; choose from train, forget, rewind, sync")


def _lock(config: Mapping[str, Any], run: Path) -> AbstractContextManager[None]:
    """The lock of real clients; those of a simulation have directories of their own."""
    return nullcontext() if config.get("store") else federation_lock(run)


def _method(name: str, text: str) -> Method:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise BadSetting(f"forget must be settings as JSON, not {text!r}") from error
    if not isinstance(value, dict):
        raise BadSetting(f"forget must be settings as JSON, not {text!r}")
    return make_method(name, value)


def _tell(news: RoundProgress) -> None:
    if news.history and not news.asked:
        entry = news.history[-1]
        told = (entry.epoch + 1, news.rounds, entry.clients, entry.loss, news.bytes_down / 1e6, news.bytes_up / 1e6)
        remote.info("round %d/%d: %d clients, loss %.3f, %.1f MB down, %.1f MB up so far", *told)
