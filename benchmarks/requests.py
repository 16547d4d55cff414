"""What a class request costs by each method: seconds, FLOPs, images, bytes and memory.

    python benchmarks/requests.py --data-dir ../shared/data [--networks DIR]
        [--parts central,rivals,repeated,large,federation] [--federation DIR]

`central`: vgg-mini on CIFAR-10, hide with and without kept statistics, at a given ratio, and paper, with what each
statistic takes of it; retraining by what torch counts for an image (`computed`, no seconds). `rivals`: one pass of
fine-tuning and of SalUn, and SSD, on the same network. `repeated`: five classes one after the other, with what keeping
the ledger current costs. `large`: ResNet-18 and ResNet-50 with new weights, on random images, at a given ratio and
calibrated for a target and a budget that any accuracy meets (new weights answer one class whatever is pruned), so that
trials end at the first look; `client-bytes` are the messages that a client with these images would send. `federation`:
ten clients, fashion-mini, Dirichlet 0.3, three rounds (kept in --federation), and one round of fine-tuning; its profile
is of a second request that asks one thing at a time. Rows are added to benchmarks/results/requests.json as they are
measured.
"""

import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from forgetting import ledger_of
from manifest import benchmark_parser, open_network, original_name
from result_files import add_row
from torch import nn

from fedortho.data.images import Dataset, evaluation_batches, images_from_tensors
from fedortho.data.request import ForgetRequest, union_of
from fedortho.devices import FlopCounter
from fedortho.engines.central import central_engine
from fedortho.engines.cost import Meter, flops_per_image
from fedortho.engines.engine import Engine
from fedortho.engines.query import Query
from fedortho.federated.server import copied_clients, federated_engine, local_grid, train_federation
from fedortho.federated.wire import count_bytes, pack_json, pack_observations
from fedortho.methods import unlearn
from fedortho.methods.finetune import FineTune
from fedortho.methods.hide import Hide
from fedortho.methods.method import ForgetResult, Method
from fedortho.methods.paper import Paper
from fedortho.methods.salun import SalUn
from fedortho.methods.ssd import SSD
from fedortho.models.predictions import accuracy
from fedortho.models.zoo import build_model
from fedortho.requests.comparing import compare
from fedortho.runs.run import Run
from fedortho.runs.settings import FederateSettings
from fedortho.statistics.ledger import (
    KEPT_TRAINING,
    KEPT_VALIDATION,
    forget_lines,
    load_ledger,
    rebind_ledger,
    write_ledger,
)
from fedortho.statistics.observe import Observation, steady_order
from fedortho.storage.records import to_json

OUT = Path(__file__).parent / "results" / "requests.json"
CLASSES = (1, 4, 6)
KEPT = "statistics kept"
CASES: tuple[tuple[str, Method, bool], ...] = (
    (f"hide, ratio given, {KEPT}", Hide(ratio=0.1, repair=False), True),
    (f"hide, ratio given, repaired, {KEPT}", Hide(ratio=0.1), True),
    (f"paper, {KEPT}", Paper(), True),
    (f"hide, {KEPT}", Hide(), True),
    ("hide, nothing kept", Hide(), False),
)
FEDERATION = FederateSettings(
    data="fashion-mini", clients=10, fraction=1.0, rounds=3, split="dirichlet:0.3", batch_size=32, threads=1
)
TRAINING = 3000  # images of the large networks' runs
ANY_BUDGET = Hide(max_retain_drop=1.0, target=1.0)  # new weights miss any other
KEY = ("part", "network", "method", "request")
Row = dict[str, Any]


def main(words: list[str] | None = None) -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--parts", default="central,rivals,repeated,large,federation")
    parser.add_argument("--federation", type=Path, help="where the federation is trained, or was; default: not kept")
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args(words)
    torch.set_num_threads(1)
    run = open_network(given.networks, original_name("vgg-mini"), given.data_dir)
    steps: dict[str, Callable[[], Iterator[Row]]] = {
        "central": lambda: central(run, run.load_data(given.data_dir)),
        "repeated": lambda: repeated(run, run.load_data(given.data_dir)),
        "rivals": lambda: rivals(run, run.load_data(given.data_dir)),
        "large": large,
        "federation": lambda: federation(given.federation),
    }
    command = "python benchmarks/requests.py " + " ".join(sys.argv[1:] if words is None else words)
    for part in given.parts.split(","):
        for row in steps[part]():
            print(part, row, flush=True)
            what = "cost of a class request by each method"
            add_row(given.out, {"part": part} | row, KEY, place_of_row, what, command.strip())


