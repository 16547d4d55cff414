"""A federation of 100 clients on CIFAR-10: train it, retrain it without the forget set, forget, and compare.

    python benchmarks/federation.py --data-dir ../shared/data [--train original,retrain-class,...] [--requests]

Trainings go into --runs (resumable; two processes may train different ones), --requests measures requests on them.
Class accuracies are on test images; the forget accuracy of clients and samples is on the training images of the forget
set, as the paper defines it. Trials use no test image.
"""

import argparse
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from result_files import read_results, write_results
from rich.progress import Progress
from torch import nn

from fedortho.data.images import Dataset
from fedortho.data.request import ForgetRequest
from fedortho.engines.engine import PlanPart, TrainingPlan
from fedortho.engines.query import Selection
from fedortho.errors import FedOrthoError
from fedortho.evaluation.accuracies import accuracies_of
from fedortho.federated.engine import RoundProgress
from fedortho.federated.server import federated_engine, local_grid, train_federation, trainable_masks
from fedortho.federated.transport import read_wire_log, total_bytes
from fedortho.methods.hide import Hide
from fedortho.methods.paper import Paper
from fedortho.requests.forgetting import forget_federated_run
from fedortho.runs.run import Run, load_run_data, open_run
from fedortho.runs.settings import FederateSettings, held_rows
from fedortho.storage.files import locked
from fedortho.storage.records import to_json
from fedortho.training.objectives import FitOptions

HERE = Path(__file__).parent
SETTINGS = FederateSettings(
    data="cifar10",
    model="vgg-mini",
    clients=100,
    rounds=60,
    fraction=0.1,
    split="dirichlet:0.6",
    epochs=2,
    batch_size=32,
    threads=1,
    device="cpu",
    evaluate_every=10,
)
FURTHER_ROUNDS = 20
FT_ROUNDS = 5
PARTS = ("training", "class", "client", "samples", "hide-recovery", "paper-recovery")


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", default="../shared/data")
    parser.add_argument("--runs", type=Path, default=Path("runs/federation"))
    parser.add_argument("--train", default="", help="trainings, separated by commas; default: all")
    parser.add_argument("--requests", action="store_true", help="measure requests on the trained runs")
    parser.add_argument("--parts", default=",".join(PARTS), help="measurements, separated by commas")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "federation-cifar10.json")
    arguments = parser.parse_args(words)
    torch.set_num_threads(1)
    base = replace(SETTINGS, data_dir=arguments.data_dir)
    data = load_run_data(base)
    trainings = variants(base, data)
    for name in [n for n in arguments.train.split(",") if n] or ([] if arguments.requests else list(trainings)):
        train(arguments.runs / name, trainings[name])
    for part in [p for p in PARTS if p in arguments.parts.split(",")] if arguments.requests else []:
        rows = measure(part, arguments.runs, trainings, data)
        command = f"python benchmarks/federation.py --data-dir {arguments.data_dir} [--requests]"
        with locked(arguments.out.with_suffix(".writing")):  # two processes may measure different parts
            before = read_results(arguments.out).rows if arguments.out.exists() else ()
            others = [row for row in before if row["part"] != part]
            everything = sorted([*others, *rows], key=lambda row: PARTS.index(row["part"]))
            write_results(arguments.out, "100 clients, CIFAR-10, vgg-mini", command, everything)


def requests(data: Dataset, base: FederateSettings) -> dict[str, ForgetRequest]:
    """A class, the client with the median number of images, and twenty images each of five clients."""
    rows = held_rows(data, base, base.partition_seed)
    order = sorted(rows, key=lambda client: (len(rows[client]), client))
    trained_on = {c: torch.isin(rows[c], data.train.rows).nonzero().flatten().tolist() for c in order[60:65]}
    samples = tuple(f"{client}/{place}" for client, places in trained_on.items() for place in places[:20])
    return {
        "class": ForgetRequest.parse("class:cat"),
        "client": ForgetRequest(clients=(order[50],)),
        "samples": ForgetRequest(samples=samples),
    }


def variants(base: FederateSettings, data: Dataset) -> dict[str, FederateSettings]:
    settings = {"original": replace(base, keep_updates=True), "unaligned": replace(base, align=0.0)}  # for FedEraser
    return settings | {f"retrain-{k}": replace(base, without=str(r)) for k, r in requests(data, base).items()}


def train(path: Path, settings: FederateSettings) -> Run:
    started = time.time()
    with Progress() as bars:
        task = bars.add_task(path.name, total=settings.rounds)

        def watch(progress: RoundProgress) -> None:
            part = progress.answered / progress.asked if progress.asked else 0
            bars.update(task, completed=progress.round + part)
            if not progress.asked:
                print(path.name, progress.history[-1], f"{time.time() - started:.0f} s", flush=True)

        return train_federation(path, settings, watch=watch)


def measure(part: str, runs: Path, trainings: dict[str, FederateSettings], data: Dataset) -> list[dict[str, Any]]:
    original = train(runs / "original", trainings["original"])
    if part == "training":
        rows = [trained(name, train(runs / name, trainings[name])) for name in ("original", "unaligned")]
    elif part.endswith("recovery"):
        rows = [recovery(part.partition("-")[0], original, data, runs)]
    else:
        request = requests(data, trainings["original"])[part]
        rows = compared(part, request, original, train(runs / f"retrain-{part}", trainings[f"retrain-{part}"]), data)
    print(*rows, sep="\n", flush=True)
    return [{"part": part} | row for row in rows]


