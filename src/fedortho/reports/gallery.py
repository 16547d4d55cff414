"""The figures of a report, drawn from a run that has forgotten, its original and its reference."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fedortho.audits.result import AuditResult
from fedortho.data.images import Dataset
from fedortho.data.request import ForgetRequest
from fedortho.errors import FedOrthoError
from fedortho.evaluation.case import COUNTERFACTUALS, Case
from fedortho.models.predictions import evaluate
from fedortho.reports.figures import attention, results
from fedortho.reports.figures.style import ROLES
from fedortho.reports.pictures import Gallery, Picture, kept_examples, lost_examples, picture_of
from fedortho.runs.record import ServedRecord
from fedortho.runs.run import Run, excluded_besides, served_record

MAX_CAMS = 12  # classes side by side
NO_ORIGINAL = "The original model was not found (give --original RUN), so nothing is compared with it."
NO_REFERENCE = "No model retrained without the forget set was found (give --reference RUN) to compare with."


def draw_gallery(
    run: Run,
    data: Dataset,
    request: ForgetRequest,
    *,
    original: Run | None = None,
    reference: Run | None = None,
    device: torch.device | str = "cpu",
    images: bool = True,
) -> Gallery:
    """All figures that can be drawn; remarks name the others. Without `images` no image of the data is shown."""
    served = served_record(run, request)
    runs = {"original": original, "unlearned": run, "reference": reference}
    models = {role: given.load_model().to(device) for role, given in runs.items() if given is not None}
    before = models.get("original", models["unlearned"])  # without an original nothing is compared with it
    others, clients = excluded_besides(run, request), run.clients(data)
    case = Case(models["unlearned"], before, (), data, request, others, clients, device)
    remarks = [text for text, given in ((NO_ORIGINAL, original), (NO_REFERENCE, reference)) if given is None]
    remarks += [] if len(case.forget_eval) else ["The images of the forget set were deleted; none is measured again."]
    pictures = _score_pictures(models, case) if original is not None else []
    pictures += _trial_pictures(served) + _training_pictures(run)
    if not images:
        return Gallery(tuple(pictures), remarks=tuple(remarks), has_images=False)
    if original is not None and request.kind == "class":
        try:
            pictures.append(_cam_picture(models, case, run.settings.model))
        except FedOrthoError as error:
            remarks.append(f"There is no Grad-CAM: {error}.")
    return Gallery(tuple(pictures), lost_examples(models, case), kept_examples(models, case), tuple(remarks))


def _score_pictures(models: Mapping[str, nn.Module], case: Case) -> list[Picture]:
    names, labels = case.data.test.names, case.request.labels(case.data.test.names)
    scores = {role: evaluate(model, case.data.test, device=case.device) for role, model in models.items()}
    before, after = scores["original"], scores["unlearned"]
    subject = " and ".join(names[label] for label in labels) or "the forget set"
    classes = results.class_accuracy_figure(before, after, names, labels, scores.get("reference"))
    about = "Bars: accuracy on the test images of each class; forgotten classes have a grey background."
    pictures = [picture_of("classes", classes, about)]
    about = "Rows are true classes, columns predictions; numbers are percentage points, after minus before."
    pictures.append(picture_of("confusion", results.confusion_figure(before, after, names, labels), about))
    if not len(case.forget_eval):
        return pictures
    images, device = case.forget_eval, case.device
    confidence = {role: results.own_confidence(model, images, device=device) for role, model in models.items()}
    ideal = "; the retrained model shows the ideal" if "reference" in models else ""
    about = f"Probability of the true class on the forget set{ideal}."
    return [*pictures, picture_of("confidence", results.confidence_figure(confidence, subject), about)]


def _trial_pictures(served: ServedRecord) -> list[Picture]:
    """The trials of the request, if the run recorded several."""
    trials = [trial for trial in served.trials if trial.ratio and not trial.scrub]
    if len(trials) < 2 or served.chosen is None:
        return []
    *points, best = (results.Point(trial.ratio, trial.forget, trial.retain) for trial in (*trials, served.chosen))
    target = served.settings.get("target")
    figure = results.frontier_figure(points, best, target=None if target is None else float(target))
    about = "Forget accuracy on training images of the forget set, retain accuracy on validation images; no test image."
    return [picture_of("frontier", figure, about)]


def _training_pictures(run: Run) -> list[Picture]:
    history = run.history()
    if sum(epoch.valid is not None for epoch in history) < 2:
        return []
    about = "Accuracy on validation images while the original model was trained."
    return [picture_of("training", results.training_figure({"the original model": history}), about)]


def _cam_picture(models: Mapping[str, nn.Module], case: Case, name: str) -> Picture:
    test, others = case.data.test, case.forgotten
    shown = test if others is None else test.subset(~ForgetRequest(others.classes).mask(test))
    if (number := len(test.names)) > MAX_CAMS:
        raise FedOrthoError(f"it is drawn for up to {MAX_CAMS} classes, and there are {number}")
    before, after = models["original"].cpu(), models["unlearned"].cpu()
    try:
        images = attention.recognised_examples([before], shown)
        layer = attention.last_layer(before, images.shape)
        maps = tuple(attention.grad_cam(model, images, layer) for model in (before, after))
    finally:
        for model in models.values():
            model.to(case.device)
    figure = attention.grad_cam_figure(images, {name: (maps[0], maps[1])}, case.request.labels(test.names))
    about = f"Bright: where layer {layer} finds each image's class; before and after share a scale."
    return replace(picture_of("grad-cam", figure, about), shows_images=True)


def audit_pictures(audits: Sequence[AuditResult], digests: Mapping[str, str] | None = None) -> list[Picture]:
    """Figures of audits whose details hold values by layer (probe) or by number of samples (relearning).

    `digests` are those of the verdict: they tell whether the retrained model was treated alike.
    """
    pictures, alike = [], " The retrained model was treated alike." if COUNTERFACTUALS[0] in (digests or {}) else ""
    for audit in audits:
        details = audit.details
        if stages := _by_role(details.get("stages")):
            depths = details.get("depths", list(next(iter(stages.values()))))  # JSON sorts layers by name
            in_order = {role: {name: found[name] for name in depths if name in found} for role, found in stages.items()}
            about = "Recall of a linear probe on what enters each layer, from the first stage to the classifier."
            pictures.append(picture_of("probe", results.probe_figure(in_order), about + alike))
        if steps := details.get("relearning"):
            by_samples = {samples: _by_role(value) for samples, value in steps.items()}
            figure = results.relearn_steps_figure(by_samples, int(details.get("steps", 0)))
            about = "Fewer steps than the retrained model needs mean that the features of the forget set remain."
            pictures.append(picture_of("relearning", figure, about + alike))
    return pictures


def _by_role(value: Any) -> dict[str, Any]:
    return {role: value[role] for role in ROLES if role in value} if isinstance(value, dict) else {}
