"""Kills of real processes: SuperLink, nodes, their client apps, the server app, and the command that waits for them.

`python benchmarks/kills.py --processes` runs it. A cycle trains a federation and then forgets a class, on a SuperLink
and two nodes of this machine. In each of the two jobs four processes are killed, one after the other, at random
moments. SuperLink and nodes are started again at once, as a supervisor does; the same command is given again when it
has ended. A node that does not answer is started again, as the error says. A job ends well if the command ends with
exit code 0 and the bytes of the undisturbed job, the run before is unchanged, both clients have the new model, and the
journal is whole.
"""

import os
import random
import re
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tomli_w
from deployments import Deployment, Driver, deployed

import fedortho as fo
from fedortho.federated.client_state import ClientRecord
from fedortho.requests.federated_jobs import app_config
from fedortho.storage.journal import check_journal
from fedortho.storage.records import read_record
from fedortho.storage.settings import as_mapping

SETTINGS = fo.FederateSettings(
    data="digits", clients=2, rounds=2, fraction=1.0, epochs=1, batch_size=64, threads=1, device="cpu", crop=0,
    flip=0.0, quorum=1.0, timeout=60.0, least_group=1,
)  # fmt: skip
METHOD = {"ratio": 0.1}
TARGETS = ("server app", "node", "SuperLink", "driver", "client app")
KILLS, CALLS = 4, 30  # of each job: processes that are killed, and calls after which it is given up
PATIENCE = 900.0  # seconds after which a command hangs
SAME = "the same bytes"
Row = dict[str, Any]


class Campaign:
    """Cycles on one deployment, with the digests of the undisturbed jobs."""

    def __init__(self, place: Path, deployment: Deployment, digests: dict[str, str], draw: random.Random) -> None:
        self.place, self.deployment, self.digests, self.draw = place, deployment, digests, draw
        self.seconds = {"training": 90.0, "request": 70.0}  # of an undisturbed job; measured as it goes on
        self.config = place / "settings.toml"
        self.config.write_text(tomli_w.dumps({k: v for k, v in as_mapping(SETTINGS).items() if v != ""}))

    def cycle(self, add: Callable[[Row], None]) -> bool:
        """Train and forget once; `add` receives a row for each kill when its job has ended. Whether all went well."""
        for client in range(SETTINGS.clients):
            shutil.rmtree(self.deployment.store(client), ignore_errors=True)
        folder = self.place / "cycle"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        run, out = folder / "run", folder / "forgot"
        jobs = {
            "training": ["federate", "--config", str(self.config), "--out", str(run)],
            "request": ["forget", str(run), "class:3", "--out", str(out), "--method", "paper", "--audit", "none"]
            + [word for name, value in METHOD.items() for word in (f"--{name}", str(value))],
        }
        for what, command in jobs.items():
            rows, code, said = self.job(what, command, folder / "driver.log")
            outcome = self.judged(what, run, out) if code == 0 else f"lost: {code} {said}"
            for row in rows:
                add({**row, "outcome": outcome})
            if outcome != SAME:
                return False  # what follows would say nothing
        return True

    def job(self, what: str, command: Sequence[str], log: Path) -> tuple[list[Row], int | None, str]:
        """Give a command until it ends well, the first times with a kill: the kills, its last exit code and error."""
        rows: list[Row] = []
        for _ in range(CALLS):
            driver, started = Driver(command, self.deployment, log), time.monotonic()
            target = self.draw.choice(TARGETS) if len(rows) < KILLS else ""
            delay = self.draw.uniform(0, self.seconds[what])
            is_hit = bool(target) and self.kill(driver, target, delay)
            code = driver.wait(PATIENCE)
            said, seconds = driver.said, round(time.monotonic() - started, 1)
            print(what, target, is_hit, round(delay, 1), code, seconds, said, flush=True)
            if is_hit:
                row = {"what": what, "target": target, "delay": round(delay, 3), "code": code, "reason": said}
                rows.append({**row, "seconds": seconds})
            if code is None:
                driver.kill()
                return rows, None, "it hangs"
            if code == 0 and not target:
                self.seconds[what] = (self.seconds[what] + seconds) / 2
            if code == 0:
                return rows, 0, ""
            if silent := re.search(r"answer \(not (\d)\)", said):
                self.restart(f"node-{silent[1]}")
            if "under way" in said:  # the job of a driver that was killed works on
                time.sleep(10)
        return rows, code, said

    def kill(self, driver: Driver, target: str, delay: float) -> bool:
        """Kill a process after a delay, or as soon as there is one; False: the command has ended before."""
        client = self.draw.randrange(SETTINGS.clients)
        programs = {"server app": ("flwr-serverapp", "superlink"), "client app": ("flwr-clientapp", f"node-{client}")}
        driver.wait(delay)
        while driver.process.poll() is None:
            if target == "driver":
                driver.kill()
                return True
            if target in ("SuperLink", "node"):
                self.restart("superlink" if target == "SuperLink" else f"node-{client}")
                return True
            if process := self.deployment.helper(*programs[target]):
                os.kill(process, signal.SIGKILL)
                return True
            time.sleep(0.1)
        return False

    def restart(self, name: str) -> None:
        """Kill a node or the SuperLink and start it again."""
        self.deployment.signal(name)
        time.sleep(1)
        self.deployment.start(name)

    def judged(self, what: str, run: Path, out: Path) -> str:
        """`SAME`, or what was lost."""
        if fo.open_run(run).record.model.digest != self.digests["training"]:
            return "lost: other bytes of the trained run"
        if what == "training":
            return SAME
        if fo.open_run(out).record.model.digest != self.digests["request"]:
            return "lost: other bytes after forgetting"
        events = [entry.event for entry in check_journal(run.parent).entries]
        if events.count("executed") != 1:
            return f"lost: the journal says {events}"
        for client in range(SETTINGS.clients):
            record = read_record(ClientRecord, self.deployment.store(client) / f"client-{client}" / "state.json")
            if record.model != self.digests["request"] or list(map(str, record.forgotten)) != ["class:3"]:
                return f"lost: client {client} has {record.model[:12]} and has forgotten {record.forgotten}"
        return SAME


def campaign(place: Path, seed: int, until: float, add: Callable[[Row], None]) -> None:
    """Cycles until the time is over, at least one, or until something is lost."""
    run = fo.federate_run(place / "expected" / "run", SETTINGS)
    assert run is not None, "it is trained here"
    fo.forget_run(run, "class:3", fo.make_method("paper", METHOD), out=place / "expected" / "forgot")
    forgot = fo.open_run(place / "expected" / "forgot")
    digests = {"training": run.record.model.digest, "request": forgot.record.model.digest}
    with deployed(place / "link", SETTINGS.clients, app_config(SETTINGS)) as deployment:
        jobs = Campaign(place, deployment, digests, random.Random(seed))
        while jobs.cycle(add) and time.monotonic() < until:
            pass
