"""The command line: alone prints, draws progress bars, sets up logging and exits."""

import logging
import sys
from importlib.metadata import version
from typing import Annotated, NoReturn

import click
import typer
from rich.logging import RichHandler
from rich.markup import escape

from fedortho.cli.console import err
from fedortho.cli.evaluate import check_command, evaluate_command
from fedortho.cli.evidence import bundle_app, journal_app
from fedortho.cli.federation import deploy_command, federate_command, sync_command
from fedortho.cli.forget import forget_command, undo_command
from fedortho.cli.methods import compare_command, tune_command
from fedortho.cli.report import report_command, results_command
from fedortho.cli.reproduce import reproduce_command
from fedortho.cli.train import import_command, train_command
from fedortho.cli.verdict import audit_command, judge_command
from fedortho.errors import FedOrthoError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
INTERRUPTED = 130  # what typer makes of ctrl-C


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
        err.print(
            "interrupted; what is finished is kept, "
            "and a training goes on where it stopped if the same command is given again"
        )
    sys.exit(code)


def _refuse(message: str) -> NoReturn:
    err.print(f"[bold red]error:[/] {escape(' '.join(message.split()))}", highlight=False, soft_wrap=True)
    sys.exit(2)


def _tell_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fedortho {version('fedortho')}")
        raise typer.Exit


@app.callback()
def common(
    _: Annotated[
        bool, typer.Option("--version", callback=_tell_version, is_eager=True, help="tell the version")
    ] = False,
) -> None:
    """Make trained convolutional networks forget, and prove it."""


app.command("train")(train_command)
app.command("import")(import_command)
app.command("evaluate")(evaluate_command)
app.command("check")(check_command)
app.command("federate")(federate_command)
app.command("sync")(sync_command)
app.command("deploy")(deploy_command)
app.command("forget")(forget_command)
app.command("undo")(undo_command)
app.command("judge")(judge_command)
app.command("audit")(audit_command)
app.command("compare")(compare_command)
app.command("tune")(tune_command)
app.command("reproduce")(reproduce_command)
app.command("report")(report_command)
app.command("results")(results_command)
app.add_typer(bundle_app, name="bundle")
app.add_typer(journal_app, name="journal")


if __name__ == "__main__":
    main()
