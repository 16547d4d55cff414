"""A kill at every file operation of every command: what is left is whole, and the same command completes it.

    python benchmarks/chaos.py [--commands forget,undo] [--every 1]

A command runs once. Before each of its file operations, and in the middle of each write, the files are looked at: that
is what a kill would leave. Every state that differs from the others is put back, and the command runs on it. States
are the same if they differ in nothing but the contents of temporary directories, which no command reads: it removes
them. Failures: a file in its place that cannot be read (`torn`); an error of the repeated command (`stuck`), other
files than those of the undisturbed run, temporary ones too (`leftover`), other weights (`differ`), or other events in
the journal than there should be (`lost`).
"""

import argparse
import hashlib
import logging
import os
import re
import shutil
import stat
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from doors import HOW, REQUEST, SMALL, write_images
from result_files import add_row
from stopping import counted

from fedortho.audits import relearn, reset_tail
from fedortho.errors import FedOrthoError
from fedortho.evidence.bundle import make_bundle
from fedortho.evidence.signature import make_key
from fedortho.federated.deploy import write_deployment
from fedortho.federated.server import sync, train_federation
from fedortho.reports.page import write_report
from fedortho.requests.comparing import compare
from fedortho.requests.forgetting import forget_run
from fedortho.requests.judging import JudgeOptions, judge_run
from fedortho.requests.qualifying import QualifyOptions, qualify_run
from fedortho.requests.rewind import rewind_run
from fedortho.requests.search import Budget
from fedortho.requests.tuning import tune
from fedortho.requests.undoing import undo_run
from fedortho.runs.purge import purge_run
from fedortho.runs.run import open_run
from fedortho.runs.settings import FederateSettings, ImportSettings, TrainSettings
from fedortho.runs.training import import_run, train_run
from fedortho.storage.files import TEMPORARY, read_json, read_tensors, tensors_digest
from fedortho.storage.journal import read_journal

COMMAND = "python benchmarks/chaos.py"
RESULT = Path(__file__).parent / "results" / "chaos.json"
PRIVATE = re.compile(rf"^(?:[^/]*/)*\.[^/]*?(?:{re.escape(TEMPORARY)}|\.building-)")  # directories of one process
FAILURES = ("torn", "stuck", "leftover", "differ", "lost")


def _train(at: Path) -> object:
    return train_run(at / "runs" / "trained", TrainSettings(data=str(at / "data"), epochs=1, valid=0.25, **SMALL))


def _federation(at: Path) -> FederateSettings:
    how: dict[str, Any] = {
        "clients": 2,
        "rounds": 2,
        "fraction": 0.5,
        "least_images": 4,
        "least_group": 1,
        "keep_rounds": "all",
    }
    return FederateSettings(data=str(at / "data"), **how, **SMALL)


def _forget(at: Path, run: str) -> object:
    how: dict[str, Any] = {
        "out": at / "runs" / "new",
        "undo": at / "undo.safetensors",
        "device": "cpu",
        "hide_first": False,
    }
    return forget_run(open_run(at / "runs" / run), REQUEST, HOW, **how)


def _import(at: Path) -> object:
    settings = ImportSettings(data=str(at / "data"), model="vgg-mini", device="cpu")
    return import_run(at / "runs" / "imported", at / "runs" / "run" / "model.safetensors", settings)


def _compare_again(at: Path) -> object:
    """A comparison with other settings takes the place of an earlier one."""
    settings = {"ssd": {"lam": 0.5}}
    return compare(at / "runs" / "run", REQUEST, "ssd", out=at / "compared", settings=settings)


def _qualify(at: Path) -> object:
    """One class to choose on, with its reference; what the audits find is not of interest, so they are short."""
    with patch.object(relearn, "STEPS", 2), patch.multiple(reset_tail, STEPS=1, MOST_STEPS=1, TAILS=1):
        return qualify_run(at / "runs" / "run", QualifyOptions(1, 1, references=1, candidates=(HOW,), device="cpu"))


