"""Costs of the engines: transport alone, rounds of training, and memory for many clients.

    python benchmarks/engines.py [--rounds 5]          # needs the extra `simulation`; use a quiet machine

Transport is a model of 45 MB (ResNet-18) out to ten clients and back. Engines take turns in one run on the same
two cores; Ray's start-up is measured apart and not part of a round. Memory is the peak of a process of its own.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from result_files import write_results

from fedortho.data.request import ForgetRequest
from fedortho.engines.query import Query, Selection, Statistic
from fedortho.federated.client import client_app
from fedortho.federated.engine import FederatedEngine
from fedortho.federated.launch import simulate
from fedortho.federated.local_grid import LocalGrid, WorkerGrid
from fedortho.federated.server import federated_engine, local_grid
from fedortho.federated.wire import pack_json, unpack_json
from fedortho.models.zoo import build_model
from fedortho.runs.run import load_run_data
from fedortho.runs.settings import FederateSettings
from fedortho.storage.files import prefixed
from fedortho.storage.settings import as_mapping

HERE = Path(__file__).parent
CLIENTS = 10
TRAINING = FederateSettings(
    data="fashion-mini", model="vgg-mini", clients=CLIENTS, rounds=1, fraction=1.0, timeout=600.0, device="cpu"
)


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "engines.json")
    parser.add_argument("--memory", type=int, default=0, help=argparse.SUPPRESS)  # a child process: so many clients
    arguments = parser.parse_args(words)
    if arguments.memory:
        print(json.dumps(peak_memory(arguments.memory)))
        return
    rows: list[dict[str, Any]] = []
    for what, measure in (("transport", transport), ("training", training)):
        for engine in ("inprocess", "ray") if what == "transport" else ("inprocess", "workers", "ray"):
            row = {"what": what, "engine": engine} | measure(engine, arguments.rounds)
            rows.append(row)
            print(row, flush=True)
    for clients in (10, 1000):
        done = subprocess.run(
            [sys.executable, __file__, "--memory", str(clients)], capture_output=True, text=True, check=True
        )
        rows.append({"what": "memory", "clients": clients} | json.loads(done.stdout.splitlines()[-1]))
        print(rows[-1], flush=True)
    rows.append({"what": "bytes", "model": "resnet50"} | sizes())
    print(rows[-1], flush=True)
    command = "python benchmarks/engines.py " + " ".join(sys.argv[1:])
    write_results(arguments.out, "engines: seconds a round, peak memory", command.strip(), rows)


def sizes() -> dict[str, Any]:
    """Bytes of one ResNet-50 client: statistics for a class request, and a round of training."""
    settings = replace(TRAINING, model="resnet50", clients=2, least_group=1, threads=1, valid=0.99, least_images=2)
    data = load_run_data(settings)
    model = build_model("resnet50", num_classes=10, channels=1)
    with tempfile.TemporaryDirectory() as store, local_grid(settings, Path(store)) as grid:
        federation = federated_engine(grid, settings, data)
        federation.send_model(model, ledger=False)
        request = ForgetRequest.parse("class:3")
        groups = (Selection("train", request), Selection("train", None, request))
        federation.measure(model, [Query(groups, Statistic("peaks"))])
        observe = federation.transport.log[-1]
        federation.fit(model, Selection(), replace(settings.recipe, epochs=1))
        trained = federation.transport.log[-1]
    query = {"observe_up": max(observe.bytes_up.values()), "observe_down": max(observe.bytes_down.values())}
    return query | {"round_up": max(trained.bytes_up.values()), "round_down": max(trained.bytes_down.values())}


def on_engine(engine: str, client: Any, job: Callable[[Any], None]) -> float:
    """Seconds of a job over a grid of this engine, start-up included."""
    started = time.perf_counter()
    if engine == "inprocess":
        job(LocalGrid(client_app(client) if isinstance(client, dict) else client, CLIENTS))
    elif engine == "workers":
        grid = WorkerGrid(client, CLIENTS, {}, workers=2)
        job(grid)
        grid.close()
    else:
        from flwr.serverapp import ServerApp

        server = ServerApp()

        @server.main()
        def main(grid: Any, context: Any) -> None:
            job(grid)

        app = client_app(client) if isinstance(client, dict) else client
        simulate(server, app, clients=CLIENTS, threads=1, workers=2)
    return time.perf_counter() - started


def transport(engine: str, rounds: int) -> dict[str, Any]:
    """A model to every client and back, deserialised and serialised on both sides, without training."""
    from flwr.app import Context, Message
    from flwr.clientapp import ClientApp

    echo = ClientApp()

    @echo.train()
    def back(message: Message, context: Context) -> Message:
        return Message(pack_json(*unpack_json(message.content)), reply_to=message)

    state = prefixed("model.", build_model("resnet18", num_classes=10).state_dict())
    seconds: list[float] = []

    def job(grid: Any) -> None:
        for _ in range(rounds + 1):
            while len(nodes := list(grid.get_node_ids())) < CLIENTS:
                time.sleep(0.05)
            started = time.perf_counter()
            content = pack_json(state, {})
            messages = [Message(content, dst_node_id=node, message_type="train") for node in nodes]
            waiting = list(grid.push_messages(messages))
            while waiting:
                for reply in grid.pull_messages(waiting):
                    unpack_json(reply.content)
                    waiting.remove(reply.metadata.reply_to_message_id)
                if engine == "ray" and waiting:
                    time.sleep(0.01)
            seconds.append(time.perf_counter() - started)

    whole = on_engine(engine, echo, job)
    return _summary(seconds, whole)


def training(engine: str, rounds: int) -> dict[str, Any]:
    """Ten clients train on 486 images each: in sequence with two threads, or two at a time with one thread each."""
    settings = replace(TRAINING, threads=2 if engine == "inprocess" else 1)
    data = load_run_data(settings)
    seconds: list[float] = []
    with tempfile.TemporaryDirectory() as store:

        def job(grid: Any) -> None:
            federation = federated_engine(grid, settings, data)
            model = build_model(settings.model, num_classes=10, channels=1)
            recipe = replace(settings.recipe, epochs=rounds + 1)
            federation.fit(model, Selection(), recipe)
            seconds.extend(entry.seconds for entry in federation.history)

        whole = on_engine(engine, {**as_mapping(settings), "store": store}, job)
    return _summary(seconds, whole)


def _summary(seconds: list[float], whole: float) -> dict[str, Any]:
    rounds = [round(value, 3) for value in seconds[1:]]  # the first one warms up
    return {"seconds": rounds, "median": statistics.median(rounds), "whole": round(whole, 2)}


def _peak() -> int:
    """Peak memory of this process in kilobytes; the resource module counts the parent's too."""
    return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1])  # type: ignore[index]  # Linux


def peak_memory(clients: int) -> dict[str, Any]:
    """Peak memory of this process: two rounds of ten clients, then statistics from all clients."""
    torch.set_num_threads(1)
    settings = replace(TRAINING, clients=clients, fraction=10 / clients, least_images=2, threads=1, least_group=1)
    data = load_run_data(settings)
    with tempfile.TemporaryDirectory() as store, local_grid(settings, Path(store)) as grid:
        federation: FederatedEngine = federated_engine(grid, settings, data)
        model = build_model(settings.model, num_classes=10, channels=1)
        model = federation.fit(model, Selection(), replace(settings.recipe, epochs=2))
        after_training = _peak()
        federation.send_model(model)
        request = ForgetRequest.parse("class:3")
        federation.measure(
            model, [Query((Selection("train", request), Selection("train", None, request)), Statistic("peaks"))]
        )
    peak = _peak()
    return {"megabytes": round(peak / 1000, 1), "megabytes_after_training": round(after_training / 1000, 1)}


if __name__ == "__main__":
    main()
