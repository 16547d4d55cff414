"""Requests on a federation with real clients: at once, interrupted, and refused by those who have forgotten more."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from flwr.serverapp import Grid
from small import SETTINGS

from fedortho.data.request import ForgetRequest
from fedortho.errors import Busy, FedOrthoError
from fedortho.federated.server import local_grid, sync, train_federation
from fedortho.methods import unlearn
from fedortho.methods.hide import Hide
from fedortho.methods.paper import Paper
from fedortho.requests.federated_jobs import do_job
from fedortho.requests.forgetting import forget_federated_run
from fedortho.requests.transaction import Step
from fedortho.runs.run import Run, open_run
from fedortho.storage.files import read_json
from fedortho.storage.journal import read_journal

THREE, FIVE = ForgetRequest.parse("class:3"), ForgetRequest.parse("class:5")
CHANGED = replace(SETTINGS, model="small:SmallNet", rounds=2, timeout=0.5)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train_federation(tmp_path_factory.mktemp("jobs") / "run", CHANGED)


@pytest.fixture
def grid(trained: Run, tmp_path: Path) -> Iterator[Grid]:
    """Clients whose files no server has: to it they are real."""
    clients = shutil.copytree(trained.path / "clients", tmp_path / "clients")
    with local_grid(CHANGED, clients, run=trained.path) as grid:
        yield grid


def copied(run: Run, to: Path) -> Run:
    return open_run(shutil.copytree(run.path, to / "run"))


def forgotten(tmp_path: Path) -> list[set[str]]:
    """The classes that each client has forgotten."""
    states = [read_json(path) for path in sorted((tmp_path / "clients").glob("client-*/state.json"))]
    return [{name for request in state["forgotten"] for name in request["classes"]} for state in states]


def events(directory: Path) -> list[str]:
    return [entry.event for entry in read_journal(directory).entries]


def test_a_run_that_forgot_less_than_the_clients_is_not_taken_by_them(trained: Run, grid: Grid, tmp_path: Path) -> None:
    run = copied(trained, tmp_path)
    forget_federated_run(run, THREE, Paper(ratio=0.3), grid, out=tmp_path / "three")
    other = forget_federated_run(run, FIVE, Paper(ratio=0.3), out=tmp_path / "five").run  # on simulated clients
    assert other is not None
    assert other.record.model.digest != open_run(tmp_path / "three").record.model.digest
    with pytest.raises(FedOrthoError, match=r"forgotten class:3.*do not cover"):
        sync(other, grid)
    assert forgotten(tmp_path) == [{"3"}] * 4
    three = open_run(tmp_path / "three")
    assert sync(three, grid) == [0, 1, 2, 3]


def test_one_of_two_requests_at_once_is_refused_by_the_lock(trained: Run, grid: Grid, tmp_path: Path) -> None:
    run = copied(trained, tmp_path)

    def meanwhile(_: object) -> None:
        with pytest.raises(Busy, match="another job"):
            forget_federated_run(run, FIVE, Paper(ratio=0.3), grid, out=tmp_path / "five")
        with pytest.raises(Busy, match="another job"):
            sync(run, grid)

    forget_federated_run(run, THREE, Paper(ratio=0.3), grid, out=tmp_path / "three", step=Step(accept=meanwhile))
    assert events(tmp_path) == ["received", "executed"]
    assert forgotten(tmp_path) == [{"3"}] * 4


def test_a_request_that_no_client_took_is_not_executed_and_leaves_no_run(
    trained: Run, grid: Grid, tmp_path: Path
) -> None:
    """Two servers with directories of their own, which no lock joins, ask the same clients."""
    first, second = copied(trained, tmp_path / "a"), copied(trained, tmp_path / "b")

    def meanwhile(_: object) -> None:
        forget_federated_run(first, THREE, Paper(ratio=0.3), grid, out=tmp_path / "a" / "three")

    with pytest.raises(FedOrthoError, match="no client took the patch"):
        forget_federated_run(
            second, FIVE, Paper(ratio=0.3), grid, out=tmp_path / "b" / "five", step=Step(accept=meanwhile)
        )
    assert events(tmp_path / "a") == ["received", "executed"]
    assert events(tmp_path / "b") == ["received", "refused"]
    assert not (tmp_path / "b" / "five").exists()
    assert forgotten(tmp_path) == [{"3"}] * 4


def test_a_request_that_too_few_took_is_executed_when_sync_completes_it(
    trained: Run, grid: Grid, tmp_path: Path
) -> None:
    run = copied(trained, tmp_path)

    def vanish(_: object) -> None:
        grid.silent = {1, 2, 3}  # type: ignore[attr-defined]

    with pytest.raises(FedOrthoError, match=r"1 of 4 clients.*fedortho sync"):
        forget_federated_run(run, THREE, Paper(ratio=0.3), grid, out=tmp_path / "three", step=Step(accept=vanish))
    assert events(tmp_path) == ["received", "unconfirmed"]
    grid.silent = set()  # type: ignore[attr-defined]
    three = open_run(tmp_path / "three")
    assert three.record.requests[-1].confirmed == (0,)
    assert sync(three, grid) == [0, 1, 2, 3]
    assert events(tmp_path) == ["received", "unconfirmed", "executed"]
    assert open_run(tmp_path / "three").record.requests[-1].confirmed == (0, 1, 2, 3)
    sync(three, grid)
    assert events(tmp_path) == ["received", "unconfirmed", "executed"], "once"


def test_the_same_job_again_sends_what_clients_missed_and_is_not_refused(
    trained: Run, grid: Grid, tmp_path: Path
) -> None:
    run = copied(trained, tmp_path)
    config = {"do": "forget", "run": str(run.path), "request": str(THREE), "out": str(tmp_path / "three")}
    config |= {"method": "paper", "forget": json.dumps({"ratio": 0.3})}
    grid.silent = {2}  # type: ignore[attr-defined]
    do_job(grid, config)
    assert forgotten(tmp_path)[2] == set()
    grid.silent = set()  # type: ignore[attr-defined]
    do_job(grid, config)
    assert forgotten(tmp_path) == [{"3"}] * 4
    assert events(tmp_path) == ["received", "executed"]


@pytest.mark.parametrize("quorum", [1.0, pytest.param(0.5, marks=pytest.mark.slow)])
def test_the_quorum_counts_clients_that_do_not_even_say_who_they_are(
    trained: Run, grid: Grid, tmp_path: Path, quorum: float
) -> None:
    """A request was served without a client that was killed while it was greeted, whatever the quorum."""
    run = copied(trained, tmp_path)
    run = replace(run, settings=replace(run.settings, quorum=quorum))
    grid.silent = {1} if quorum == 1.0 else {1, 2, 3}  # type: ignore[attr-defined]
    with pytest.raises(FedOrthoError, match=r"only [13] of 4 clients .*see --quorum"):
        forget_federated_run(run, THREE, Paper(ratio=0.3), grid, out=tmp_path / "three")
    assert events(tmp_path) == ["received", "refused"]
    assert not (tmp_path / "three").exists()
    assert forgotten(tmp_path) == [set()] * 4
    with pytest.raises(FedOrthoError, match=r"only [13] of 4 clients .*see --quorum"):
        train_federation(tmp_path / "again", replace(CHANGED, quorum=quorum), grid)


def test_who_answered_and_who_confirmed_is_in_the_run_and_in_the_journal(
    trained: Run, grid: Grid, tmp_path: Path
) -> None:
    run = copied(trained, tmp_path)

    def vanish(_: object) -> None:
        grid.silent = {2}  # type: ignore[attr-defined]

    forget_federated_run(run, THREE, Paper(ratio=0.3), grid, out=tmp_path / "three", step=Step(accept=vanish))
    served = open_run(tmp_path / "three").record.requests[-1]
    assert (served.answered, served.confirmed) == ((0, 1, 2, 3), (0, 1, 3))
    details = read_journal(tmp_path).entries[-1].details
    assert (details["answered"], details["confirmed"], details["unconfirmed"]) == ("0-3", "0,1,3", "2")


def test_a_patch_that_breaks_the_budget_on_the_servers_images_is_not_sent(
    trained: Run, grid: Grid, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients that count falsely make the search end anywhere: here with nine of ten kernels."""
    run = copied(trained, tmp_path)

    def misled(model, engine, request, method, **how):  # type: ignore[no-untyped-def]
        found = unlearn(model, engine, request, Hide(ratio=0.9, repair=False), **how)
        engine.apart = {2: 9.0, 3: 1.0}
        return replace(found, settings={**found.settings, "ratio": 0.0})

    monkeypatch.setattr("fedortho.requests.forgetting.unlearn", misled)
    with pytest.raises(FedOrthoError, match=r"patch was not sent; the statistics of clients 2 stand apart"):
        forget_federated_run(run, THREE, Hide(), grid, out=tmp_path / "three")
    assert events(tmp_path) == ["received", "refused"]
    assert forgotten(tmp_path) == [set()] * 4
    assert not (tmp_path / "three").exists()
