"""A client that leaves a federation: what a membership attack finds after each method, on shadow federations.

    python benchmarks/membership_clients.py --data-dir ../shared/data [--methods retrain,federaser]

The images of membership.py (1,500 of CIFAR-10 at 16x16 pixels) belong to six clients by a Dirichlet partition (beta 1),
and its network is trained by 16 federations of three clients each: both halves of eight drawn halves. All clients train
in each of 15 rounds, five epochs a round; updates and rounds are kept for FedEraser and r2d. (The attack on models as
trained was looked at before any method was run: with ten clients, five in each federation, and ten rounds of three or
five epochs it has no power, AUC 0.58 and 0.52.) One client is drawn. The eight federations that have it forget it, the
others forget another client of theirs, drawn too. The attack is U-LiRA on the drawn client's images: federations that
forgot it against those that never had it. `original` is no method. Settings are published ones with the federation's
recipe, as in `fedortho forget`; nothing was tuned.

Without --methods only `original` is run: here, too, it has no power, so nothing can be said of a method. Models are
kept in runs/membership-clients, so a killed process goes on where it was; rows go to
benchmarks/results/membership-clients.json.
"""

import os
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from manifest import benchmark_parser
from membership import IMAGES, SIZE, TEST, build
from PIL import Image
from result_files import add_row, read_results
from torch import Tensor, nn

from fedortho.data.sources import load_images
from fedortho.engines.query import draw
from fedortho.evaluation.sample_attack import attack_samples, margins_under
from fedortho.evaluation.shadows import half
from fedortho.federated.server import train_federation
from fedortho.models.predictions import accuracy
from fedortho.requests.forgetting import forget_run
from fedortho.requests.levels import chosen_method
from fedortho.runs.run import Run, load_run_data, open_run
from fedortho.runs.settings import FederateSettings, held_rows
from fedortho.storage.files import read_tensors, write_tensors
from fedortho.unlearning.calibrate import Refused

HERE = Path(__file__).parent
PLACE = HERE.parent / "runs" / "membership-clients"
FEDERATIONS, CLIENTS = 16, 6
SETTINGS = FederateSettings(
    model="membership_clients:network", clients=CLIENTS, rounds=15, fraction=1.0, split="dirichlet:1", epochs=5,
    batch_size=16, crop=0, ortho=0.0, valid=0.0, evaluate_every=0, keep_updates=True, keep_rounds="all", least_group=1,
    threads=1, device="cpu",
)  # fmt: skip
WHAT = (
    f"a client of a federation: {FEDERATIONS} federations of three of six clients; {IMAGES:,} images of CIFAR-10 at "
    f"{SIZE}x{SIZE} pixels"
)
COMMAND = "python benchmarks/membership_clients.py --data-dir ../shared/data"
METHODS = (
    *("original", "retrain", "r2d", "federaser", "finetune", "not", "fused", "scrub", "ct", "msg", "neggrad"),
    *("salun", "ssd", "bad-teacher", "paper", "hide"),
)


def network() -> nn.Module:
    """The network of membership.py."""
    return build(0)


def written_images(data_dir: str) -> str:
    """The images of membership.py as a folder, written once."""
    folder = PLACE / "images"
    if not folder.exists():
        data = load_images("cifar10", data_dir, size=SIZE)
        for split, images in (("train", draw(data.train, IMAGES, 0)), ("test", draw(data.test, TEST, 0))):
            for row, label in zip(images.rows.tolist(), images.labels.tolist(), strict=True):
                place = PLACE / "writing" / split / images.names[label]
                place.mkdir(parents=True, exist_ok=True)
                Image.fromarray(images.pixels[row].movedim(0, -1).numpy()).save(place / f"{row:05}.png")
        (PLACE / "writing").rename(folder)
    return str(folder)


