"""judge takes the same kinds of data and requests as forget."""

import copy

import pytest
from small import TinyNet
from torch import nn

from fedortho.audits import retention
from fedortho.audits.judge import judge
from fedortho.audits.measurements import MeasurementCache, accuracy_on
from fedortho.audits.retention import RETENTION
from fedortho.audits.verdict import Verdict
from fedortho.data.images import Images, make_dataset
from fedortho.data.request import ForgetRequest
from fedortho.errors import BadData, BadSetting
from fedortho.evaluation.case import Case


def shown(verdict: Verdict) -> list[tuple[str, float | None]]:
    return [(metric.name, metric.value) for metric in verdict.metrics]


def test_images_a_dataset_and_a_request_in_words_give_the_same_verdict(toy: Images) -> None:
    model = TinyNet().eval()
    by_dataset = judge(model, make_dataset(toy, toy), ForgetRequest.parse("class:1"), original=model, audit="none")
    by_images = judge(model, {"train": toy, "test": toy}, "class:1", original=model, audit="none")
    assert shown(by_images) == shown(by_dataset)
    assert by_images.subject == by_dataset.subject == "class 1"
    assert by_images.label == "no reference; none of 6 run"


@pytest.mark.parametrize(
    ("same", "named"),
    [
        (("model", "reference"), "the unlearned model and the reference model"),
        (("model", "original"), "the unlearned model and the original model"),
        (("original", "reference"), "the original model and the reference model"),
        (("reference", "second_reference"), "the reference model and the second reference model"),
    ],
)
def test_no_model_is_judged_against_itself(toy: Images, same: tuple[str, str], named: str) -> None:
    models = {role: TinyNet().eval() for role in ("model", "original", "reference", "second_reference")}
    models[same[1]] = copy.deepcopy(models[same[0]])
    references = [models.pop("reference"), models.pop("second_reference")]
    with pytest.raises(BadSetting, match=f"{named} have the same weights"):
        judge(data={"train": toy, "test": toy}, request="class:1", reference=references, **models)


def test_more_than_three_references_are_refused(toy: Images) -> None:
    with pytest.raises(BadSetting, match="4 reference models are given; expected at most 3"):
        judge(TinyNet().eval(), {"train": toy, "test": toy}, "class:1", reference=[TinyNet() for _ in range(4)])


def test_without_the_original_no_audit_is_run(toy: Images) -> None:
    verdict = judge(TinyNet().eval(), make_dataset(toy, toy), "class:1")
    assert {audit.outcome for audit in verdict.audits} == {"NOT RUN"}
    assert verdict.retention is None
    assert not verdict.passes


def test_retention_reads_no_image_that_the_metrics_have_read(toy: Images, monkeypatch: pytest.MonkeyPatch) -> None:
    read = list[str]()

    def counted(case: Case, model: nn.Module, images: Images, role: str) -> float:
        read.append(role)
        return accuracy_on(case, model, images, role)

    monkeypatch.setattr(retention, "accuracy_on", counted)
    model, original, reference = (TinyNet().eval() for _ in range(3))
    data = make_dataset(toy, toy)
    verdict = judge(model, data, "class:1", original=original, reference=reference, only=["C2"])
    assert read == ["original"], "the other two are metrics"
    assert verdict.retention is not None
    metric = verdict.metric("retain-accuracy")
    assert metric is not None
    assert (verdict.retention.unlearned, verdict.retention.reference) == (metric.value, metric.reference)
    case = Case(model, original, (reference,), data, ForgetRequest.parse("class:1"))
    assert verdict.retention.value == RETENTION(case, MeasurementCache()).value, "as measured by itself"


def test_data_without_test_images_is_refused(toy: Images) -> None:
    with pytest.raises(BadData, match="the data has no test images, on which a model is judged"):
        judge(TinyNet().eval(), toy, "class:1")
