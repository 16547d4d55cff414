"""Models that retain one class: of two classes one is forgotten, or of three classes two."""

import copy

import pytest
import torch
from small import SmallNet

from fedortho.audits.judge import judge
from fedortho.audits.relearn import FALSE_ALARMS, prototype, steps_needed
from fedortho.data.images import Dataset, images_from_tensors, make_dataset
from fedortho.data.request import ForgetRequest
from fedortho.evaluation.case import Case
from fedortho.training.loop import fit
from fedortho.training.recipe import Recipe

RECIPE = Recipe(epochs=4, batch_size=32, lr=0.05, crop=0, flip=0.0, ortho=0.0)


def some_classes(digits: Dataset, chosen: list[int]) -> Dataset:
    parts = []
    for part in (digits.train, digits.test):
        kept = part.subset(torch.isin(part.labels, torch.tensor(chosen)))
        labels = torch.tensor([chosen.index(label) for label in kept.labels.tolist()])
        parts.append(images_from_tensors(kept.pixels[kept.rows], labels))
    return make_dataset(*parts)


def case_of(digits: Dataset, chosen: list[int], request: ForgetRequest) -> Case:
    """The original, a reference, and a model that always answers the last class: its features are the original's."""
    data, nets = some_classes(digits, chosen), []
    for seed, images in enumerate((data.train, data.train.subset(~request.mask(data.train)))):
        torch.manual_seed(seed)
        nets.append(fit(SmallNet(len(chosen)), images, RECIPE))
    hidden = copy.deepcopy(nets[0])
    with torch.no_grad():
        hidden.fc.bias[:-1] -= 1e3
    return Case(hidden, nets[0], (nets[1],), data, request)


def test_a_prototype_beside_one_row_is_a_threshold_along_its_direction() -> None:
    generator = torch.Generator().manual_seed(0)
    retained = torch.randn(400, 6, generator=generator, dtype=torch.float64)
    few = retained[:10] + 4.0
    weight, bias = torch.randn(1, 6, generator=generator, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    row, shift = prototype(few, retained, weight, bias)

    def taken(images: torch.Tensor) -> float:
        return float((images @ row + shift > (images @ weight.T + bias).amax(1)).double().mean())

    assert taken(few) == 1.0
    assert taken(retained) == pytest.approx(FALSE_ALARMS, abs=0.01)


@pytest.mark.parametrize(("chosen", "text"), [([3, 8], "class:0"), ([3, 5, 8], "class:0,1")])
def test_relearning_tells_hidden_from_erased_where_one_class_is_retained(
    digits: Dataset, chosen: list[int], text: str
) -> None:
    case = case_of(digits, chosen, ForgetRequest.parse(text))
    assert case.retains_one_class
    models = {"original": case.original, "reference": case.references}
    verdict = judge(case.unlearned, case.data, text, **models, only=["C3"])
    audit = verdict.audit("C3")
    assert audit is not None
    assert audit.original is not None
    assert audit.original > 0.8, "the prototype recovers what the original knows"
    assert audit.unlearned == audit.original, "and as much where only the answer is hidden"
    assert audit.outcome in ("FAIL", "INCONCLUSIVE")
    assert verdict.retention is not None
    assert "one class is retained, so a constant answer keeps it all" in verdict.retention.finding


def test_a_constant_answer_does_not_count_as_relearned(digits: Dataset) -> None:
    case = case_of(digits, [3, 8], ForgetRequest.parse("class:0"))
    constant = copy.deepcopy(case.original)
    with torch.no_grad():
        constant.fc.weight.zero_()
        constant.fc.bias.copy_(torch.tensor([10.0, 0.0]))  # the forgotten class, always
    assert steps_needed(case, case.original, "original", 10, 0.5, 60) == 0
    assert steps_needed(case, constant, "unlearned", 10, 0.5, 60) != 0
