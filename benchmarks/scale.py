"""One request to a federation in this process, for a growing number of clients: CPU seconds, peak memory and bytes.

    python benchmarks/scale.py [--clients 100,1000,10000] [--recorded]

Every client has an app of its own with 20 images of two classes of digits, drawn by its number. The request is class:3
by the paper's method, on a small network. Each size runs in a process of its own, whose peak memory is that of the row.
CPU seconds are those of the server and of all clients together, because all are in one process. With --recorded
client N answers with what client N modulo 10 has computed, under its own number: the server's work is the same, and
that of the clients is not done; so it shows how the server alone scales.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from result_files import add_row

import fedortho as fo
from fedortho.data.images import made_images
from fedortho.federated import switch_off
from fedortho.federated.transport import total_bytes
from fedortho.federated.wire import pack_json, unpack_json

HERE = Path(__file__).parent
NAMES = tuple(map(str, range(10)))
IMAGES, EPOCHS = 20, 4  # images of a client; epochs in which the model is trained in one place
METHOD = fo.make_method("paper", {"ratio": 0.2})


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", default="100,1000,10000")
    parser.add_argument("--one", type=int, default=0, help="measure this number of clients here, and print the row")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "scale.json")
    parser.add_argument("--recorded", action="store_true", help="only ten clients compute, the others repeat them")
    given = parser.parse_args(words)
    if given.one:
        print(json.dumps(measure(given.one, given.recorded)))
        return
    what = "one request (class:3, paper, 18,000 weights, digits, 20 images per client) to a federation in one process"
    for clients in map(int, given.clients.split(",")):
        command = [sys.executable, __file__, "--one", str(clients), *(["--recorded"] if given.recorded else [])]
        printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        row = json.loads(printed.splitlines()[-1])
        add_row(
            given.out,
            row,
            ("clients", "recorded"),
            lambda row: (row["recorded"], row["clients"]),
            what,
            "python benchmarks/scale.py",
        )
        print(row, flush=True)


def measure(clients: int, is_recorded: bool) -> dict[str, Any]:
    """The row of one size: what the request costs, and how much of it is the first distribution of the model."""
    switch_off(os.environ)
    from flwr.clientapp import ClientApp

    from fedortho.federated.local_grid import LocalGrid

    torch.set_num_threads(1)
    model = trained()
    own = fo.unlearning_app(ClientApp(), images=images_of, model=network, threads=1, device="cpu")
    app, spent = timed(recorded(own) if is_recorded else own)
    with tempfile.TemporaryDirectory(prefix="fedortho-scale-") as store:
        grid = LocalGrid(app, clients, {"store": store})
        before = peak_mb()
        unlearner = fo.Unlearner(grid, model, timeout=86400.0, ledger=False)  # one request
        started, cpu = time.monotonic(), time.process_time()
        result = unlearner.forget("class:3", METHOD)
        seconds, cpu = time.monotonic() - started, time.process_time() - cpu
        disk = sum(path.stat().st_size for path in Path(store).rglob("*") if path.is_file())
    assert len(unlearner.confirmed) == clients
    up, down = total_bytes(unlearner.exchanges)
    return {
        "clients": clients,
        "recorded": is_recorded,
        "cpu_seconds": round(cpu, 1),
        "cpu_seconds_server": round(cpu - spent[0], 1),  # of these those outside the client app
        "seconds": round(seconds, 1),
        "peak_mb_before": round(before),
        "peak_mb": round(peak_mb()),
        "disk_mb": round(disk / 1e6, 1),
        "exchanges": len(unlearner.exchanges),  # hello, the model, one query, the patch
        "bytes_up": up,
        "bytes_down": down,
        "forget": accuracy(result.model, 3),
        "digest": result.patch.after,
    }


def recorded(app: Any) -> Any:
    """An app whose client N repeats what client N modulo 10 has answered, with its own number."""
    from flwr.app import Message

    known: dict[tuple[str, int], tuple[Any, Any]] = {}

    def answer(message: Any, context: Any) -> Any:
        client, kind = int(context.node_config["partition-id"]), message.metadata.message_type
        key = (kind, client % 10)
        if key not in known:
            known[key] = unpack_json(app(message, context).content)
        tensors, value = known[key]
        return Message(pack_json(tensors, {**value, "client": client}), reply_to=message)

    return answer


def timed(app: Any) -> tuple[Any, list[float]]:
    """An app that adds up the CPU seconds of its answers."""
    spent = [0.0]

    def answer(message: Any, context: Any) -> Any:
        started = time.process_time()
        try:
            return app(message, context)
        finally:
            spent[0] += time.process_time() - started

    return answer, spent


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@lru_cache(maxsize=1)
def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and labels of the training images."""
    train = fo.load_images("digits").train
    return train.normalise(train.pixels[train.rows]), train.labels


def network() -> torch.nn.Module:
    """Three convolutions and a linear layer."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers: list[torch.nn.Module] = []
        for inputs, outputs in ((1, 16), (16, 24), (24, 64)):
            layers += [
                torch.nn.Conv2d(inputs, outputs, 3, 1, 1, bias=False),
                torch.nn.BatchNorm2d(outputs),
                torch.nn.ReLU(),
            ]
        return torch.nn.Sequential(*layers, torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(64, 10))


def trained() -> torch.nn.Module:
    recipe = fo.Recipe(epochs=EPOCHS, batch_size=64, flip=0.0, crop=1)
    return fo.fit(network(), fo.load_images("digits").train, recipe)


def images_of(context: Any) -> tuple[fo.Images, fo.Images]:
    """Training and validation images of a node: of two classes each, the first given by its number."""
    inputs, labels = digits()
    client = int(context.node_config["partition-id"])
    random = torch.Generator().manual_seed(client)
    rows = []
    for label in (client % 10, (client + 1 + client // 10 % 9) % 10):
        own = (labels == label).nonzero().flatten()
        rows.append(own[torch.randint(len(own), (IMAGES // 2,), generator=random)])
    train, valid = (torch.cat([part[start:end] for part in rows]) for start, end in ((0, 7), (7, 10)))
    return tuple(made_images(inputs[part], labels[part], NAMES) for part in (train, valid))  # type: ignore[return-value]  # a pair


def accuracy(model: torch.nn.Module, label: int) -> float:
    inputs, labels = digits()
    with torch.no_grad():
        right = model.eval()(inputs).argmax(1) == labels
    return round(float(right[labels == label].float().mean()), 4)


if __name__ == "__main__":
    main()
