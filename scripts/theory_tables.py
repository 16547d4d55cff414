"""The paper's theory as measured: a table and a figure."""

from functools import partial
from typing import Any

from result_text import RESULTS, Drawing, grid, origin, read

from fedortho.experiments.theory import LayerTheory, theory_figure, theory_sentences
from fedortho.storage.records import from_json

SIDES = ("without", "with")
DRAWN = "vgg-mini"


def theory() -> str:
    """One line for each layer, without and with orthogonal kernels; what holds in words."""
    result, found = read("theory"), networks()
    lines = []
    for model in dict.fromkeys(name for name, _ in found):
        for plain, orthogonal in zip(*(found[model, side] for side in SIDES), strict=True):
            pairs = [(each.epsilon, each.eta, each.bound, each.largest_covariance) for each in (plain, orthogonal)]
            cells = [f"{a:.2g} / {b:.2g}" for a, b in zip(*pairs, strict=True)]
            means = plain.mean_covariance, orthogonal.mean_covariance
            lines.append([model, plain.layer, *cells, f"{means[0]:.3f} / {means[1]:.3f}"])
    header = ["model", "layer", "ε", "η", "bound ε + (1 + ε) η", "largest covariance", "mean covariance"]
    words = " ".join(theory_sentences({" ".join(key): layers for key, layers in found.items()}))
    return f"{grid(header, lines)}\n\n{words} Without / with orthogonality.{origin(result)}"


def networks() -> dict[tuple[str, str], list[LayerTheory]]:
    """The layers of each network, by model and orthogonality."""
    found: dict[tuple[str, str], list[LayerTheory]] = {}
    for row in read("theory")["rows"]:
        key = (row["model"], row["orthogonality"])
        measured: dict[str, Any] = {
            name: value for name, value in row.items() if name not in ("model", "orthogonality")
        }
        found.setdefault(key, []).append(from_json(LayerTheory, measured, RESULTS / "theory.json"))
    return found


def theory_figures() -> dict[str, Drawing]:
    """Covariances and maxima of one model, without and with orthogonality."""
    drawn = {f"{side} orthogonality": networks()[DRAWN, side] for side in SIDES}
    points = {name: [layer.cells for layer in layers] for name, layers in drawn.items()}
    about = f"{DRAWN} on CIFAR-10, seed 0, 500 training images"  # as in benchmarks/theory.py
    return {"theory": (points, partial(theory_figure, drawn, about))}
