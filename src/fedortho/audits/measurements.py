"""What audits look at: answers and features of single models, each computed once."""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fedortho.audits.audit import Audit
from fedortho.data.images import Images, evaluation_batches
from fedortho.errors import BadData, BadSetting
from fedortho.evaluation.case import Case
from fedortho.models.capture import capture
from fedortho.models.classifier import find_classifier
from fedortho.models.predictions import answers_of, refuse_broken
from fedortho.statistics.query import draw

T = TypeVar("T")
PER_CLASS, AT_MOST = 250, 5000  # images of a class, and in all, that features are taken of
ROUNDING = 1e-9  # 0.55 − 0.5 is no more than 0.05


class MeasurementCache:
    """What was measured on single models, by what was measured; for cases that differ in nothing but their models."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, int], tuple[nn.Module, Any]] = {}

    def recall(self, what: str, model: nn.Module, measure: Callable[[nn.Module], T]) -> T:
        """The measurement of this model, made unless it was made before."""
        key = (what, id(model))
        if key not in self._found:
            self._found[key] = model, measure(model)  # the model is kept, so no other gets its id
        return self._found[key][1]  # type: ignore[no-any-return]  # what was measured under this name


def ready(case: Case, model: nn.Module) -> nn.Module:
    """A copy in eval mode on the case's device, for attacks to change."""
    return copy.deepcopy(model).to(case.device).eval()


def answers(case: Case, model: nn.Module, images: Images, who: str) -> Tensor:
    """The logits of these images, (n, classes) on the CPU; what is no number is refused, naming the model."""
    parts = []
    with torch.no_grad():
        for inputs, _ in evaluation_batches(images, device=case.device):
            parts.append(answers_of(model, inputs.contiguous(memory_format=torch.channels_last)).float().cpu())
    if not parts:
        raise BadData("there are no images to audit on")
    logits = torch.cat(parts)
    refuse_broken(logits, f"the {who} model")
    return logits


def right(case: Case, model: nn.Module, images: Images, who: str) -> float:
    """The share of these images that the model names rightly."""
    return float((answers(case, model, images, who).argmax(1) == images.labels).double().mean())  # on the CPU


def once(case: Case, cache: MeasurementCache, who: str, what: str, look: Callable[[nn.Module, str], T]) -> T:
    """A measurement of one of the case's models, made unless it was made before."""
    model: nn.Module | None = getattr(case, who)
    assert model is not None, f"asked for only where there is a {who}"
    return cache.recall(what, model, lambda model: look(model, who))


def judged_answers(case: Case, cache: MeasurementCache, who: str) -> Tensor:
    """What one of the case's models, as it is, answers to the images that forgetting is judged on."""
    return once(case, cache, who, "judged", lambda model, who: answers(case, ready(case, model), case.judged, who))


def forget_accuracy(case: Case, cache: MeasurementCache, who: str) -> float:
    """What one of the case's models, as it is, still gets right of what had to go."""
    return float((judged_answers(case, cache, who).argmax(1) == case.judged.labels).double().mean())  # on the CPU


def who_is_there(case: Case) -> list[str]:
    """The models that an audit compares."""
    return ["forgot", "original", *(["reference"] if case.reference is not None else [])]


def each(case: Case, cache: MeasurementCache, what: str, look: Callable[[nn.Module, str], T]) -> dict[str, T]:
    """The same measurement of every model that is compared."""
    return {who: once(case, cache, who, what, look) for who in who_is_there(case)}


def classifier_of(case: Case, model: nn.Module) -> str:
    """The linear layer that gives the answers; its inputs are the features."""
    example = torch.rand(2, *case.data.train.shape, generator=torch.Generator().manual_seed(0)).to(case.device)
    name = find_classifier(model, case.data.train.classes, example)
    if name is None:
        raise BadSetting("the model does not end in a linear layer with one output per class; it has no features")
    return name


def features(case: Case, model: nn.Module, images: Images, names: Sequence[str]) -> dict[str, Tensor]:
    """What these layers receive, maps averaged over their area: (n, channels) each, float64."""

    def pooled(given: Tensor) -> Tensor:
        return (given.flatten(2).mean(2) if given.dim() > 2 else given).cpu().double()

    found: dict[str, list[Tensor]] = {name: [] for name in names}
    for inputs, _ in evaluation_batches(images, device=case.device):
        with torch.no_grad(), capture(model, names, pooled, inputs=True) as seen:
            model(inputs.contiguous(memory_format=torch.channels_last))
        for name, given in seen.items():
            found[name].append(given[-1])
    return {name: torch.cat(parts) for name, parts in found.items()}


def sampled(case: Case) -> Images:
    """Training images of every class that an attacker may use, equally many of each: kept ones and those to go."""
    usable = case.data.train.subset(
        torch.isin(case.data.train.rows, torch.cat([case.kept_train.rows, case.gone_train.rows]))
    )
    labels = usable.labels.unique().tolist()
    number = max(min(PER_CLASS, AT_MOST // len(labels)), 1)
    rows = [draw(usable.subset(usable.labels == label), number, case.seed).rows for label in labels]
    return usable.subset(torch.isin(usable.rows, torch.cat(rows)))


def last_features(case: Case, cache: MeasurementCache, who: str) -> tuple[Tensor, Tensor]:
    """Features before the classifier, of the sampled training images and of those that forgetting is judged on."""

    def look(model: nn.Module, _: str) -> tuple[Tensor, Tensor]:
        twin = ready(case, model)
        name = classifier_of(case, twin)
        return features(case, twin, sampled(case), [name])[name], features(case, twin, case.judged, [name])[name]

    return once(case, cache, who, "last features", look)


def ruled(
    name: str,
    says: str,
    case: Case,
    measured: Mapping[str, float],
    value: float | None,
    limit: float,
    details: Mapping[str, Any],
    *,
    is_gap: bool = False,
) -> Audit:
    """The audit that follows: without a reference there is nothing to hold the limit against.

    Where the value `is_gap` and the original is as near to the reference as a PASS asks for, passing means nothing.
    """
    forgot, original, reference = (measured.get(who) for who in ("forgot", "original", "reference"))
    if case.reference is None or value is None:
        says = f"{says}; no retrained reference to read this against"
        return Audit(name, "NO REFERENCE", says, None, None, forgot, original, reference, details=details)
    if is_gap and not tells(measured, limit):
        says = f"{says}; the original would pass too, so this tells nothing here"
        return Audit(name, "NOT RUN", says, value, limit, forgot, original, reference, details=details)
    outcome = "PASS" if value <= limit + ROUNDING else "FAIL"
    return Audit(name, outcome, says, value, limit, forgot, original, reference, details=details)


def tells(measured: Mapping[str, float], limit: float) -> bool:
    """Whether the original is further from the reference than the limit; else one that forgot nothing would pass."""
    return measured["original"] - measured["reference"] > limit


def compared(measured: Mapping[str, float]) -> str:
    """The numbers in words: 82.0 % (retrained 51.0 %, original 83.0 %).

    >>> compared({"forgot": 0.5, "original": 0.75})
    '50.0 % (original 75.0 %)'
    """
    others = [("retrained", measured.get("reference")), ("original", measured.get("original"))]
    beside = ", ".join(f"{name} {100 * share:.1f} %" for name, share in others if share is not None)
    return f"{100 * measured['forgot']:.1f} % ({beside})"


def gap(measured: Mapping[str, float]) -> float | None:
    """How far the forgotten model is above the reference; None without one."""
    return measured["forgot"] - measured["reference"] if "reference" in measured else None
