"""Samples and a client: what a membership attack finds after each method, on shadow models that all methods share.

    python benchmarks/membership.py --data-dir ../shared/data [--methods retrain,ssd] [--requests drawn]

1,500 training images of CIFAR-10 at 16x16 pixels, a network of three convolutions, 16 shadow models, each trained on
one half of the images for 30 epochs: small, so that two shared cores can train them, and long enough that images are
memorised. (The attack on models as trained was looked at before any method was run; 24 models of 2,000 images and 40
epochs were begun and left for time.) Requests: 100 drawn images; the 100 most memorised ones; the images of one client,
drawn, of 20 with a Dirichlet partition (beta 0.3). The client's images are unlearned centrally, as rows: 16 federations
would be too expensive here. The first four models only choose the most memorised images and the other twelve are
measured, so that chance does not choose what it is measured by.

Every model unlearns those images of a request that it was trained on. The attack is U-LiRA: an image under models that
unlearned it against the same image under models that never had it and unlearned others. `original` is no method: the
models as trained, which must be found; `retrain` must not be. On the most memorised images these two are the self-test
of the audit. Settings are the published ones; only the augmentation is that of the training, as in `fedortho forget`.
Nothing was tuned on these images. `hide` gets the accuracy that the four models have on those of the images that they
were not trained on as its limit; where a model is within it, nothing is changed (`changed` is the share of the models).

Margins and accuracies of every model are kept in runs/membership, so a killed process goes on where it was; one row for
each request and method goes to benchmarks/results/membership.json.
"""

import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from manifest import benchmark_parser
from result_files import add_row, read_results
from torch import Tensor, nn

from fedortho.data.images import Dataset
from fedortho.data.partition import partition
from fedortho.data.request import ForgetRequest
from fedortho.data.sources import load_images
from fedortho.engines.central import CentralEngine
from fedortho.engines.query import draw
from fedortho.evaluation.sample_attack import attack_samples, margins_under, most_memorised
from fedortho.evaluation.shadows import Shadows, ShadowSettings
from fedortho.methods import find_method, make_method, unlearn
from fedortho.methods.method import Method, Schedule
from fedortho.models.predictions import accuracy, logits_of
from fedortho.models.zoo import VGG
from fedortho.storage.settings import as_mapping
from fedortho.training.recipe import Recipe
from fedortho.unlearning.calibrate import Refused

HERE = Path(__file__).parent
PLACE = HERE.parent / "runs" / "membership"
RECIPE = Recipe(epochs=30, crop=0, ortho=0.0)
SETTINGS = ShadowSettings(models=16, images=0, recipe=RECIPE)
IMAGES, TEST, SIZE, TARGETS, CLIENTS = 1500, 2000, 16, 100, 20
WIDTHS = ([16], [32], [64])
REQUESTS = ("drawn", "memorised", "client")
BACK = {f"r2d {back} epochs": back for back in (3, 15, 27)}  # replayed of 30
METHODS = (
    *("original", "retrain", *BACK, "finetune", "not", "fused", "regrow", "eu-k", "cf-k", "scrub", "ct", "msg"),
    *("neggrad", "salun", "ssd", "bad-teacher", "paper", "hide"),
)
MEASURED = range(SETTINGS.choosing, SETTINGS.models)
ACCURACIES = ("forget", "never", "retain", "test")
WHAT = (
    f"samples and a client: {SETTINGS.models} shadow models, each trained for {RECIPE.epochs} epochs on half of "
    f"{IMAGES:,} images of CIFAR-10 at {SIZE}x{SIZE} pixels; {SETTINGS.models - SETTINGS.choosing} of them are measured"
)
COMMAND = "python benchmarks/membership.py --data-dir ../shared/data"


def build(seed: int) -> nn.Module:
    """A new network."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return VGG(WIDTHS, 10, 3, bias=False, last_pool=False)


@dataclass(frozen=True)
class Bench:
    """The data, the shadow models, and the images of each request as a mask over the proxy."""

    data: Dataset
    shadows: Shadows
    requests: Mapping[str, Tensor]


def prepared(data_dir: str, place: Path = PLACE) -> Bench:
    """The shadow models that choose are trained here, the others at their first use."""
    data = load_images("cifar10", data_dir, size=SIZE)
    pool, test = draw(data.train, IMAGES, 0), draw(data.test, TEST, 0)
    shadows = Shadows(place, pool, build, SETTINGS)
    return Bench(replace(data, train=pool, test=test), shadows, requests_on(shadows))


def requests_on(shadows: Shadows) -> dict[str, Tensor]:
    pool = shadows.proxy
    drawn = random.Random("fedortho membership 2026-11-17 samples").sample(range(len(pool)), TARGETS)
    client = random.Random("fedortho membership 2026-11-17 client").randrange(CLIENTS)
    held = partition(pool.labels, CLIENTS, "dirichlet:0.3", seed=0, minimum=10)[client]
    masks = {name: torch.zeros(len(pool), dtype=torch.bool) for name in ("drawn", "client")}
    masks["drawn"][drawn], masks["client"][held] = True, True
    return masks | {"memorised": most_memorised(shadows, range(SETTINGS.choosing))}


def limit_for(bench: Bench, request: str) -> float:
    """The share of a request's images that models which choose, and were not trained on them, answer right."""
    targets = bench.shadows.proxy.subset(bench.requests[request])
    right = answered = 0
    for number in range(SETTINGS.choosing):
        outside = ~bench.shadows.members[number][bench.requests[request]]
        answers = logits_of(bench.shadows.original(number), targets).argmax(1) == targets.labels
        right, answered = right + int((answers & outside).sum()), answered + int(outside.sum())
    return right / answered


