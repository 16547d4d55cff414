"""The command line: alone prints, draws progress bars, sets up logging and exits."""

import dataclasses
import inspect
import json
import logging
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NoReturn

import click
import typer
from rich.logging import RichHandler
from rich.markup import escape

from fedortho.calibrate import Refused
from fedortho.cli_evidence import bundle_app, journal_app
from fedortho.cli_methods import compare_command, tune_command
from fedortho.cli_report import report_command, results_command
from fedortho.cli_verdict import (
    Budget,
    Reference,
    References,
    Retrain,
    audit_command,
    check_wishes,
    judge_command,
    judged,
    print_verdict,
)
from fedortho.devices import choose_device
from fedortho.errors import FedOrthoError
from fedortho.methods import preset
from fedortho.methods.fedortho import ForgetSettings
from fedortho.models import build_model
from fedortho.request import ForgetRequest
from fedortho.runs import FederateSettings, ImportSettings, Run, TrainSettings, import_run, open_run, train_run
from fedortho.scores import evaluate
from fedortho.screen import (
    bar,
    bars,
    check_table,
    class_table,
    err,
    federation_bar,
    frontier_table,
    out,
    print_run,
    print_served,
    say,
    training_bar,
)
from fedortho.serve import describe, serve_request, undo_run
from fedortho.settings import field_help, field_types, kebab, make_settings, read_toml
from fedortho.sites import check_model

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Make trained convolutional networks forget, and prove it.",
)
INTERRUPTED = 130  # what typer makes of ctrl-C

RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="a run directory")]
OutPath = Annotated[Path, typer.Option("--out", help="the run directory to write")]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON for machines")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or mps")]
DataDir = Annotated[str, typer.Option("--data-dir", help="where the run's data lies on this machine")]


def main() -> None:
    """Run the command; what a user can mend becomes one line and exit code 2."""
    handler = RichHandler(console=err, show_time=False, show_path=False)
    logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[handler])
    if "" not in sys.path:
        sys.path.append("")  # --model package.module:function may lie where the user stands
    try:
        code = app(standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(2)
    except click.ClickException as error:
        _refuse(error.format_message())
    except FedOrthoError as error:
        _refuse(str(error))
    if code == INTERRUPTED:
        err.print("interrupted; training goes on where it stopped if the same command is given again")
    sys.exit(code)


def _refuse(message: str) -> NoReturn:
    err.print(f"[bold red]error:[/] {escape(' '.join(message.split()))}", highlight=False, soft_wrap=True)
    sys.exit(2)


def takes_settings(kind: type[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command one flag per field of `kind`; it receives the flags that were used as `given`."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        types, texts = field_types(kind), field_help(kind)
        defaults = kind()
        parameters = [p for p in inspect.signature(function).parameters.values() if p.name != "given"]
        for name, type_ in types.items():
            default = getattr(defaults, name)
            text = texts[name] if default in ("", -1e30) else f"{texts[name]} (default: {default})"
            flag = f"--{kebab(name)}/--no-{kebab(name)}" if type_ is bool else f"--{kebab(name)}"
            option = typer.Option(flag, help=text, show_default=False)
            annotation = Annotated[type_ | None, option]  # type: ignore[valid-type]  # made at run time
            parameters.append(
                inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
            )

        def command(**values: Any) -> None:
            flags = {name: values.pop(name) for name in types}
            function(given={name: value for name, value in flags.items() if value is not None}, **values)

        command.__doc__, command.__name__ = function.__doc__, function.__name__
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # as inspect documents
        command.__annotations__ = {p.name: p.annotation for p in parameters}
        return command

    return decorate


@app.command()
@takes_settings(TrainSettings)
def train(
    out_path: OutPath,
    config: Annotated[Path | None, typer.Option(help="a TOML file of settings; flags win over it")] = None,
    *,
    given: dict[str, Any],
) -> None:
    """Train a model with orthogonal kernels; a killed run goes on where it stopped."""
    settings = make_settings(TrainSettings, read_toml(config) if config else {}, given)
    with bars() as shown:
        observing = bar(shown, "writing the ledger")
        decoding = bar(shown, "decoding images")
        run = train_run(out_path, settings, watch=training_bar(shown), progress=decoding, observing=observing)
    print_run(run)


@app.command("import")
@takes_settings(ImportSettings)
def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="safetensors, or a .pt file with a state dict")],
    out_path: OutPath,
    *,
    given: dict[str, Any],
) -> None:
    """Make a run directory of a model that was trained elsewhere, and evaluate it."""
    settings = make_settings(ImportSettings, given)
    with bars() as shown:
        decoding, observing = bar(shown, "decoding images"), bar(shown, "writing the ledger")
        run = import_run(out_path, file, settings, progress=decoding, observing=observing)
    print_run(run)


