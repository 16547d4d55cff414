"""The paper's figures and some more, from real runs; each is written to benchmarks/figures/NAME.png.

    python benchmarks/figures.py --data-dir ../shared/data [--only gram,frontier] [--references runs]

CIFAR-10 networks come from benchmarks/runs. Where the paper needs orthogonality in other layers, and for the costs of
methods in a federation, small fashion-mini networks are trained into benchmarks/runs/figures (minutes, kept for the
next time).
"""

import argparse
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fedortho.audits.measurements import classifier_of, features, ready, sampled
from fedortho.audits.probe import recall
from fedortho.data.images import Dataset, Images
from fedortho.data.request import ForgetRequest
from fedortho.engines.central import CentralEngine, central_engine
from fedortho.evaluation.case import Case
from fedortho.federated.server import train_federation
from fedortho.methods import preset
from fedortho.methods.hyperparameters import read_settings
from fedortho.models.predictions import accuracy, evaluate
from fedortho.reports.figures import activations, costs, kernels, results
from fedortho.reports.figures.style import finding_of, png
from fedortho.requests.comparing import compare
from fedortho.requests.references import find_reference, reference_settings
from fedortho.runs.run import Run, open_run
from fedortho.runs.settings import FederateSettings, TrainSettings
from fedortho.runs.training import train_run
from fedortho.statistics.ledger import load_ledger
from fedortho.statistics.observe import Observation
from fedortho.statistics.query import draw
from fedortho.training.loop import fit
from fedortho.training.recipe import Recipe
from fedortho.unlearning.plan import ForgetSettings, plan_forgetting, trace_frontier

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HERE = Path(__file__).parent
REQUEST = ForgetRequest.parse("class:1")  # as benchmarks/manifest.py drew it
PLACES = {"none": "deep", "shallow": "shallow", "mid": "mid", "deep": "deep"}
METHODS = ["retrain", "hide", "paper", "finetune", "not", "fused", "ssd"]
RELEARN = Recipe(epochs=1, batch_size=50, lr=0.01, schedule="constant", ortho=0.0, crop=0, flip=0.0)


class Bench:
    """Models, images and what was found of them; each is made when a figure first asks for it."""

    def __init__(self, data_dir: str, runs: Path, references: Path) -> None:
        self.data_dir, self.runs, self.references = data_dir, runs, references
        self._forgot: dict[str, tuple[nn.Module, nn.Module]] = {}

    def run(self, model: str, variant: str = "lazy-0.1") -> Run:
        return open_run(self.runs / f"cifar10-{model}-{variant}-seed0")

    @cached_property
    def data(self) -> Dataset:
        return self.run("vgg-mini").load_data(self.data_dir)

    @cached_property
    def few(self) -> Images:
        return draw(self.data.test, 1000, seed=0)

    @property
    def gone(self) -> list[int]:
        return REQUEST.labels(self.data.test.names)

    @property
    def what(self) -> str:
        return self.data.test.names[self.gone[0]]

    @cached_property
    def forget_test(self) -> Images:
        return self.data.test.subset(REQUEST.mask(self.data.test))

    def pair(self, model: str, variant: str = "lazy-0.1") -> tuple[nn.Module, nn.Module]:
        """A model and what forgetting makes of it, by the robust preset."""
        key = f"{model} {variant}"
        if key not in self._forgot:
            before = self.run(model, variant).load_model()
            outcome = plan_forgetting(before, central_engine(before, self.data, self.ledger(model, variant)), REQUEST)
            self._forgot[key] = before, outcome.patch.apply(before)
        return self._forgot[key]

    def ledger(self, model: str, variant: str = "lazy-0.1") -> Observation | None:
        run = self.run(model, variant)
        return load_ledger(run.path / "ledger.safetensors", run.load_model())

    @cached_property
    def roles(self) -> dict[str, nn.Module]:
        before, after = self.pair("vgg-mini")
        found = {"original": before, "forgot": after}
        run = self.run("vgg-mini")
        settings = reference_settings(run, REQUEST)
        reference = find_reference(self.references, settings, run.record["data"]["digest"])
        return found if reference is None else found | {"reference": reference.load_model()}

    @cached_property
    def placed(self) -> dict[str, Run]:
        """Fashion networks with orthogonality in other places."""
        return {
            "plain" if place == "none" else f"{place} layers orthogonal": train_run(
                self.runs / "figures" / f"fashion-mini-vgg-mini-ortho-{place}",
                TrainSettings(
                    data="fashion-mini",
                    epochs=4,
                    threads=1,
                    ortho=0.0 if place == "none" else 0.1,
                    ortho_layers=layers,
                ),
            )
            for place, layers in PLACES.items()
        }

    @cached_property
    def placed_features(self) -> tuple[dict[str, dict[str, Tensor]], dict[str, str]]:
        images = draw(next(iter(self.placed.values())).load_data().test, 500, seed=0)
        models = {name: run.load_model() for name, run in self.placed.items()}
        depths = kernels.depths_of(next(iter(models.values())), images.shape)
        return {name: kernels.feature_likeness(m, images, list(depths)) for name, m in models.items()}, depths


