"""The pictures of a report: figures of a run that has forgotten, and images that it still recognises or no longer."""

import io
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fedortho.data.images import Dataset, Images, evaluation_batches
from fedortho.data.request import ForgetRequest
from fedortho.errors import FedOrthoError
from fedortho.evaluation.case import Case
from fedortho.models.predictions import Evaluation, answers_of, evaluate
from fedortho.reports.figures import activations, costs, results
from fedortho.reports.figures.style import finding_of, png
from fedortho.requests.judging import entry_for
from fedortho.runs.federation import held_rows
from fedortho.runs.run import Run
from fedortho.runs.served import excluded_besides
from fedortho.runs.settings import FederateSettings

if TYPE_CHECKING:
    from matplotlib.figure import Figure


DPI, SHOWN_DPI = 150, 96  # drawn finer than shown, for print and fine screens
MOST_CAMS = 12  # classes beside one another
EXAMPLES = 12
SEARCHED = 400  # images that stay, to find examples among


@dataclass(frozen=True)
class Picture:
    """A figure for a page."""

    name: str
    finding: str
    about: str  # how to read it
    data: bytes
    shows_images: bool = False  # whether images of the data can be seen in it

    @property
    def alt(self) -> str:
        return f"{self.finding}. {self.about}"

    @property
    def shown_size(self) -> tuple[int, int]:
        """Width and height on the page, so that nothing jumps while it loads."""
        from PIL import Image

        with Image.open(io.BytesIO(self.data)) as opened:
            width, height = opened.size
        return round(width * SHOWN_DPI / DPI), round(height * SHOWN_DPI / DPI)


@dataclass(frozen=True)
class Example:
    """An image, its class, and the predictions of the models before and after."""

    data: bytes
    truth: str
    before: str | None  # None: the original model is not known
    after: str

    @property
    def alt(self) -> str:
        before = "" if self.before is None else f" (before: {self.before})"
        return f"{self.truth}, now called {self.after}{before}"


@dataclass(frozen=True)
class Gallery:
    """What a report shows, and why something is not shown."""

    pictures: tuple[Picture, ...] = ()
    lost: tuple[Example, ...] = ()  # recognised before, no longer
    kept: tuple[Example, ...] = ()  # recognised before and after
    remarks: tuple[str, ...] = ()
    has_images: bool = True  # False: images of the data were left out on purpose


@dataclass
class _Scene:
    """The models by role, the images, and what was answered."""

    models: Mapping[str, nn.Module]  # forgot; original and reference where they are known
    case: Case
    remarks: list[str] = field(default_factory=list)

    @property
    def names(self) -> tuple[str, ...]:
        return self.case.data.test.names

    @property
    def gone(self) -> list[int]:
        return self.case.request.labels(self.names)

    @property
    def shown(self) -> Images:
        """Test images, but for classes that other requests had forgotten."""
        test, others = self.case.data.test, self.case.forgotten
        return test.subset(~ForgetRequest(others.classes).mask(test)) if others is not None else test

    def scores(self) -> dict[str, Evaluation]:
        case = self.case
        return {role: evaluate(model, case.data.test, device=case.device) for role, model in self.models.items()}


def illustrate(
    run: Run,
    data: Dataset,
    request: ForgetRequest,
    *,
    original: Run | None = None,
    reference: Run | None = None,
    device: torch.device | str = "cpu",
    images: bool = True,
) -> Gallery:
    """Draw what can be drawn; what cannot is said in the remarks. Without `images` none of the data can be seen."""
    entry = entry_for(run, request)
    runs = {"original": original, "forgot": run, "reference": reference}
    models = {role: given.load_model().to(device) for role, given in runs.items() if given is not None}
    scene = _Scene(models, _case(run, data, request, models, device))
    if original is None:
        scene.remarks.append("The model as it was before is not here (--original RUN), so nothing is compared with it.")
    if reference is None:
        scene.remarks.append("No model retrained without what had to go is here (--reference RUN) to compare with.")
    pictures = [
        *(_score_pictures(scene) if original is not None else []),
        *_record_pictures(run, entry),
    ]
    if not images:
        return Gallery(tuple(pictures), remarks=tuple(scene.remarks), has_images=False)
    if original is not None and request.kind == "class":
        pictures += _cam_pictures(scene, run.settings.model)
    lost, kept = _examples(scene)
    return Gallery(tuple(pictures), lost, kept, tuple(scene.remarks))


def _case(
    run: Run, data: Dataset, request: ForgetRequest, models: Mapping[str, nn.Module], device: torch.device | str
) -> Case:
    """What is shown in the words of the audits, which know best what had to go and what stays."""
    settings = run.settings
    clients = held_rows(data, settings, settings.partition_seed) if isinstance(settings, FederateSettings) else None
    others = excluded_besides(run, request)
    before = models.get("original", models["forgot"])  # without one nothing is compared with it
    return Case(models["forgot"], before, None, None, data, request, others, clients, device)


def picture_of(name: str, figure: "Figure", about: str) -> Picture:
    """A figure for a page, where its finding is a heading and not part of the picture."""
    finding = finding_of(figure)
    figure.suptitle("")
    return Picture(name, finding, about, png(figure, DPI))


def _score_pictures(scene: _Scene) -> list[Picture]:
    scores, names, case = scene.scores(), scene.names, scene.case
    before, after = scores["original"], scores["forgot"]
    found = {
        role: results.own_confidence(model, case.judged, device=case.device) for role, model in scene.models.items()
    }
    what = " and ".join(names[label] for label in scene.gone) or "the images that had to go"
    return [
        picture_of(
            "classes",
            results.class_accuracy_figure(before, after, names, scene.gone, scores.get("reference")),
            "Bars: accuracy on the test images of each class; what had to go stands on grey.",
        ),
        picture_of(
            "confusion",
            results.confusion_figure(before, after, names, scene.gone),
            "Rows are true classes, columns answers; numbers are percentage points, after less before.",
        ),
        picture_of(
            "confidence",
            results.confidence_figure(found, what),
            "How sure the models are of the right answer on what had to go: best is what the retrained one shows.",
        ),
    ]


