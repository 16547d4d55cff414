"""The commands about federations: federate, sync and deploy."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from fedortho.cli.console import bars, err, federation_bar, print_run, say
from fedortho.cli.flags import Config, DataDir, Deployment, EngineName, OutPath, RunPath, TensorBoard, takes_settings
from fedortho.cli.tensorboard import tensorboard_watch
from fedortho.errors import FedOrthoError
from fedortho.requests.dispatch import federate_run, sync_run
from fedortho.runs.run import Run, open_run
from fedortho.runs.settings import FederateSettings
from fedortho.storage.settings import make_settings, read_toml


@takes_settings(FederateSettings)
def federate_command(
    out_path: OutPath,
    config: Config = None,
    tensorboard: TensorBoard = None,
    engine: EngineName = "inprocess",
    workers: Annotated[int, typer.Option(help="processes in which clients run at the same time, inprocess only")] = 1,
    deployment: Deployment = None,
    *,
    given: dict[str, Any],
) -> None:
    """Train a federation of clients; an interrupted one continues after its last complete round."""
    settings = make_settings(FederateSettings, read_toml(config) if config else {}, given)
    if engine != "inprocess":
        if tensorboard is not None:
            raise FedOrthoError(
                f"--tensorboard is given with --engine {engine}; expected inprocess, which has rounds here"
            )
        run = federate_run(out_path, settings, engine=engine, deployment=deployment, workers=workers, log=log_line)
    else:
        with bars() as shown, tensorboard_watch(tensorboard, out_path, settings, federation_bar(shown)) as watch:
            run = federate_run(out_path, settings, deployment=deployment, workers=workers, watch=watch)
    print_elsewhere(run, out_path)


def log_line(text: str) -> None:
    err.print(text, highlight=False, soft_wrap=True, markup=False)


def print_elsewhere(run: Run | None, path: Path) -> None:
    """The run, or where a SuperLink has written it."""
    if run is not None:
        print_run(run)
    else:
        say(f"written to {escape(str(path.absolute()))} on the SuperLink's machine")


def sync_command(run_path: RunPath, deployment: Deployment = None, data_dir: DataDir = "") -> None:
    """Send clients the patches that they missed, in a simulation or a deployment."""
    run = open_run(run_path)
    clients = sync_run(run, deployment=deployment, data_dir=data_dir, log=log_line)
    if deployment is None and isinstance(run.settings, FederateSettings):
        say(f"{len(clients)} of {run.settings.clients} clients have the model {run.record.model.digest[:16]}")


@takes_settings(FederateSettings)
def deploy_command(
    out_path: Annotated[Path, typer.Option("--out", help="the directory to write")],
    address: Annotated[str, typer.Option(help="host name or IP address of the SuperLink's machine, as nodes reach it")],
    nodes: Annotated[int, typer.Option(help="number of nodes, one per client")] = 3,
    port: Annotated[int, typer.Option(help="port of the SuperLink")] = 8000,
    insecure: Annotated[bool, typer.Option("--insecure", help="no TLS and no keys; for loopback only")] = False,
    *,
    given: dict[str, Any],
) -> None:
    """Write scripts, certificates and keys for a federation on several machines; docs/deploy.md explains them."""
    from fedortho.federated.deploy import write_deployment
    from fedortho.requests.federated_jobs import app_config

    if given.get("clients", nodes) != nodes:
        raise FedOrthoError(f"--clients is {given['clients']} and --nodes {nodes}; expected one node per client")
    config = app_config(make_settings(FederateSettings, given, {"clients": nodes}))
    write_deployment(out_path, nodes=nodes, address=address, port=port, insecure=insecure, config=config)
    say(f"written to {escape(str(out_path))}; {escape(str(out_path / 'README.txt'))} says what goes where")
