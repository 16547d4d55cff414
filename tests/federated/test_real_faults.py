"""Faults of a federation of real processes, with TLS and keys: each ends in the same bytes or a clear refusal."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from deployments import Deployment, Driver, deployed
from process_kills import METHOD, SAME, SETTINGS, Row, campaign
from small import write_images

from fedortho.data.request import ForgetRequest
from fedortho.federated.client_state import ClientRecord
from fedortho.federated.server import train_federation
from fedortho.methods import make_method
from fedortho.requests.federated_jobs import app_config
from fedortho.requests.forgetting import forget_federated_run
from fedortho.runs.run import open_run
from fedortho.storage.journal import JournalEntry, check_journal
from fedortho.storage.records import read_record

pytestmark = pytest.mark.slow
PATIENCE = float(os.environ.get("FEDORTHO_TEST_PATIENCE", "300"))  # seconds for a request; more on a busy machine
FEDERATION = replace(SETTINGS, quorum=0.5, timeout=PATIENCE / 3)
BOTH = (0, 1)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a run that two clients trained in this process, and what forgetting makes of it here."""
    place = tmp_path_factory.mktemp("trained")
    run = train_federation(place / "run", FEDERATION)
    forget_federated_run(run, ForgetRequest.parse("class:3"), make_method("paper", METHOD), out=place / "forgot")
    return place