def gram(bench: Bench) -> "Figure":
    layer = activations.last_layer(bench.run("resnet-mini").load_model(), bench.data.test.shape)
    return _gram(bench, "resnet-mini", [layer])


def gram_layers(bench: Bench) -> "Figure":
    depths = kernels.depths_of(bench.run("vgg-mini").load_model(), bench.data.test.shape)
    last = {depth: layer for layer, depth in depths.items()}
    return _gram(bench, "vgg-mini", list(dict.fromkeys([next(iter(depths)), *(last[d] for d in kernels.DEPTHS)])))


def _gram(bench: Bench, model: str, layers: list[str]) -> "Figure":
    variants = {"plain": "none", "orthogonal": "lazy-0.1"}
    return kernels.gram_figure(
        {
            name: kernels.kernel_likeness(bench.run(model, variant).load_model(), layers)
            for name, variant in variants.items()
        }
    )


def features_by_depth(bench: Bench) -> "Figure":
    models = {
        name: bench.run("vgg-mini", variant).load_model()
        for name, variant in (("plain", "none"), ("deep layers orthogonal", "lazy-0.1"))
    }
    layers = list(kernels.depths_of(models["plain"], bench.few.shape))
    found = {name: kernels.feature_likeness(model, bench.few, layers) for name, model in models.items()}
    return kernels.likeness_by_depth_figure(found)


def placed_by_depth(bench: Bench) -> "Figure":
    return kernels.likeness_by_depth_figure(bench.placed_features[0])


def placed_curves(bench: Bench) -> "Figure":
    return kernels.likeness_curves_figure(*bench.placed_features)


def _answers(bench: Bench, choose: Callable[[Tensor], tuple[int, ...]]) -> "Figure":
    shown = []
    for name, variant in (("plain", "none"), ("orthogonal", "lazy-0.1")):
        before, after = bench.pair("resnet-mini", variant)
        layer = activations.last_layer(before, bench.data.test.shape)
        old, new = (activations.class_peaks(model, bench.few, layer) for model in (before, after))
        shown.append(activations.KernelAnswers(name, old, new, choose(old)))
    return activations.activation_figure(shown, bench.data.test.names, bench.gone)


def answers(bench: Bench) -> "Figure":
    """The kernels that the paper shows, the 3rd and the 8th."""
    return _answers(bench, lambda _: (2, 7))


def answers_strongest(bench: Bench) -> "Figure":
    """The two kernels that prefer the forgotten class most."""

    def strongest(peaks: Tensor) -> tuple[int, ...]:
        kept = [label for label in range(len(peaks)) if label not in bench.gone]
        difference = peaks[bench.gone].mean(0) - peaks[kept].mean(0)
        return tuple(difference.argsort(descending=True)[:2].tolist())

    return _answers(bench, strongest)


def grad_cam(bench: Bench) -> "Figure":
    pairs = {name: bench.pair(model) for name, model in (("ResNet", "resnet-mini"), ("VGG", "vgg-mini"))}
    images = activations.recognised_examples([before for before, _ in pairs.values()], bench.few)
    maps = {}
    for name, pair in pairs.items():
        layer = activations.last_layer(pair[0], images.shape)
        before, after = (activations.grad_cam(model, images, layer) for model in pair)
        maps[name] = (before, after)
    return activations.grad_cam_figure(images, maps, bench.gone)


def cost(bench: Bench) -> "Figure":
    place = bench.runs / "figures"
    settings = FederateSettings(
        data="fashion-mini", clients=10, fraction=1.0, rounds=8, split="dirichlet:0.3", batch_size=32, threads=1
    )
    run = train_federation(place / "fashion-mini-federation", settings)
    rows = compare(
        run,
        run.load_data(),
        ForgetRequest.parse("class:3"),
        METHODS,
        place / "fashion-mini-compared",
        settings=read_settings(settings.data, settings.model, "short"),
    )
    return costs.cost_figure({row.method: row.cost for row in rows if row.cost is not None})


