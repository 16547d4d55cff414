"""A kill campaign: a federation is killed at random moments of training and of a request; the same call is repeated.

    python benchmarks/kills.py [--trials 100] [--minutes 10] [--seed 0] [--processes]

Targets: `all` (driver, server app and clients, which share one process here) and `node` (one of two processes in which
clients run, in training). A trial ends well if the repeated call gives the bytes of the undisturbed one, the run that
was there before is unchanged and the journal is whole; a refusal in between must be one of ours. Anything else is
`lost`. With --processes SuperLink, nodes, server app and driver are processes of their own: see process_kills.py.
Another seed draws other moments; rows of all seeds are kept.
"""

import argparse
import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from process_kills import campaign
from result_files import add_row, read_results

import fedortho as fo
from fedortho.federated import switch_off
from fedortho.storage.journal import check_journal

HERE = Path(__file__).parent
SETTINGS = fo.FederateSettings(
    data="digits", model="kills:small_network", clients=3, rounds=2, fraction=1.0, epochs=1, batch_size=64, threads=1,
    device="cpu", crop=0, flip=0.0, quorum=1.0, timeout=300.0, least_group=1,
)  # fmt: skip
METHOD = fo.make_method("paper", {"ratio": 0.1})
KEY = ("mode", "seed", "number")
CALLS = 3  # times that a call is repeated while it is refused, as on a machine that is too busy for its timeout


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", action="store_true", help="kill real processes on loopback")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "kills.json")
    given = parser.parse_args(words)
    torch.set_num_threads(1)
    switch_off(os.environ)
    mode = "processes" if given.processes else "in process"
    rows = read_results(given.out).rows if given.out.exists() else ()
    known = [row["number"] for row in rows if (row["mode"], row["seed"]) == (mode, given.seed)]

    def add(row: dict[str, Any]) -> None:
        whole = {"mode": mode, "seed": given.seed, "number": len(known), **row}
        known.append(len(known))
        what, command = "kills at random moments", "python benchmarks/kills.py, and with --processes"
        add_row(given.out, whole, KEY, lambda r: [r[k] for k in KEY], what, command)
        print(whole, flush=True)

    until = time.monotonic() + 60 * given.minutes
    with tempfile.TemporaryDirectory(prefix="fedortho-kills-") as folder:
        if given.processes:
            campaign(Path(folder), given.seed + 1000 * len(known), until, add)
        else:
            in_process(Path(folder), range(len(known), given.trials), given.seed, until, add)


def in_process(
    place: Path, numbers: Sequence[int], seed: int, until: float, add: Callable[[dict[str, Any]], None]
) -> None:
    """Trials with all clients in one process, or two of them in processes of their own."""
    os.environ["FEDORTHO_TRUST_CODE"] = "all"  # the network below
    __import__("fedortho.federated.local_grid")  # so that children begin at once
    train(place / "run")
    forget(place / "run", place / "forgot")
    seconds = {"training": timed(train, place / "again")}  # the first one decodes the images
    seconds["request"] = timed(forget, place / "again", place / "again-forgot")
    for number in numbers:
        if time.monotonic() > until:
            return
        what = "request" if number % 2 else "training"
        target = "node" if number % 10 == 8 else "all"
        delay = random.Random(f"{seed}-{number}").uniform(0, seconds[what])
        outcome, reason = trial(place, place / f"trial-{number}", what, target, delay)
        add({"what": what, "target": target, "delay": round(delay, 3), "outcome": outcome, "reason": reason})
        shutil.rmtree(place / f"trial-{number}")


def small_network(classes: int, channels: int) -> torch.nn.Module:
    """Three convolutions and a linear layer."""
    layers: list[torch.nn.Module] = []
    for inputs, outputs in ((channels, 8), (8, 12), (12, 24)):
        layers += [
            torch.nn.Conv2d(inputs, outputs, 3, 1, 1, bias=False),
            torch.nn.BatchNorm2d(outputs),
            torch.nn.ReLU(),
        ]
    return torch.nn.Sequential(
        *layers, torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(outputs, classes)
    )


def train(path: Path, workers: int = 1) -> None:
    fo.federate_run(path, SETTINGS, workers=workers)


def forget(run: Path, out: Path) -> None:
    fo.forget_run(run, "class:3", METHOD, out=out)


def timed(job: Callable[..., None], *words: Any) -> float:
    started = time.monotonic()
    job(*words)
    return time.monotonic() - started


def trial(place: Path, folder: Path, what: str, target: str, delay: float) -> tuple[str, str]:
    """Kill the job after `delay` seconds, repeat it, and compare."""
    folder.mkdir()
    expected = fo.open_run(place / ("run" if what == "training" else "forgot")).record.model.digest
    if what == "request":
        shutil.copytree(place / "run", folder / "run")
    out = folder / ("run" if what == "training" else "forgot")

    def job() -> None:
        if what == "training":
            train(out, 2 if target == "node" else 1)
        else:
            forget(folder / "run", out)

    was_killed, reason = killed(job, target, delay, folder / "reason")
    for _ in range(CALLS):
        again, refusal = killed(job, "", 0.0, folder / "reason")
        if not refusal:
            break
    if refusal or again:
        return "lost", refusal or "the repeated call died"
    if fo.open_run(out).record.model.digest != expected:
        return "lost", "other bytes"
    if what == "request":
        if fo.open_run(folder / "run").record.model.digest != fo.open_run(place / "run").record.model.digest:
            return "lost", "the run before has changed"
        check_journal(folder)
    if reason:
        return "refused, then the same bytes", reason
    return ("the same bytes" if was_killed else "it had ended"), ""


def killed(job: Callable[[], None], target: str, delay: float, note: Path) -> tuple[bool, str]:
    """Run a job in a child and kill it, or one of its own children, after a delay; was it killed, and its refusal."""
    note.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            job()
            code = 0
        except fo.FedOrthoError as error:
            note.write_text(str(error), encoding="utf-8")
            code = 2
        finally:
            os._exit(code)
    was_killed = False
    if target:
        time.sleep(delay)
        while not was_killed and (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
            for victim in [child] if target == "all" else children_of(child)[:1]:
                os.kill(victim, signal.SIGKILL)
                was_killed = True
            time.sleep(0.01)
        if not was_killed:
            return False, "" if ended[1] == 0 else "it failed before it was killed"
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    reason = note.read_text(encoding="utf-8") if note.exists() else ""
    if not target:
        return code not in (0, 2), reason
    if code == 1:
        return was_killed, "an error that is not ours"
    return was_killed, reason


def children_of(process: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


if __name__ == "__main__":
    main()
