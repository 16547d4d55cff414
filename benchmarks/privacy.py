"""What a server sees of a request, message by message, with open and masked sums: benchmarks/results/privacy.json.

    python benchmarks/privacy.py [--run DIR]

Ten clients, fashion-mini, Dirichlet 1, vgg-mini, six rounds; `class:3` is hidden once with open and once with masked
sums, to the same model. A row has a kind of message: how often it was asked, what the replies contain, and the mean
bytes of one reply.
"""

import argparse
import logging
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from flwr.app import Message
from malice import FEDERATION, METHOD, REQUEST
from result_files import write_results

from fedortho.federated.local_grid import LocalGrid
from fedortho.federated.server import copied_clients, federated_engine, local_grid, train_federation
from fedortho.federated.wire import count_bytes, unpack_json
from fedortho.methods import unlearn
from fedortho.runs.run import Run, open_run
from fedortho.runs.settings import FederateSettings
from fedortho.storage.files import tensors_digest

OUT = Path(__file__).parent / "results" / "privacy.json"


class Seeing(LocalGrid):
    """Keeps of every reply its kind, what it contains and its bytes."""

    def __init__(self, good: LocalGrid) -> None:
        self.__dict__.update(good.__dict__)
        self.seen: list[tuple[str, frozenset[str], int]] = []

    def _answer(self, message: Message) -> Message:
        reply = super()._answer(message)
        tensors, value = unpack_json(reply.content)
        named = {key for key, each in value.items() if each not in (0, "", [], None, False)}
        arrays = {
            f"tensor {part}" for name in tensors for part in name.split(".") if part in ("sums", "counts", "masked")
        }
        self.seen.append((message.metadata.message_type, frozenset(named | arrays), count_bytes(reply.content)))
        return reply


def seen_by_server(run: Run, data: Any, sums: str) -> tuple[list[dict[str, Any]], str]:
    """A row for each kind of message of one request, and the digest of the model that it ends with."""
    assert isinstance(run.settings, FederateSettings)
    settings = replace(run.settings, sums=sums)
    with copied_clients(run) as store, local_grid(settings, store, run=run.path) as grid:
        assert isinstance(grid, LocalGrid)
        watching = Seeing(grid)
        engine = federated_engine(watching, settings, data)
        result = unlearn(run.load_model(), engine, REQUEST, METHOD)
        engine.send_patch(result.patch, REQUEST)
    rows = []
    for action in dict.fromkeys(kind for kind, _, _ in watching.seen):
        found = [(fields, size) for kind, fields, size in watching.seen if kind == action]
        sizes = [size for _, size in found]
        row = {"sums": sums, "message": action, "exchanges": sum(e.kind == action for e in engine.transport.log)}
        rows.append(
            row | {"contains": sorted(set().union(*(f for f, _ in found))), "bytes-up": sum(sizes) / len(sizes)}
        )
    return rows, tensors_digest(result.model.state_dict())


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--run", type=Path, help="where the federation is, or will be, trained")
    options = parser.parse_args(words)
    torch.set_num_threads(1)
    logging.getLogger("fedortho").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory(prefix="fedortho-privacy-") as place:
        path = options.run or Path(place) / "run"
        run = open_run(path) if (path / "model.safetensors").exists() else train_federation(path, FEDERATION)
        data = run.load_data()
        found = {sums: seen_by_server(run, data, sums) for sums in ("open", "masked")}
    same = len({digest for _, digest in found.values()}) == 1
    rows = [row for each, _ in found.values() for row in each]
    write_results(options.out, __doc__.split("\n")[0], "python benchmarks/privacy.py", rows, same_model=same)


if __name__ == "__main__":
    main()
