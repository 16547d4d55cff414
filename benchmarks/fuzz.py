"""Hostile input at every door: damaged files, hostile values, texts by hypothesis, odd paths on the command line.

    python benchmarks/fuzz.py [--cases 20000] [--seed 0] [--door bundle] [--minutes 20]

A case is made by the seed, its door and its number alone, so any failure can be repeated. It may be refused by an error
that a user can mend, or accepted. Failures: any other exception (`tracebacks`), more than ten seconds or two gigabytes
(`hangs`), and, at a door whose file is sealed by digests, another content than the valid one (`forgeries`).
"""

import argparse
import contextlib
import io
import logging
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import hypothesis
import torch
from doors import REQUEST, Door, World, build_world, file_doors, try_order, try_reply
from hypothesis import strategies as some
from result_files import write_results

from fedortho.cli import app as cli
from fedortho.data.request import ForgetRequest
from fedortho.errors import FedOrthoError
from fedortho.methods import METHODS
from fedortho.runs.settings import FederateSettings, ImportSettings, TrainSettings
from fedortho.storage.files import parse_json
from fedortho.storage.settings import field_types, make_settings

RESULT = Path(__file__).parent / "results" / "fuzz.json"
SECONDS = 10  # that a case may take
WORDS: tuple[str, ...] = (
    "class:",
    "client:",
    "samples:",
    "0",
    "1",
    "99",
    "9" * 5000,
    "dress",
    "[/x]",
    '"',
    "'",
    ",",
    " ",
    "\\",
    "\0",
    "\n",
)
WORDS += (
    "sha256:",
    "hmac:",
    "~nobody/x",
    "/dev/zero",
    "*",
    "[",
    "..",
    "é",
    "\ud800",
    "\u202e",
    "1/2",
    "-1",
    "x.csv:y",
    "%s",
)
NUMBERS = (
    "-1",
    "0",
    "1",
    "-9" * 9,
    "2147483648",
    "9" * 18,
    "1" + "0" * 24,
    "9" * 5000,
    "1e999",
    "nan",
    "-inf",
    "x",
    "",
)


class Hang(BaseException):
    """A case that took too long."""


@dataclass
class Count:
    """What happened at a door."""

    cases: int = 0
    refused: int = 0
    accepted: int = 0
    tracebacks: int = 0
    hangs: int = 0
    forgeries: int = 0
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)  # the first few, with the number of the case

    def take(self, number: int, use: Callable[[], object], valid: object = None) -> None:
        """Try a case and count what happens; `valid` is the only result that a sealed door may give."""
        self.cases += 1
        try:
            with time_limit():
                found = use()
        except (FedOrthoError, SystemExit) as stop:
            self.refused += 1
            if isinstance(stop, SystemExit) and stop.code not in (0, 1, 2):
                self.fail(number, "tracebacks", f"exit code {stop.code}")
        except (Hang, MemoryError) as error:
            self.fail(number, "hangs", type(error).__name__)
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            self.fail(
                number, "tracebacks", f"{type(error).__name__}: {str(error)[:150]} at {frame.name}:{frame.lineno}"
            )
        else:
            self.accepted += 1
            if valid is not None and found != valid:
                self.fail(number, "forgeries", "accepted with another content")

    def fail(self, number: int, kind: str, why: str) -> None:
        setattr(self, kind, getattr(self, kind) + 1)
        if len(self.failures) < 10:
            self.failures.append(f"case {number}: {why}")


@contextlib.contextmanager
def time_limit() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise Hang

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def try_file(count: Count, door: Door, seed: str, cases: int) -> None:
    """Damaged and hostile versions of a file, and things that are no files."""
    whole, valid = door.path.read_bytes(), door.use() if door.sealed else None
    try:
        for number in range(cases):
            draw = random.Random(f"{seed}-{number}")
            door.path.unlink(missing_ok=True) if not door.path.is_dir() else door.path.rmdir()
            odd = draw.randrange(50)
            if odd == 0:
                os.mkfifo(door.path)
            elif odd == 1:
                door.path.symlink_to("/dev/zero")
            elif odd == 2:
                door.path.mkdir()
            elif odd == 3:
                door.path.symlink_to(door.path)
            elif odd > 4:
                door.path.write_bytes(door.mutate(whole, draw))
            count.take(number, door.use, valid)
    finally:
        door.path.unlink(missing_ok=True) if not door.path.is_dir() else door.path.rmdir()
        door.path.write_bytes(whole)


def by_hypothesis(count: Count, seed: str, cases: int, what: Any, use: Callable[[Any], object]) -> None:
    """Values of a strategy."""

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=cases,
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(what)
    def attempt(value: Any) -> None:
        count.take(count.cases, lambda: use(value))

    attempt()


