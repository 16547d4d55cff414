"""Run the apps on Flower's own engines: a Ray simulation on this machine, or a SuperLink."""

import functools
import importlib.util
import json
import logging
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedortho.errors import BadSetting, FedOrthoError
from fedortho.federated import SWITCHES, switch_off
from fedortho.storage.records import Scalar
from fedortho.storage.settings import read_toml

logger = logging.getLogger(__name__)
CONNECTION = "fedortho"  # name of the SuperLink in a deployment's config.toml
POLL_SECONDS = 3.0
PATIENCE = 20  # times in a row that a SuperLink may fail to tell a run's status
SHORT_PATH = "/tmp" if os.path.isdir("/tmp") else None  # Ray's sockets need a short path
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def need_flower() -> None:
    """Raise an error that names the command to install Flower, unless it is installed."""
    if importlib.util.find_spec("flwr") is None:
        raise FedOrthoError("Flower is not installed; run: pip install 'fedortho[federated]'")


def simulate(server: Any, client: Any, *, clients: int, threads: int, workers: int) -> None:
    """Run a server app and a client app on Ray, `workers` clients at a time; no process and no file remains."""
    switch_off(os.environ)
    # deprecated in favour of `flwr run`, which leaves a SuperLink running that accepts code from anyone who reaches
    # its port; in 1.41 this is the only call that ends with the server
    from flwr.simulation import run_simulation

    stopped = threading.Event()
    outcome: list[BaseException | None] = []
    with _ray_settings(threads) as scratch, _gentle_interrupt(stopped):
        init = {"address": "local", "num_cpus": workers, "_temp_dir": scratch}
        per_client = {"num_cpus": 1, "num_gpus": 0.0}  # with Flower's default of 2 CPUs, two cores run one worker
        resources: dict[str, Any] = {"init_args": init, "client_resources": per_client}
        try:
            run_simulation(_guarded(server, stopped, outcome), client, clients, backend_config=resources)
        except RuntimeError as error:
            if not outcome:
                raise FedOrthoError("Ray failed; see the log above, or use another --backend") from error
        finally:
            interrupted = stopped.is_set()
            stopped.set()
    if interrupted:
        raise KeyboardInterrupt
    if not outcome:
        raise FedOrthoError("the simulation ended before its server; see the log above")
    if outcome[0] is not None:
        raise outcome[0]


def _guarded(server: Any, stopped: threading.Event, outcome: list[BaseException | None]) -> Any:
    """The server app, which appends its exception or None to `outcome`; its thread must not outlive Ray."""
    from flwr.serverapp import ServerApp

    guarded = ServerApp()

    def unless_stopped(call: Callable[..., Any], *given: Any) -> Any:
        if stopped.is_set():
            raise FedOrthoError("the simulation was stopped")
        return call(*given)

    @guarded.main()
    def main(grid: Any, context: Any) -> None:
        for name in ("pull_messages", "get_node_ids"):  # a server that waits for clients calls one of these
            setattr(grid, name, functools.partial(unless_stopped, getattr(grid, name)))
        try:
            server(grid, context)
            outcome.append(None)
        except BaseException as error:
            outcome.append(error)

    return guarded


@contextmanager
def _gentle_interrupt(stopped: threading.Event) -> Iterator[None]:
    """The first ctrl-C waits for busy clients, because Ray hangs otherwise; the second one kills."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        stopped.set()
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _ray_settings(threads: int) -> Iterator[str]:
    """Ray's environment and a directory for its logs, which may quote clients' errors; both are removed at the end."""
    before, log = dict(os.environ), logging.getLogger("flwr")
    level = log.level
    os.environ.update(
        FLWR_LOG_LEVEL="ERROR",
        OMP_NUM_THREADS=str(threads or 1),
        RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0",  # hides no GPU from the workers
        RAY_AUTH_MODE="token",  # Ray listens on every address of this machine
        RAY_AUTH_TOKEN=_ray_token(),
    )
    log.setLevel(logging.ERROR)
    try:
        with tempfile.TemporaryDirectory(prefix="fo-ray-", dir=SHORT_PATH, ignore_cleanup_errors=True) as scratch:
            yield scratch
    finally:
        log.setLevel(level)
        os.environ.clear()
        os.environ.update(before)


@functools.cache
def _ray_token() -> str:
    """One token for all simulations of this process, because Ray reads it once."""
    return secrets.token_hex(32)


def connection_toml(link: str, certificate: Path | None) -> str:
    """The config.toml that `flwr` reads from FLWR_HOME: address and certificate of the SuperLink."""
    path = json.dumps(str(certificate), ensure_ascii=False)  # quoted as TOML wants it
    trust = "insecure = true" if certificate is None else f"root-certificates = {path}"
    return f"[superlink]\ndefault = '{CONNECTION}'\n\n[superlink.{CONNECTION}]\naddress = '{link}'\n{trust}\n"


def submit(deployment: Path, config: Mapping[str, Scalar], *, say: Callable[[str], None] = logger.info) -> None:
    """Run the apps on a deployment's SuperLink, pass its log to `say` line by line, and wait for the end.

    An interrupt stops the run, too. A run that has not started after the config's `timeout` seconds is given up.
    """
    need_flower()
    link, certificate = _read_deployment(deployment, config)
    with tempfile.TemporaryDirectory(prefix="fedortho-flwr-") as folder:
        flower = _Flower(Path(folder), link)
        (flower.home / "config.toml").write_text(connection_toml(link, certificate), encoding="utf-8")
        run = flower.start(deployment / "app", config)
        try:
            flower.wait_for_start(run, float(config.get("timeout", 600.0)))
            status, details = flower.follow(run, say)
        except BaseException:
            flower.call("stop", run, CONNECTION)
            raise
    if status != "finished:completed":
        reason = details.removeprefix("ServerApp failed with exception: ")
        raise FedOrthoError(f"{reason} (run {run} on the SuperLink at {link}, {status.replace(':', ', ')})")


def _read_deployment(folder: Path, config: Mapping[str, Scalar]) -> tuple[str, Path | None]:
    """The address of a deployment's SuperLink and its certificate; refused if the app lacks a key of `config`."""
    try:
        connection = read_toml(folder / "config.toml")["superlink"][CONNECTION]
        known = read_toml(folder / "app" / "pyproject.toml")["tool"]["flwr"]["app"]["config"]
        certificate = None if connection.get("insecure") else folder.absolute() / "ca.crt"  # it may have been moved
        link = str(connection["address"])
    except (BadSetting, AttributeError, KeyError, TypeError) as error:
        raise FedOrthoError(f"{folder} is not a deployment ({error}); write one with fedortho deploy") from error
    if certificate is not None and not certificate.is_file():
        raise FedOrthoError(f"there is no {certificate}: copy it from the folder that fedortho deploy wrote")
    if unknown := sorted(set(config) - set(known)):
        raise FedOrthoError(
            f"the app in {folder / 'app'} has no setting {unknown[0]!r}: another version of fedortho wrote it; "
            "write a new deployment and copy its app/ over this one"
        )
    return link, certificate


