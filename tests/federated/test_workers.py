import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path

import pytest
import torch
from flwr.serverapp import Grid
from small import SETTINGS
from torch import nn

from fedortho.engines.query import Query, Selection, Statistic
from fedortho.federated.engine import FederatedEngine
from fedortho.federated.local_grid import WorkerGrid
from fedortho.federated.server import federated_engine, local_grid
from fedortho.federated.workers import receive, send
from fedortho.models.zoo import build_model
from fedortho.runs.run import load_run_data
from fedortho.storage.files import tensors_digest

CLIENTS = replace(SETTINGS, timeout=120.0)  # processes start slowly on a busy machine


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory, own_cache: Path) -> Iterator[WorkerGrid]:
    """Four clients in two processes, for all tests here: each process takes seconds to import its libraries."""
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", path)  # the processes import small.TinyNet
        with local_grid(CLIENTS, tmp_path_factory.mktemp("workers"), 2) as grid:
            assert isinstance(grid, WorkerGrid)
            yield grid


def engine_over(grid: Grid) -> FederatedEngine:
    return federated_engine(grid, CLIENTS, load_run_data(CLIENTS))


def train(engine: FederatedEngine, rounds: int) -> nn.Module:
    model = build_model(CLIENTS.model, num_classes=10, channels=1)
    return engine.fit(model, Selection(), replace(CLIENTS.recipe, epochs=rounds))


def failures(engine: FederatedEngine) -> list[int]:
    """How many clients failed in each exchange."""
    return [len(exchange.failed) for exchange in engine.transport.log]


def results(grid: Grid) -> tuple[str, list[float], int]:
    """Digest of the model after two rounds, sums of all clients, and bytes up."""
    engine = engine_over(grid)
    model = train(engine, 2)
    engine.send_model(model)
    ((seen,),) = engine.measure(model, [Query((Selection(),), Statistic("peaks"))])
    sums = torch.cat([value.flatten() for value in seen.sums.values()]).tolist()
    return tensors_digest(model.state_dict()), sums, engine.tally.bytes_up


def test_clients_in_several_processes_give_the_same_bytes_as_one_after_the_other(
    grid: WorkerGrid, tmp_path: Path
) -> None:
    with local_grid(CLIENTS, tmp_path / "clients") as one_process:
        assert results(grid) == results(one_process)


@pytest.mark.slow
def test_a_process_that_dies_costs_one_answer_and_is_replaced(
    grid: WorkerGrid, caplog: pytest.LogCaptureFixture
) -> None:
    engine = engine_over(grid)
    victim = grid._workers[0]._process
    assert victim is not None
    os.kill(victim.pid, signal.SIGKILL)
    victim.wait()
    train(engine, 2)
    assert failures(engine) == [0, 1, 0], "greeting, first round, second round"
    assert "its own log says why" in caplog.text


@pytest.mark.slow
def test_a_client_that_hangs_is_given_up_and_its_process_replaced(grid: WorkerGrid) -> None:
    engine = engine_over(grid)
    hung = grid._workers[0]._process
    assert hung is not None
    os.kill(hung.pid, signal.SIGSTOP)
    engine.transport.timeout = 6.0
    train(engine, 1)
    engine.transport.timeout = CLIENTS.timeout
    train(engine, 1)
    assert failures(engine) == [0, 1, 0]
    assert hung.poll() is not None


def test_the_text_of_an_error_stays_in_its_process(grid: WorkerGrid, caplog: pytest.LogCaptureFixture) -> None:
    engine = engine_over(grid)
    state = Path(grid._node_config["store"]) / "client-2" / "state.json"
    state.parent.mkdir(parents=True, exist_ok=True)
    state.write_text("a secret of client 2")
    train(engine, 1)
    assert set(engine.transport.log[-1].failed) == {2}
    assert "secret" not in caplog.text
    state.unlink()


def test_frames_survive_the_pipe_and_its_end_is_told() -> None:
    mine, theirs = Pipe()
    tied = torch.arange(4.0)
    send(mine, {"word": "ä"}, {"a": tied, "b": tied, "c": torch.zeros(0)})
    mine.close()
    note, tensors = receive(theirs)
    assert note == {"word": "ä"}
    assert tensors["b"].equal(tied)
    assert tensors["c"].shape == (0,)
    with pytest.raises(EOFError):
        receive(theirs)