def texts() -> Any:
    """Requests: words of the language and any text, mixed."""
    return some.lists(some.one_of(some.sampled_from(WORDS), some.text(max_size=8)), max_size=8).map("".join)


def values() -> Any:
    """Values of settings, and other values."""
    whole = some.one_of(some.integers(), some.sampled_from([2**31, 2**63, -(2**70), 10**400]))
    return some.one_of(whole, some.floats(), some.booleans(), some.text(max_size=12), some.none(), some.just([]))


def command_lines(world: World) -> list[Callable[[random.Random], list[str]]]:
    """Command lines with one odd path or number."""
    place, run = world.place, str(world.run.path)
    odd = [*(str(place / name) for name in ("none", "pipe", "loop", "data", "bundle.zip", "x" * 300, "settings.json"))]
    odd += ["/dev/zero", "/proc/self/mem", "/proc/none", "", ".", "\udcff", "a\x1b[2J", str(place / ("d/" * 2000)), "-"]

    def path(draw: random.Random) -> str:
        return draw.choice(odd)

    commands: list[Callable[[random.Random], list[str]]] = [
        lambda draw: ["evaluate", path(draw)],
        lambda draw: ["check", path(draw), "--classes", draw.choice(NUMBERS), "--shape", draw.choice(NUMBERS)],
        lambda draw: ["results", path(draw)],
        lambda draw: ["report", path(draw), "--out", path(draw)],
        lambda draw: ["judge", path(draw), "--reference", path(draw), "--shadows", draw.choice(NUMBERS)],
        lambda draw: ["forget", run, f"samples:{path(draw)}", "--dry-run", "--out", path(draw)],
        lambda draw: ["forget", run, REQUEST, "--config", path(draw), "--dry-run", "--keep-undo", path(draw)],
        lambda draw: ["forget", run, "".join(draw.choices(WORDS, k=3)), "--dry-run"],
        lambda draw: ["undo", path(draw), path(draw), "--out", path(draw)],
        lambda draw: ["bundle", "check", path(draw), "--public", path(draw), "--model", path(draw)],
        lambda draw: ["bundle", "make", run, REQUEST, "--out", path(draw), "--sign", path(draw)],
        lambda draw: ["journal", "check", path(draw), "--head", draw.choice(WORDS)],
        lambda draw: ["journal", "show", path(draw)],
        lambda draw: ["import", path(draw), "--data", path(draw), "--out", path(draw)],
        lambda draw: ["train", "--config", path(draw), "--out", path(draw)],
        lambda draw: ["train", "--data", path(draw), "--epochs", "0", "--out", str(place / "tried")],
        lambda draw: ["train", "--threads", draw.choice(NUMBERS[6:]), "--epochs", "0", "--out", path(draw)],
        lambda draw: ["federate", "--clients", draw.choice(NUMBERS), "--rounds", "0", "--out", path(draw)],
        lambda draw: [
            "deploy",
            "--address",
            draw.choice((*odd, "::1%$(x)")),
            "--nodes",
            draw.choice(NUMBERS),
            "--out",
            path(draw),
        ],
        lambda draw: ["data", "ls", path(draw), "--limit", draw.choice(NUMBERS)],
        lambda draw: ["data", "find", run, "".join(draw.choices(WORDS, k=3))],
        lambda draw: ["compare", run, REQUEST, "--methods", draw.choice(WORDS), "--settings", path(draw)],
        lambda draw: ["tune", draw.choice(WORDS), run, REQUEST, "--out", path(draw), "--on", draw.choice(WORDS)],
        lambda draw: ["qualify", run, "--dry-run", "--classes", draw.choice(NUMBERS), "--seed", draw.choice(NUMBERS)],
        lambda draw: ["reproduce", draw.choice(WORDS), "--seeds", draw.choice(NUMBERS), "--rows", draw.choice(WORDS)],
    ]
    return commands


def try_commands(count: Count, world: World, seed: str, cases: int) -> None:
    """Command lines as `fedortho` gets them: one line, exit code 2, nothing that a terminal obeys."""
    (world.place / "loop").symlink_to(world.place / "loop")
    os.mkfifo(world.place / "pipe")
    commands = command_lines(world)
    for number in range(cases):
        draw = random.Random(f"{seed}-{number}")
        words = commands[number % len(commands)](draw)
        count.take(number, partial(told, words))


def told(words: list[str]) -> None:
    """Run a command line; a defect of fedortho (exit code 1), or output that is not plain, is an error here."""
    out, err, before = io.StringIO(), io.StringIO(), list(sys.argv)
    sys.argv = ["fedortho", *words]
    code: Any = 0
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            cli.main()
    except SystemExit as stop:
        code = stop.code
    finally:
        sys.argv = before
    text = out.getvalue() + err.getvalue()
    assert all(sign.isprintable() or sign in "\n\r\t" for sign in text), f"{words}: control characters"
    if "a defect: please report it" in text or "Traceback" in text:
        raise AssertionError(f"{words}: {text[-300:]}")
    if code:
        raise SystemExit(code)