COMMANDS: dict[str, Callable[[Path], object]] = {
    "train": _train,
    "import": _import,
    "forget": lambda at: _forget(at, "run"),
    "undo": lambda at: undo_run(at / "runs" / "hidden", at / "kept.safetensors", at / "runs" / "undone"),
    "judge": lambda at: judge_run(at / "runs" / "hidden", REQUEST, JudgeOptions("none", device="cpu")),
    "report": lambda at: write_report(at / "runs" / "hidden", images=False, device="cpu"),
    "bundle": lambda at: make_bundle(at / "runs" / "hidden", REQUEST, at / "bundle.zip"),
    "key": lambda at: make_key(at / "own.pem"),
    "compare": lambda at: compare(at / "runs" / "run", REQUEST, "logit-mask", out=at / "compared", settings={}),
    "compare again": _compare_again,
    "tune": lambda at: tune(at / "runs" / "run", REQUEST, "ssd", out=at / "t.json", budget=Budget(2, 32, 1)),
    "data purge": lambda at: purge_run(at / "runs" / "hidden"),
    "deploy": lambda at: write_deployment(at / "link", nodes=1, address="localhost", config={"rounds": 1}),
    "federate": lambda at: train_federation(at / "runs" / "trained", _federation(at)),
    "forget in a federation": lambda at: _forget(at, "federation"),
    "rewind": lambda at: rewind_run(at / "runs" / "federation", "client:0", at / "runs" / "rewound"),
    "qualify": _qualify,
    "sync": lambda at: sync(open_run(at / "runs" / "federation")),
}


def build_base(at: Path) -> Path:
    """The files that every command finds: data, a run, one that has forgotten, and a federation."""
    data = write_images(at / "data")
    train_run(at / "runs" / "run", TrainSettings(data=str(data), epochs=1, valid=0.25, **SMALL))
    how: dict[str, Any] = {
        "out": at / "runs" / "hidden",
        "undo": at / "kept.safetensors",
        "device": "cpu",
        "hide_first": False,
    }
    forget_run(open_run(at / "runs" / "run"), REQUEST, HOW, **how)
    judge_run(at / "runs" / "hidden", REQUEST, JudgeOptions("none", device="cpu"))
    train_federation(at / "runs" / "federation", _federation(at))
    compare(at / "runs" / "run", REQUEST, "ssd", out=at / "compared", settings={})
    return at


@dataclass
class Tally:
    """What happened to a command that was killed at its operations."""

    every: int = 1  # the first state, and then every n-th, was completed
    operations: int = 0  # at each of which it would have been killed
    states: int = 0  # that these kills leave
    completed: int = 0  # states on which the command ran again
    torn: int = 0
    stuck: int = 0
    leftover: int = 0
    differ: int = 0
    lost: int = 0
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)

    def fail(self, kind: str, place: int, why: str) -> None:
        setattr(self, kind, getattr(self, kind) + 1)
        if len(self.failures) < 10:
            self.failures.append(f"operation {place}: {kind}: {why[:300]}")


class States:
    """The states of a directory, each kept once, in memory; contents that several files have are kept once too."""

    def __init__(self, at: Path) -> None:
        self.at, self.contents = at, dict[str, bytes]()  # by digest
        self.found: dict[object, tuple[int, dict[str, tuple[int, str]]]] = {}  # by what tells them apart

    def look(self, place: int) -> None:
        """Keep the state at this operation if it is a new one."""
        files = {str(path.relative_to(self.at)): self._kept(path) for path in sorted(self.at.rglob("*"))}
        own = {name: kept for name, kept in files.items() if not PRIVATE.search(name)}
        private = Counter(PRIVATE.split(name)[0] for name in files if re.fullmatch(f"{PRIVATE.pattern}[^/]*", name))
        self.found.setdefault((frozenset(own.items()), frozenset(private.items())), (place, files))

    def _kept(self, path: Path) -> tuple[int, str]:
        """Mode and digest of a file, whose contents are kept; a directory has no digest."""
        try:
            mode = path.stat().st_mode
            if not stat.S_ISREG(mode):
                return mode, ""
            contents = path.read_bytes()
        except FileNotFoundError:  # a lock that another thread has just removed
            return 0, ""
        digest = hashlib.sha256(contents).hexdigest()
        self.contents.setdefault(digest, contents)
        return mode, digest

    def restore(self, files: dict[str, tuple[int, str]]) -> None:
        shutil.rmtree(self.at, ignore_errors=True)
        self.at.mkdir()
        for name, (mode, digest) in files.items():
            if stat.S_ISDIR(mode):
                (self.at / name).mkdir(parents=True, exist_ok=True)
            elif digest:
                (self.at / name).write_bytes(self.contents[digest])
                (self.at / name).chmod(stat.S_IMODE(mode))


