"""Bytes and FLOPs of a class request at the size of the paper's Fig. 5, computed: ResNet-50, CIFAR-100, 100 clients.

    python benchmarks/paper_costs.py

Nothing is trained. What one image and one model cost comes from the network itself; rounds, clients and images from the
paper's recipe (`federated` in src/fedortho/experiments/recipes.toml) and from the methods' published settings. The same
formulas give the costs that benchmarks/costs.py measured in a small federation (`check`, and a test). For `paper` and
`hide` the messages of a client and the FLOPs of a request are those that benchmarks/requests.py measured on ResNet-50.
"""

import argparse
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from result_files import read_results, write_results
from torch import nn

from fedortho.engines.cost import flops_per_image
from fedortho.experiments.experiment import PAPER_DATA, load_experiment
from fedortho.methods import METHODS
from fedortho.methods.fused import FUSED
from fedortho.models.zoo import build_model
from fedortho.runs.settings import FederateSettings
from fedortho.training.penalties import ortho_flops

RESULTS = Path(__file__).parent / "results"
PAPER = ("cifar100", "resnet50", "dirichlet:0.6")  # data, model and split of Fig. 5
COMPUTED = ("retrain", "finetune", "not", "fused")
image_flops = cache(flops_per_image)  # a pass forwards and one back, for all methods on a network


@dataclass(frozen=True)
class Computed:
    """Sums over all clients, as in `Cost`; no time."""

    flops: float
    kept_flops: float
    bytes_up: float
    bytes_down: float


def computed_cost(
    method: str, model: nn.Module, shape: tuple[int, int, int], settings: FederateSettings, images: int, forgotten: int
) -> Computed:
    """The cost of forgetting a class of `forgotten` among `images` training images, in the settings' federation.

    Retraining repeats the training on the retain set. The others train all clients in each of their rounds, one pass;
    FUSED freezes all but its adapters, so an image takes a forward pass and one back through the same layers.
    """
    forward, both = image_flops(model, shape)
    size = sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())
    retained, kept = images - forgotten, 0.0
    rounds = settings.rounds if method == "retrain" else 1
    clients = rounds * settings.clients * (settings.fraction if method == "retrain" else 1.0)
    if method == "retrain":
        passes = rounds * settings.fraction * settings.epochs * retained
        flops = passes * both + passes / settings.batch_size / settings.ortho_every * ortho_flops(
            model, shape, settings.recipe
        )
    elif method == "fused":
        kept = float(images * both)  # one local epoch ranks the layers
        flops, size = kept + retained * 2 * forward, adapter_bytes(model)
    else:
        flops = float(retained * both)
    return Computed(flops, kept, clients * size, clients * size)


def adapter_bytes(model: nn.Module) -> int:
    """Of FUSED's sparse adapters, if the layers that change most are the largest ones."""
    weights = [each.weight.numel() for each in model.modules() if isinstance(each, nn.Conv2d | nn.Linear)]
    largest = sorted(weights, reverse=True)[: FUSED().number]
    return 4 * sum(round(FUSED().density * number) for number in largest)


def of_paper() -> list[dict[str, Any]]:
    """A row for each method of Fig. 5, for hide, and for as many rounds as are published."""
    classes, images, _ = PAPER_DATA["cifar100"]
    networks = load_experiment("unlearning_iid_non_iid", "paper").networks
    federations = [each for each in networks if isinstance(each, FederateSettings)]
    (settings,) = (each for each in federations if (each.data, each.model, each.split) == PAPER)
    model, rows = build_model("resnet50", num_classes=classes, channels=3), []
    for method in COMPUTED:
        one = computed_cost(method, model, (3, 32, 32), settings, images, images // classes)
        rounds = settings.rounds if method == "retrain" else 1
        rows.append({"method": method, "rounds": rounds, "source": "computed"} | asdict(one))
        if (published := getattr(METHODS[method](), "epochs", 1)) > 1 and method != "retrain":
            again = {key: published * value for key, value in asdict(one).items() if key != "kept_flops"}
            again["flops"] -= (published - 1) * one.kept_flops  # once
            more = {"kept_flops": one.kept_flops} | again
            rows.append({"method": method, "rounds": published, "source": "computed"} | more)
    statistics = float(images * image_flops(model, (3, 32, 32))[0])  # kept since training, or one pass
    requests = read_results(RESULTS / "requests.json").rows
    measured = {row["method"]: row for row in requests if row["network"] == "resnet50"}
    for method, name in (("paper", "hide, ratio given, statistics kept"), ("hide", "hide, statistics kept")):
        row = measured[name]
        up = settings.clients * float(row["client-bytes"]["all"])
        request = float(row["cost"]["request-flops"])
        rows.append(
            {"method": method, "rounds": 0, "source": "messages and request measured", "flops": statistics + request}
            | {"kept_flops": statistics, "bytes_up": up, "bytes_down": None}
        )
    return rows


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS / "paper-costs.json")
    arguments = parser.parse_args(words)
    what = "bytes and FLOPs of a class request, ResNet-50 on CIFAR-100, 100 clients: computed, nothing trained"
    write_results(arguments.out, what, "python benchmarks/paper_costs.py", of_paper())


if __name__ == "__main__":
    main()
