"""What a class request costs by each method: seconds, FLOPs, images, bytes and memory.

    python benchmarks/requests.py --data-dir ../shared/data [--networks DIR] [--parts central,repeated,large,federation]

`central`: vgg-mini on CIFAR-10, hide with and without kept statistics, at a given ratio, and paper; of methods that
train the cost of one pass by what torch counts for an image (`computed`, no seconds). `repeated`: five classes one
after the other, with what keeping the ledger current costs. `large`: ResNet-18 and ResNet-50 with new weights, on
random images. `federation`: ten clients, fashion-mini, Dirichlet 0.3, three rounds. Rows are added to
benchmarks/results/requests.json as they are measured.
"""

import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from forgetting import ledger_of
from manifest import benchmark_parser, open_network, original_name
from result_files import add_row
from torch import Tensor, nn

from fedortho.data.images import Dataset, evaluation_batches, images_from_tensors
from fedortho.data.request import ForgetRequest, union_of
from fedortho.devices import FlopCounter
from fedortho.engines.central import central_engine
from fedortho.engines.cost import flops_per_image
from fedortho.engines.engine import Engine
from fedortho.engines.query import Query, Selection, Statistic
from fedortho.federated.server import train_federation
from fedortho.federated.wire import count_bytes, pack_json, pack_observations
from fedortho.methods import unlearn
from fedortho.methods.hide import Hide
from fedortho.methods.method import ForgetResult, Method
from fedortho.methods.paper import Paper
from fedortho.models.norms import norms_behind
from fedortho.models.predictions import accuracy
from fedortho.models.zoo import build_model
from fedortho.requests.comparing import compare
from fedortho.runs.run import Run
from fedortho.runs.settings import FederateSettings
from fedortho.statistics.ledger import KEPT_TRAINING, forget_lines, load_ledger, rebind_ledger, write_ledger
from fedortho.statistics.observe import Observation, key_of
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
KEY = ("part", "network", "method", "request")
Row = dict[str, Any]


def main(words: list[str] | None = None) -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--parts", default="central,repeated,large,federation")
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args(words)
    torch.set_num_threads(1)
    run = open_network(given.networks, original_name("vgg-mini"), given.data_dir)
    steps: dict[str, Callable[[], Iterator[Row]]] = {
        "central": lambda: central(run, run.load_data(given.data_dir)),
        "repeated": lambda: repeated(run, run.load_data(given.data_dir)),
        "large": large,
        "federation": federation,
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


def central(run: Run, data: Dataset) -> Iterator[Row]:
    model, ledger = run.load_model(), ledger_of(run, data)
    plain = peak(lambda: [model(inputs) for inputs, _ in evaluation_batches(data.valid.subset(range(1000)))])
    for label in CLASSES:
        for name, method, has_ledger in CASES:
            engine = central_engine(model, data, ledger if has_ledger else None)
            found: list[Row] = []
            memory = peak(lambda: found.append(served(method, model, engine, f"class:{label}")[1])) / plain  # noqa: B023  # called at once
            about = {"network": "vgg-mini", "method": name, "request": f"class:{label}", "memory": round(memory, 2)}
            yield about | {"cost": found[0]}
    both = flops_per_image(model, data.train.shape)[1]
    images, forget = len(data.train), int((data.train.labels == 1).sum())
    retain = images - forget
    for name, flops in (
        ("finetune, one pass", both * retain),
        ("salun, one pass", both * (images + forget)),
        ("ssd, nothing kept", both * (images + forget)),
        ("ssd, importances kept", both * forget),
        ("retrain", both * retain * int(run.settings.epochs)),
    ):
        cost = {"flops": float(flops), "request-flops": float(flops)}
        yield {"network": "vgg-mini", "method": name, "request": "class:1", "computed": True, "cost": cost}


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
    """The edit alone and repaired, on networks of full size."""
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
        copies = torch.arange(KEPT_TRAINING) % 40  # each image several times, as rows of their own
        kept = ledger.kept
        many = replace(kept.where(copies), rows=torch.arange(KEPT_TRAINING), labels=copies % 10)
        repeated_images = replace(
            images, pixels=pixels[copies], store_labels=copies % 10, rows=torch.arange(KEPT_TRAINING)
        )
        ledger = replace(ledger, kept=many, counts=torch.bincount(copies % 10, minlength=10))
        data = Dataset("random", repeated_images, repeated_images.subset([]), repeated_images.subset([]), "")
        for what, method, _ in CASES[:2]:
            _, cost = served(method, model, central_engine(model, data, ledger), "class:3")
            sent = {"client-bytes": bytes_of_client(model, ledger)}
            yield {"network": name, "method": what, "request": "class:3", "cost": cost} | sent


def bytes_of_client(model: nn.Module, ledger: Observation) -> dict[str, int]:
    """What one client of a federation sends: the statistics of a class request, and the moments to repair one edit."""
    assert ledger.kept is not None
    sites = ledger.kept.structure.sites("deep", "channel", "stream")
    peaks = ledger.among([key_of(site, "stream") for site in sites]).collapsed()
    moments: dict[str, Tensor] = {}
    for norm in norms_behind(model, sites, torch.rand(2, 3, 32, 32)):
        values = model.get_buffer(f"{norm}.running_var").double().unsqueeze(0)
        moments |= {f"0:{norm}:{kind}": 40 * values for kind in ("mean", "square")}  # of 400 images of ten clients
    both = {"peaks": [peaks, peaks], "moments": [Observation(moments, torch.tensor([40]))]}
    found = {}
    for kind, observed in both.items():
        sums, _ = pack_observations([observed], [Query((Selection(),) * len(observed), Statistic(kind))])
        found[kind] = count_bytes(pack_json(sums, {}))
    return found


def federation() -> Iterator[Row]:
    """A calibrated request of ten clients, and what one round of fine-tuning would send and compute."""
    with tempfile.TemporaryDirectory() as place:
        run = train_federation(Path(place) / "federation", FEDERATION)
        (row,) = compare(run, "class:3", ["hide"], out=Path(place) / "compared")
        told = to_json(row)
        model = run.load_model()
        images = run.history()[-1].images or 0
        sent = sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())
    yield {"network": "vgg-mini, ten clients", "method": "hide", "request": "class:3"} | {
        "cost": told["cost"] and told["cost"] | {"request-flops": told["cost"]["flops"] - told["cost"]["kept-flops"]},
        "accuracies": told["accuracies"],
        "refused": told["refused"],
    }
    flops = float(flops_per_image(model, (1, 28, 28))[1] * images)
    cost = {"flops": flops, "request-flops": flops, "bytes-up": 10 * sent}
    about = {"network": "vgg-mini, ten clients", "method": "finetune, one round", "request": "class:3"}
    yield about | {"computed": True, "cost": cost}


def peak(work: Callable[[], object]) -> float:
    """Peak memory of this process in megabytes while it works (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")
    with torch.no_grad():
        work()
    return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 1000  # type: ignore[index]  # Linux


if __name__ == "__main__":
    main()
