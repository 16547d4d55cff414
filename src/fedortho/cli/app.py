"""The `fedortho` command: logging, one-line errors, exit codes and the list of commands."""

import logging
import os
import sys
import traceback
from importlib.metadata import version
from typing import Annotated, NoReturn

import typer
from rich.logging import RichHandler
from typer import Option

from fedortho.cli.console import err, one_line, out, warn
from fedortho.cli.evidence import bundle_app, journal_app
from fedortho.cli.forget import forget_command, undo_command
from fedortho.cli.methods import compare_command, reproduce_command, tune_command
from fedortho.cli.show import check_command, data_app, evaluate_command, report_command, results_command, theory_command
from fedortho.cli.train import deploy_command, federate_command, import_command, sync_command, train_command
from fedortho.cli.verdict import audit_command, judge_command, qualify_command
from fedortho.errors import FedOrthoError, first_line
from fedortho.runs.run import open_run

EXIT_CODES = (
    "Exit codes: 0 done; 1 the answer is no (check, judge --strict), or a defect of fedortho; "
    "2 refused, one line says why; 130 interrupted, one line says what goes on. --json: what a script reads."
)
app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=EXIT_CODES,
)
INTERRUPTED = 130  # typer's exit code after ctrl-C
USAGE_ERROR = typer.BadParameter.__bases__[0]  # of click, or of the copy of click in newer versions of typer
ANYWHERE = ("--debug", "--trust-code", "--quiet")  # so that they can be appended to a command that failed
KEPT = "finished parts are kept, and the same command does the rest"
GOES_ON = {  # after ctrl-C
    "train": "the same command continues after the last finished epoch",
    "federate": "the same command continues after the last complete round",
    **dict.fromkeys(("compare", "tune", "qualify", "reproduce"), KEPT),
    **dict.fromkeys(
        ("judge", "audit"), "no verdict was written; the same command begins again, but for finished references"
    ),
    "forget": "the same command does what is not written yet, an edit under way from its beginning",
    **dict.fromkeys(("import", "sync", "deploy"), "the same command begins again"),
}


class PlainFormatter(logging.Formatter):
    """Messages of the log as one line each, whoever wrote them."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # logging's name
        return one_line(super().formatMessage(record))


def main() -> None:
    """Run the command; an error that a user can fix becomes one line and exit code 2, any other one exit code 1."""
    handler = RichHandler(console=err, show_time=False, show_path=False)
    handler.setFormatter(PlainFormatter("%(message)s"))
    out.quiet = "--quiet" in sys.argv
    logging.basicConfig(level=logging.WARNING if out.quiet else logging.INFO, handlers=[handler])
    if "" not in sys.path:
        sys.path.append("")  # --model package.module:function is also looked for in the working directory
    debug, words = "--debug" in sys.argv, [word for word in sys.argv[1:] if word not in ANYWHERE]
    try:
        for place in words if "--trust-code" in sys.argv else ():  # runs that the line names, and no others
            if os.path.isfile(f"{place.rpartition('=')[2]}/run.json"):
                open_run(place.rpartition("=")[2], trust_code=True)
        code = app(words, standalone_mode=False)
    except typer.Abort:
        code = INTERRUPTED
    except Exception as error:  # the last resort: whatever it is, the user sees one line
        if type(error).__name__ == "NoArgsIsHelpError":  # its help is its message
            error.show()  # type: ignore[attr-defined]  # an error of click
            sys.exit(2)
        for part in traceback.format_exception(error) if debug else ():
            for line in part.splitlines() if part.startswith("  File") else [part.strip()]:  # a message is one line
                warn(line)
        _refuse(error)
    if code == INTERRUPTED:
        warn(f"interrupted; {GOES_ON.get(next(iter(words), ''), 'nothing was written')}")
    sys.exit(code)


def _refuse(error: Exception) -> NoReturn:
    """Print an error as one line and exit: with 2 if the user can fix it, with 1 if it is a defect of fedortho."""
    message, code = str(error), 2
    if isinstance(error, USAGE_ERROR):
        message = error.format_message()  # type: ignore[attr-defined]  # an error of click
    elif isinstance(error, MemoryError):
        message = "there is not enough memory; use a machine with more, or smaller data"
    elif isinstance(error, OSError):
        message = f"{error.filename or 'a file'} cannot be used: {error.strerror or error}"
    elif not isinstance(error, FedOrthoError):
        message, code = f"{type(error).__name__}: {first_line(error)}; a defect: please report it with --debug", 1
    warn(("error:", "bold red"), f" {' '.join(message.split())}")
    sys.exit(code)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fedortho {version('fedortho')}")
        raise typer.Exit


@app.callback()
def common(
    _version: Annotated[
        bool, Option("--version", callback=_print_version, is_eager=True, help="print the version")
    ] = False,
    _quiet: Annotated[bool, Option("--quiet", help="errors, warnings and --json only; allowed anywhere")] = False,
    _debug: Annotated[bool, Option("--debug", help="print the traceback of an error; allowed anywhere")] = False,
    _trust: Annotated[
        bool, Option("--trust-code", help="trust code that the runs on this command line name; allowed anywhere on it")
    ] = False,
) -> None:
    """Make trained convolutional networks forget a class, a client or samples, and measure how far they did."""


COMMANDS = (
    *(train_command, import_command, evaluate_command, check_command, federate_command, sync_command, deploy_command),
    *(forget_command, undo_command, judge_command, audit_command, qualify_command, compare_command, tune_command),
    *(reproduce_command, theory_command, report_command, results_command),
)
for command in COMMANDS:
    app.command(command.__name__.removesuffix("_command"))(command)
app.add_typer(data_app, name="data")
app.add_typer(bundle_app, name="bundle")
app.add_typer(journal_app, name="journal")