@dataclass(frozen=True)
class Bench:
    """The federations: their settings, who has the drawn client, and whom each forgets."""

    settings: FederateSettings
    members: Tensor  # (federations, clients)
    client: int

    def run(self, number: int) -> Run:
        """A federation of one half of the clients, trained at the first use."""
        path, absent = PLACE / f"federation-{number:02}", torch.nonzero(~self.members[number]).flatten().tolist()
        without = f"client:{','.join(map(str, absent))}"
        settings = replace(self.settings, without=without, seed=number)
        return open_run(path) if (path / "run.json").exists() else train_federation(path, settings)

    def forgotten(self, number: int) -> int:
        """The client that a federation forgets: the drawn one, or another of its own."""
        own = torch.nonzero(self.members[number]).flatten().tolist()
        return self.client if self.client in own else random.Random(f"other {number}").choice(own)


def prepared(data_dir: str) -> Bench:
    settings = replace(SETTINGS, data=written_images(data_dir))
    members = torch.stack([half(number, CLIENTS, seed=0) for number in range(FEDERATIONS)])
    return Bench(settings, members, random.Random("fedortho membership 2026-11-17 federation").randrange(CLIENTS))


def measured(bench: Bench, name: str, number: int) -> Mapping[str, Tensor]:
    """Margins of the drawn client's images, accuracies and cost after one federation has forgotten a client."""
    path = PLACE / "measured" / f"{name}-{number:02}.safetensors"
    if not path.exists():
        run, data = bench.run(number), shared_data(bench.settings)
        model, began, flops, changed = run.load_model(), time.process_time(), 0.0, 1.0
        if name != "original":
            try:
                request = f"client:{bench.forgotten(number)}"
                served = forget_run(run, request, chosen_method(run, name), out=None, device="cpu")
                model, flops = served.result.model, served.result.cost.flops
            except Refused:
                changed = 0.0
        seconds = time.process_time() - began
        rows = held_rows(data, bench.settings, bench.settings.partition_seed)
        own = {client: data.train.subset(torch.isin(data.train.rows, held)) for client, held in rows.items()}
        gone, kept = bench.forgotten(number), torch.nonzero(bench.members[number]).flatten().tolist()
        staying = torch.cat([rows[client] for client in kept if client != gone])
        never = own[bench.client] if gone != bench.client else own[kept[0]].subset([])
        sets = (own[gone], never, data.train.subset(torch.isin(data.train.rows, staying)), data.test)
        shares = [accuracy(model, images) if len(images) else torch.nan for images in sets]
        about = torch.tensor([*shares, seconds, flops, changed], dtype=torch.float64)
        margins = margins_under(model, own[bench.client], f"federation {number}")
        write_tensors(path, {"margins": margins, "about": about})
    return read_tensors(path)[0]


shared_data = cache(load_run_data)


def row_of(bench: Bench, name: str) -> dict[str, Any]:
    """The attack on all federations, and means over them."""
    found = [measured(bench, name, number) for number in range(FEDERATIONS)]
    table = torch.stack([each["margins"] for each in found])
    members = bench.members[:, bench.client].unsqueeze(1).expand_as(table)
    about = torch.stack([each["about"] for each in found])
    has = bench.members[:, bench.client]
    forget, (never, retain, test) = about[has, 0].mean(), about[:, 1:4].nanmean(0).tolist()
    row = {"request": "federation", "method": name, "images": table.shape[1], "models": FEDERATIONS}
    row |= {"attack": attack_samples(table, members), "settings": {}}
    row |= {"accuracies": {"forget": float(forget), "never": never, "retain": retain, "test": test}}
    return row | dict(zip(("seconds", "flops", "changed"), about[:, 4:].mean(0).tolist(), strict=True))


def main(words: list[str] | None = None) -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--methods", default="original", help=f"of {', '.join(METHODS)}")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "membership-clients.json", help="result file")
    given = parser.parse_args(words)
    torch.set_num_threads(1)
    os.environ["FEDORTHO_TRUST_CODE"] = "all"  # the network above
    bench = prepared(given.data_dir)
    rows = read_results(given.out).rows if given.out.exists() else ()
    done = {row["method"] for row in rows}
    for name in given.methods.split(","):
        if name not in done:
            row = row_of(bench, name)
            add_row(given.out, row, ("method",), lambda each: METHODS.index(each["method"]), WHAT, COMMAND)
            print(name, f"AUC {row['attack']['AUC']:.3f}", row["accuracies"], flush=True)


if __name__ == "__main__":
    main()