def trained(name: str, run: Run) -> dict[str, Any]:
    history = run.history()
    row = {"what": "training", "variant": name, **to_json(run.record.result), "settings": dict(run.record.settings)}
    row["drift_by_round"] = [entry.drift for entry in history]
    row["seconds"] = sum(entry.seconds for entry in history)
    return row | sent(run, "train.local")


def compared(kind: str, request: ForgetRequest, original: Run, retrained: Run, data: Dataset) -> list[dict[str, Any]]:
    """The original, retraining, fine-tuning, hide and paper, for one request."""
    settings = original.settings
    assert isinstance(settings, FederateSettings)
    clients = held_rows(data, settings, settings.partition_seed)
    about = {"what": "request", "kind": kind, "images": int(request.mask(data.train, clients).sum())}
    rows = [
        about | {"method": "original"} | asdict(accuracies_of(original.load_model(), data, request, clients=clients))
    ]
    row = about | {"method": "retrain", "rounds": settings.rounds}
    row["seconds"] = sum(entry.seconds for entry in retrained.history())
    row |= sent(retrained, "train.local")
    rows.append(row | asdict(accuracies_of(retrained.load_model(), data, request, clients=clients)))
    rows.append(about | finetuned(original, request, data))
    return rows + [about | served(original, request, name, data) for name in ("hide", "hide, exact repair", "paper")]


def sent(run: Run, kind: str = "") -> dict[str, Any]:
    log = [exchange for exchange in read_wire_log(run.path / "wire.json") if exchange.kind.startswith(kind)]
    up, down = total_bytes(log)
    return {"exchanges": len(log), "bytes_up": up, "bytes_down": down}


def served(run: Run, request: ForgetRequest, name: str, data: Dataset) -> dict[str, Any]:
    """A request served by one method; hide has a retain budget of three points."""
    changes: dict[str, Any] = {"max_retain_drop": 0.03} if name.startswith("hide") else {}
    if name.endswith("exact repair"):
        changes["repair_by"] = "layers"
    started = time.time()
    try:
        done = forget_federated_run(
            run, request, (Hide if name.startswith("hide") else Paper)(**changes), out=None, data=data
        )
    except FedOrthoError as error:
        return {"method": name, "refused": str(error), "seconds": time.time() - started}
    row: dict[str, Any] = {"method": name, **asdict(done.record.after), "seconds": time.time() - started}
    cost, chosen = done.result.cost, done.result.chosen
    row |= {"exchanges": cost.exchanges, "bytes_up": cost.bytes_up, "bytes_down": cost.bytes_down}
    if chosen is not None:
        row |= {"ratio": chosen.ratio, "scrub": chosen.scrub}
    return row


def finetuned(run: Run, request: ForgetRequest, data: Dataset) -> dict[str, Any]:
    """Further rounds on the retain set at a tenth of the learning rate."""
    started = time.time()
    model, up, down = more_rounds(run, run.load_model(), request, data, FT_ROUNDS, None)
    clients = held_rows(data, run.settings, run.settings.partition_seed)  # type: ignore[arg-type]  # a federation's
    row = {"method": "ft", "rounds": FT_ROUNDS, **asdict(accuracies_of(model, data, request, clients=clients))}
    return row | {"seconds": time.time() - started, "exchanges": FT_ROUNDS, "bytes_up": up, "bytes_down": down}


def more_rounds(
    run: Run, model: nn.Module, request: ForgetRequest, data: Dataset, rounds: int, mask: Any, passes: int = 2
) -> tuple[nn.Module, int, int]:
    settings = run.settings
    assert isinstance(settings, FederateSettings)
    recipe = replace(settings.recipe, epochs=rounds, lr=settings.lr / 10, schedule="constant")
    with local_grid(settings, run.path / "clients") as grid:
        engine = federated_engine(grid, settings, data)
        group = Selection("train", None, request)
        plan = TrainingPlan((PlanPart(group),), FitOptions(local_epochs=passes))
        trained = engine.fit(model, plan, recipe, trainable=mask)
    return trained, engine.tally.bytes_up, engine.tally.bytes_down


def recovery(name: str, run: Run, data: Dataset, runs: Path) -> dict[str, Any]:
    """Twenty further rounds on the retain set after a class request; with hide the silenced kernels are frozen."""
    request, out = ForgetRequest.parse("class:cat"), runs / f"forgot-{name}"
    changes: dict[str, Any] = {"max_retain_drop": 0.03} if name == "hide" else {"ratio": 0.3}
    if not out.exists():
        forget_federated_run(run, request, (Hide if name == "hide" else Paper)(**changes), out=out, data=data)
    forgot = open_run(out)
    model = forgot.load_model()
    mask = trainable_masks(forgot, model)
    further, _, _ = more_rounds(forgot, model, request, data, FURTHER_ROUNDS, mask or None, passes=1)
    row: dict[str, Any] = {"what": "recovery", "method": name, "rounds": FURTHER_ROUNDS, "masked_tensors": len(mask)}
    return row | {
        "before": asdict(accuracies_of(model, data, request)),
        "after": asdict(accuracies_of(further, data, request)),
    }


if __name__ == "__main__":
    main()