def place_of_row(row: Mapping[str, Any]) -> list[str]:
    return [str(row[name]) for name in KEY]


def served(
    method: Method, model: nn.Module, engine: Engine, request: str, forgotten: ForgetRequest | None = None
) -> tuple[ForgetResult, Row]:
    """The result of a request, and its cost with the CPU seconds of this process."""
    started = time.process_time()
    result = unlearn(model, engine, request, method, forgotten=forgotten)
    computed = {"request-flops": result.cost.request_flops, "cpu-seconds": time.process_time() - started}
    return result, to_json(result.cost) | computed


class WatchedEngine(Meter):
    """An engine that notes FLOPs, CPU seconds and a client's bytes by what is asked, one answer after the other.

    The FLOPs are those of the request: without what everybody keeps.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.profile: dict[str, dict[str, float]] = {}

    def measure(self, model: nn.Module, queries: Sequence[Query]) -> list[list[Observation]]:
        answers = []
        for query in queries:
            started, before = time.process_time(), replace(self.tally)
            with FlopCounter() as counter:
                (found,) = super().measure(model, [query])
            answers.append(found)
            sums, _ = pack_observations([[each.collapsed() for each in found]], [query])
            elsewhere = self.tally.since(before)
            flops = counter.flops + elsewhere.flops - elsewhere.kept_flops
            spent = {"seconds": time.process_time() - started, "flops": flops}
            spent["bytes"] = count_bytes(pack_json(sums, {}))
            noted = self.profile.setdefault(query.statistic.kind, dict.fromkeys(("asked", *spent), 0))
            for key, value in {"asked": 1, **spent}.items():
                noted[key] += value
        return answers


def rivals(run: Run, data: Dataset) -> Iterator[Row]:
    """Methods that compute gradients, one pass each."""
    model = run.load_model()
    for name, method in (
        ("ssd", SSD()),
        ("finetune, one pass", FineTune(epochs=1)),
        ("salun, one pass", SalUn(epochs=1)),
    ):
        cost = served(method, model, central_engine(model, data), "class:1")[1]
        yield {"network": "vgg-mini", "method": name, "request": "class:1", "cost": cost}


def central(run: Run, data: Dataset) -> Iterator[Row]:
    model, ledger = run.load_model(), ledger_of(run, data)
    plain = peak(lambda: [model(inputs) for inputs, _ in evaluation_batches(data.valid.subset(range(1000)))])
    for label in CLASSES:
        for name, method, has_ledger in CASES:
            engine = WatchedEngine(central_engine(model, data, ledger if has_ledger else None))
            found: list[Row] = []
            memory = peak(lambda: found.append(served(method, model, engine, f"class:{label}")[1])) / plain  # noqa: B023  # called at once
            about = {"network": "vgg-mini", "method": name, "request": f"class:{label}", "memory": round(memory, 2)}
            yield about | {"cost": found[0], "profile": engine.profile}
    retain = int((data.train.labels != 1).sum())
    flops = float(flops_per_image(model, data.train.shape)[1] * retain * int(run.settings.epochs))
    about = {"network": "vgg-mini", "method": "retrain", "request": "class:1", "computed": True}
    yield about | {"cost": {"flops": flops, "request-flops": flops}}


def repeated(run: Run, data: Dataset) -> Iterator[Row]:
    """Five requests on the same model, each with the cost of keeping the ledger current for the next."""
    model, ledger = run.load_model(), ledger_of(run, data)
    done: list[ForgetRequest] = []
    for label in range(5):
        request, earlier = ForgetRequest.parse(f"class:{label}"), union_of(done)
        engine, method = central_engine(model, data, ledger), Hide(max_retain_drop=0.02)
        result, cost = served(method, model, engine, str(request), forgotten=earlier)
        done.append(request)
        started = time.process_time()
        with FlopCounter() as counter:
            moved = rebind_ledger(ledger, model, result.model, data.train)
        model, all_done = result.model, union_of(done)
        assert all_done is not None
        ledger = forget_lines(moved, all_done.split(data.train)[1])
        forgotten = {str(old): accuracy(model, old.split(data.test)[0]) for old in done}
        yield {
            "network": "vgg-mini",
            "method": "hide",
            "request": str(request),
            "cost": cost,
            "ledger-flops": float(counter.flops),
            "ledger-seconds": round(time.process_time() - started, 2),
            "forgotten": forgotten,
        }


def large() -> Iterator[Row]:
    """The edit alone, repaired and calibrated, on networks of full size.

    Images are copies of 40, each a row of its own. Kept are the activations of as many training and validation images
    as of a real run, those of every tenth image of the class that the network answers among them.
    """
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (40, 3, 32, 32), dtype=torch.uint8, generator=generator)
    images = images_from_tensors(pixels, torch.arange(40) % 10)
    for name in ("resnet18", "resnet50"):
        torch.manual_seed(0)
        model = build_model(name, num_classes=10).eval()
        with tempfile.TemporaryDirectory() as place:
            write_ledger(Path(place) / "ledger.safetensors", model, images)
            ledger = load_ledger(Path(place) / "ledger.safetensors", model)
        assert ledger is not None
        assert ledger.kept is not None
        with torch.no_grad():
            answered = int(model(images.normalise(pixels)).argmax(1).bincount(minlength=10).argmax())
        copies = torch.arange(TRAINING + KEPT_VALIDATION) % 40
        labels = torch.where(torch.arange(len(copies)) % 10 == 0, answered, (answered + 1 + copies % 9) % 10)
        labels[TRAINING - 2 * KEPT_TRAINING : TRAINING] = answered  # enough of them to measure trials on
        every = replace(images, pixels=pixels[copies], store_labels=labels, rows=torch.arange(len(copies)))
        train, valid = every.subset(range(TRAINING)), every.subset(range(TRAINING, len(copies)))
        stored = torch.cat([steady_order(train.rows, 0)[:KEPT_TRAINING], valid.rows])
        with torch.no_grad():
            right = model(images.normalise(pixels)).argmax(1)[copies[stored]] == labels[stored]
        parts = {"rows": stored, "labels": labels[stored], "training": stored < TRAINING, "right": right}
        ledger = replace(
            ledger,
            kept=replace(ledger.kept.where(copies[stored]), **parts),
            counts=torch.bincount(train.labels, minlength=10),
        )
        data = Dataset("random", train, valid, valid.subset([]), "")
        plain = peak(lambda: [model(inputs) for inputs, _ in evaluation_batches(data.valid.subset(range(256)))])  # noqa: B023  # called at once
        for what, method in (*((what, method) for what, method, _ in CASES[:2]), (f"hide, {KEPT}", ANY_BUDGET)):
            engine = WatchedEngine(central_engine(model, data, ledger))
            found: list[Row] = []
            memory = peak(lambda: found.append(served(method, model, engine, f"class:{answered}")[1])) / plain  # noqa: B023  # called at once
            sent = {kind: int(noted["bytes"]) for kind, noted in engine.profile.items()}
            row = {"network": name, "method": what, "request": f"class:{answered}", "memory": round(memory, 2)}
            yield row | {
                "cost": found[0],
                "client-bytes": sent | {"all": sum(sent.values())},
                "profile": engine.profile,
            }


def federation(kept: Path | None) -> Iterator[Row]:
    """A calibrated request of ten clients, and one round of fine-tuning."""
    with tempfile.TemporaryDirectory() as place:
        run = train_federation((kept or Path(place)) / "federation", FEDERATION)
        for row in compare(run, "class:3", ["hide", "finetune"], passes="one", out=Path(place) / "compared"):
            told = to_json(row)
            request = {"request-flops": told["cost"]["flops"] - told["cost"]["kept-flops"]} if told["cost"] else {}
            name = "hide" if row.method == "hide" else "finetune, one round"
            yield {"network": "vgg-mini, ten clients", "method": name, "request": "class:3"} | {
                "cost": told["cost"] and told["cost"] | request,
                "accuracies": told["accuracies"],
                "refused": told["refused"],
                **({"profile": federated_profile(run)} if row.method == "hide" else {}),
            }


def federated_profile(run: Run) -> dict[str, dict[str, float]]:
    """What all clients of a federation and its server spend on a calibrated request, by what is asked."""
    assert isinstance(run.settings, FederateSettings)
    with copied_clients(run) as store, local_grid(run.settings, store, run=run.path) as grid:
        engine = WatchedEngine(federated_engine(grid, run.settings, run.load_data("")))
        unlearn(run.load_model(), engine, "class:3", Hide())
    return engine.profile


def peak(work: Callable[[], object]) -> float:
    """Peak memory of this process in megabytes while it works (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")
    with torch.no_grad():
        work()
    return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 1000  # type: ignore[index]  # Linux


if __name__ == "__main__":
    main()
