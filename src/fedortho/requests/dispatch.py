"""Work on a run, wherever its images are: on this machine, with simulated clients, on Ray or on a SuperLink."""

import logging
from collections.abc import Callable
from pathlib import Path

from fedortho.errors import FedOrthoError
from fedortho.federated.server import Watch, sync, train_federation
from fedortho.requests.federated_jobs import check_engine, sync_elsewhere, train_elsewhere
from fedortho.runs.run import Run, open_run
from fedortho.runs.settings import FederateSettings

logger = logging.getLogger(__name__)
Log = Callable[[str], None]


def federate_run(
    path: Path | str,
    settings: FederateSettings,
    *,
    engine: str = "inprocess",
    deployment: Path | str | None = None,
    workers: int = 1,
    watch: Watch | None = None,
    log: Log = logger.info,
) -> Run | None:
    """Train a federation into a run directory; an interrupted one continues after its last complete round.

    `engine` is `inprocess` (clients run here, in `workers` processes at a time, with the same result for any number),
    `ray`, or `superlink` with the directory that `write_deployment` wrote as `deployment`. `watch` receives the
    progress of rounds in process, `log` the lines of a SuperLink's log. Returns None if the run was written on the
    SuperLink's machine and is not on this one.
    """
    path, deployment = Path(path), None if deployment is None else Path(deployment)
    check_engine(engine, deployment)
    if workers < 1 or (workers > 1 and engine != "inprocess"):
        raise FedOrthoError(f"--workers is {workers} with --engine {engine}; expected 1 or more, with inprocess only")
    if engine == "inprocess":
        return train_federation(path, settings, watch=watch, workers=workers)
    train_elsewhere(path, settings, deployment, log)
    return open_run(path) if (path / "run.json").exists() else None


def sync_run(
    run: Run | Path | str, *, deployment: Path | str | None = None, data_dir: str = "", log: Log = logger.info
) -> list[int]:
    """Send the clients of a federation the patches that they missed; returns the clients that have the run's model.

    With a `deployment` the clients are those of its SuperLink, which reports them in its log and not here.
    """
    run = open_run(run).at(data_dir)
    if not isinstance(run.settings, FederateSettings):
        raise FedOrthoError(f"{run.path} was not trained by a federation; it has no clients to update")
    if deployment is None:
        return sync(run)
    sync_elsewhere(run, Path(deployment), log)
    return []
