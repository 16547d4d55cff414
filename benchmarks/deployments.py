"""A federation as real processes on this machine, which are started, stopped and killed; for tests and `kills.py`."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedortho.federated.deploy import write_deployment
from fedortho.storage.records import Scalar


def free_ports(number: int) -> int:
    """The first of so many free ports in a row."""
    for first in range(20000 + os.getpid() % 9000, 32000, number):
        try:
            for port in range(first, first + number):
                with socket.socket() as candidate:
                    candidate.bind(("127.0.0.1", port))
        except OSError:
            continue
        return first
    raise RuntimeError("no free ports")


def wait_for_port(port: int, seconds: float) -> None:
    """Return when somebody listens on the port."""
    until = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            if time.monotonic() > until:
                raise TimeoutError(f"nobody listens on {port}") from None
            time.sleep(0.5)
        else:
            return


def left_behind(marks: Sequence[str]) -> list[str]:
    """Processes whose command line contains one of the marks."""
    lines = subprocess.run(["ps", "axww", "-o", "stat=,command="], check=True, capture_output=True, text=True).stdout
    return [line for line in lines.splitlines() if not line.startswith("Z") and any(mark in line for mark in marks)]


@dataclass
class Deployment:
    """A SuperLink and nodes, started by the scripts that `fedortho deploy` writes; without keys unless `secure`."""

    folder: Path
    clients: int
    config: Mapping[str, Scalar]
    secure: bool = False
    environ: dict[str, str] = field(default_factory=dict)
    running: dict[str, subprocess.Popen[bytes]] = field(init=False, default_factory=dict)
    logged: dict[str, int] = field(init=False, default_factory=dict)  # characters in a log before the last start

    def __post_init__(self) -> None:
        self.port = free_ports(self.clients + 2)  # one more for a further node
        ports: dict[str, Any] = {"port": self.port, "node_port": self.port + 1, "insecure": not self.secure}
        write_deployment(self.folder, nodes=self.clients, address="127.0.0.1", **ports, config=self.config)
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self.environ = os.environ | {"PATH": path, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} | self.environ

    def start(self, name: str = "superlink", script: str = "", **environ: str) -> None:
        """Start a script, by default the one of this name, in a session of its own; a SuperLink is waited for."""
        self.logged[name] = len(self.log(name))
        with (self.folder / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                [str(self.folder / f"{script or name}.sh")],
                env=self.environ | environ,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        if name == "superlink":
            wait_for_port(self.port, 400)
            if self.secure:
                register = [str(self.folder / "register.sh")]
                subprocess.run(register, env=self.environ, check=True, timeout=120, stdout=subprocess.DEVNULL)

    def wait_for_node(self, name: str, seconds: float) -> None:
        """Return when a node that was started has joined the SuperLink."""
        until = time.monotonic() + seconds
        while "SuperNode ID" not in self.log(name)[self.logged[name] :]:
            if time.monotonic() > until:
                raise TimeoutError(f"{name} has not joined")
            time.sleep(0.5)

    def store(self, client: int) -> Path:
        return self.folder / f"node-{client}" / "store"

    def signal(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a process that was started here a signal; a killed one is waited for."""
        self.running[name].send_signal(number)
        if number == signal.SIGKILL:
            self.running.pop(name).wait()

    def helper(self, program: str, name: str) -> int | None:
        """The process of a Flower program that works for the SuperLink or a node, such as flwr-serverapp."""
        port = self.port if name == "superlink" else self.port + 1 + int(name.removeprefix("node-"))
        for process, words in self._processes():
            if any(word.endswith(f"/{program}") for word in words) and f"127.0.0.1:{port}" in words:
                return process
        return None

    def _processes(self) -> Iterator[tuple[int, list[str]]]:
        """All processes of this deployment that still run: they name its folder or one of its ports."""
        marks = [f"127.0.0.1:{self.port + place}" for place in range(self.clients + 2)] + [str(self.folder)]
        for entry in Path("/proc").iterdir():
            with suppress(OSError, ValueError):
                words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
                if int(entry.name) != os.getpid() and any(mark in word for word in words for mark in marks):
                    yield int(entry.name), words

    def log(self, name: str) -> str:
        """What a process has written; empty before its first start."""
        path = self.folder / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def close(self) -> None:
        """End every process of the deployment."""
        for process in self.running.values():
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
                process.terminate()
        until = time.monotonic() + 20
        while (left := list(self._processes())) and time.monotonic() < until:
            for process in self.running.values():
                process.poll()
            time.sleep(0.5)
        for number, _ in left:
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)


@contextmanager
def deployed(
    folder: Path,
    clients: int,
    config: Mapping[str, Scalar],
    *,
    secure: bool = False,
    started: int | None = None,
    **environ: str,
) -> Iterator[Deployment]:
    """A deployment that runs, with all its nodes or the first `started`, and is ended with the block."""
    deployment = Deployment(folder, clients, config, secure, environ)
    try:
        for name in ("superlink", *(f"node-{number}" for number in range(clients)[:started])):
            deployment.start(name)
        yield deployment
    finally:
        deployment.close()


@dataclass
class Driver:
    """A `fedortho` command that works on a deployment."""

    words: Sequence[str]
    deployment: Deployment
    log: Path
    backend: str = "superlink"  # "": a command that has no such flag

    def __post_init__(self) -> None:
        program = shutil.which("fedortho", path=str(Path(sys.executable).parent)) or "fedortho"
        where = [*(["--backend", self.backend] if self.backend else []), "--deployment", str(self.deployment.folder)]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [program, *self.words, *where],
                env=self.deployment.environ,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self, seconds: float, until: Callable[[], bool] = lambda: False) -> int | None:
        """The exit code; None: it still runs after so many seconds, or when `until` holds."""
        end = time.monotonic() + seconds
        while self.process.poll() is None and time.monotonic() < end and not until():
            time.sleep(0.2)
        return self.process.poll()

    def kill(self) -> None:
        """Kill the command and the `flwr` commands that it has started, as the end of a terminal or a machine does."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    @property
    def said(self) -> str:
        """Its last line of output that is an error of ours; empty: there is none."""
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.startswith("error:")]
        return lines[-1] if lines else ""
