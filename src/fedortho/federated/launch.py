"""The apps on Flower's own engines: a Ray simulation on this machine, or a run on a SuperLink."""

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
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedortho.errors import FedOrthoError
from fedortho.federated import SWITCHES, switch_off

logger = logging.getLogger(__name__)
Scalar = bool | int | float | str
CONNECTION = "fedortho"  # what a deployment's config.toml calls its SuperLink
POLL_SECONDS = 3.0
SHORT = "/tmp" if os.path.isdir("/tmp") else None  # Ray's sockets need a short path
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def need_flower() -> None:
    """Refuse to go on without Flower, and say how to get it."""
    if importlib.util.find_spec("flwr") is None:
        raise FedOrthoError("Flower is not installed; run: pip install 'fedortho[federated]'")


def simulate(server: Any, client: Any, *, clients: int, threads: int, workers: int) -> None:
    """Run two Flower apps on Ray, `workers` clients at a time, and leave no process and no file behind."""
    switch_off(os.environ)
    # Deprecated in favour of `flwr run`; but that leaves a SuperLink running, which takes code from whoever reaches
    # its port. In 1.41 this is the only call that ends when the server does.
    from flwr.simulation import run_simulation

    over = threading.Event()
    outcome: list[BaseException | None] = []
    with _ray_settings(threads) as scratch, _gentle_interrupt(over):
        start = {"address": "local", "num_cpus": workers, "_temp_dir": scratch}
        shares = {"num_cpus": 1, "num_gpus": 0.0}  # Flower's 2 makes one worker of two cores
        resources: dict[str, Any] = {"init_args": start, "client_resources": shares}
        try:
            run_simulation(_guarded(server, over, outcome), client, clients, backend_config=resources)
        except RuntimeError as error:
            if not outcome:
                raise FedOrthoError("Ray broke down, see the log above; use another --engine") from error
        finally:
            interrupted = over.is_set()
            over.set()
    if interrupted:
        raise KeyboardInterrupt
    if not outcome:
        raise FedOrthoError("the simulation ended before its server did; see the log above")
    if outcome[0] is not None:
        raise outcome[0]


def _guarded(server: Any, over: threading.Event, outcome: list[BaseException | None]) -> Any:
    """The server's app, telling how it ended; Flower runs it in a thread, which must not outlive Ray."""
    from flwr.serverapp import ServerApp

    guarded = ServerApp()

    @guarded.main()
    def main(grid: Any, context: Any) -> None:
        for name in ("pull_messages", "get_node_ids"):  # a server that waits for clients calls one of these
            setattr(grid, name, _unless(over, getattr(grid, name)))
        try:
            server(grid, context)
            outcome.append(None)
        except BaseException as error:
            outcome.append(error)

    return guarded


def _unless(over: threading.Event, call: Callable[..., Any]) -> Callable[..., Any]:
    def checked(*given: Any) -> Any:
        if over.is_set():
            raise FedOrthoError("the simulation was stopped")
        return call(*given)

    return checked


@contextmanager
def _gentle_interrupt(over: threading.Event) -> Iterator[None]:
    """The first ctrl-C waits for the clients at work: Ray would hang without them. The second one kills."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        over.set()
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _ray_settings(threads: int) -> Iterator[str]:
    """A directory for Ray, with logs that may quote clients' errors, and its environment; all gone at the end."""
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
        with tempfile.TemporaryDirectory(prefix="fo-ray-", dir=SHORT, ignore_cleanup_errors=True) as scratch:
            yield scratch
    finally:
        log.setLevel(level)
        os.environ.clear()
        os.environ.update(before)


@functools.cache
def _ray_token() -> str:
    """The same for all simulations of this process: Ray reads it once."""
    return secrets.token_hex(32)


def connection_toml(link: str, certificate: Path | None) -> str:
    """What `flwr` reads from FLWR_HOME: where the SuperLink is and who vouches for it."""
    path = json.dumps(str(certificate), ensure_ascii=False)  # quoted as TOML wants it
    trust = "insecure = true" if certificate is None else f"root-certificates = {path}"
    return f"[superlink]\ndefault = '{CONNECTION}'\n\n[superlink.{CONNECTION}]\naddress = '{link}'\n{trust}\n"