@dataclass(frozen=True)
class _Flower:
    """The `flwr` command with its own FLWR_HOME, so that the user's ~/.flwr is neither read nor written."""

    home: Path
    link: str

    def start(self, app: Path, config: Mapping[str, Scalar]) -> str:
        import tomli_w  # comes with flwr

        overrides = self.home / "run.toml"  # a file: as an argument, a string with both kinds of quotes is refused
        overrides.write_text(tomli_w.dumps(dict(config)), encoding="utf-8")
        answer = self.call("run", str(app), CONNECTION, "--run-config", str(overrides))
        if not answer.get("success"):
            reason = " ".join(str(answer.get("error-message")).split())[:300]  # on one line
            raise FedOrthoError(
                f"the SuperLink at {self.link} did not take the run ({reason}); "
                "is superlink.sh running there, and can this machine reach it?"
            )
        return str(answer["run-id"])

    def wait_for_start(self, run: str, timeout: float) -> None:
        """Return when the run has started; after `timeout` seconds it is given up."""
        until = time.monotonic() + timeout
        while (status := self.status(run)[0]) in ("", "pending", "starting"):
            if time.monotonic() > until:
                raise FedOrthoError(
                    f"run {run} on the SuperLink at {self.link} is {status or 'unknown'} after {timeout:g} s and was "
                    "given up; see superlink.sh's log, or give a longer --timeout"
                )
            time.sleep(POLL_SECONDS)

    def follow(self, run: str, say: Callable[[str], None]) -> tuple[str, str]:
        """Pass on the run's log, again when the stream breaks, and return its final status with details."""
        said = silent = 0
        while silent < PATIENCE:
            said = self._pass_on(run, say, said)
            status, details = self.status(run)
            if status.startswith("finished"):
                return status, details
            silent = 0 if status else silent + 1
            time.sleep(POLL_SECONDS)
        raise FedOrthoError(f"the SuperLink at {self.link} no longer answers; run {run} cannot be followed")

    def _pass_on(self, run: str, say: Callable[[str], None], said: int) -> int:
        """Pass on the lines of the log after the first `said`, until it ends or breaks; how many there were so far."""
        number = 0  # a stream begins with the first line of the run, each time
        process = self._process("log", run, CONNECTION, "--stream", errors=subprocess.DEVNULL)
        try:
            for number, line in enumerate(process.stdout or (), 1):
                text = COLOUR.sub("", line).rstrip()
                if number > said and text not in ("", "INFO :"):
                    say(text)
        finally:
            process.terminate()
            process.communicate()
        return max(said, number)

    def status(self, run: str) -> tuple[str, str]:
        """The status of a run and its details; empty if the SuperLink does not answer."""
        answer = self.call("list", CONNECTION, "--run-id", run)
        known = answer["runs"][0] if answer.get("success") else {"status": "", "status-details": ""}
        return str(known["status"]), str(known["status-details"])

    def call(self, *arguments: str) -> dict[str, Any]:
        """The JSON output of a `flwr` command."""
        output, _ = (process := self._process(*arguments, "--format", "json")).communicate()
        try:
            return dict(json.loads(output[output.index("{") :]))
        except ValueError:
            return {"success": False, "error-message": output or f"exit code {process.returncode}"}

    def _process(self, *arguments: str, errors: int = subprocess.STDOUT) -> subprocess.Popen[str]:
        places = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        command = [shutil.which("flwr", path=places) or "flwr", *arguments]
        environ = os.environ | SWITCHES | {"FLWR_HOME": str(self.home), "PYTHONUNBUFFERED": "1"}
        pipe = subprocess.PIPE
        return subprocess.Popen(command, env=environ, stdout=pipe, stderr=errors, encoding="utf-8", errors="replace")
