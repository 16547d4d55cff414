"""Measurements that several audits share: logits, accuracies and features of the case's models, each computed once."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fedortho.data.images import Images
from fedortho.engines.query import draw
from fedortho.errors import BadData, BadSetting
from fedortho.evaluation.accuracies import share_correct
from fedortho.evaluation.case import Case
from fedortho.models.capture import capture
from fedortho.models.graph import stage_entries
from fedortho.models.layout import ordered_batches
from fedortho.models.predictions import answers_of, refuse_broken
from fedortho.models.split import find_classifier

T = TypeVar("T")
PER_CLASS, MAX_SAMPLE = 250, 5000  # images of a class, and in all, whose features are used


@dataclass(frozen=True)
class MeasurementCache:
    """Measurements of single models; may be shared by cases that differ only in their models."""

    measured: dict[tuple[str, int], tuple[nn.Module, Any]] = field(default_factory=dict)  # by name and id of the model


def measure_model(
    case: Case, cache: MeasurementCache, role: str, name: str, measure: Callable[[nn.Module, str], T]
) -> T:
    """A measurement of one of the case's models, cached; `measure` receives a copy to change and the role."""
    model = case.models[role]
    key = name, id(model)
    if key not in cache.measured:  # the model is kept, so that no other gets its id
        cache.measured[key] = model, measure(editable_copy(case, model), role)
    return cache.measured[key][1]  # type: ignore[no-any-return]  # measured under this name


def keep_measurement(case: Case, cache: MeasurementCache, role: str, name: str, value: object) -> None:
    """Put a value into the cache that was measured on one of the case's models elsewhere."""
    cache.measured[name, id(case.models[role])] = case.models[role], value


def measure_models(
    case: Case, cache: MeasurementCache, name: str, measure: Callable[[nn.Module, str], T]
) -> dict[str, T]:
    """The same measurement of every model that is compared, by role."""
    return {role: measure_model(case, cache, role, name, measure) for role in case.models}


def editable_copy(case: Case, model: nn.Module) -> nn.Module:
    """A copy in eval mode on the case's device, for attacks to change."""
    return copy.deepcopy(model).to(case.device).eval()


def checked_logits(case: Case, model: nn.Module, images: Images, role: str) -> Tensor:
    """The logits of these images, (n, classes) on the CPU; NaN and infinity are refused, naming the model."""
    if not len(images):
        raise BadData("there are no images to audit on")
    with torch.no_grad():
        batches = ordered_batches(model, images, case.device)
        logits = torch.cat([answers_of(model, inputs).float().cpu() for inputs, _ in batches])
    refuse_broken(logits, f"the {role} model")
    return logits


def accuracy_on(case: Case, model: nn.Module, images: Images, role: str) -> float:
    """The accuracy of a model on these images."""
    return share_correct(checked_logits(case, model, images, role), images.labels)


def eval_logits(case: Case, cache: MeasurementCache, role: str) -> Tensor:
    """The logits of one of the case's models, unchanged, on the evaluated forget images."""
    images = case.forget_eval
    return measure_model(case, cache, role, "eval logits", lambda model, _: checked_logits(case, model, images, role))


def forget_accuracy(case: Case, cache: MeasurementCache, role: str) -> float:
    """The forget accuracy of one of the case's models, unchanged."""
    return share_correct(eval_logits(case, cache, role), case.forget_eval.labels)


def example_batch(case: Case) -> Tensor:
    """Two random images, for networks that are only traced."""
    return torch.rand(2, *case.data.train.shape, generator=torch.Generator().manual_seed(0)).to(case.device)


def classifier_name(case: Case, model: nn.Module) -> str:
    """The linear layer that outputs the logits; its inputs are the features."""
    name = find_classifier(model, case.data.train.classes, example_batch(case))
    if name is None:
        raise BadSetting("the model does not end in a linear layer with one output per class; it has no features")
    return name


def features(case: Case, model: nn.Module, images: Images, names: Sequence[str]) -> dict[str, Tensor]:
    """The inputs of these layers, maps averaged over their area: (n, channels) each, float64."""

    def pooled(inputs: Tensor) -> Tensor:
        return (inputs.flatten(2).mean(2) if inputs.dim() > 2 else inputs).cpu().double()

    parts: dict[str, list[Tensor]] = {name: [] for name in names}
    for batch, _ in ordered_batches(model, images, case.device):
        with torch.no_grad(), capture(model, names, pooled, inputs=True) as captured:
            model(batch)
        for name, inputs in captured.items():
            parts[name].append(inputs[-1])
    return {name: torch.cat(batches) for name, batches in parts.items()}


def balanced_sample(case: Case) -> Images:
    """Training images of the retain and the forget set, equally many of each class, for an attacker's probe."""
    rows = torch.cat([case.retain_train.rows, case.forget_train.rows])
    usable = case.data.train.subset(torch.isin(case.data.train.rows, rows))
    labels = usable.labels.unique().tolist()
    number = max(min(PER_CLASS, MAX_SAMPLE // len(labels)), 1)
    drawn = [draw(usable.subset(usable.labels == label), number, case.seed).rows for label in labels]
    return usable.subset(torch.isin(usable.rows, torch.cat(drawn)))


def depth_features(case: Case, cache: MeasurementCache, role: str) -> dict[str, tuple[Tensor, Tensor]]:
    """Inputs of each stage but the first, and last of the classifier: of the balanced sample, of the evaluated images.

    An edit that is absorbed into the layers of a stage is behind its entry, so it hides nothing from who reads there.
    """

    def measure(model: nn.Module, _: str) -> dict[str, tuple[Tensor, Tensor]]:
        sample = balanced_sample(case)
        names = [*stage_entries(model, sample.shape), classifier_name(case, model)]
        train, evaluated = (features(case, model, images, names) for images in (sample, case.forget_eval))
        return {name: (train[name], evaluated[name]) for name in names}

    return measure_model(case, cache, role, "depth features", measure)


def classifier_features(case: Case, cache: MeasurementCache, role: str) -> tuple[Tensor, Tensor]:
    """Features before the classifier: of the balanced training sample, and of the evaluated forget images."""
    return list(depth_features(case, cache, role).values())[-1]
