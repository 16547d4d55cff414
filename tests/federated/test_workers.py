import io
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small import SETTINGS

from fedortho.federated.local_grid import WorkerGrid
from fedortho.federated.server import federated_engine, local_grid
from fedortho.federated.workers import receive, send
from fedortho.models.zoo import build_model
from fedortho.runs.run import load_run_data
from fedortho.runs.settings import FederateSettings
from fedortho.statistics.query import Query, Selection, Statistic
from fedortho.storage.files import tensors_digest

CLIENTS = replace(
    SETTINGS, clients=4, fraction=1.0, threads=1, timeout=120.0
)  # processes start slowly on a busy machine


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch, own_cache: Path) -> None:
    """The processes must find small.TinyNet as this one does."""
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    )


def trained(settings: FederateSettings, store: Path, workers: int) -> tuple[str, list[float], int]:
    """Digest after two rounds, sums of all clients, and bytes up."""
    with local_grid(settings, store, workers) as grid:
        engine = federated_engine(grid, settings, load_run_data(settings))
        model = build_model(settings.model, num_classes=10, channels=1)
        model = engine.fit(model, Selection(), replace(settings.recipe, epochs=2))
        engine.send_model(model)
        ((seen,),) = engine.measure(model, [Query((Selection(),), Statistic("peaks"))])
        sums = torch.cat([value.flatten() for value in seen.sums.values()]).tolist()
        return tensors_digest(model.state_dict()), sums, engine.tally.bytes_up


def test_clients_in_several_processes_give_the_same_bytes_as_one_after_the_other(tmp_path: Path) -> None:
    here = trained(CLIENTS, tmp_path / "here", 1)
    assert trained(CLIENTS, tmp_path / "there", 2) == here


def test_a_process_that_dies_costs_one_answer_and_is_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with local_grid(CLIENTS, tmp_path / "clients", 2) as grid:
        assert isinstance(grid, WorkerGrid)
        engine = federated_engine(grid, CLIENTS, load_run_data(CLIENTS))
        model = build_model(CLIENTS.model, num_classes=10, channels=1)
        victim = grid._workers[0]._process
        assert victim is not None
        os.kill(victim.pid, signal.SIGKILL)
        victim.wait()
        engine.fit(model, Selection(), replace(CLIENTS.recipe, epochs=2))
        failed = [exchange.failed for exchange in engine.transport.log]
    assert [len(clients) for clients in failed] == [0, 1, 0], "greeting, first round, second round"
    assert "its own log says why" in caplog.text


def test_a_client_that_hangs_is_given_up_and_its_process_replaced(tmp_path: Path) -> None:
    with local_grid(CLIENTS, tmp_path / "clients", 2) as grid:
        assert isinstance(grid, WorkerGrid)
        engine = federated_engine(grid, CLIENTS, load_run_data(CLIENTS))
        hung = grid._workers[0]._process
        assert hung is not None
        os.kill(hung.pid, signal.SIGSTOP)
        engine.transport.timeout = 6.0
        model = build_model(CLIENTS.model, num_classes=10, channels=1)
        engine.fit(model, Selection(), replace(CLIENTS.recipe, epochs=1))
        engine.transport.timeout = CLIENTS.timeout
        engine.fit(model, Selection(), replace(CLIENTS.recipe, epochs=1))
        failed = [exchange.failed for exchange in engine.transport.log]
    assert [len(clients) for clients in failed] == [0, 1, 0]
    assert hung.poll() is not None


def test_the_text_of_an_error_stays_in_its_process(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with local_grid(CLIENTS, tmp_path / "clients", 2) as grid:
        engine = federated_engine(grid, CLIENTS, load_run_data(CLIENTS))
        (tmp_path / "clients" / "client-2").mkdir(parents=True)
        (tmp_path / "clients" / "client-2" / "state.json").write_text("a secret of client 2")
        engine.fit(
            build_model(CLIENTS.model, num_classes=10, channels=1), Selection(), replace(CLIENTS.recipe, epochs=1)
        )
        assert set(engine.transport.log[-1].failed) == {2}
    assert "secret" not in caplog.text


def test_frames_survive_the_pipe_and_its_end_is_told() -> None:
    pipe = io.BytesIO()
    tied = torch.arange(4.0)
    send(pipe, {"word": "ä"}, {"a": tied, "b": tied, "c": torch.zeros(0)})
    pipe.seek(0)
    note, tensors = receive(pipe)
    assert note == {"word": "ä"}
    assert tensors["b"].equal(tied)
    assert tensors["c"].shape == (0,)
    with pytest.raises(EOFError):
        receive(pipe)
