"""Serve a request in a federation: unlearn with its clients, write the new run, send the patch."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from fedortho.data.images import Dataset
from fedortho.data.request import ForgetRequest
from fedortho.devices import choose_device
from fedortho.engines.central import CentralEngine
from fedortho.errors import FedOrthoError
from fedortho.federated.engine import FederatedEngine
from fedortho.methods.method import Method
from fedortho.requests.forgetting import ServedRequest, serve_request
from fedortho.runs.derived import check_output_paths
from fedortho.runs.federation import held_rows
from fedortho.runs.run import Run, load_run_data, open_run
from fedortho.runs.served import excluded_by, served_requests
from fedortho.runs.settings import FederateSettings, relocated

if TYPE_CHECKING:
    from flwr.serverapp import Grid

from fedortho.federated.server import copied_clients, federated_engine, local_grid, patches_of
from fedortho.federated.transport import append_wire_log

logger = logging.getLogger(__name__)


def forget_federated_run(
    run: Run,
    request: ForgetRequest,
    method: Method | str = "hide",
    grid: "Grid | None" = None,
    *,
    out: Path | None,
    undo: Path | None = None,
    data: Dataset | None = None,
    data_dir: str = "",
    device: str = "auto",
) -> ServedRequest:
    """Serve a request in a federation: unlearn with its clients, write the new run, send the patch.

    Without a grid the clients of the run are simulated here, on a copy of their directories. With `out` None nothing
    is written and no patch is sent.
    """
    check_output_paths(out, undo)
    assert isinstance(run.settings, FederateSettings), "the caller looked"
    federated = relocated(run.settings, data_dir)
    federated = federated if device == "auto" else replace(federated, device=device)
    if grid is not None:
        return _forget(run, federated, request, method, grid, out=out, undo=undo, data=data)
    with copied_clients(run, out) as (store, fresh), local_grid(federated, store) as here:
        served = _forget(run, federated, request, method, here, out=fresh, undo=undo, data=data)
    return served if out is None else replace(served, run=open_run(out))


def _forget(
    run: Run,
    federated: FederateSettings,
    request: ForgetRequest,
    method: Method | str,
    grid: "Grid",
    *,
    out: Path | None,
    undo: Path | None,
    data: Dataset | None,
) -> ServedRequest:
    data = data or load_run_data(federated)
    engine = federated_engine(grid, federated, data, served_requests(run))
    model = run.load_model()
    engine.bring_up_to_date(model, patches_of(run))
    clients = (
        None
        if any(info.has_own_images for info in engine.clients.values())
        else held_rows(data, federated, federated.partition_seed)
    )
    if clients is not None:  # all images are known here, so ids are checked before any client is asked
        for holder in (engine, CentralEngine(data, clients=clients)):
            holder.check(request, excluded_by(run))
    device = choose_device(federated.device)
    served = serve_request(
        run, data, request, method, out=out, undo=undo, device=device, engine=engine, clients=clients
    )
    if out is not None:
        try:
            engine.send_patch(served.result.patch, request)
        except FedOrthoError as error:  # too few clients confirmed; the run is written, and sync sends the patch again
            logger.warning("%s", error)
        have = {client for client, info in engine.clients.items() if info.model == served.result.patch.after}
        late = sorted(set(range(federated.clients)) - have - _left(engine))
        if late:
            word = f"fedortho sync {out.name} sends it again"
            logger.warning("clients %s have not confirmed the patch; %s", late[:5], word)
        append_wire_log(out / "wire.json", engine.transport.log)
    return served


def _left(engine: FederatedEngine) -> set[int]:
    return {client for client, info in engine.clients.items() if info.has_left} | engine.left
