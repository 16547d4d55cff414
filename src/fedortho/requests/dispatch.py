"""Work on a run, wherever its images are: on this machine, with simulated clients, on Ray or on a SuperLink."""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedortho.audits.verdict import spoken_time
from fedortho.data.images import Dataset
from fedortho.data.request import ForgetRequest
from fedortho.devices import choose_device
from fedortho.errors import FedOrthoError
from fedortho.federated.server import Watch, sync, train_federation
from fedortho.methods import find_method, make_method
from fedortho.methods.hyperparameters import read_settings
from fedortho.methods.method import Method
from fedortho.requests.federated_forgetting import forget_federated_run
from fedortho.requests.federated_jobs import check_engine, sync_elsewhere, train_elsewhere
from fedortho.requests.forgetting import ServedRequest, serve_request
from fedortho.requests.run_context import method_for_run
from fedortho.runs.run import Run, open_run
from fedortho.runs.settings import FederateSettings
from fedortho.storage.settings import as_mapping
from fedortho.unlearning.calibrate import Refused

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


def forget_run(
    run: Run | Path | str,
    request: ForgetRequest | str,
    method: Method | str = "hide",
    *,
    out: Path | str | None = None,
    undo: Path | str | None = None,
    data: Dataset | None = None,
    data_dir: str = "",
    device: str = "auto",
) -> ServedRequest:
    """Make the model of a run forget and write a new run to `out`; the given run stays as it is.

    `method` is a name or a method with its hyper-parameters. Without `out` nothing is written and the result shows
    what the method finds. `undo` is a file for the tensors that are changed, from which `undo_run` restores them.
    `data` is the run's data if it is already loaded. A federation is simulated with its clients on this machine. Raises
    `Refused`, with the trials that were measured, if target and budget cannot both hold.
    """
    run, request = open_run(run), ForgetRequest.parse(request) if isinstance(request, str) else request
    method = chosen_method(run, method) if isinstance(method, str) else method
    paths: dict[str, Any] = {"out": None if out is None else Path(out), "undo": None if undo is None else Path(undo)}
    data = data or run.load_data(data_dir)
    try:
        if isinstance(run.settings, FederateSettings):
            return forget_federated_run(run, request, method, data=data, data_dir=data_dir, device=device, **paths)
        return serve_request(run, data, request, method, device=choose_device(device), **paths)
    except Refused as refusal:
        raise Refused(f"{refusal}; {_advice(run, request)}", refusal.frontier) from refusal


def chosen_method(run: Run, name: str, settings: str = "published", changes: Mapping[str, Any] | None = None) -> Method:
    """A method with its hyper-parameters for a run: those of `settings`, overridden by `changes`.

    `settings` is `published`, `short`, `tuned` or a JSON file. Methods that train use the run's augmentation and seed,
    and retraining its recipe.
    """
    known = read_settings(run.settings.data, run.settings.model, settings).get(name, {})
    is_planning = hasattr(find_method(name), "plan")  # a method of ours, whose seed is not the run's
    base = make_method(name, known) if is_planning else method_for_run(run, name, known)
    return make_method(name, as_mapping(base), changes or {})


def _advice(run: Run, request: ForgetRequest) -> str:
    """What to do after a refusal, with the time that retraining took."""
    seconds = sum(entry.seconds for entry in run.history())
    cost = f"training took {spoken_time(seconds)}" if seconds else "its cost is unknown"
    flags = "--max-retain-drop or --target" if request.classes else "--max-retain-drop"
    return f"raise {flags}, edit more layers with --layers mid,deep, or retrain ({cost})"