def _record_pictures(run: Run, entry: Mapping[str, Any]) -> list[Picture]:
    """What the run has written down: the trials of the request, and its training."""
    found = []
    points = [
        results.Point(trial["ratio"], trial["forget"], trial["retain"])
        for trial in entry.get("trials", [])
        if trial["ratio"] and not trial["scrub"]
    ]
    if len(points) > 1:
        chosen = results.Point(entry["ratio"], entry["trial-forget"], entry["trial-retain"])
        figure = results.frontier_figure(points, chosen, target=entry.get("settings", {}).get("target"))
        about = "Forgetting on training images that had to go, keeping on validation images; no test image was used."
        found.append(picture_of("frontier", figure, about))
    if any(epoch.valid is not None for epoch in run.history()):
        about = "Accuracy on images set aside while the model was trained, before it forgot anything."
        found.append(picture_of("training", costs.training_figure({run.settings.model: run.history()}), about))
    return found


def _cam_pictures(scene: _Scene, name: str) -> list[Picture]:
    before, after = scene.models["original"].cpu(), scene.models["forgot"].cpu()
    if (number := len(scene.names)) > MOST_CAMS:
        scene.remarks.append(f"Grad-CAM is drawn for up to {MOST_CAMS} classes; here are {number}.")
        return []
    try:
        images = activations.recognised_examples([before], scene.shown)
        layer = activations.last_layer(before, images.shape)
        old, new = (activations.grad_cam(model, images, layer) for model in (before, after))
    except FedOrthoError as error:
        scene.remarks.append(f"There is no Grad-CAM: {error}.")
        return []
    finally:
        for model in scene.models.values():
            model.to(scene.case.device)
    about = f"Bright: where layer {layer} finds each image's class; before and after share a scale."
    drawn = picture_of("grad-cam", activations.grad_cam_figure(images, {name: (old, new)}, scene.gone), about)
    return [replace(drawn, shows_images=True)]


def audit_pictures(audits: list[dict[str, Any]]) -> list[Picture]:
    """Figures of what audits found layer by layer, or step by step, where their details tell."""
    found = []
    for audit in audits:
        details = audit.get("details") or {}
        if stages := _by_role(details.get("stages")):
            about = "Recall of a linear probe on the features, from the first stage to the classifier."
            found.append(picture_of("probe", results.probe_figure(stages), about))
        if steps := details.get("relearning"):
            told = {key: _by_role(value) for key, value in steps.items()}
            most = int(details.get("steps", 0))
            about = "Fewer steps than the retrained model needs mean that something was left to build on."
            found.append(picture_of("relearning", results.relearn_steps_figure(told, most), about))
    return found


def _by_role(value: Any) -> dict[str, Any]:
    return {role: value[role] for role in results.ROLES if role in value} if isinstance(value, dict) else {}


def _examples(scene: _Scene) -> tuple[tuple[Example, ...], tuple[Example, ...]]:
    """Images that had to go and are no longer recognised; and of the others some that still are, of many classes.

    All are test images. Those of clients and samples are the very data that had to go: a page must not keep them.
    """
    case = scene.case
    others, lost = case.kept_test, case.judged if case.request.kind == "class" else case.data.test.subset([])
    sides: list[tuple[Example, ...]] = []
    for images, recognised in ((lost, False), (others.subset(_turns(others.labels)[:SEARCHED]), True)):
        if not len(images):
            sides.append(())
            continue
        told = {role: _answers(scene, role, images) for role in scene.models if role != "reference"}
        right = told["forgot"] == images.labels
        chosen = right if recognised else ~right
        if "original" in told:
            chosen &= told["original"] == images.labels
        sides.append(_cut(images, told, chosen))
    return sides[0], sides[1]


def _answers(scene: _Scene, role: str, images: Images) -> Tensor:
    model = scene.models[role].eval()
    with torch.no_grad():
        batches = evaluation_batches(images, device=scene.case.device)
        return torch.cat([answers_of(model, inputs).argmax(1).cpu() for inputs, _ in batches])


def _turns(labels: Tensor) -> Tensor:
    """Positions in an order that takes the first image of each class, then the second, and so on.

    >>> _turns(torch.tensor([5, 5, 5, 2, 2])).tolist()
    [0, 3, 1, 4, 2]
    """
    turn = torch.zeros(len(labels), dtype=torch.int64)
    for label in labels.unique().tolist():
        places = (labels == label).nonzero().flatten()
        turn[places] = torch.arange(len(places))
    return turn.argsort(stable=True)


def _cut(images: Images, told: Mapping[str, Tensor], chosen: Tensor) -> tuple[Example, ...]:
    places = chosen.nonzero().flatten()
    places = places[_turns(images.labels[places])[:EXAMPLES]]
    pictures, names = activations.as_pictures(images.subset(places)), images.names
    return tuple(
        Example(
            _thumbnail(pictures[number]),
            names[int(images.labels[place])],
            names[int(told["original"][place])] if "original" in told else None,
            names[int(told["forgot"][place])],
        )
        for number, place in enumerate(places.tolist())
    )


def _thumbnail(pixels: Tensor, side: int = 64) -> bytes:
    """A PNG, no larger than so many pixels."""
    from PIL import Image

    picture = Image.fromarray(pixels.numpy())
    picture.thumbnail((side, side))
    out = io.BytesIO()
    picture.save(out, "PNG", optimize=True)
    return out.getvalue()
