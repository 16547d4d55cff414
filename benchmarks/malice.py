"""What hostile clients can do to a request, and what bounds keep them from: benchmarks/results/malice.json.

    python benchmarks/malice.py [--out FILE]

A hundred clients, fashion-mini, Dirichlet 1, vgg-mini, twelve rounds of twenty clients; `class:3` is hidden by a tenth
of the kernels, or, where clients give false answers, by a search with a budget of two points. None, one or twenty
clients lie, in one way each; the sums are pooled without bounds (`sum`), `bounded` or `trimmed`. A row has the
accuracies on test images that the request would end with, whether the server's own check with that budget stopped it,
and which clients stood apart. Rows that are there are not measured again.
"""

import argparse
import json
import logging
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from flwr.app import Message
from result_files import add_row, read_results

from fedortho.data.request import ForgetRequest
from fedortho.errors import FedOrthoError
from fedortho.evaluation.accuracies import accuracies_of
from fedortho.federated.local_grid import FIRST_NODE, LocalGrid
from fedortho.federated.server import copied_clients, federated_engine, local_grid, train_federation
from fedortho.federated.wire import pack_integers, pack_json, unpack_integers, unpack_json
from fedortho.methods import unlearn
from fedortho.methods.hide import Hide
from fedortho.requests.forgetting import APART, ServedRequest, check_retention
from fedortho.runs.run import Run, open_run
from fedortho.runs.settings import FederateSettings
from fedortho.unlearning.calibrate import Refused

OUT = Path(__file__).parent / "results" / "malice.json"
FEDERATION = FederateSettings(
    data="fashion-mini", clients=100, rounds=12, fraction=0.2, epochs=2, batch_size=16, split="dirichlet:1", threads=1,
    device="cpu",
)  # fmt: skip
REQUEST, METHOD, SEARCH = (
    ForgetRequest.parse("class:3"),
    Hide(ratio=0.1, max_retain_drop=0.02),
    Hide(max_retain_drop=0.02),
)
ATTACKS = ("scaled sums", "sign flips", "false counts", "label flips", "false answers")
POOLINGS = ("sum", "bounded", "trimmed")


class Hostile(LocalGrid):
    """A grid whose clients in `liars` attack in one way; the others are honest, and all replies are well-formed.

    Scaled sums (by 1,000) and sign flips change what is summed; false counts are a hundred times as many images, with
    sums to match; false answers say that every edit forgets all and keeps all; with label flips the client takes
    another class for the one to be forgotten.
    """

    def __init__(self, good: LocalGrid, liars: Collection[int], attack: str) -> None:
        self.__dict__.update(good.__dict__)
        self.liars, self.attack = set(liars), attack

    def _answer(self, message: Message) -> Message:
        client, kind = message.metadata.dst_node_id - FIRST_NODE, message.metadata.message_type
        if client not in self.liars or kind not in ("query.hello", "query.observe"):
            return super()._answer(message)
        tensors, order = unpack_json(message.content)
        if self.attack == "label flips" and kind == "query.observe":
            flipped = json.loads(json.dumps(order).replace('"classes": ["3"]', '"classes": ["7"]'))
            message = _with(message, tensors, flipped)
        reply = super()._answer(message)
        if reply.has_error():
            return reply
        tensors, value = unpack_json(reply.content)
        if kind == "query.hello" and self.attack == "false counts":
            value |= {"images": value["images"] * 100, "valid": value["valid"] * 100}
        elif kind == "query.observe":
            tensors = {name: self._false(name, tensor, tensors, order) for name, tensor in tensors.items()}
        return Message(pack_json(tensors, value), reply_to=message)

    def _false(self, name: str, tensor: torch.Tensor, tensors: Mapping[str, torch.Tensor], order: Any) -> torch.Tensor:
        """One tensor of a reply as the liar sends it."""
        number, place, what, *_ = name.split(".")
        query, counts = order["queries"][int(number)], tensors[f"{number}.{place}.counts"]
        if what != "sums":
            return tensor * 100 if self.attack == "false counts" else tensor
        is_answer, whole = query["statistic"]["kind"] == "right", unpack_integers(tensor, len(counts))
        if self.attack == "false answers" and is_answer:
            keeps = query["selections"][int(place)]["split"] == "valid" and not name.endswith(":changed")
            return pack_integers(counts.unsqueeze(1).expand_as(whole) * int(keeps))
        factor = {"false counts": 100, "scaled sums": 1 if is_answer else 1000, "sign flips": 1 if is_answer else -1}
        return pack_integers(whole * factor.get(self.attack, 1))


def _with(message: Message, tensors: Any, value: Any) -> Message:
    """The message with another content, as its receiver would have got it."""
    changed = Message(pack_json(tensors, value), dst_node_id=message.metadata.dst_node_id, message_type="query.observe")
    changed.metadata.__dict__.update(message.metadata.__dict__)
    return changed


def attacked(run: Run, data: Any, attack: str, liars: int, pooling: str) -> dict[str, Any]:
    """One request with so many liars: what it ends with, and whether somebody noticed."""
    assert isinstance(run.settings, FederateSettings)
    settings = replace(run.settings, pooling=pooling)
    with copied_clients(run) as store, local_grid(settings, store, run=run.path) as grid:
        assert isinstance(grid, LocalGrid)
        engine = federated_engine(Hostile(grid, range(liars), attack), settings, data)
        row: dict[str, Any] = {"attack": attack if liars else "none", "liars": liars, "pooling": pooling}
        model = run.load_model()
        try:
            result = unlearn(model, engine, REQUEST, SEARCH if attack == "false answers" else METHOD)
        except (Refused, FedOrthoError) as refusal:
            before = accuracies_of(model, data, REQUEST)
            return row | {"forget": before.forget, "retain": before.retain, "stopped": str(refusal)[:120], "apart": []}
        after, stopped = accuracies_of(result.model, data, REQUEST), ""
        try:
            searched = replace(result, settings={**result.settings, "ratio": 0.0})  # the check is for searches
            check_retention(engine, ServedRequest(searched, None, 0.0), run, data)  # type: ignore[arg-type]  # no record is read
        except FedOrthoError as error:
            stopped = str(error)[:120]
        apart = sorted(client for client, ratio in engine.apart.items() if ratio > APART)
        return row | {"forget": after.forget, "retain": after.retain, "stopped": stopped, "apart": apart}


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--run", type=Path, help="where the federation is, or will be, trained")
    parser.add_argument("--liars", type=int, nargs="*", default=[1, 20], help="numbers of hostile clients")
    options = parser.parse_args(words)
    torch.set_num_threads(1)
    logging.getLogger("fedortho").setLevel(logging.ERROR)
    key = ("attack", "liars", "pooling")
    known = {tuple(row[k] for k in key) for row in read_results(options.out).rows} if options.out.exists() else set()
    with tempfile.TemporaryDirectory(prefix="fedortho-malice-") as place:
        path = options.run or Path(place) / "run"
        run = open_run(path) if (path / "model.safetensors").exists() else train_federation(path, FEDERATION)
        data = run.load_data()
        cases = [("none", 0, pooling) for pooling in POOLINGS]
        cases += [(attack, liars, pooling) for attack in ATTACKS for liars in options.liars for pooling in POOLINGS]
        for case in cases:
            if case not in known:
                row = attacked(run, data, *case)
                add_row(
                    options.out,
                    row,
                    key,
                    lambda r: [r["liars"], r["attack"], r["pooling"]],
                    __doc__.split("\n")[0],
                    "python benchmarks/malice.py",
                )
                print(row, flush=True)


if __name__ == "__main__":
    main()