@pytest.fixture(scope="module")
def link(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """A SuperLink and two nodes; the third key is that of a stranger."""
    folder = tmp_path_factory.mktemp("link") / "link"
    cache = str(tmp_path_factory.getbasetemp() / "cache")
    with deployed(folder, 3, app_config(FEDERATION), secure=True, started=2, FEDORTHO_CACHE=cache) as deployment:
        for client in BOTH:
            deployment.wait_for_node(f"node-{client}", PATIENCE)
        yield deployment


@pytest.fixture
def place(trained: Path, link: Deployment, tmp_path: Path) -> Path:
    """A directory with a copy of the run, whose clients' files are in the stores of the nodes."""
    shutil.copytree(trained / "run", tmp_path / "run", ignore=shutil.ignore_patterns("clients"))
    for client in BOTH:
        shutil.rmtree(link.store(client), ignore_errors=True)
        files = trained / "run" / "clients"
        shutil.copytree(files / "models", link.store(client) / "models")
        shutil.copytree(files / f"client-{client}", link.store(client) / f"client-{client}")
    return tmp_path


def forgetting(link: Deployment, place: Path, request: str = "class:3", out: str = "forgot") -> Driver:
    words = ["forget", str(place / "run"), request, "--out", str(place / out), "--audit", "none", "--method", "paper"]
    return Driver([*words, "--ratio", str(METHOD["ratio"])], link, place / f"{out}.log")


def restart(link: Deployment, name: str, script: str = "", **environ: str) -> None:
    """Stop a node and start it by another script or with another environment."""
    link.signal(name, signal.SIGTERM)
    link.running.pop(name).wait(60)
    link.start(name, script=script, **environ)
    link.wait_for_node(name, PATIENCE)


def text(driver: Driver) -> str:
    return driver.log.read_text(errors="replace")


def ended(place: Path) -> JournalEntry:
    return check_journal(place).entries[-1]


def record(link: Deployment, client: int) -> ClientRecord:
    return read_record(ClientRecord, link.store(client) / f"client-{client}" / "state.json")


def digest(run: Path) -> str:
    return str(open_run(run).record.model.digest)


def test_processes_that_are_killed_at_random_cost_no_byte(tmp_path: Path) -> None:
    rows: list[Row] = []
    campaign(tmp_path, seed=0, until=0.0, add=rows.append)
    assert {row["what"] for row in rows} == {"training", "request"}
    assert {row["outcome"] for row in rows} == {SAME}, rows


def test_of_two_requests_at_once_one_is_served_and_the_other_is_refused(
    trained: Path, link: Deployment, place: Path
) -> None:
    first = forgetting(link, place)
    assert first.wait(PATIENCE, until=(place / "journal.jsonl").exists) is None, text(first)
    second = forgetting(link, place, "class:5", "other")
    assert second.wait(PATIENCE) == 2, text(second)
    assert "another job with the clients of" in second.said
    assert first.wait(PATIENCE) == 0, text(first)
    assert digest(place / "forgot") == digest(trained / "forgot")
    assert [str(r) for client in BOTH for r in record(link, client).forgotten] == ["class:3", "class:3"]
    assert not (place / "other").exists()


def test_a_stranger_with_a_known_number_and_a_node_whose_policy_refuses_are_named(
    link: Deployment, place: Path
) -> None:
    script = link.folder / "node-2.sh"
    stranger = link.folder / "stranger.sh"
    stranger.write_text(script.read_text().replace("partition-id=2", "partition-id=0"))
    stranger.chmod(0o755)
    restart(link, "node-1", FEDORTHO_PRIVACY="queries='train'")
    link.start("stranger")
    link.wait_for_node("stranger", PATIENCE)
    driver = forgetting(link, place)
    assert driver.wait(PATIENCE) == 0, text(driver)
    assert "calls itself client 0, which was another node with another store" in text(driver)
    assert "client 1: refuses: its node's settings do not allow it (query.observe)" in text(driver)
    assert ended(place).event == "executed"
    assert ended(place).details["answered"] == "0"
    assert ended(place).details["confirmed"] == "0,1"
    link.signal("stranger")
    restart(link, "node-1")


def test_a_hung_node_is_given_up_and_gets_the_patch_later(link: Deployment, place: Path) -> None:
    link.signal("node-1", signal.SIGSTOP)
    driver = forgetting(link, place)
    assert driver.wait(PATIENCE) == 0, text(driver)
    assert ended(place).event == "executed"
    assert ended(place).details["unconfirmed"] == "1"
    assert record(link, 1).forgotten == ()
    link.signal("node-1", signal.SIGCONT)
    time.sleep(40)  # until its heartbeat
    late = Driver(["sync", str(place / "forgot")], link, place / "sync.log", backend="")
    assert late.wait(PATIENCE) == 0, text(late)
    assert record(link, 1).model == digest(place / "forgot")


def test_a_node_with_other_data_fails_by_itself_and_says_why_in_its_own_log(link: Deployment, place: Path) -> None:
    restart(link, "node-1", FEDORTHO_DATA=str(write_images(place / "images", {"ant": 9, "bee": 9})))
    driver = forgetting(link, place)
    assert driver.wait(PATIENCE) == 0, text(driver)
    assert ended(place).details["answered"] == "0"
    assert "client 1, query.hello" in link.log("node-1")
    assert record(link, 1).forgotten == ()
    restart(link, "node-1")


def test_a_full_disk_leaves_a_client_as_it_was(link: Deployment, place: Path) -> None:
    limited = link.folder / "limited.sh"
    limited.write_text(f"#!/bin/sh\nulimit -f 1000\nexec {link.folder}/node-1.sh\n")  # below the size of the model
    limited.chmod(0o755)
    before = record(link, 1)
    restart(link, "node-1", script="limited")
    driver = forgetting(link, place)
    assert driver.wait(PATIENCE) == 0, text(driver)
    assert ended(place).details["unconfirmed"] == "1"
    assert record(link, 1) == before
    restart(link, "node-1")
    late = Driver(["sync", str(place / "forgot")], link, place / "sync.log", backend="")
    assert late.wait(PATIENCE) == 0, text(late)
    assert record(link, 1).model == digest(place / "forgot")


def test_a_node_with_a_key_that_nobody_registered_never_joins(link: Deployment) -> None:
    key = link.folder / "keys" / "node-2"
    kept = key.read_bytes()
    key.unlink()
    subprocess.run(["ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-f", str(key)], check=True)
    try:
        link.start("node-2")
        assert link.running.pop("node-2").wait(120) != 0
    finally:
        key.write_bytes(kept)
    assert "SuperNode" in link.log("node-2")