def submit(deployment: Path, config: Mapping[str, Scalar], *, say: Callable[[str], None] = logger.info) -> None:
    """Run the apps on a deployment's SuperLink, hand its log to `say` line by line, and wait for the end.

    Interrupted, it stops the run as well.
    """
    need_flower()
    link, certificate = _read_deployment(deployment, config)
    with tempfile.TemporaryDirectory(prefix="fedortho-flwr-") as folder:
        flower = _Flower(Path(folder), link)
        (flower.home / "config.toml").write_text(connection_toml(link, certificate), encoding="utf-8")
        run = flower.start(deployment / "app", config)
        try:
            flower.follow(run, say)
            status, details = flower.wait(run)
        except BaseException:
            flower.call("stop", run, CONNECTION)
            raise
    if status != "finished:completed":
        said = details.removeprefix("ServerApp failed with exception: ")
        raise FedOrthoError(f"{said} (run {run} on the SuperLink at {link}, {status.replace(':', ', ')})")


def _read_deployment(folder: Path, config: Mapping[str, Scalar]) -> tuple[str, Path | None]:
    """Where its SuperLink is and which certificate it trusts; refused if its app cannot take `config`."""
    try:
        connection = tomllib.loads((folder / "config.toml").read_text(encoding="utf-8"))["superlink"][CONNECTION]
        project = tomllib.loads((folder / "app" / "pyproject.toml").read_text(encoding="utf-8"))
        known = project["tool"]["flwr"]["app"]["config"]
        certificate = None if connection.get("insecure") else folder.absolute() / "ca.crt"  # wherever it now lies
        link = str(connection["address"])
    except (OSError, KeyError, tomllib.TOMLDecodeError) as error:
        raise FedOrthoError(f"{folder} is not a deployment ({error}); write one with fedortho deploy") from error
    if certificate is not None and not certificate.is_file():
        raise FedOrthoError(f"there is no {certificate}: copy it from the folder that fedortho deploy wrote")
    if strange := sorted(set(config) - set(known)):
        raise FedOrthoError(
            f"the app in {folder / 'app'} has no setting {strange[0]!r}: another version of fedortho wrote it; "
            "write a new deployment and copy its app/ over this one"
        )
    return link, certificate


@dataclass(frozen=True)
class _Flower:
    """The `flwr` command with a home of its own, so that nobody's ~/.flwr is read or written."""

    home: Path
    link: str

    def start(self, app: Path, config: Mapping[str, Scalar]) -> str:
        import tomli_w  # comes with flwr

        overrides = self.home / "run.toml"  # a file: as an argument, a string with both kinds of quotes is refused
        overrides.write_text(tomli_w.dumps(dict(config)), encoding="utf-8")
        answer = self.call("run", str(app), CONNECTION, "--run-config", str(overrides))
        if not answer.get("success"):
            raise FedOrthoError(
                f"the SuperLink at {self.link} did not take the run ({_line(answer.get('error-message'))}); "
                "is superlink.sh running there, and can this machine reach it?"
            )
        return str(answer["run-id"])

    def follow(self, run: str, say: Callable[[str], None]) -> None:
        """Hand on the run's log until it ends, or the connection does."""
        process = self._process("log", run, CONNECTION, "--stream")
        try:
            for line in process.stdout or ():
                text = COLOUR.sub("", line).rstrip()
                if text not in ("", "INFO :"):
                    say(text)
        finally:
            process.terminate()
            process.communicate()

    def wait(self, run: str, patience: int = 20) -> tuple[str, str]:
        """How the run ended, as `flwr run` never tells; the SuperLink may be away for `patience` questions in a row."""
        silent = 0
        while silent < patience:
            answer = self.call("list", CONNECTION, "--run-id", run)
            silent = 0 if answer.get("success") else silent + 1
            found = answer["runs"][0] if not silent else {"status": "unknown"}
            if found["status"].startswith("finished"):
                return str(found["status"]), str(found["status-details"])
            time.sleep(POLL_SECONDS)
        raise FedOrthoError(f"the SuperLink at {self.link} no longer answers; run {run} cannot be followed")

    def call(self, *arguments: str) -> dict[str, Any]:
        """What `flwr` answers, as JSON."""
        output, _ = (process := self._process(*arguments, "--format", "json")).communicate()
        try:
            return dict(json.loads(output[output.index("{") :]))
        except ValueError:
            return {"success": False, "error-message": output or f"exit code {process.returncode}"}

    def _process(self, *arguments: str) -> subprocess.Popen[str]:
        places = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        command = [shutil.which("flwr", path=places) or "flwr", *arguments]
        environ = os.environ | SWITCHES | {"FLWR_HOME": str(self.home), "PYTHONUNBUFFERED": "1"}
        pipe, same = subprocess.PIPE, subprocess.STDOUT
        return subprocess.Popen(command, env=environ, stdout=pipe, stderr=same, encoding="utf-8", errors="replace")


def _line(text: object) -> str:
    """The beginning of a long message, on one line."""
    return " ".join(str(text).split())[:300]
