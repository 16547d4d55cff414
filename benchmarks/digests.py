"""Digests of the models and patches that training and forgetting end with: a restructuring changes none of them.

    python benchmarks/digests.py [--networks DIR] [--only PART] [--update]

benchmarks/results/digests.json has one SHA-256 per model and patch, over names, types, shapes and bytes of its tensors.
The script computes them again (three minutes on one core) and prints each key whose digest DIFFERS, is MISSING now or
is NEW; exit code 1 if there is any. Networks are read from DIR; without that directory they are skipped.

Float sums depend on torch and on the processor, so digests of another torch version or CPU capability are refused with
exit code 2. Write your own with `--update` before you restructure; digests of parts that did not run stay in the file.
"""

import argparse
import logging
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from manifest import NETWORKS
from result_files import write_results
from torch import Tensor, nn

from fedortho.data.request import ForgetRequest
from fedortho.data.sources import load_images
from fedortho.engines.central import CentralEngine
from fedortho.engines.query import Selection
from fedortho.evidence.bundle import make_bundle, open_bundle
from fedortho.federated.engine import FederatedEngine
from fedortho.federated.server import federated_engine, local_grid, train_federation
from fedortho.methods import METHODS, make_method, unlearn
from fedortho.methods.method import PlanningMethod
from fedortho.models.zoo import build_model
from fedortho.requests.forgetting import ServedRequest, forget_federated_run, serve_request
from fedortho.requests.references import finished_runs
from fedortho.requests.undoing import undo_run
from fedortho.runs.run import Run, load_run_data
from fedortho.runs.settings import FederateSettings, TrainSettings
from fedortho.runs.training import train_run
from fedortho.storage.files import read_json, tensors_digest
from fedortho.training.loop import fit
from fedortho.training.recipe import Recipe

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "digests.json"
WHAT = "SHA-256 of the tensors of trained models, edited models and patches"
SMALL_NET = "digests:SmallNet"  # this file: Python finds the modules beside the script
CLASS_3 = ForgetRequest.parse("class:3")
SAMPLES = "samples:0,4,5,7,41,44,91,117"  # training rows of digits with valid=0.2 and seed 0

DEMO = TrainSettings(data="fashion-mini", model="vgg-mini", epochs=2, threads=1)
FEDERATION = FederateSettings(rounds=2, fraction=1.0, split="dirichlet:0.5", batch_size=32, threads=1, device="cpu")
FOUR_CLIENTS = replace(FEDERATION, data="fashion-mini", model="vgg-mini", clients=4)
DIGITS = replace(FEDERATION, data="digits", model=SMALL_NET, valid=0.2, crop=0, flip=0.0, timeout=600.0, least_group=1)
THREE_CLIENTS = replace(DIGITS, clients=3, split="dirichlet:5")
UNEQUAL_CLIENTS = replace(DIGITS, clients=3, split="dirichlet:0.3", least_images=100)
CONTINUED = replace(DIGITS, clients=4, norms="recalibrate")
BUNDLED = replace(DEMO, data="digits", batch_size=64, lr=0.05, crop=0, flip=0.0)
RESIDUAL = replace(BUNDLED, model="resnet-mini", epochs=4, valid=0.2)
SMALL_RECIPE = Recipe(epochs=6, crop=0, flip=0.0, lr=0.1, batch_size=32)
UPDATES_RECIPE = replace(SMALL_RECIPE, epochs=4, schedule="constant", ortho=0.0, align=0.0)

