"""The same federation on Flower's own engines: equal weights, errors that come back, nothing left running."""

import os
import signal
import time
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from deployments import deployed, free_ports, left_behind

from fedortho.data.request import ForgetRequest
from fedortho.errors import FedOrthoError
from fedortho.federated import SWITCHES, deploy, launch
from fedortho.federated.server import train_federation
from fedortho.methods.hide import Hide
from fedortho.requests.federated_jobs import app_config, run_ray
from fedortho.requests.forgetting import forget_federated_run
from fedortho.runs.run import open_run
from fedortho.runs.settings import FederateSettings

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # warnings of Ray and Flower themselves
]
CLIENTS = 3
REQUEST = "class:3"
SETTINGS = FederateSettings(
    data="digits", model="vgg-mini", device="cpu", threads=1, clients=CLIENTS, rounds=2, fraction=1.0, epochs=2,
    batch_size=32, lr=0.05, flip=0.0, crop=1, timeout=150.0, quorum=1.0,
)  # fmt: skip
needs_ray = pytest.mark.skipif(
    find_spec("ray") is None, reason="Ray is not installed: pip install 'fedortho[simulation]'"
)


def job(**given: launch.Scalar) -> dict[str, launch.Scalar]:
    return app_config(SETTINGS) | given


def digest(run: Path) -> str:
    return str(open_run(run).record.model.digest)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Digests in this process: after training, and after forgetting a class."""
    place = tmp_path_factory.mktemp("here")
    run = train_federation(place / "run", SETTINGS)
    forget_federated_run(run, ForgetRequest.parse(REQUEST), Hide(), out=place / "forgot")
    return digest(place / "run"), digest(place / "forgot")


@needs_ray
def test_ray_trains_and_forgets_to_the_same_weights_as_this_process(tmp_path: Path, expected: tuple[str, str]) -> None:
    before, store = dict(os.environ), tmp_path / "clients"
    ray = {"clients": CLIENTS, "store": store, "threads": 1}
    run_ray(job(out=str(tmp_path / "run")), **ray)
    run_ray(job(do="forget", run=str(tmp_path / "run"), request=REQUEST, out=str(tmp_path / "forgot")), **ray)
    assert (digest(tmp_path / "run"), digest(tmp_path / "forgot")) == expected
    ours = {"RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}  # Flower sets it when it is imported
    assert dict(os.environ) == before | SWITCHES | ours, "the environment is put back"
    assert not list(Path("/tmp").glob("fo-ray-*")), "Ray's files are removed"
    assert not left_behind(("raylet", "gcs_server"))


@needs_ray
def test_what_the_server_raises_under_ray_is_raised_here(tmp_path: Path) -> None:
    with pytest.raises(FedOrthoError, match="dance"):
        run_ray(job(do="dance"), clients=CLIENTS, store=tmp_path, threads=1)


@needs_ray
def test_ctrl_c_ends_a_simulation_whose_clients_are_at_work() -> None:
    from flwr.app import Message, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp

    client, server = ClientApp(), ServerApp()

    @client.query("wait")
    def wait(message: Message, context: Any) -> Message:
        time.sleep(15)
        return Message(RecordDict(), reply_to=message)

    @server.main()
    def main(grid: Any, context: Any) -> None:
        while not (nodes := list(grid.get_node_ids())):
            time.sleep(0.1)
        asked = grid.push_messages([Message(RecordDict(), nodes[0], "query.wait")])
        time.sleep(12)
        os.kill(os.getpid(), signal.SIGINT)
        while True:
            grid.pull_messages(asked)
            time.sleep(0.1)

    with pytest.raises(KeyboardInterrupt):
        launch.simulate(server, client, clients=1, threads=1, workers=1)
    assert not left_behind(("raylet", "gcs_server"))


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A SuperLink and three nodes on this machine, with TLS and keys, started by the scripts that deploy writes."""
    folder = tmp_path_factory.mktemp("link") / "a deployment"
    cache = str(tmp_path_factory.getbasetemp() / "cache")
    with deployed(folder, CLIENTS, job(), secure=True, FEDORTHO_CACHE=cache):
        yield folder
    assert not left_behind((str(folder),)), "every process of the deployment has ended"


def submitted(folder: Path, config: Mapping[str, launch.Scalar], seconds: float) -> list[str]:
    """The run's log, or a failure if it takes longer than it may."""
    lines: list[str] = []

    def late(*_: Any) -> None:
        raise TimeoutError("the run takes too long:\n" + "\n".join(lines[-20:]))

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        launch.submit(folder, config, say=lines.append)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    return lines


def test_a_superlink_trains_and_forgets_to_the_same_weights_as_this_process(
    tmp_path: Path, deployment: Path, expected: tuple[str, str]
) -> None:
    run, forgot = tmp_path / 'it\'s a "run"', tmp_path / "forgot"
    submitted(deployment, job(out=str(run)), 400)
    submitted(deployment, job(do="forget", run=str(run), request=REQUEST, out=str(forgot)), 400)
    assert (digest(run), digest(forgot)) == expected


def test_what_the_server_raises_on_a_superlink_is_raised_here(deployment: Path) -> None:
    with pytest.raises(FedOrthoError, match=r"^no job 'dance'; choose from .*\(run \d+ on the SuperLink at"):
        submitted(deployment, job(do="dance"), 90)


def test_a_superlink_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    port = free_ports(1)
    deploy.write_deployment(tmp_path / "link", nodes=1, address="127.0.0.1", port=port, config=job())
    with pytest.raises(FedOrthoError, match=r"superlink\.sh running") as caught:
        launch.submit(tmp_path / "link", job())
    assert "\n" not in str(caught.value)
