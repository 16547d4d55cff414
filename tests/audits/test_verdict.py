"""The verdict as a record, and what it says in words."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from verdicts import RECORD

from fedortho.audits import AUDITS
from fedortho.audits.result import AuditResult, Outcome
from fedortho.audits.verdict import DERIVED, NEVER_TESTED, Verdict, read_verdict, subject_of, write_verdict
from fedortho.data.request import ForgetRequest
from fedortho.errors import BadRecord
from fedortho.evaluation.metrics import Metric
from fedortho.storage.files import write_json

NAMES = ("C1", "C2", "C3", "C4", "C5", "C6")


def probed(**details: object) -> list[dict[str, object]]:
    """A failed probe in JSON, with details that somebody has edited."""
    return [{"outcome": "FAIL", "finding": "", "name": "C1", "unlearned": 0.9, "details": details}]


def test_a_verdict_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert read_verdict(tmp_path) is None
    write_verdict(tmp_path, RECORD)
    assert read_verdict(tmp_path) == RECORD
    written = json.loads((tmp_path / "verdict.json").read_text())
    assert written["schema"] == 3
    assert {key: written[key] for key in ("label", "passes")} == {"label": RECORD.label, "passes": False}
    assert "title" in written["metrics"][0], "no number goes out without what is needed to read it"


@pytest.mark.parametrize(
    ("change", "token"),
    [
        ({"schema": 1}, "schema 1"),
        ({"has-reference": "yes"}, "has-reference"),
        ({"sentance": "x"}, "sentance"),
        ({"audits": [{"outcome": "MAYBE", "finding": ""}]}, "outcome"),
        ({"metrics": [{"name": "test-accuracy", "value": 2.0}]}, "outside 0 to 1"),
        ({"metrics": 3}, "metrics"),
        *(({"audits": probed(references=number)}, "details of its audits") for number in (7, "x", None, 1e300)),
        ({"audits": probed(depths=3, erased_behind="x")}, "details of its audits"),
    ],
)
def test_a_file_that_is_no_verdict_is_refused_by_name(tmp_path: Path, change: dict[str, object], token: str) -> None:
    write_json(tmp_path / "verdict.json", RECORD.to_json() | change)
    with pytest.raises(BadRecord, match=token) as error:
        read_verdict(tmp_path)
    assert "judge again" in str(error.value)


def test_what_ran_and_could_not_tell_is_inconclusive_also_in_a_verdict_of_schema_2(tmp_path: Path) -> None:
    old = RECORD.to_json() | {"schema": 2}
    old["audits"] = [
        {"outcome": "NOT RUN", "finding": "the original passes too", "unlearned": 0.5, "name": "C1"},
        {"outcome": "NOT RUN", "finding": "not decided within 60 steps", "details": {"steps": 60}, "name": "C3"},
        {"outcome": "NOT RUN", "finding": "needs shadow models", "name": "C4"},
    ]
    write_json(tmp_path / "verdict.json", old)
    found = read_verdict(tmp_path)
    assert found is not None
    assert [audit.outcome for audit in found.audits] == ["INCONCLUSIVE", "INCONCLUSIVE", "NOT RUN"]
    assert "2 inconclusive, 1 not run" in found.label


def test_derived_sentences_are_computed_anew_and_not_believed(tmp_path: Path) -> None:
    lies = dict.fromkeys(DERIVED, "all is well")
    write_json(tmp_path / "verdict.json", RECORD.to_json() | lies)
    assert read_verdict(tmp_path) == RECORD


def verdict(
    unlearned: float = 0.0, probe: tuple[float, float, float] = (0.9, 0.95, 0.5), **outcomes: Outcome
) -> Verdict:
    """A verdict as it might be: probe of (unlearned, original, reference)."""
    audits = [AuditResult(outcomes.get(name, "PASS"), "finding", name=name, title=AUDITS[name].title) for name in NAMES]
    audits[0] = replace(audits[0], unlearned=probe[0], original=probe[1], reference=probe[2])
    metrics = (Metric("forget-accuracy", unlearned, 0.0, 100),)
    retention = AuditResult(outcomes.get("retention", "PASS"), "finding", name="retention")
    return Verdict("class:1", "class cat", "hide", metrics, tuple(audits), retention, True, retrain_seconds=600.0)


def test_the_sentence_says_hidden_and_how_far_erased() -> None:
    assert verdict(C1="FAIL").sentence == (
        "Class cat is no longer predicted (0.0% of its test images are). A linear probe still finds it in 90.0% "
        "of images, in one retrained model in 50.0%: hidden, not erased (failed: C1). Retraining takes about 10 "
        "minutes here."
    )
    assert "hidden, partly erased (failed: C1, C3)" in verdict(probe=(0.7, 0.95, 0.5), C1="FAIL", C3="FAIL").sentence
    assert "recoverable (failed: C2)" in verdict(C2="FAIL").sentence
    assert "no more readable than in one retrained model, but the features differ" in verdict(C5="FAIL").sentence
    assert "still predicted for 40.0%" in verdict(0.4).sentence
    assert "accuracy on the retain set has suffered" in verdict(retention="FAIL").sentence
    assert "6 audits find no more of it than in one retrained model. " in verdict().sentence


def test_the_kind_of_a_request_is_not_read_from_the_name_of_a_class() -> None:
    one = replace(verdict(C1="FAIL"), subject="class salt and pepper")
    assert one.sentence.startswith("Class salt and pepper is no longer predicted (0.0% of its test images are).")
    assert one.answer == "Class salt and pepper is hidden, not erased: 1 of 6 audits failed"
    two = replace(one, request="class:1,2", subject="classes cat, dog")
    assert two.sentence.startswith("Classes cat, dog are no longer predicted (0.0% of their test images are). A linear")
    assert two.answer == "Classes cat, dog are hidden, not erased: 1 of 6 audits failed"
    assert "finds them in 90.0%" in two.sentence
    client = replace(one, request="client:1,2", subject="clients 1, 2")
    assert client.answer == "Clients 1, 2 are not erased: 1 of 6 audits failed"
    assert "--level erase" not in client.advice


def test_a_verdict_about_no_request_is_refused() -> None:
    with pytest.raises(BadRecord, match="colour"):
        Verdict.from_json(RECORD.to_json() | {"request": "colour:red"}, "verdict.json")


def test_what_is_clean_behind_a_stage_only_is_called_that_and_never_passes() -> None:
    one = verdict(C3="FAIL")
    behind = {"C1": {"depths": ["conv2", "conv3", "fc"], "references": 3}, "C3": {"erased_behind": "conv2"}}
    one = replace(one, audits=tuple(replace(audit, details=behind.get(audit.name, {})) for audit in one.audits))
    assert "hidden, erased behind conv2 only (failed: C3)" in one.sentence
    assert "in three retrained models on average in 50.0%" in one.sentence
    assert not one.passes
    both = replace(one.audits[0], outcome="FAIL", details=behind["C1"] | {"erased_behind": "conv3"})
    one = replace(one, audits=(both, *one.audits[1:]))
    assert "erased behind conv3 only (failed: C1, C3)" in one.sentence, "the deeper of the two"
    copied = replace(one.audits[5], outcome="FAIL")
    assert "erased behind" not in replace(one, audits=(*one.audits[:5], copied)).sentence, "a copy brings it back"


def test_an_audit_that_cannot_tell_is_never_counted_as_passed() -> None:
    one = verdict(C1="INCONCLUSIVE", C4="NOT RUN")
    assert "4 audits find no more of it than in one retrained model; 1 was inconclusive; 1 was not run" in one.sentence
    assert one.label == "passed 4 of 6, 1 inconclusive, 1 not run"
    none = verdict(**dict.fromkeys(NAMES, "INCONCLUSIVE"))
    assert "no audit can tell whether it is erased (6 were inconclusive)" in none.sentence
    assert "of another seed" in none.advice
    spoilt = verdict(**dict.fromkeys(NAMES, "INCONCLUSIVE"), retention="FAIL").sentence
    assert "no audit can tell" in spoilt
    assert "erased as far as" not in spoilt


def test_a_claim_on_one_image_is_called_that() -> None:
    one = (Metric("forget-accuracy", 1.0, 1.0, 1),)
    sample = replace(verdict(), request="samples:7", subject="1 sample", metrics=one).sentence
    assert sample.startswith(
        "1 sample: 100.0% of one image is still classified correctly (one retrained model: 100.0%)."
    )
    assert "100.0% of its one test image (one retrained model" in replace(verdict(), metrics=one).sentence


def test_a_reference_model_that_predicts_the_class_is_doubted() -> None:
    doubted = "the reference model predicts it (one retrained model: 85.0%)"
    for share, words in ((0.0, "images are). A linear"), (0.85, doubted)):
        assert words in replace(verdict(), metrics=(Metric("forget-accuracy", 0.0, share, 100),)).sentence


def test_only_a_verdict_with_everything_run_and_passed_passes() -> None:
    assert verdict().passes
    for outcome in ("FAIL", "ERROR", "INCONCLUSIVE", "NOT RUN", "NO REFERENCE"):
        for name in (*NAMES, "retention"):
            one = verdict(**{name: outcome})
            assert not one.passes
            assert one.label != verdict().label
    assert "retrain without the forget set (--level exact, about 10 minutes here)" in verdict(C1="FAIL").advice
    assert "--max-retain-drop" in verdict(retention="FAIL").advice
    assert "--audit full" in verdict(C4="NOT RUN").advice
    assert verdict().advice == ""
    assert "--reference RUN" in replace(verdict(C1="NO REFERENCE"), has_reference=False).advice


@pytest.mark.parametrize(
    ("stages", "depths", "is_kept"),
    [(0, ["a", "b", "c", "fc"], True), (0, ["a", "fc"], False), (1, ["a", "fc"], True), (99, ["a", "b", "fc"], False)],
)
def test_where_erase_kept_a_stage_the_advice_is_to_reset_it_too(stages: int, depths: list[str], is_kept: bool) -> None:
    one = replace(verdict(C1="FAIL"), method="regrow", settings={"stages": stages})
    one = replace(one, audits=(replace(one.audits[0], details={"depths": depths}), *one.audits[1:]))
    assert ("reset every stage (--set stages=99:" in one.advice) is is_kept
    assert "retrain without the forget set" in one.advice
    assert "--level erase" not in one.advice
    assert "--set stages" not in replace(one, method="hide").advice


def test_what_was_not_tested_is_always_told() -> None:
    assert verdict().not_tested == list(NEVER_TESTED)
    assert verdict(C4="NOT RUN").not_tested[0].startswith("C4, membership (U-LiRA-lite): ")


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ("class:0,1", "classes a, b"),
        ("client:3", "client 3"),
        ("samples:1,2", "2 samples"),
        ("class:b client:1", "class b and client 1"),
    ],
)
def test_a_request_in_words(request_: str, words: str) -> None:
    assert subject_of(ForgetRequest.parse(request_), ["a", "b"]) == words


def test_the_answer_says_erased_hidden_or_open_and_how_many_audits_say_so() -> None:
    assert verdict().answer == "Class cat is erased: 6 of 6 audits passed"
    assert verdict(C1="FAIL", C3="FAIL").answer == "Class cat is hidden, not erased: 2 of 6 audits failed"
    assert verdict(0.5, C1="FAIL").answer == "Class cat is still predicted, not erased: 1 of 6 audits failed"
    undecided = verdict(C1="INCONCLUSIVE", C4="NOT RUN")
    assert undecided.answer == "Class cat is hidden; whether it is erased is open: 4 of 6 audits passed"
    alone = replace(undecided, has_reference=False)
    assert alone.answer.endswith("whether it is erased is open: there is no retrained model")
    unaudited = verdict(**dict.fromkeys(NAMES, "NOT RUN"))
    assert unaudited.answer.endswith("is open: no audit was run")
    assert verdict(retention="FAIL").answer.startswith("Class cat is forgotten at a price")
    client = replace(verdict(C3="FAIL"), request="client:3", subject="client 3")
    assert client.answer == "Client 3 is not erased: 1 of 6 audits failed"
