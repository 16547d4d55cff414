"""The CIFAR networks that the benchmarks share: originals, and references retrained without a class or samples.

    python benchmarks/manifest.py --data-dir ../shared/data [--networks DIR] [--only vgg-mini]
    python benchmarks/manifest.py --networks DIR --update

benchmarks/manifest.json names every network by its digest and has the settings that it is trained by. The first command
trains what is missing in DIR (benchmarks/networks by default, which git ignores), resumes what was stopped, and refuses
by name a network with other weights, unless it was trained on another kind of processor, which rounds differently.
Several processes can share the work. The second command writes the manifest from the networks in DIR.

The class of the comparison was drawn before any of its networks was trained, from the classes on which no choice of
ours was made (0 and 3 served as examples): `random.Random("fedortho comparison 2026-11-16").sample([1, 2, 4, 5, 6, 7,
8, 9], 2)` gave [1, 6]; 1 (automobile) is reported, hyper-parameters are tuned on 6 (frog) of seed 0. Automobile was
seen during development since. Two further classes were therefore drawn, before any of their references was trained,
from those on which nothing was chosen: `random.Random("fedortho comparison 2026-11-17").sample([0, 5, 7, 9], 2)` gave
[0, 9] (airplane and truck); they are reported beside it. The samples of benchmarks/samples.txt were drawn beforehand
from the training rows (in order) of vgg-mini, seed 0:
`random.Random("fedortho comparison samples 2026-11-16").sample(rows, 100)`.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from fedortho.errors import BadCheckpoint, Busy, unknown
from fedortho.requests.references import finished_runs
from fedortho.runs.run import Run, open_run
from fedortho.runs.settings import TrainSettings
from fedortho.runs.training import train_run
from fedortho.storage.files import locked, read_json, write_json
from fedortho.storage.records import to_json
from fedortho.storage.settings import as_mapping, make_settings
from fedortho.training.loop import Progress

HERE = Path(__file__).parent
NETWORKS = HERE / "networks"
MANIFEST = HERE / "manifest.json"
REPORTED, TUNED_ON = "class:1", "class:6"
DRAWN = ("class:0", "class:9")  # reported too, and not seen during development
R = TypeVar("R")
STATED = ("data", "model", "epochs", "seed", "lr", "batch-size", "ortho", "ortho-every")
SEEDS = {"vgg-mini": (0, 1, 2), "resnet-mini": (0,)}  # of the originals
VARIANTS: dict[str, dict[str, Any]] = {
    "none": {"ortho": 0.0},
    "lazy-0.1": {"ortho": 0.1, "ortho_every": 4},
    "exact-0.1": {"ortho": 0.1, "ortho_every": 1},
    "exact-0.5": {"ortho": 0.5, "ortho_every": 1},
    "lazy-0.5": {"ortho": 0.5, "ortho_every": 4},
}


def original_name(model: str, seed: int = 0, variant: str = "lazy-0.1", dataset: str = "cifar10") -> str:
    return f"{dataset}-{model}-{variant}-seed{seed}"


def reference_names(original: str, request: str = REPORTED) -> list[str]:
    """The references of the manifest that were retrained without the request for this original."""
    listed = read_json(MANIFEST)
    same = [name for name in listed if name.startswith(f"{original}-without-")]
    return [name for name in same if listed[name]["settings"]["without"] == request]


def open_network(directory: Path, name: str, data_dir: str) -> Run:
    """`open_free_network`, once no other process opens or trains it."""
    return patiently(lambda: open_free_network(directory, name, data_dir))


def open_free_network(directory: Path, name: str, data_dir: str) -> Run:
    """The network of this name, trained if it is missing; one with other weights than the manifest's is refused.

    A name that the manifest does not list is opened as it is.
    """
    listed = read_json(MANIFEST)
    if name not in listed:
        if not (directory / name).exists():
            raise unknown("network", name, listed)
        return open_run(directory / name)
    settings = make_settings(TrainSettings, listed[name]["settings"] | {"data-dir": data_dir})
    return check_digest(train_run(directory / name, settings, watch=epoch_printer(name)))


def patiently(attempt: Callable[[], R | None]) -> R:
    """What a function returns, once no other process opens or trains the same network."""
    while True:
        try:
            found = attempt()
            assert found is not None, "it is on this machine"
            return found
        except Busy:
            time.sleep(1)


def check_digest(run: Run) -> Run:
    """The run itself; a network with other weights than the manifest's is refused by name.

    One that was trained on another kind of processor, which rounds differently, is told and taken.
    """
    name, digest, here = run.path.name, run.record.model.digest, run.record.environment
    processor = f"{here.processor} {here.instructions}".strip()
    listed = read_json(MANIFEST).get(name, {"digest": digest})
    if digest != listed["digest"] and processor == listed["processor"]:
        raise BadCheckpoint(
            f"{run.path} has digest {digest}; benchmarks/manifest.json expects {listed['digest']} for {name}; "
            "delete the directory to train it again, or write a manifest of your networks with --update"
        )
    if digest != listed["digest"]:
        print(f"{name} was trained on {processor}, that of the manifest on {listed['processor']}", file=sys.stderr)
    run.load_model()  # refuses tensors that run.json does not describe
    return run


def write_manifest(directory: Path) -> None:
    """Write the digest and the settings of every finished network in the directory.

    Of the settings, those that networks differ in are always written, the others where they are not the default.
    """
    default = as_mapping(TrainSettings())
    listed: dict[str, Any] = {}
    for run in finished_runs(directory, strict=True):
        settings = {key: value for key, value in as_mapping(run.settings).items() if key not in ("data-dir", "device")}
        listed[run.path.name] = {
            "digest": run.record.model.digest,
            "processor": f"{run.record.environment.processor} {run.record.environment.instructions}".strip(),
            "data-digest": run.record.data.digest,
            "settings": {key: value for key, value in settings.items() if key in STATED or value != default[key]},
            "result": to_json(run.record.result),
        }
    with locked(MANIFEST.with_suffix(".writing")):
        write_json(MANIFEST, listed)


def epoch_printer(name: str) -> Any:
    """A function that prints one line on standard error after every epoch."""
    printed = 0

    def show(progress: Progress) -> None:
        nonlocal printed
        if len(progress.history) > printed:
            printed, epoch = len(progress.history), progress.history[-1]
            print(
                f"{name}: epoch {epoch.epoch + 1}/{progress.epochs} loss {epoch.loss:.3f} "
                f"validation {epoch.valid:.3f} ortho {epoch.ortho or 0:.4f} {epoch.seconds:.0f} s",
                file=sys.stderr,
                flush=True,
            )

    return show


def benchmark_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with the two flags that the benchmarks share."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", default="../shared/data", help="directory of the datasets' Parquet files")
    parser.add_argument("--networks", type=Path, default=NETWORKS, help="directory of the trained networks")
    return parser


def main(words: list[str] | None = None) -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--only", default="", help="models to train, separated by commas; default: all")
    parser.add_argument("--update", action="store_true", help="write the manifest from the networks in the directory")
    arguments = parser.parse_args(words)
    if arguments.update:
        write_manifest(arguments.networks)
        return
    models = arguments.only.split(",") if arguments.only else []
    listed = read_json(MANIFEST)
    waiting = [name for name in listed if not models or listed[name]["settings"]["model"] in models]
    while waiting:
        busy = []
        for name in waiting:
            try:
                run = open_free_network(arguments.networks, name, arguments.data_dir)
                print(name, run.record.model.digest, flush=True)
            except Busy:
                busy.append(name)
        if len(busy) == len(waiting):
            time.sleep(10)
        waiting = busy


if __name__ == "__main__":
    main()