def frontier(bench: Bench) -> "Figure":
    model, settings = bench.run("vgg-mini").load_model(), ForgetSettings(scrub=False)
    ledger = bench.ledger("vgg-mini")
    trials = trace_frontier(model, central_engine(model, bench.data, ledger), REQUEST, settings)
    points = [results.Point(t.ratio, t.forget, t.retain) for t in trials if t.ratio]
    outcome = plan_forgetting(model, central_engine(model, bench.data, ledger), REQUEST, replace(settings, scrub=True))
    least = None if outcome.retain_before is None else outcome.retain_before - settings.max_retain_drop
    chosen = next((p for p in points if outcome.chosen is not None and p.ratio == outcome.chosen.ratio), None)
    return results.frontier_figure(points, chosen, target=settings.target, least=least)


def classes(bench: Bench) -> "Figure":
    scores = {role: evaluate(model, bench.data.test) for role, model in bench.roles.items()}
    before, after = scores["original"], scores["forgot"]
    return results.class_accuracy_figure(before, after, bench.data.test.names, bench.gone, scores.get("reference"))


def confusion(bench: Bench) -> "Figure":
    before, after = (evaluate(bench.roles[role], bench.data.test) for role in ("original", "forgot"))
    return results.confusion_figure(before, after, bench.data.test.names, bench.gone)


def confidence(bench: Bench) -> "Figure":
    found = {role: results.own_confidence(model, bench.forget_test) for role, model in bench.roles.items()}
    return results.confidence_figure(found, bench.what)


def relearn(bench: Bench, forgotten: int = 50, kept: int = 450, turns: int = 8) -> "Figure":
    """Plain training on 50 forgotten and 450 other images, ten steps a turn."""
    train = bench.data.train
    mask = REQUEST.mask(train)
    gone, others = draw(train.subset(mask), forgotten, seed=0), draw(train.subset(~mask), kept, seed=0)
    mixed = replace(gone, rows=torch.cat([gone.rows, others.rows]))
    curves = {}
    for role, model in bench.roles.items():
        student, curve = model, [(0, accuracy(model, bench.forget_test))]
        for turn in range(turns):
            student = fit(student, mixed, replace(RELEARN, seed=turn))
            curve.append(((turn + 1) * (forgotten + kept) // RELEARN.batch_size, accuracy(student, bench.forget_test)))
        curves[role] = curve
    return results.relearn_figure(curves, 0.8 * curves["original"][0][1])


def probe(bench: Bench) -> "Figure":
    """The probe of audit C1 on what each convolution but the first receives, and on what the classifier does."""
    before, after = bench.pair("vgg-mini")
    erased = plan_forgetting(before, CentralEngine(bench.data), REQUEST, preset("erase")).patch.apply(before)
    roles = {"original": before, "forgot": after, "erased": erased} | bench.roles
    case = Case(after, before, None, None, bench.data, REQUEST)
    layers = list(kernels.depths_of(before, bench.data.train.shape))[1:]
    labels, found = sampled(case).labels, {}
    for role in (role for role in results.ROLES if role in roles):
        twin = ready(case, roles[role])
        names = [*layers, classifier_of(case, twin)]
        taught, asked = (features(case, twin, images, names) for images in (sampled(case), case.judged))
        found[role] = {name: recall(taught[name], asked[name], labels, case.judged.labels) for name in names}
    return results.probe_figure(found)


def training(bench: Bench) -> "Figure":
    variants = {"plain": "none", "orthogonal": "lazy-0.1"}
    histories = {
        f"{model}, {name}": bench.run(model, variant).history()
        for model in ("vgg-mini", "resnet-mini")
        for name, variant in variants.items()
    }
    return costs.training_figure(histories, target=0.75)


FIGURES = {
    function.__name__.replace("_", "-"): function
    for function in (
        *(gram, gram_layers, features_by_depth, placed_by_depth, placed_curves, answers, answers_strongest),
        *(grad_cam, cost, frontier, classes, confusion, confidence, relearn, probe, training),
    )
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", default="../shared/data")
    parser.add_argument("--runs", type=Path, default=HERE / "runs")
    parser.add_argument("--references", type=Path, help="where retrained networks lie (default: with the runs)")
    parser.add_argument("--only", default=",".join(FIGURES))
    parser.add_argument("--out", type=Path, default=HERE / "figures")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.out.mkdir(exist_ok=True)
    bench = Bench(arguments.data_dir, arguments.runs, arguments.references or arguments.runs)
    for name in arguments.only.split(","):
        figure = FIGURES[name](bench)
        picture = png(figure)
        (arguments.out / f"{name}.png").write_bytes(picture)
        print(f"{name}: {len(picture) / 1000:.0f} KB: {finding_of(figure)}", flush=True)


if __name__ == "__main__":
    main()