def campaign(world: World, cases: int, seed: int, only: str = "", deadline: float = float("inf")) -> dict[str, Count]:
    """Counts by door; cases are shared among the doors, twice as many where digests seal the file."""
    doors, counts = file_doors(world), dict[str, Count]()
    kinds = {**METHODS, "train": TrainSettings, "import": ImportSettings, "federate": FederateSettings}
    names = {name: (*field_types(kind), "other") for name, kind in kinds.items()}
    named = some.sampled_from(sorted(kinds)).flatmap(
        lambda name: some.tuples(
            some.just(name), some.dictionaries(some.sampled_from(names[name]), values(), max_size=3)
        )
    )
    data = world.run.load_data()
    shares = {name: 2.0 if door.sealed else 1.0 for name, door in doors.items()}
    shares |= {"picture": 0.3, "split.json": 0.5, "rows": 0.5, "Parquet": 0.5, "comparison": 0.5}
    shares |= {"requests": 3.0, "flags": 3.0, "JSON": 2.0, "orders": 1.0, "replies": 2.0, "commands": 1.0}
    whole = sum(shares.values())
    for name, share in shares.items():
        if (only and name != only) or time.monotonic() > deadline:
            continue
        count, number, begin = counts.setdefault(name, Count()), max(1, round(cases * share / whole)), time.monotonic()
        key = f"{seed}-{name}"
        if name in doors:
            try_file(count, doors[name], key, number)
        elif name == "requests":
            by_hypothesis(
                count, key, number, texts(), lambda text: ForgetRequest.parse(text).resolved(data).split(data.train)
            )
        elif name == "flags":
            by_hypothesis(count, key, number, named, lambda pair: make_settings(kinds[pair[0]], pair[1]))
        elif name == "JSON":
            by_hypothesis(count, key, number, some.one_of(some.binary(), texts()), read_any)
        elif name == "commands":
            try_commands(count, world, key, number)
        else:
            use = partial(try_order if name == "orders" else try_reply, world)
            for case in range(number):
                count.take(case, partial(use, random.Random(f"{key}-{case}")))
        count.seconds = round(time.monotonic() - begin, 1)
        sys.stderr.write(f"{name}: {number} cases, {count.seconds} s\n")
    return counts


def read_any(text: bytes | str) -> object:
    """JSON of any bytes; ValueError is what its callers expect."""
    with contextlib.suppress(ValueError):
        return parse_json(text)
    raise FedOrthoError("refused")


def main(words: list[str] | None = None) -> None:
    usage = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    usage.add_argument("--cases", type=int, default=24_000)
    usage.add_argument("--seed", type=int, default=0)
    usage.add_argument("--door", default="")
    usage.add_argument("--minutes", type=float, default=60.0)
    usage.add_argument("--out", type=Path, default=RESULT)
    chosen = usage.parse_args(words)
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="fedortho-fuzz-") as place, contextlib.chdir(place):
        os.environ |= {"FEDORTHO_CACHE": f"{place}/cache", "FEDORTHO_STATE": f"{place}/state"}
        world = build_world(Path(place).resolve() / "world")
        deadline = time.monotonic() + 60 * chosen.minutes
        taken = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + (2 << 30), resource.RLIM_INFINITY))
        with open(os.devnull, "w", encoding="utf-8") as nowhere, contextlib.redirect_stdout(nowhere):
            counts = campaign(world, chosen.cases, chosen.seed, chosen.door, deadline)
        shutil.rmtree(world.place, ignore_errors=True)
    rows = [{"door": name, **vars(count)} for name, count in counts.items()]
    total: Counter[str] = Counter()
    for count in counts.values():
        total.update(
            {key: getattr(count, key) for key in ("cases", "refused", "accepted", "tracebacks", "hangs", "forgeries")}
        )
    for name, count in counts.items():
        told_rest = (
            f"{count.cases} cases, {count.tracebacks} tracebacks, {count.hangs} hangs, {count.forgeries} forgeries"
        )
        sys.stdout.write(f"{name}: {told_rest}, {count.seconds} s\n" + "".join(f"  {why}\n" for why in count.failures))
    sys.stdout.write(f"{dict(total)}\n")
    if not chosen.door:
        command = f"python benchmarks/fuzz.py --cases {chosen.cases} --seed {chosen.seed}"
        write_results(chosen.out, "hostile input at every door", command, rows, total=dict(total), seed=chosen.seed)
    sys.exit(bool(total["tracebacks"] or total["hangs"] or total["forgeries"]))


if __name__ == "__main__":
    main()