EngineName = Annotated[str, typer.Option("--engine", help="where clients run: inprocess, ray or superlink")]
Deployment = Annotated[Path | None, typer.Option(help="for superlink: the folder that fedortho deploy wrote")]


@app.command()
@takes_settings(FederateSettings)
def federate(
    out_path: OutPath,
    config: Annotated[Path | None, typer.Option(help="a TOML file of settings; flags win over it")] = None,
    engine: EngineName = "inprocess",
    workers: Annotated[int, typer.Option(help="inprocess: processes in which clients run at the same time")] = 1,
    deployment: Deployment = None,
    *,
    given: dict[str, Any],
) -> None:
    """Train a federation of clients; a killed one goes on after its last whole round."""
    from fedortho.federated.jobs import check_engine, train_elsewhere

    settings = make_settings(FederateSettings, read_toml(config) if config else {}, given)
    check_engine(engine, deployment)
    if workers < 1 or (workers > 1 and engine != "inprocess"):
        raise FedOrthoError(f"--workers is at least 1 and belongs to --engine inprocess, not {workers} on {engine}")
    if engine == "inprocess":
        from fedortho.federated.server import train_federation

        with bars() as shown:
            print_run(train_federation(out_path, settings, watch=federation_bar(shown), workers=workers))
        return
    train_elsewhere(engine, out_path, settings, deployment, _log_line)
    _print_elsewhere(out_path)


def _log_line(text: str) -> None:
    err.print(text, highlight=False, soft_wrap=True, markup=False)


def _print_elsewhere(path: Path) -> None:
    if (path / "run.json").exists():
        print_run(open_run(path))
    else:
        say(f"written to {escape(str(path.absolute()))} on the SuperLink's machine")


@app.command()
def sync(run_path: RunPath, deployment: Deployment = None) -> None:
    """Bring clients that missed a patch to the run's model: of a simulation, or of a deployment."""
    from fedortho.federated.jobs import sync_elsewhere
    from fedortho.federated.server import sync as bring

    run = open_run(run_path)
    if not isinstance(run.settings, FederateSettings):
        raise FedOrthoError(f"{run_path} was not trained by a federation; there is nobody to bring up to date")
    if deployment is not None:
        sync_elsewhere(run, deployment, _log_line)
        return
    say(f"{len(bring(run))} of {run.settings.clients} clients have the model {run.record['model']['digest'][:16]}")