PLAIN = {"crop": 0, "flip": 0.0}
METHOD_SETTINGS: dict[str, dict[str, Any]] = {  # those of tests/methods/test_contract.py
    "retrain": {"epochs": 5, "batch_size": 32, "lr": 0.1} | PLAIN,
    "hide": {"max_retain_drop": 0.05, "target": 0.05},
    "directions": {"max_retain_drop": 0.05, "target": 0.05},
    "paper": {"ratio": 0.2, "alpha": 1.0},
    "finetune": {"epochs": 8, "lr": 0.1} | PLAIN,
    "not": {"epochs": 5, "lr": 0.03} | PLAIN,
    "fused": {"epochs": 6, "lr": 0.05, "density": 0.5} | PLAIN,
    "ssd": {"alpha": 50.0},
    "salun": {"epochs": 3, "lr": 0.1, "batch_size": 32} | PLAIN,
    "unsir": {"epochs": 2, "lr": 0.005, "batch_size": 32, "noise_images": 64, "noise_copies": 1} | PLAIN,
    "bad-teacher": {"epochs": 4, "lr": 0.01, "batch_size": 32} | PLAIN,
    "class-pruning": {"epochs": 4, "lr": 0.05, "ratio": 0.2} | PLAIN,
    "neggrad": {"epochs": 2, "lr": 0.02, "beta": 0.95, "batch_size": 32} | PLAIN,
    "logit-mask": {},
}
CLIENT_SETTINGS: dict[str, dict[str, Any]] = {"hide": {"ratio": 0.1}, "paper": {}, "ssd": {"alpha": 1.0}}
ONE_EPOCH = {"epochs": 1}  # of the other methods, for clients and samples
RESIDUAL_REQUESTS: dict[str, tuple[str, str, dict[str, Any]]] = {  # key → request, method, hyper-parameters
    "class-3/hide": ("class:3", "hide", {"max_retain_drop": 0.2, "target": 0.1}),
    "class-3/hide-layers": ("class:3", "hide", {"ratio": 0.2, "repair_by": "layers"}),
    "class-3/hide-global": ("class:3", "hide", {"ratio": 0.2, "scope": "global"}),
    "class-3/paper": ("class:3", "paper", {}),
    "samples/hide-same-class": (SAMPLES, "hide", {"ratio": 0.2, "contrast": "same-class"}),
}

Tensors = Mapping[str, Tensor]
Digested = Iterator[tuple[str, Tensors]]  # key and tensors
Part = Callable[[Path], Digested]  # works in a temporary directory