def kill_everywhere(name: str, base: Path, at: Path, every: int = 1) -> Tally:
    """Complete a command from each state that a kill leaves, or from some; `base` is copied to `at`."""
    tally, begin, work = Tally(every=every), time.monotonic(), COMMANDS[name]
    shutil.rmtree(at, ignore_errors=True)
    shutil.copytree(base, at, symlinks=True)
    states = States(at)

    def look(number: int = 0, _: str = "") -> None:
        tally.operations = max(tally.operations, number)
        states.look(tally.operations)

    with counted(look, look):
        work(at)
    names, weights, events = names_in(at), weights_in(at), events_in(at)
    tally.states = len(states.found)
    for place, files in list(states.found.values())[::every]:
        states.restore(files)
        tally.completed += 1
        for torn in torn_in(at):
            tally.fail("torn", place, torn)
        try:
            work(at)
        except Exception as error:  # a command that never overwrites says so if it was killed after its last step
            if "exists already" not in str(error):
                tally.fail("stuck", place, f"{type(error).__name__}: {error}")
                continue
        if odd := names_in(at) ^ names:
            tally.fail("leftover", place, ", ".join(sorted(odd)[:3]))
        now = weights_in(at)
        if other := [file for file in weights if now.get(file) != weights[file]]:
            tally.fail("differ", place, ", ".join(other[:3]))
        if events_in(at) != events:
            tally.fail("lost", place, f"{events_in(at)} instead of {events}")
    tally.seconds = round(time.monotonic() - begin, 1)
    return tally


def names_in(at: Path) -> set[str]:
    """All files and directories but those of the journal, which the next entry tidies up, and empty temporary ones."""
    found = {str(path.relative_to(at)): path for path in at.rglob("*")}
    empty = {name for name, path in found.items() if TEMPORARY in name and (path.is_dir() or path.name == "lock")}
    return {name for name in found.keys() - empty if "journal." not in name}


def torn_in(at: Path) -> list[str]:
    """Files in their places that cannot be read; hidden ones are temporary."""
    found = []
    for path in at.rglob("*"):
        if any(part.startswith(".") for part in path.relative_to(at).parts) or not path.is_file():
            continue
        try:
            if path.suffix == ".json":
                read_json(path)
            elif path.suffix == ".safetensors":
                read_tensors(path)
            elif path.name == "journal.jsonl":
                read_journal(path.parent)
        except FedOrthoError as error:
            found.append(str(error))
    return found


def weights_in(at: Path) -> dict[str, str]:
    files = [path for path in at.rglob("*.safetensors") if path.is_file() and path.name != "ledger.safetensors"]
    return {str(path.relative_to(at)): tensors_digest(read_tensors(path)[0]) for path in files}


def events_in(at: Path) -> dict[str, int]:
    """Events of the journal, without those that a repeated call adds: it is received, and may be judged, again."""
    events = Counter(entry.event for entry in read_journal(at / "runs").entries)
    return {event: number for event, number in events.items() if event not in ("received", "judged")}


def main(words: list[str] | None = None) -> None:
    usage = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    usage.add_argument("--commands", default="", help=f"some of {', '.join(COMMANDS)}, with commas between")
    usage.add_argument("--every", type=int, default=1)
    usage.add_argument("--out", type=Path, default=RESULT)
    chosen = usage.parse_args(words)
    names = chosen.commands.split(",") if chosen.commands else list(COMMANDS)
    if other := [name for name in names if name not in COMMANDS]:
        usage.error(f"no command {other[0]!r}; choose from {', '.join(COMMANDS)}")
    if chosen.every < 1:
        usage.error(f"--every is {chosen.every}; expected at least 1")
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    failed = 0
    with tempfile.TemporaryDirectory(prefix="fedortho-chaos-") as place, patch.object(os, "fsync", lambda _: None):
        # A killed process loses nothing that the system has: only a power loss would, and nobody pulls the plug here.
        os.environ |= {"FEDORTHO_CACHE": f"{place}/world/cache", "FEDORTHO_STATE": f"{place}/state"}
        at = Path(place).resolve() / "world"
        build_base(at)
        at.rename(base := at.with_name("base"))
        for name in names:
            tally = kill_everywhere(name, base, at, chosen.every)
            sys.stdout.write(f"{name}: {tally.operations} operations, {tally.completed} of {tally.states} states: ")
            numbers = ", ".join(f"{getattr(tally, kind)} {kind}" for kind in FAILURES)
            sys.stdout.write("\n  ".join([f"{numbers}, {tally.seconds} s", *tally.failures]) + "\n")
            sys.stdout.flush()
            row, what = {"command": name, **vars(tally)}, "states that a kill at any file operation leaves, completed"
            add_row(chosen.out, row, ("command",), lambda each: list(COMMANDS).index(each["command"]), what, COMMAND)
            failed += sum(getattr(tally, kind) for kind in FAILURES)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
