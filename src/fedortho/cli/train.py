"""The commands that train: train and import, and those about federations: federate, sync and deploy."""

from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from fedortho.cli import flags
from fedortho.cli.console import bar, bars, federation_bar, print_run, say, training_bar, warn
from fedortho.errors import FedOrthoError
from fedortho.requests.federated_jobs import app_config, federate_run, sync_run
from fedortho.runs.continuing import continued_settings
from fedortho.runs.run import Run, open_run
from fedortho.runs.settings import FederateSettings, ImportSettings, TrainSettings
from fedortho.runs.training import import_run, train_run
from fedortho.storage.settings import kebab, make_settings, read_toml


@flags.takes_settings(TrainSettings, start="--continue")
def train_command(out_path: flags.OutPath, config: flags.Config = None, *, given: dict[str, Any]) -> None:
    """Train a model with orthogonal kernels; an interrupted training continues where it stopped.

    With --continue RUN training goes on from another run, by its settings unless others are given, into a new run.
    """
    changes = (read_toml(config) if config else {}) | {kebab(name): value for name, value in given.items()}
    start = changes.pop("start", "")
    settings = continued_settings(start, changes) if start else make_settings(TrainSettings, changes)
    with bars() as shown:
        watch, observing = training_bar(shown), bar(shown, "writing the ledger")
        decoding = bar(shown, "decoding images")
        run = train_run(out_path, settings, watch=watch, progress=decoding, observing=observing)
    print_run(run)


@flags.takes_settings(ImportSettings)
def import_command(
    file: Annotated[Path, Argument(metavar="FILE", help="a safetensors file, or a .pt file with a state dict")],
    out_path: flags.OutPath,
    recipe: flags.RecipeFile = None,
    *,
    given: dict[str, Any],
) -> None:
    """Make a run directory from weights that were trained elsewhere, and evaluate them."""
    settings = make_settings(ImportSettings, given)
    with bars() as shown:
        decoding, observing = bar(shown, "decoding images"), bar(shown, "writing the ledger")
        run = import_run(out_path, file, settings, flags.read_recipe(recipe), progress=decoding, observing=observing)
    print_run(run)


@flags.takes_settings(FederateSettings)
def federate_command(
    out_path: flags.OutPath,
    config: flags.Config = None,
    backend: flags.Backend = "inprocess",
    workers: Annotated[int, Option(help="processes in which clients run at the same time, inprocess only")] = 1,
    deployment: flags.Deployment = None,
    *,
    given: dict[str, Any],
) -> None:
    """Train a federation of clients; an interrupted one continues after its last complete round."""
    settings = make_settings(FederateSettings, read_toml(config) if config else {}, given)
    if backend != "inprocess":
        run = federate_run(out_path, settings, backend=backend, deployment=deployment, workers=workers, log=warn)
    else:
        with bars() as shown:
            run = federate_run(out_path, settings, workers=workers, deployment=deployment, watch=federation_bar(shown))
    print_elsewhere(run, out_path)


def print_elsewhere(run: Run | None, path: Path) -> None:
    """The run, or where a SuperLink has written it."""
    if run is not None:
        print_run(run)
    else:
        say(f"written to {path.absolute()} on the SuperLink's machine")


def sync_command(
    run_path: flags.RunPath,
    deployment: flags.Deployment = None,
    timeout: flags.Timeout = 0.0,
    data_dir: flags.DataDir = "",
    device: flags.Device = "auto",
) -> None:
    """Send clients the patches that they missed, in a simulation or a deployment."""
    run = open_run(run_path).at(timeout=timeout)
    clients = sync_run(run, deployment=deployment, data_dir=data_dir, device=device, log=warn)
    if deployment is None and isinstance(run.settings, FederateSettings):
        say(f"{len(clients)} of {run.settings.clients} clients have the model {run.record.model.digest[:16]}")


@flags.takes_settings(FederateSettings)
def deploy_command(
    out_path: Annotated[Path, Option("--out", help="the directory to write")],
    address: Annotated[str, Option(help="host name or IP address of the SuperLink's machine, as nodes reach it")],
    nodes: Annotated[int, Option(help="number of nodes, one per client")] = 3,
    port: Annotated[int, Option(help="port of the SuperLink")] = 8000,
    node_port: Annotated[int, Option(help="port of node 0's client app on its own machine; node N has N more")] = 9094,
    insecure: Annotated[bool, Option("--insecure", help="no TLS and no keys; for loopback only")] = False,
    *,
    given: dict[str, Any],
) -> None:
    """Write scripts, certificates and keys for a federation on several machines; docs/deploy.md explains them."""
    from fedortho.federated.deploy import write_deployment

    if given.get("clients", nodes) != nodes:
        raise FedOrthoError(f"--clients is {given['clients']} and --nodes {nodes}; expected one node per client")
    config = app_config(make_settings(FederateSettings, given, {"clients": nodes}))
    how = {"port": port, "node_port": node_port}
    write_deployment(out_path, nodes=nodes, address=address, **how, insecure=insecure, config=config)
    say(f"written to {out_path}; {out_path / 'README.txt'} says what goes where")
