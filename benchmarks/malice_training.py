"""What hostile clients do to training, by the strategy that combines models: benchmarks/results/malice-training.json.

    python benchmarks/malice_training.py [--out FILE]

Ten clients, digits, Dirichlet 1, a small network, five rounds of two epochs. None, one or two clients lie, in one way
each: they train on labels turned round (9 for 0, 8 for 1, …), send their update with the opposite sign, or send it
tenfold with the opposite sign. A row has the accuracy on test images after training. Rows that are there are not
measured again.
"""

import argparse
import logging
import os
import tempfile
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import torch
from flwr.app import Message
from result_files import add_row, read_results

import fedortho as fo
from fedortho.federated.client_state import ClientImages, ClientState
from fedortho.federated.local_grid import FIRST_NODE, LocalGrid
from fedortho.federated.server import local_grid, train_federation
from fedortho.federated.wire import pack_json, unpack_json
from fedortho.models.predictions import accuracy
from fedortho.runs.settings import FederateSettings

OUT = Path(__file__).parent / "results" / "malice-training.json"
FLOWER = "flwr.serverapp.strategy:"
STRATEGIES = {
    "weighted mean": "",
    "FedMedian": FLOWER + "FedMedian",
    "FedTrimmedAvg": FLOWER + "FedTrimmedAvg(beta=0.2)",
    "MultiKrum": FLOWER + "MultiKrum(num_malicious_nodes=2, num_nodes_to_select=6)",
}
ATTACKS = {"sign flips, tenfold": -10.0, "label flips": 1.0, "sign flips": -1.0}  # factor of the update that is sent
SETTINGS = FederateSettings(
    data="digits", model="scale:network", clients=10, rounds=5, fraction=1.0, split="dirichlet:1", epochs=2,
    batch_size=16, crop=0, flip=0.0, threads=1, device="cpu", least_group=1,
)  # fmt: skip
honest_images = ClientState.images


def flipped_images(state: ClientState, *given: object) -> ClientImages:
    """The images of a client with the opposite labels."""
    images = honest_images(state, *given)  # type: ignore[arg-type]  # as it was called
    train = replace(images.train, store_labels=images.train.classes - 1 - images.train.store_labels)
    return replace(images, train=train)


class Poisoned(LocalGrid):
    """A grid whose clients in `liars` train in one hostile way; the others are honest; all replies are well-formed."""

    def __init__(self, good: LocalGrid, liars: Collection[int], attack: str) -> None:
        self.__dict__.update(good.__dict__)
        self.liars, self.attack = set(liars), attack

    def _answer(self, message: Message) -> Message:
        is_liar = message.metadata.dst_node_id - FIRST_NODE in self.liars
        if not is_liar or message.metadata.message_type != "train.local":
            return super()._answer(message)
        if self.attack == "label flips":
            with patch.object(ClientState, "images", flipped_images):
                return super()._answer(message)
        sent, factor = unpack_json(message.content)[0], ATTACKS[self.attack]
        tensors, value = unpack_json(super()._answer(message).content)
        false = {
            name: sent[name] + factor * (tensor - sent[name]) if tensor.is_floating_point() else tensor
            for name, tensor in tensors.items()
        }
        for name in [name for name in false if name.endswith("running_var")]:
            false[name] = false[name].clamp(min=1e-3)  # a negative one would make no number
        return Message(pack_json(false, value), reply_to=message)


def trained(attack: str, liars: int, strategy: str) -> float:
    """The accuracy on test images of a federation with so many liars."""
    settings = replace(SETTINGS, strategy=STRATEGIES[strategy])
    with tempfile.TemporaryDirectory(prefix="fedortho-malice-") as folder:
        path = Path(folder) / "run"
        with local_grid(settings, path / "clients", run=path) as grid:
            assert isinstance(grid, LocalGrid), "clients are in this process"
            run = train_federation(path, settings, Poisoned(grid, range(liars), attack))
        return accuracy(run.load_model(), run.load_data().test)


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args(words)
    torch.set_num_threads(1)
    os.environ["FEDORTHO_TRUST_CODE"] = "all"  # the network of scale.py
    for name in ("fedortho", "flwr"):
        logging.getLogger(name).setLevel(logging.ERROR)
    key = ("attack", "liars", "strategy")
    known = [tuple(row[k] for k in key) for row in read_results(options.out).rows] if options.out.exists() else []
    cases = [("none", 0, strategy) for strategy in STRATEGIES]
    cases += [(attack, liars, strategy) for liars in (2, 1) for attack in ATTACKS for strategy in STRATEGIES]
    what, command = __doc__.split("\n")[0], "python benchmarks/malice_training.py"
    for case in [case for case in cases if case not in known]:
        try:
            row = {"accuracy": round(trained(*case), 4), "refused": ""}
        except fo.FedOrthoError as error:
            row = {"accuracy": 0.0, "refused": str(error)[:160]}
        row |= dict(zip(key, case, strict=True))
        add_row(options.out, row, key, lambda r: [r["liars"], r["attack"], r["strategy"]], what, command)
        print(row, flush=True)


if __name__ == "__main__":
    main()