class SmallNet(nn.Module):
    """Three convolutions with batch norm, as in tests/small.py."""

    widths = (16, 24, 64)

    def __init__(self, num_classes: int, channels: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inputs, outputs in zip((channels, *self.widths), self.widths, strict=False):
            layers += [nn.Conv2d(inputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
        self.features = nn.Sequential(*layers)
        self.fc = nn.Linear(self.widths[-1], num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.features(x).mean((2, 3)))  # type: ignore[no-any-return]  # torch's modules return Any


def weights(run: Run) -> Tensors:
    return run.load_model().state_dict()


def served(key: str, result: ServedRequest) -> Digested:
    """The patch and the model of a request."""
    yield f"{key}/patch", result.result.patch.packed()[0]
    yield f"{key}/model", weights(written(result))


def written(result: ServedRequest) -> Run:
    assert result.run is not None, "every request here has an `out`"
    return result.run


def demo(place: Path) -> Digested:
    """The network of the demo, and Dress forgotten by each of our methods."""
    run = train_run(place / "trained", DEMO)
    yield "demo/trained", weights(run)
    for name in ("hide", "directions", "paper"):
        result = serve_request(run, run.load_data(), "class:Dress", name, out=place / name)
        yield from served(f"demo/class-Dress/{name}", result)


def federation_of_4(place: Path) -> Digested:
    """A federation that forgets a class, and then a client by a fixed ratio."""
    run = train_federation(place / "trained", FOUR_CLIENTS)
    yield "federation-of-4/trained", weights(run)
    first = forget_federated_run(run, CLASS_3, make_method("hide", {"max_retain_drop": 0.1}), out=place / "class")
    yield from served("federation-of-4/class-3", first)
    method, request = make_method("hide", {"ratio": 0.1}), ForgetRequest.parse("client:2")
    second = forget_federated_run(written(first), request, method, out=place / "client")
    yield from served("federation-of-4/class-3-then-client-2", second)


def goes_on(place: Path) -> Digested:
    """A federation that is trained further after a request, with the silenced weights fixed."""
    run = train_federation(place / "trained", CONTINUED)
    yield "goes-on/trained", weights(run)
    result = forget_federated_run(run, CLASS_3, make_method("hide", {"ratio": 0.1}), out=place / "class")
    yield from served("goes-on/class-3", result)
    later = train_federation(place / "later", replace(CONTINUED, start=str(written(result).path)))
    yield "goes-on/class-3-then-trained", weights(later)


def new_small_net(seed: int = 0) -> nn.Module:
    return build_model(SMALL_NET, num_classes=10, channels=1, seed=seed)


def engine_of(settings: FederateSettings, store: Path) -> FederatedEngine:
    """The engine of a federation in this process."""
    with local_grid(settings, store) as grid:
        return federated_engine(grid, settings, load_run_data(settings))


def small(place: Path) -> Digested:
    """A class forgotten by every method, centrally and in a federation; a client and samples in the federation."""
    data = load_images("digits", valid=0.2)
    net = fit(new_small_net(), data.train, SMALL_RECIPE)
    yield "small/trained", net.state_dict()

    def federation(store: str) -> FederatedEngine:
        engine = engine_of(THREE_CLIENTS, place / store)
        engine.send_model(net, ledger=False)
        return engine

    for name, settings in METHOD_SETTINGS.items():
        method, central = make_method(name, settings), CentralEngine(data, build=new_small_net)
        yield f"small/class-3/{name}/central", unlearn(net, central, CLASS_3, method).model.state_dict()
        engine = federation(f"class-{name}")
        yield f"small/class-3/{name}/federation-of-3", unlearn(net, engine, CLASS_3, method).model.state_dict()
    for key, request in (("client-1", "client:1"), ("samples", SAMPLES)):
        for name in ("hide", "paper"):
            method = make_method(name, {"ratio": 0.1})
            assert isinstance(method, PlanningMethod)
            patch = method.plan(net, federation(f"{key}-plan-{name}"), ForgetRequest.parse(request)).patch
            yield f"small/{key}/plan-{name}/patch", patch.packed()[0]
            yield f"small/{key}/plan-{name}/model", patch.apply(net).state_dict()
        for name, settings in METHOD_SETTINGS.items():
            if "client" in METHODS[name].kinds:
                method = make_method(name, settings, CLIENT_SETTINGS.get(name, ONE_EPOCH))
                engine = federation(f"{key}-{name}")
                yield f"small/{key}/{name}/federation-of-3", unlearn(net, engine, request, method).model.state_dict()


def federaser(place: Path) -> Digested:
    """Four rounds with kept updates, replayed without a client."""
    engine, updates = engine_of(UNEQUAL_CLIENTS, place / "clients"), place / "updates"
    net = engine.fit(new_small_net(), Selection(), UPDATES_RECIPE, updates=updates)
    yield "federaser/trained", net.state_dict()
    engine.send_model(net, ledger=False)
    for key, average_first in (("each-client", False), ("average-first", True)):
        settings = {"lr": 0.05, "batch_size": 32, "updates": str(updates), "average_first": average_first} | PLAIN
        forgot = unlearn(net, engine, "client:2", make_method("federaser", settings)).model
        yield f"federaser/client-2/{key}", forgot.state_dict()


def bundle(place: Path) -> Digested:
    """A run that forgets two classes; the bundle of the first request, its patch applied, and the request undone."""
    method = make_method("hide", {"ratio": 0.25, "statistics_images": 200, "trial_images": 200, "repair_images": 200})
    run, undo, archive = train_run(place / "trained", BUNDLED), place / "second.undo", place / "evidence.zip"
    second = written(serve_request(run, run.load_data(), "class:3", method, out=place / "second", undo=undo))
    third = serve_request(second, second.load_data(), "class:5", method, out=place / "third")
    yield "bundle/before", weights(run)
    make_bundle(second, CLASS_3, archive)
    with zipfile.ZipFile(archive) as opened:
        yield "bundle/class-3/patch-in-zip", safetensors.torch.load(opened.read("patch.safetensors"))
    patch = open_bundle(archive).patch
    yield "bundle/class-3/patch", patch.packed()[0]
    yield "bundle/class-3/model", patch.apply(run.load_model()).state_dict()
    yield "bundle/class-3/model-in-run", weights(second)
    yield from served("bundle/class-3-then-class-5", third)
    yield "bundle/class-3-undone/model", weights(undo_run(second, undo, place / "undone"))


def residual(place: Path) -> Digested:
    """A residual network, with other scopes, repairs and contrasts."""
    run = train_run(place / "trained", RESIDUAL)
    yield "residual/trained", weights(run)
    for key, (request, name, settings) in RESIDUAL_REQUESTS.items():
        method = make_method(name, settings)
        yield from served(f"residual/{key}", serve_request(run, run.load_data(), request, method, out=place / key))


def stored_networks(directory: Path, _: Path) -> Digested:
    for run in finished_runs(directory, strict=True):
        yield f"networks/{run.path.name}", weights(run)


FUNCTIONS: tuple[Part, ...] = (demo, federation_of_4, goes_on, small, federaser, bundle, residual)
PARTS = {function.__name__.replace("_", "-"): function for function in FUNCTIONS}  # keys begin with these names


def part_of(key: str) -> str:
    return key.partition("/")[0]


def compute(parts: Mapping[str, Part]) -> dict[str, str]:
    """The digest of every key of these parts."""
    found: dict[str, str] = {}
    for name, part in parts.items():
        began, before = time.perf_counter(), len(found)
        with tempfile.TemporaryDirectory(prefix="digests-") as place:
            os.environ["FEDORTHO_CACHE"] = str(Path(place, "cache"))
            for key, tensors in part(Path(place)):
                assert key not in found, f"{key} occurs twice"
                assert tensors, f"{key} has no tensors"
                found[key] = tensors_digest(tensors)
        print(f"{name}: {len(found) - before} digests in {time.perf_counter() - began:.0f} s", flush=True)
    return found


def compare(stored: Mapping[str, str], found: Mapping[str, str]) -> int:
    """Print each key that differs, is missing or is new, and a summary; the number of those keys."""
    states = dict.fromkeys(stored.keys() - found.keys(), "MISSING")
    states |= dict.fromkeys(found.keys() - stored.keys(), "NEW")
    states |= {key: "DIFFERS" for key in found.keys() & stored.keys() if found[key] != stored[key]}
    for key, state in sorted(states.items()):
        print(f"{state}  {key}")
    same, counts = len(stored.keys() | found.keys()) - len(states), Counter(states.values())
    print(f"{same} same, {counts['DIFFERS']} differ, {counts['MISSING']} missing, {counts['NEW']} new")
    return len(states)


def update(stored: Mapping[str, str], found: Mapping[str, str]) -> None:
    """Write the digests that were found, and the stored ones of all other parts."""
    parts = set(map(part_of, found))
    digests = {key: digest for key, digest in stored.items() if part_of(key) not in parts} | dict(found)
    rows = [{"part": part, "digests": number} for part, number in Counter(map(part_of, sorted(digests))).items()]
    command = " ".join(["python benchmarks/digests.py", *sys.argv[1:]])
    commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=HERE, text=True).strip()
    write_results(RESULTS, WHAT, command, rows, commit=commit, digests=digests, **machine())
    print(f"{len(digests)} digests written to {RESULTS}")


def machine() -> dict[str, str]:
    """What the bytes of float sums depend on."""
    return {"torch": torch.__version__, "cpu": torch.backends.cpu.get_cpu_capability()}


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", type=Path, default=NETWORKS, help="directory of the trained networks")
    parser.add_argument("--only", choices=[*PARTS, "networks"], help="the part to compute; default: all")
    parser.add_argument("--update", action="store_true", help="write the digests instead of comparing them")
    arguments = parser.parse_args(words)
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    file = read_json(RESULTS) if RESULTS.exists() else {"digests": {}} | machine()
    here, there = machine(), {key: file[key] for key in machine()}
    if here != there and not arguments.update:
        told = [f"torch {each['torch']} with {each['cpu']}" for each in (there, here)]
        print(f"{RESULTS} is from {told[0]}, this is {told[1]}; write digests of this machine with --update")
        return 2
    parts = PARTS | {"networks": partial(stored_networks, arguments.networks)}
    parts = {name: part for name, part in parts.items() if arguments.only in (None, name)}
    if "networks" in parts and not arguments.networks.is_dir():
        print(f"networks: skipped, {arguments.networks} does not exist; give --networks DIR")
        del parts["networks"]
    found = compute(parts)
    stored = file["digests"] if here == there else {}
    if arguments.update:
        update(stored, found)
        return 0
    return int(compare({key: digest for key, digest in stored.items() if part_of(key) in parts}, found) > 0)


if __name__ == "__main__":
    sys.exit(main())
