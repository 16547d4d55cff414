"""A kill campaign: a federation is killed at random moments of training and of a request; the same call is repeated.

    python benchmarks/kills.py [--trials 100] [--minutes 10] [--seed 0]

Targets: `all` (driver, server app and clients, which share one process here) and `node` (one of two processes in which
clients run, in training). A trial ends well if the repeated call gives the bytes of the undisturbed one, the run that
was there before is unchanged and the journal is whole; a refusal in between must be one of ours. Anything else is
`lost`.
"""

import argparse
import os
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from result_files import write_results

import fedortho as fo
from fedortho.federated import switch_off
from fedortho.storage.journal import check_journal

HERE = Path(__file__).parent
SETTINGS = fo.FederateSettings(
    data="digits", model="kills:small_network", clients=3, rounds=2, fraction=1.0, epochs=1, batch_size=64, threads=1,
    device="cpu", crop=0, flip=0.0, quorum=1.0, timeout=60.0, least_group=1,
)  # fmt: skip
METHOD = fo.make_method("paper", {"ratio": 0.1})


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "kills.json")
    given = parser.parse_args(words)
    torch.set_num_threads(1)
    switch_off(os.environ)
    os.environ["FEDORTHO_TRUST_CODE"] = "all"  # the network below
    __import__("fedortho.federated.local_grid")  # so that children begin at once
    rows: list[dict[str, Any]] = []
    until, draw = time.monotonic() + 60 * given.minutes, random.Random(given.seed)
    with tempfile.TemporaryDirectory(prefix="fedortho-kills-") as folder:
        place = Path(folder)
        train(place / "run")
        forget(place / "run", place / "forgot")
        seconds = {"training": timed(train, place / "again")}  # the first one decodes the images
        seconds["request"] = timed(forget, place / "again", place / "again-forgot")
        for number in range(given.trials):
            if time.monotonic() > until:
                break
            what = "request" if number % 2 else "training"
            target = "node" if number % 10 == 8 else "all"
            delay = draw.uniform(0, seconds[what] * (2 if target == "node" else 1))
            outcome, reason = trial(place, place / f"trial-{number}", what, target, delay)
            rows.append(
                {"what": what, "target": target, "delay": round(delay, 3), "outcome": outcome, "reason": reason}
            )
            write_results(given.out, "kills at random moments, in process", "python benchmarks/kills.py", rows)
            print(number, rows[-1], flush=True)
            shutil.rmtree(place / f"trial-{number}")
    print(Counter((row["what"], row["target"], row["outcome"]) for row in rows))


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
    again, refusal = killed(job, "", 0.0, folder / "reason")
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
        victims = [child] if target == "all" else children_of(child)[:1]
        for victim in victims:
            if os.waitpid(child, os.WNOHANG) != (0, 0):
                return False, ""
            os.kill(victim, signal.SIGKILL)
            was_killed = True
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