@app.command()
@takes_settings(FederateSettings)
def deploy(
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
    from fedortho.federated.jobs import app_config

    if given.get("clients", nodes) != nodes:
        raise FedOrthoError(f"each client has a node: --clients {given['clients']} and --nodes {nodes} do not fit")
    config = app_config(make_settings(FederateSettings, given, {"clients": nodes}))
    write_deployment(out_path, nodes=nodes, address=address, port=port, insecure=insecure, config=config)
    say(f"written to {escape(str(out_path))}; {escape(str(out_path / 'README.txt'))} says what goes where")


@app.command("evaluate")
def evaluate_(
    run_path: RunPath,
    split: Annotated[str, typer.Option(help="test, valid or train")] = "test",
    data_dir: DataDir = "",
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Count what a trained model gets right, class by class."""
    if split not in ("test", "valid", "train"):
        raise FedOrthoError(f"no split {split!r}; choose from test, valid, train")
    run = open_run(run_path)
    place = choose_device(device)
    with bars() as shown:
        data = run.load_data(data_dir, bar(shown, "decoding images"))
    images = getattr(data, split)
    score = evaluate(run.load_model().to(place), images, device=place)
    if as_json:
        value = {"run": str(run_path), "split": split, "images": score.images, "accuracy": score.accuracy}
        value |= {"loss": score.loss, "per-class": dict(zip(images.names, score.per_class, strict=True))}
        typer.echo(json.dumps(value, indent=2))
    else:
        say(escape(f"{run_path}: {split} images of {data.name}"))
        out.print(class_table(score, images.names))


@app.command()
@takes_settings(ForgetSettings)
def forget(
    run_path: RunPath,
    request: Annotated[
        list[str], typer.Argument(help="class:3, class:3,7, class:cat, client:3, samples:FILE; several at once")
    ],
    out_path: Annotated[Path | None, typer.Option("--out", help="new run directory (default: RUN-REQUEST)")] = None,
    preset_name: Annotated[str, typer.Option("--preset", help="robust or paper")] = "robust",
    engine: EngineName = "inprocess",
    deployment: Deployment = None,
    audit: Budget = "quick",
    reference: Reference = None,
    references: References = None,
    retrain: Retrain = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="find the patch and show it; write nothing")] = False,
    keep_undo: Annotated[Path | None, typer.Option(help="keep what is removed in this file, for fedortho undo")] = None,
    data_dir: DataDir = "",
    device: Device = "auto",
    as_json: AsJson = False,
    *,
    given: dict[str, Any],
) -> None:
    """Make a trained model forget; writes a new run directory and leaves the old one as it was."""
    from fedortho.federated.jobs import check_engine, forget_elsewhere
    from fedortho.federated.server import forget_in_federation

    settings = preset(preset_name, **given)
    asked = ForgetRequest.parse(shlex.join(request))
    run = open_run(run_path)
    check_engine(engine, deployment)
    check_wishes(run, asked, audit, reference)
    if engine != "inprocess" and not isinstance(run.settings, FederateSettings):
        raise FedOrthoError(f"{run_path} was not trained by a federation; leave --engine out")
    place = choose_device(device)
    out_dir = out_path or run_path.with_name(f"{run_path.name}-{_file_name(asked)}")
    if engine != "inprocess":
        if dry_run or keep_undo or data_dir or device != "auto":
            only = "--dry-run, --keep-undo, --data-dir and --device"
            raise FedOrthoError(f"{only} work here only; with --engine {engine} clients have their own places")
        forget_elsewhere(engine, run, asked, settings, out=out_dir, deployment=deployment, say=_log_line)
        _print_elsewhere(out_dir)
        return
    with bars() as shown:
        data = run.load_data(data_dir, bar(shown, "decoding images"))
        shown.add_task(f"forgetting {_file_name(asked)}", total=None, news="")
        try:
            places: dict[str, Any] = {"out": None if dry_run else out_dir, "undo": keep_undo}
            if isinstance(run.settings, FederateSettings):
                places |= {"data_dir": data_dir, "device": device}
                served = forget_in_federation(run, asked, settings, data=data, **places)
            else:
                served = serve_request(run, data, asked, settings, device=place, **places)
        except Refused as refusal:
            shown.stop()
            err.print(frontier_table(refusal.frontier))
            raise FedOrthoError(f"{refusal}; {_retrain_advice(run)}") from refusal
    verdict = None
    if served.run is not None and audit != "none":
        verdict = judged(
            served.run,
            asked,
            data,
            original=run,
            reference=reference,
            references=references,
            retrain=retrain,
            audit=audit,
            data_dir=data_dir,
            device=device,
        )
    if as_json:
        told = describe(served) | ({} if verdict is None else {"verdict": verdict.as_mapping()})
        typer.echo(json.dumps(told, indent=2))
        return
    print_served(served, run_path)
    if verdict is not None and served.run is not None:
        print_verdict(verdict, whole=False)
        say(escape(f"all metrics: fedortho judge {served.run.path}; a page to read: fedortho report {served.run.path}"))


def _retrain_advice(run: Run) -> str:
    seconds = sum(entry.seconds for entry in run.history())
    cost = f"that took {seconds / 60:.1f} minutes here the last time" if seconds else "its cost is not known"
    return f"allow more with --max-retain-drop or --target, edit more with --layers mid,deep, or retrain ({cost})"


def _file_name(request: ForgetRequest) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", str(request))[:40].strip("-")


@app.command()
def undo(
    run_path: RunPath,
    undo_file: Annotated[Path, typer.Argument(metavar="FILE", help="what --keep-undo wrote")],
    out_path: OutPath,
) -> None:
    """Restore the model of before the last request, bit for bit, from its undo file."""
    run = undo_run(open_run(run_path), undo_file, out_path)
    say(f"written to {escape(str(run.path))}: model {run.record['model']['digest'][:16]}")


@app.command()
def check(
    model: Annotated[str, typer.Argument(help="a run directory, a model's name, or package.module:function")],
    shape: Annotated[str, typer.Option(help="channels x height x width of its images, unless it is a run")] = "3x32x32",
    classes: Annotated[int, typer.Option(help="number of classes, unless it is a run")] = 10,
    as_json: AsJson = False,
) -> None:
    """List every convolution and the edits that apply to it; exit code 1 if some layer cannot be treated."""
    if (Path(model) / "run.json").exists():
        run = open_run(Path(model))
        net, sizes = run.load_model(), run.load_data().train.shape
    else:
        if not re.fullmatch(r"\d+x\d+x\d+", shape):
            raise FedOrthoError(f"shape must be like 3x32x32, not {shape!r}")
        channels, height, width = map(int, shape.split("x"))
        net, sizes = build_model(model, classes=classes, channels=channels), (channels, height, width)
    findings = check_model(net, sizes)
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
    else:
        say(f"{model}: what can be edited")
        out.print(check_table(findings))
    if any(finding.conv or finding.channel or finding.group for finding in findings):
        raise typer.Exit(1)


app.command("judge")(judge_command)
app.command("audit")(audit_command)
app.command("compare")(compare_command)
app.command("tune")(tune_command)
app.command("report")(report_command)
app.command("results")(results_command)
app.add_typer(bundle_app, name="bundle")
app.add_typer(journal_app, name="journal")


if __name__ == "__main__":
    main()
