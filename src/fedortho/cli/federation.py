"""The commands about federations: federate, sync and deploy."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from fedortho.cli.console import bars, err, federation_bar, print_run, say
from fedortho.cli.flags import Config, DataDir, Deployment, EngineName, OutPath, RunPath, TensorBoard, takes_settings
from fedortho.cli.tensorboard import tensorboard_watch
from fedortho.errors import FedOrthoError
from fedortho.runs.run import open_run
from fedortho.runs.settings import FederateSettings
from fedortho.storage.settings import make_settings, read_toml


@takes_settings(FederateSettings)
def federate_command(
    out_path: OutPath,
    config: Config = None,
    tensorboard: TensorBoard = None,
    engine: EngineName = "inprocess",
    workers: Annotated[int, typer.Option(help="inprocess: processes in which clients run at the same time")] = 1,
    deployment: Deployment = None,
    *,
    given: dict[str, Any],
) -> None:
    """Train a federation of clients; a killed one goes on after its last whole round."""
    from fedortho.requests.federated_jobs import check_engine, train_elsewhere

    settings = make_settings(FederateSettings, read_toml(config) if config else {}, given)
    check_engine(engine, deployment)
    if workers < 1 or (workers > 1 and engine != "inprocess"):
        raise FedOrthoError(f"--workers is at least 1 and belongs to --engine inprocess, not {workers} on {engine}")
    if engine == "inprocess":
        from fedortho.federated.server import train_federation

        with bars() as shown, tensorboard_watch(tensorboard, out_path, settings, federation_bar(shown)) as watch:
            print_run(train_federation(out_path, settings, watch=watch, workers=workers))
        return
    if tensorboard is not None:
        raise FedOrthoError(f"--tensorboard belongs to --engine inprocess; on {engine} rounds are not told here")
    train_elsewhere(out_path, settings, deployment, log_line)
    print_elsewhere(out_path)


def log_line(text: str) -> None:
    err.print(text, highlight=False, soft_wrap=True, markup=False)


def print_elsewhere(path: Path) -> None:
    if (path / "run.json").exists():
        print_run(open_run(path))
    else:
        say(f"written to {escape(str(path.absolute()))} on the SuperLink's machine")


def sync_command(run_path: RunPath, deployment: Deployment = None, data_dir: DataDir = "") -> None:
    """Bring clients that missed a patch to the run's model: of a simulation, or of a deployment."""
    from fedortho.federated.server import sync
    from fedortho.requests.federated_jobs import sync_elsewhere

    run = open_run(run_path).at(data_dir)
    if not isinstance(run.settings, FederateSettings):
        raise FedOrthoError(f"{run_path} was not trained by a federation; there is nobody to bring up to date")
    if deployment is not None:
        sync_elsewhere(run, deployment, log_line)
        return
    say(f"{len(sync(run))} of {run.settings.clients} clients have the model {run.record['model']['digest'][:16]}")


@takes_settings(FederateSettings)
def deploy_command(
    out_path: Annotated[Path, typer.Option("--out", help="the folder to write")],
    address: Annotated[str, typer.Option(help="name or IP address of the SuperLink's machine, as nodes reach it")],
    nodes: Annotated[int, typer.Option(help="number of nodes, one per client")] = 3,
    port: Annotated[int, typer.Option(help="its port")] = 8000,
    insecure: Annotated[bool, typer.Option("--insecure", help="no TLS and no keys; for loopback only")] = False,
    *,
    given: dict[str, Any],
) -> None:
    """Write scripts, certificates and keys for a federation on several machines; docs/deploy.md explains them."""
    from fedortho.federated.deploy import write_deployment
    from fedortho.requests.federated_jobs import app_config

    if given.get("clients", nodes) != nodes:
        raise FedOrthoError(f"each client has a node: --clients {given['clients']} and --nodes {nodes} do not fit")
    config = app_config(make_settings(FederateSettings, given, {"clients": nodes}))
    write_deployment(out_path, nodes=nodes, address=address, port=port, insecure=insecure, config=config)
    say(f"written to {escape(str(out_path))}; {escape(str(out_path / 'README.txt'))} says what goes where")
