from dataclasses import replace

import pytest

from fedortho.audits.qualification import ClassTrial, MethodTrial, Qualification, least_share
from fedortho.data.request import ForgetRequest
from fedortho.errors import BadRecord

PASSED = ClassTrial(
    "class:1", "test", {"C1": "PASS", "C2": "PASS", "C5": "NOT RUN"}, "a", ("r", "s"), 0.0, 0.8, 0.81, 30.0, 100.0
)
FAILED = replace(PASSED, request="class:2", outcomes={"C1": "PASS", "C3": "FAIL"})
CHOSEN = replace(PASSED, request="class:0", split="valid")
UNDECIDED = replace(PASSED, request="class:3", outcomes={"C1": "INCONCLUSIVE"})


def finished(*trials: ClassTrial) -> Qualification:
    requests = tuple(trial.request for trial in trials)
    tried = (MethodTrial("regrow", {}, (CHOSEN,)),)
    return Qualification("o", "d", 0, ("class:0",), requests, tried, MethodTrial("regrow", {}, trials))


def test_a_class_passes_if_nothing_failed_and_the_probe_decided() -> None:
    assert [trial.passed for trial in (PASSED, FAILED, UNDECIDED)] == [True, False, False]


@pytest.mark.parametrize(("passed", "drawn", "share"), [(3, 3, 0.368), (10, 10, 0.741), (2, 3, 0.135), (0, 3, 0.0)])
def test_the_share_is_the_one_sided_binomial_bound(passed: int, drawn: int, share: float) -> None:
    assert least_share(passed, drawn) == pytest.approx(share, abs=1e-3)
    if 0 < passed < drawn:  # the bound's definition: so many successes, or more, have probability 5 %
        from scipy.stats import binom

        assert binom.sf(passed - 1, drawn, least_share(passed, drawn)) == pytest.approx(0.05, abs=1e-6)


def test_the_cost_counts_every_reference_once_and_every_trial() -> None:
    found = finished(PASSED, FAILED)
    assert found.retrainings == pytest.approx(6 + 3 * 0.3)
    assert found.break_even == pytest.approx(6.9 / 0.7)
    dear = finished(replace(PASSED, flops=100.0))
    assert dear.break_even is None, "a method as dear as retraining never pays"


def test_reference_models_from_elsewhere_leave_the_cost_open() -> None:
    found = finished(replace(PASSED, reference_flops=0.0), replace(PASSED, request="class:2"))
    assert found.confirmed is not None
    assert [trial.share_of_training for trial in found.confirmed.classes] == [None, 0.3]
    assert (found.retrainings, found.break_even) == (None, None)
    assert found.sentence.endswith("confidence. What it cost is not known: reference models were trained elsewhere.")
    assert found.is_qualified


def test_a_class_counts_once_and_only_if_it_was_drawn_and_confirmed_on_test_images() -> None:
    found = finished(PASSED, FAILED)
    assert found.confirmed is not None
    for change in (
        {"confirming": ("class:1", "class:1")},
        {"choosing": ("class:1",)},
        {"confirmed": MethodTrial("regrow", {}, (PASSED, PASSED))},
        {"confirmed": MethodTrial("regrow", {}, (PASSED, replace(PASSED, request="class:7")))},
        {"confirmed": MethodTrial("regrow", {}, (replace(PASSED, split="valid"), FAILED))},
    ):
        with pytest.raises(BadRecord, match=r"has a class twice|other classes than those drawn"):
            replace(found, **change)  # type: ignore[arg-type]  # names of fields


def test_a_record_without_classes_or_with_a_method_that_it_did_not_choose_is_refused() -> None:
    found = finished(PASSED, FAILED)
    empty = MethodTrial("regrow", {})
    for change, words in (
        ({"confirming": (), "confirmed": empty}, "no class to choose on or none to confirm on"),
        ({"choosing": (), "tried": ()}, "no class to choose on or none to confirm on"),
        ({"tried": ()}, "confirmed by regrow, which is not what it chose"),
        ({"tried": (MethodTrial("regrow", {"lr": 1.0}, (CHOSEN,)),)}, "not what it chose"),
        ({"tried": (MethodTrial("regrow", {}, (replace(CHOSEN, split="test"),)),)}, "not on validation images"),
        ({"tried": (MethodTrial("regrow", {}, (replace(CHOSEN, request="class:9"),)),)}, "other classes than those"),
    ):
        with pytest.raises(BadRecord, match=words):
            replace(found, **change)  # type: ignore[arg-type]  # names of fields


def test_it_covers_one_class_on_its_own_model_and_data() -> None:
    found, one = finished(PASSED), ForgetRequest.parse("class:5")
    assert found.covers(one, "o", "d", "regrow", {})
    assert not found.covers(one, "o", "other images", "regrow", {})
    assert not found.covers(one, "other", "d", "regrow", {})
    for text in ("class:5,6", "client:5", "samples:5", "class:5 client:5"):
        assert not found.covers(ForgetRequest.parse(text), "o", "d", "regrow", {}), "no such request was drawn"


def test_what_is_not_finished_claims_nothing() -> None:
    found = finished(PASSED, UNDECIDED)
    assert "1 of 2" in found.sentence
    begun = replace(found, confirmed=MethodTrial("regrow", {}, (PASSED,)))
    assert not begun.is_finished
    assert begun.sentence == "the qualification is not finished"
