"""The paper's figures and some more, from real runs; each is written to benchmarks/figures/NAME.png.

    python benchmarks/figures.py --data-dir ../shared/data [--networks DIR] [--only gram,frontier]
    python benchmarks/figures.py --data-dir ../shared/data --only grad-cam --models resnet18,vgg16

CIFAR-10 networks come from --networks and are trained there if they are missing; one that benchmarks/manifest.json does
not list, such as cifar10-resnet18-lazy-0.1-seed0, must be there. For figures with orthogonality in other layers small
fashion-mini networks are trained into runs/figures (minutes, once). Figures of costs are drawn by scripts/tables.py
from result files. Figures of the paper forget its class 0; those that show a retrained network, class 1. A line below
each figure names network, data, seed, class and layers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from frontier import trace_frontier
from manifest import REPORTED, benchmark_parser, open_network, original_name, reference_names
from paper_figures import activations, kernels, relearning
from torch import Tensor, nn

from fedortho.audits.measurements import balanced_sample, classifier_name, editable_copy, features
from fedortho.audits.probe import recall
from fedortho.data.images import Dataset, Images
from fedortho.data.request import ForgetRequest
from fedortho.engines.central import CentralEngine, central_engine
from fedortho.engines.query import draw
from fedortho.errors import unknown
from fedortho.evaluation.case import Case
from fedortho.methods.directions import Directions
from fedortho.methods.hide import Hide
from fedortho.models.predictions import accuracy, evaluate
from fedortho.reports.figures import attention, results
from fedortho.reports.figures.style import ROLES, caption, caption_of, entitle, finding_of, percent, png
from fedortho.runs.run import Run
from fedortho.runs.settings import TrainSettings
from fedortho.runs.training import train_run
from fedortho.statistics.ledger import load_ledger
from fedortho.statistics.observe import Observation
from fedortho.training.loop import fit
from fedortho.training.recipe import Recipe

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HERE = Path(__file__).parent
RUNS = HERE.parent / "runs" / "figures"
REQUEST, PAPER_REQUEST = ForgetRequest.parse(REPORTED), ForgetRequest.parse("class:0")
PAPER_KERNELS = (2, 7)  # the 3rd and the 8th
PLACED = "vgg-mini on fashion-mini, four epochs, seed 0, 500 test images"
PLACES = {"none": "deep", "shallow": "shallow", "mid": "mid", "deep": "deep"}
TARGET = 0.75  # validation accuracy while a network is trained
CAM_MODELS = ("resnet-mini", "vgg-mini")
RELEARN = Recipe(epochs=1, batch_size=50, lr=0.01, schedule="constant", ortho=0.0, crop=0, flip=0.0)


class FigureData:
    """Models, images and measurements that figures share; each is computed when a figure first reads it."""

    def __init__(self, data_dir: str, networks: Path, models: Sequence[str] = CAM_MODELS) -> None:
        self.data_dir, self.networks, self.models = data_dir, networks, tuple(models)  # models: those of Grad-CAM
        self._forgot: dict[str, tuple[nn.Module, nn.Module]] = {}

    def run(self, model: str, variant: str = "lazy-0.1") -> Run:
        return open_network(self.networks, original_name(model, 0, variant), self.data_dir)

    @cached_property
    def data(self) -> Dataset:
        return self.run(self.models[-1]).load_data(self.data_dir)

    @cached_property
    def test_sample(self) -> Images:
        return draw(self.data.test, 1000, seed=0)

    def forget_labels(self, request: ForgetRequest = REQUEST) -> list[int]:
        return request.labels(self.data.test.names)

    def named(self, figure: "Figure", models: str, *words: str, request: ForgetRequest | None = None) -> "Figure":
        """The figure with a line below it: networks, data, seed, the class that was forgotten, and more words."""
        (label,) = self.forget_labels(request) if request is not None else (None,)
        forgot = [] if label is None else [f"forgotten by hide: class {label} ({self.data.test.names[label]})"]
        caption(figure, "; ".join([f"{models} on {self.data.name}, seed 0", *forgot, *words]))
        return figure

    @cached_property
    def forget_test(self) -> Images:
        return self.data.test.subset(REQUEST.mask(self.data.test))

    def pair(
        self, model: str, variant: str = "lazy-0.1", request: ForgetRequest = REQUEST
    ) -> tuple[nn.Module, nn.Module]:
        """A model before and after the request, edited by hide."""
        key = f"{model} {variant} {request}"
        if key not in self._forgot:
            before = self.run(model, variant).load_model()
            outcome = Hide().plan(before, central_engine(before, self.data, self.ledger(model, variant)), request)
            self._forgot[key] = before, outcome.patch.apply(before)
        return self._forgot[key]

    def ledger(self, model: str, variant: str = "lazy-0.1") -> Observation | None:
        run = self.run(model, variant)
        return load_ledger(run.path / "ledger.safetensors", run.load_model())

    @cached_property
    def roles(self) -> dict[str, nn.Module]:
        before, after = self.pair("vgg-mini")
        reference = open_network(self.networks, reference_names(original_name("vgg-mini"))[0], self.data_dir)
        return {"original": before, "unlearned": after, "reference": reference.load_model()}

    @cached_property
    def placed(self) -> dict[str, Run]:
        """fashion-mini networks with orthogonality at other depths."""
        return {
            "plain" if place == "none" else f"{place} layers orthogonal": train_run(
                RUNS / f"fashion-mini-vgg-mini-ortho-{place}",
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
        return {name: kernels.feature_similarity(m, images, list(depths)) for name, m in models.items()}, depths


def gram(shared: FigureData) -> "Figure":
    layer = attention.last_layer(shared.run("resnet-mini").load_model(), shared.data.test.shape)
    return _gram(shared, "resnet-mini", [layer])


def gram_layers(shared: FigureData) -> "Figure":
    """Up to three shallow, mid and deep layers."""
    depths = kernels.depths_of(shared.run("vgg-mini").load_model(), shared.data.test.shape)
    return _gram(shared, "vgg-mini", [layer for few in kernels.layers_by_depth(depths).values() for layer in few])


def _gram(shared: FigureData, model: str, layers: list[str]) -> "Figure":
    variants = {"plain": "none", "orthogonal": "lazy-0.1"}
    models = {name: shared.run(model, variant).load_model() for name, variant in variants.items()}
    figure = kernels.gram_figure({name: kernels.kernel_similarity(each, layers) for name, each in models.items()})
    depths = kernels.depths_of(models["plain"], shared.data.test.shape)
    return shared.named(figure, model, f"kernels of {_by_depth({layer: depths[layer] for layer in layers})}")


def _by_depth(depths: Mapping[str, str]) -> str:
    groups = {depth: [layer for layer, word in depths.items() if word == depth] for depth in kernels.DEPTHS}
    return "; ".join(f"{depth}: {', '.join(layers)}" for depth, layers in groups.items() if layers)


def features_by_depth(shared: FigureData) -> "Figure":
    models = {
        name: shared.run("vgg-mini", variant).load_model()
        for name, variant in (("plain", "none"), ("deep layers orthogonal", "lazy-0.1"))
    }
    depths = kernels.depths_of(models["plain"], shared.test_sample.shape)
    found = {
        name: kernels.feature_similarity(model, shared.test_sample, list(depths)) for name, model in models.items()
    }
    figure = kernels.similarity_by_depth_figure(found)
    return shared.named(figure, "vgg-mini", f"{len(shared.test_sample):,} test images", _by_depth(depths))


def placed_by_depth(shared: FigureData) -> "Figure":
    found, depths = shared.placed_features
    figure = kernels.similarity_by_depth_figure(found)
    caption(figure, f"{PLACED}; {_by_depth(depths)}")
    return figure


def placed_curves(shared: FigureData) -> "Figure":
    """Up to three shallow, mid and deep layers."""
    found, depths = shared.placed_features
    chosen = {layer: depth for depth, layers in kernels.layers_by_depth(depths).items() for layer in layers}
    few = {name: {layer: similarity[layer] for layer in chosen} for name, similarity in found.items()}
    figure = kernels.similarity_curves_figure(few, chosen)
    caption(figure, f"{PLACED}; {_by_depth(chosen)}")
    return figure


def _answers(shared: FigureData, choose: Callable[[Tensor], tuple[int, ...]]) -> "Figure":
    shown, model, labels = [], "resnet-mini", shared.forget_labels(PAPER_REQUEST)
    for name, variant in (("plain", "none"), ("orthogonal", "lazy-0.1")):
        before, after = shared.pair(model, variant, PAPER_REQUEST)
        layer = attention.last_layer(before, shared.data.test.shape)
        old, new = (activations.class_peaks(each, shared.test_sample, layer) for each in (before, after))
        shown.append(activations.KernelResponses(name, old, new, choose(old)))
    figure = activations.activation_figure(shown, shared.data.test.names, labels)
    images = f"{len(shared.test_sample):,} test images"
    return shared.named(figure, model, f"layer {layer}", images, request=PAPER_REQUEST)


def answers(shared: FigureData) -> "Figure":
    """The kernels that the paper shows."""
    return _answers(shared, lambda _: PAPER_KERNELS)


def answers_strongest(shared: FigureData) -> "Figure":
    """The two kernels with the largest difference between the forget class and the others."""
    labels = shared.forget_labels(PAPER_REQUEST)

    def strongest(peaks: Tensor) -> tuple[int, ...]:
        retain = [label for label in range(len(peaks)) if label not in labels]
        difference = peaks[labels].mean(0) - peaks[retain].mean(0)
        return tuple(difference.argsort(descending=True)[:2].tolist())

    return _answers(shared, strongest)


def grad_cam(shared: FigureData) -> "Figure":
    pairs = {model: shared.pair(model, request=PAPER_REQUEST) for model in shared.models}
    images = attention.recognised_examples([before for before, _ in pairs.values()], shared.test_sample)
    layers = {model: attention.last_layer(before, images.shape) for model, (before, _) in pairs.items()}
    maps = {}
    for model, pair in pairs.items():
        before, after = (attention.grad_cam(each, images, layers[model]) for each in pair)
        maps[model] = (before, after)
    figure = attention.grad_cam_figure(images, maps, shared.forget_labels(PAPER_REQUEST))
    where = [f"layer {layer} of {model}" for model, layer in layers.items()]
    return shared.named(figure, " and ".join(layers), *where, "one test image of each class", request=PAPER_REQUEST)


def frontier(shared: FigureData) -> "Figure":
    model, settings = shared.run("vgg-mini").load_model(), Hide(scrub=False)
    ledger = shared.ledger("vgg-mini")
    trials = trace_frontier(settings, model, central_engine(model, shared.data, ledger), REQUEST)
    points = [results.Point(t.ratio, t.forget, t.retain) for t in trials if t.ratio]
    outcome = settings.plan(model, central_engine(model, shared.data, ledger), REQUEST)
    least = None if outcome.retain_before is None else outcome.retain_before - settings.max_retain_drop
    assert outcome.chosen is not None, "an edit met target and budget"
    chosen = next(point for point in points if point.ratio == outcome.chosen.ratio)
    figure = results.frontier_figure(points, chosen, target=settings.target, least=least)
    return shared.named(figure, "vgg-mini", "without the edit of the classifier; validation images", request=REQUEST)


def classes(shared: FigureData) -> "Figure":
    scores = {role: evaluate(model, shared.data.test) for role, model in shared.roles.items()}
    before, after = scores["original"], scores["unlearned"]
    labels = shared.forget_labels()
    figure = results.class_accuracy_figure(before, after, shared.data.test.names, labels, scores.get("reference"))
    return shared.named(figure, "vgg-mini", "all test images", request=REQUEST)


def confusion(shared: FigureData) -> "Figure":
    before, after = (evaluate(shared.roles[role], shared.data.test) for role in ("original", "unlearned"))
    figure = results.confusion_figure(before, after, shared.data.test.names, shared.forget_labels())
    return shared.named(figure, "vgg-mini", "all test images", request=REQUEST)


def confidence(shared: FigureData) -> "Figure":
    found = {role: results.own_confidence(model, shared.forget_test) for role, model in shared.roles.items()}
    (label,) = shared.forget_labels()
    figure = results.confidence_figure(found, shared.data.test.names[label])
    return shared.named(figure, "vgg-mini", "test images of the class", request=REQUEST)


def relearn(shared: FigureData, forget: int = 50, retain: int = 450, epochs: int = 8) -> "Figure":
    """Plain training on 50 images of the forget set and 450 of the retain set, ten steps an epoch."""
    train = shared.data.train
    mask = REQUEST.mask(train)
    forget_images, others = draw(train.subset(mask), forget, seed=0), draw(train.subset(~mask), retain, seed=0)
    mixed = replace(forget_images, rows=torch.cat([forget_images.rows, others.rows]))
    curves = {}
    for role, model in shared.roles.items():
        student, curve = model, [(0, accuracy(model, shared.forget_test))]
        for epoch in range(epochs):
            student = fit(student, mixed, replace(RELEARN, seed=epoch))
            steps = (epoch + 1) * (forget + retain) // RELEARN.batch_size
            curve.append((steps, accuracy(student, shared.forget_test)))
        curves[role] = curve
    figure = relearning.relearn_figure(curves, 0.8 * curves["original"][0][1])
    return shared.named(figure, "vgg-mini", f"{forget} and {retain} training images", request=REQUEST)


def probe(shared: FigureData) -> "Figure":
    """The probe of audit C1 on the inputs of every convolution but the first and of the classifier."""
    before, after = shared.pair("vgg-mini")
    erased = Directions().plan(before, CentralEngine(shared.data), REQUEST).patch.apply(before)
    roles = {"original": before, "unlearned": after, "erased": erased} | shared.roles
    case = Case(after, before, (), shared.data, REQUEST)
    layers = list(kernels.depths_of(before, shared.data.train.shape))[1:]
    labels, found = balanced_sample(case).labels, {}
    for role in (role for role in ROLES if role in roles):
        twin = editable_copy(case, roles[role])
        names = [*layers, classifier_name(case, twin)]
        taught, asked = (features(case, twin, images, names) for images in (balanced_sample(case), case.forget_eval))
        found[role] = {name: recall(taught[name], asked[name], labels, case.forget_eval.labels) for name in names}
    return shared.named(results.probe_figure(found), "vgg-mini", request=REQUEST)


def training(shared: FigureData) -> "Figure":
    variants = {"plain": "none", "orthogonal": "lazy-0.1"}
    histories = {
        f"{model}, {name}": shared.run(model, variant).history()
        for model in ("vgg-mini", "resnet-mini")
        for name, variant in variants.items()
    }
    figure, counts = results.training_figure(histories), []
    figure.axes[0].axhline(TARGET, color="#444444", linestyle=":", linewidth=1)
    for name, history in histories.items():
        reached = (entry.epoch + 1 for entry in history if entry.valid is not None and entry.valid >= TARGET)
        counts.append(f"{name}: {next(reached, 'never')}")
    entitle(figure, f"Epochs until {percent(TARGET)} validation accuracy; {'; '.join(counts)}")
    return shared.named(figure, "vgg-mini and resnet-mini")


FIGURES = {
    function.__name__.replace("_", "-"): function
    for function in (
        *(gram, gram_layers, features_by_depth, placed_by_depth, placed_curves, answers, answers_strongest),
        *(grad_cam, frontier, classes, confusion, confidence, relearn, probe, training),
    )
}


def main(words: list[str] | None = None) -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--only", default=",".join(FIGURES), help="figures, separated by commas; default: all")
    parser.add_argument("--models", default=",".join(CAM_MODELS), help="networks of grad-cam, separated by commas")
    parser.add_argument("--out", type=Path, default=HERE / "figures")
    arguments = parser.parse_args(words)
    names = arguments.only.split(",")
    if wrong := [name for name in names if name not in FIGURES]:
        parser.error(str(unknown("figure", wrong[0], FIGURES)))
    torch.set_num_threads(1)
    arguments.out.mkdir(exist_ok=True)
    shared = FigureData(arguments.data_dir, arguments.networks, arguments.models.split(","))
    for name in names:
        figure = FIGURES[name](shared)
        picture = png(figure)
        (arguments.out / f"{name}.png").write_bytes(picture)
        print(f"{name}: {len(picture) / 1000:.0f} KB: {finding_of(figure)} ({caption_of(figure)})", flush=True)


if __name__ == "__main__":
    main()
