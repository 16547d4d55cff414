"""The driver of a SuperLink under faults, with a `flwr` command that behaves as a test says."""

import stat
import sys
import time
from pathlib import Path

import pytest

from fedortho.errors import BadSetting, FedOrthoError
from fedortho.federated import deploy, launch

pytest.importorskip("flwr")

FLWR = """#!{python}
import json, pathlib, sys
home = pathlib.Path({home!r})
calls = home / "calls"
with calls.open("a") as log:
    print(*sys.argv[1:], file=log)
done = [line.split()[0] for line in calls.read_text().splitlines()]
if sys.argv[1] == "run":
    print(json.dumps({{"success": True, "run-id": "7"}}))
elif sys.argv[1] == "list":
    states = {states!r}
    state = states[min(done.count("list"), len(states)) - 1]
    runs = [{{"status": state, "status-details": "it said so"}}]
    print(json.dumps({{"success": bool(state), "runs": runs}}))
elif sys.argv[1] == "log":
    print("\\n".join({lines!r}[: 2 * done.count("log")]))
"""


def prepare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, states: list[str], lines: list[str]) -> tuple[Path, Path]:
    """A deployment, and the calls of a false `flwr` whose runs have these states; each stream has two lines more."""
    command, folder = tmp_path / "flwr", tmp_path / "link"
    command.write_text(FLWR.format(python=sys.executable, home=str(tmp_path), states=states, lines=lines))
    command.chmod(command.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(launch.shutil, "which", lambda *_, **__: str(command))
    monkeypatch.setattr(launch, "POLL_SECONDS", 0.01)
    deploy.write_deployment(folder, nodes=1, address="127.0.0.1", insecure=True, config={"timeout": 600.0})
    return folder, tmp_path / "calls"


def test_a_log_that_breaks_is_followed_again_and_no_line_is_said_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = ["pending", "starting", "running", "running", "", "running", "finished:completed"]
    folder, _ = prepare(tmp_path, monkeypatch, states, ["one", "two", "three", "four", "five"])
    said: list[str] = []
    launch.submit(folder, {"timeout": 60.0}, say=said.append)
    assert said == ["one", "two", "three", "four", "five"]


def test_a_run_that_never_starts_is_given_up_and_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, calls = prepare(tmp_path, monkeypatch, ["pending"], [])
    started = time.monotonic()
    with pytest.raises(FedOrthoError, match=r"run 7 .* is pending after 0.2 s and was given up.*--timeout"):
        launch.submit(folder, {"timeout": 0.2})
    assert time.monotonic() - started < 30
    assert calls.read_text().splitlines()[-1].startswith("stop 7")


def test_a_superlink_that_falls_silent_and_a_run_that_fails_are_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "PATIENCE", 2)
    folder, _ = prepare(tmp_path, monkeypatch, ["running", ""], ["one"])
    with pytest.raises(FedOrthoError, match="no longer answers; run 7 cannot be followed"):
        launch.submit(folder, {"timeout": 60.0})
    (tmp_path / "other").mkdir()
    folder, _ = prepare(tmp_path / "other", monkeypatch, ["running", "finished:failed"], ["one"])
    with pytest.raises(FedOrthoError, match=r"it said so \(run 7 on the SuperLink .* finished, failed\)"):
        launch.submit(folder, {"timeout": 60.0})


def test_ports_of_nodes_are_chosen_and_checked(tmp_path: Path) -> None:
    how = {"nodes": 2, "address": "127.0.0.1", "insecure": True, "config": {}}
    deploy.write_deployment(tmp_path / "link", node_port=20100, **how)  # type: ignore[arg-type]
    assert '--port "${FEDORTHO_PORT:-20101}"' in (tmp_path / "link" / "node-1.sh").read_text()
    with pytest.raises(BadSetting, match="--node-port is 65535; it must be 1 to 65534"):
        deploy.write_deployment(tmp_path / "other", node_port=65535, **how)  # type: ignore[arg-type]
