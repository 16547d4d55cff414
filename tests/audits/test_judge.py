"""judge takes the same kinds of data and requests as forget."""

from small import TinyNet

from fedortho.audits.judge import judge
from fedortho.audits.verdict import Verdict
from fedortho.data.images import Images, make_dataset
from fedortho.data.request import ForgetRequest


def shown(verdict: Verdict) -> list[tuple[str, float | None]]:
    return [(metric.name, metric.value) for metric in verdict.metrics]


def test_images_a_dataset_and_a_request_in_words_give_the_same_verdict(toy: Images) -> None:
    model = TinyNet().eval()
    by_dataset = judge(model, make_dataset(toy), ForgetRequest.parse("class:1"), original=model, audit="none")
    by_images = judge(model, toy, "class:1", original=model, audit="none")
    assert shown(by_images) == shown(by_dataset)
    assert by_images.subject == by_dataset.subject == "class 1"
    assert by_images.label == "no reference; none of 6 run"


def test_without_the_original_no_audit_is_run(toy: Images) -> None:
    verdict = judge(TinyNet().eval(), toy, "class:1")
    assert {audit.outcome for audit in verdict.audits} == {"NOT RUN"}
    assert verdict.retention is None
    assert not verdict.passes