def method_of(bench: Bench, request: str, name: str, kept: str = "") -> Method:
    """A method with its published settings, the training's augmentation where it publishes none, and its recipe."""
    recipe = {field.name: getattr(RECIPE, field.name) for field in fields(Recipe)}
    if name == "hide":
        return make_method(name, {"limit": limit_for(bench, request)})
    if name in BACK:
        return make_method("r2d", recipe, {"back": BACK[name], "kept": kept})
    if name == "retrain":
        return make_method(name, recipe)
    own = getattr(find_method(name), "crop", None) == Schedule.crop
    return make_method(name, {"crop": RECIPE.crop} if own else {})


def measured(bench: Bench, request: str, name: str, number: int) -> Mapping[str, Tensor]:
    """Margins of the request's images, accuracies and cost after one shadow model has unlearned what it has of them."""
    shadows, mask = bench.shadows, bench.requests[request]
    targets, members = shadows.proxy.subset(mask), shadows.members[number]

    def measure() -> dict[str, Tensor]:
        kept = str(shadows.epochs(number)) if name in BACK else ""
        began, model = time.process_time(), shadows.original(number)
        images, flops, changed = shadows.proxy.subset(members), 0.0, 1.0
        if name != "original":
            rows = shadows.proxy.subset(members & mask).rows
            asked = ForgetRequest(samples=tuple(map(str, rows.tolist())))
            engine = CentralEngine(replace(bench.data, train=images), build=build)
            try:
                result = unlearn(model, engine, asked, method_of(bench, request, name, kept))
                model, flops = result.model, result.cost.flops
            except Refused:  # the method changes nothing
                changed = 0.0
        seconds = time.process_time() - began
        sets = {"forget": members & mask, "never": mask & ~members, "retain": members & ~mask}
        shares = [accuracy(model, shadows.proxy.subset(part)) for part in sets.values()]
        shares.append(accuracy(model, bench.data.test))
        about = torch.tensor([*shares, seconds, flops, changed], dtype=torch.float64)
        return {"margins": margins_under(model, targets, f"shadow model {number}"), "about": about}

    return shadows.kept(f"{name}-{request}-{number:02}", measure)


def row_of(bench: Bench, request: str, name: str) -> dict[str, Any]:
    """The attack on all measured models, and means over them."""
    found = [measured(bench, request, name, number) for number in MEASURED]
    mask, members = bench.requests[request], bench.shadows.members[SETTINGS.choosing :]
    table = torch.stack([each["margins"] for each in found])
    about = torch.stack([each["about"] for each in found]).mean(0).tolist()
    row = {"request": request, "method": name, "images": int(mask.sum()), "models": len(found)}
    row |= {"attack": attack_samples(table, members[:, mask], SETTINGS.seed)}
    row |= {"accuracies": dict(zip(ACCURACIES, about, strict=False))}
    row |= dict(zip(("seconds", "flops", "changed"), about[len(ACCURACIES) :], strict=True))
    settings = {} if name == "original" else dict(as_mapping(method_of(bench, request, name)))
    return row | {"settings": settings}


def main(words: list[str] | None = None) -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--requests", default=",".join(REQUESTS))
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--out", type=Path, default=HERE / "results" / "membership.json", help="result file")
    given = parser.parse_args(words)
    torch.set_num_threads(1)
    bench = prepared(given.data_dir)
    done = {(row["request"], row["method"]) for row in (read_results(given.out).rows if given.out.exists() else ())}
    for name in given.methods.split(","):
        for request in given.requests.split(","):
            if (request, name) in done:
                continue
            row = row_of(bench, request, name)
            add_row(given.out, row, ("request", "method"), order, WHAT, COMMAND)
            print(request, name, f"AUC {row['attack']['AUC']:.3f}", row["accuracies"], flush=True)


def order(row: Mapping[str, Any]) -> Any:
    return REQUESTS.index(row["request"]), METHODS.index(row["method"])


if __name__ == "__main__":
    main()
