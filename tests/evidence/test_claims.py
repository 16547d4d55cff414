"""Bundles whose digests all fit and whose claims are not true."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bundles import Runs, all_passed, better, better_metrics, edited, forge, manifest, wholly_forged
from forging import campaign

from fedortho.audits import AUDITS
from fedortho.audits.qualification import ClassTrial, MethodTrial, Qualification
from fedortho.audits.relearn import RELEARNED
from fedortho.audits.result import Outcome
from fedortho.audits.verdict import Verdict
from fedortho.evidence import claims
from fedortho.evidence.bundle import BadBundle, make_bundle, open_bundle, read_bundle
from fedortho.evidence.canonical_zip import pack_files
from fedortho.evidence.published_head import publish_head
from fedortho.evidence.recheck import check_bundle
from fedortho.reports.pictures import Gallery
from fedortho.requests.qualifying import QualifyOptions, draw_classes
from fedortho.storage.files import canonical_json
from fedortho.storage.journal import append_entry, parse_entry
from fedortho.storage.records import to_json


def states(path: Path, **given: Any) -> dict[str, list[str]]:
    """What a check finds, by state."""
    findings = check_bundle(path, **given).claims
    return {
        state: [each.text for each in findings if each.state == state] for state in ("checked", "not checked", "absent")
    }


def test_a_wholly_forged_bundle_is_refused_by_name(judged: Path, tmp_path: Path) -> None:
    (tmp_path / "x.zip").write_bytes(wholly_forged(judged / "evidence.zip"))
    model = judged / "first" / "model.safetensors"
    with pytest.raises(BadBundle) as told:
        check_bundle(tmp_path / "x.zip", model=model, run=judged / "first", audits="C1")
    for lie in (
        "journal.jsonl is missing, though entries 2, 4 of",
        "entry.json: after.retain is 0.999; here it is 0.9",
        "verdict.json: C1 outcome is 'PASS'; here it is 'FAIL'",
        "report.html: line",
    ):
        assert lie in str(told.value)


@pytest.mark.slow
def test_no_forgery_of_a_small_file_is_accepted(judged: Path, tmp_path: Path) -> None:
    shutil.copy(judged / "evidence.zip", tmp_path)
    rows = campaign(tmp_path / "evidence.zip", judged / "first", ["request.json", "digests.json"])
    assert [(row["accepted"], row["refused"] > 5) for row in rows] == [(0, True)] * 2


def test_an_honest_bundle_is_measured_again_and_agrees(judged: Path, tmp_path: Path) -> None:
    head = publish_head(judged, tmp_path / "head.json")
    found = states(judged / "evidence.zip", run=judged / "first", audits="C1,C2", head=tmp_path / "head.json")
    checked, unchecked = " | ".join(found["checked"]), " | ".join(found["not checked"])
    for text in (
        "the method finds the same patch",
        "accuracies, measured again",
        "metrics, measured again",
        "audit retention, repeated: PASS",
        "audit C1, repeated: FAIL",
        "audit C2, repeated: PASS",
        "report.html, rendered again",
        f"up to entry {head.number} belong to the chain published at {head.time}",
        "that tells of this request or run, and no other",
    ):
        assert text in checked
    assert "audit C3, said to be FAIL: not repeated; --audits C3" in unchecked
    assert "whether its reference models never saw the forget set: that is their maker's word" in unchecked
    assert "audit C6, said to be PASS: not repeated" in unchecked
    assert [text[:8] for text in found["absent"]] == ["signatur", "audit C4", "audit C5"]


def test_without_the_data_every_claim_is_named_as_not_checked(judged: Path) -> None:
    found = states(judged / "evidence.zip")
    assert len(found["checked"]) == 2, "bytes, and that the journal's lines follow from each other"
    expected = (
        "the bundle that was made",
        "was published",
        "gives the model after",
        "finds this patch",
        "accuracies, said",
    )
    for text, claim in zip(found["not checked"], expected, strict=False):
        assert claim in text
    unchecked = " | ".join(found["not checked"])
    assert "the verdict, said to be 'FAILED C1, C3; passed 2 of 6, 2 not run': no audit was repeated here" in unchecked
    assert "report.html" in unchecked
    assert "times, costs, ticket, clients that took part, copies" in unchecked


def test_what_a_run_has_done_since_is_named_as_not_checked(judged: Path, tmp_path: Path) -> None:
    later = edited(judged / "evidence.zip", "digests.json", lambda value: value | {"run-now": "a" * 64})
    (tmp_path / "x.zip").write_bytes(forge(judged / "evidence.zip", {"digests.json": later}))
    assert any(text.startswith("what the run has done since") for text in states(tmp_path / "x.zip")["not checked"])
    assert not any("done since" in text for text in states(judged / "evidence.zip")["not checked"])


def changed(judged: Path, tmp_path: Path, files: dict[str, bytes], without: tuple[str, ...] = ()) -> Path:
    (tmp_path / "x.zip").write_bytes(forge(judged / "evidence.zip", files, without))
    return tmp_path / "x.zip"


def test_a_verdict_of_which_no_line_tells_is_named(judged: Path, tmp_path: Path) -> None:
    *lines, last = open_bundle(judged / "evidence.zip").files["journal.jsonl"].splitlines(keepends=True)
    entry = parse_entry(last.rstrip(b"\n"))
    hidden = canonical_json({"body": entry.body, "number": entry.number}).encode() + b"\n"
    path = changed(judged, tmp_path, {"journal.jsonl": b"".join([*lines, hidden])})
    assert "a line of journal.jsonl that tells of the verdict" in states(path)["absent"]


def test_other_verdicts_on_the_same_model_are_named(judged: Path, tmp_path: Path) -> None:
    assert not any("other verdicts" in text for text in states(judged / "evidence.zip")["not checked"])
    for name in ("journal.jsonl", "journal.head"):
        shutil.copy(judged / name, tmp_path / name)
    after = open_bundle(judged / "evidence.zip").digests.after
    append_entry(tmp_path, "judged", "second", "class:3", after=after, details={"label": "FAILED C6", "passes": False})
    make_bundle(judged / "second", "class:3", tmp_path / "x.zip", journal=tmp_path)
    (claim,) = (text for text in states(tmp_path / "x.zip")["not checked"] if "other verdicts" in text)
    assert claim == "why journal.jsonl tells of other verdicts on this model: entry 5, 'FAILED C6'"


def test_a_drawn_class_with_some_of_its_audits_or_without_a_reference_is_refused(judged: Path, tmp_path: Path) -> None:
    bundle, names = open_bundle(judged / "evidence.zip"), (*AUDITS, "retention")
    outcomes: dict[str, Outcome] = dict.fromkeys(names, "PASS")
    trial = ClassTrial("class:5", "test", outcomes, "a" * 64, ("b" * 64,), 0.0, 0.9, 0.9, 1.0, 10.0)
    chosen = replace(trial, request="class:6", split="valid")
    for change, lie in (
        ({}, ""),
        ({"outcomes": {"C1": "PASS"}}, "class:5 has no outcome of C2, C3, C4, C5, C6, retention"),
        ({"references": ()}, "class:5 was compared with no reference model"),
        ({"references": ("a" * 64,)}, "class:5 was compared with itself"),
        ({"references": (bundle.digests.before,)}, "class:5 was compared with the model before"),
    ):
        odd = replace(trial, **change)  # type: ignore[arg-type]  # names of fields
        tried, confirmed = (MethodTrial("hide", bundle.entry.settings, (each,)) for each in (chosen, odd))
        drawn = (("class:6",), ("class:5",), (tried,), confirmed)
        told = to_json(Qualification(bundle.digests.before, bundle.digests.data, 0, *drawn))
        forged = edited(
            judged / "evidence.zip", "verdict.json", lambda value, told=told: value | {"qualification": told}
        )
        path = changed(judged, tmp_path, {"verdict.json": forged})
        if not lie:
            check_bundle(path)
            continue
        with pytest.raises(BadBundle, match=lie):
            check_bundle(path)


def test_a_qualification_has_the_classes_that_its_seed_draws(runs: Runs) -> None:
    honest = draw_classes(runs["first"], QualifyOptions(classes=3, choosing=2, seed=5))
    others = [f"class:{label}" for label in range(10) if f"class:{label}" not in honest.choosing + honest.confirming]
    for told, run, lie in (
        (honest, "first", ""),
        (replace(honest, seed=6), "first", "drawn by its seed"),
        (replace(honest, confirming=(*honest.confirming[:2], others[0])), "first", "confirming"),
        (honest, "second", "has forgotten before"),
    ):
        found = claims.Findings()
        assert claims.check_drawn(found, told, runs[run]) is (not lie)
        assert lie in " ".join(found.lies)


def test_each_lie_is_named(judged: Path, tmp_path: Path) -> None:
    def prettier(value: dict[str, Any]) -> dict[str, Any]:
        value = better_metrics(value)
        value["metrics"].append(value["metrics"][1] | {"name": "client-change-min", "value": 0.0})
        attack = next(metric for metric in value["metrics"] if "attack accuracy" in metric["details"])
        attack["details"]["attack accuracy"] = 0.123
        return value

    made = judged / "evidence.zip"
    files = {
        "entry.json": edited(made, "entry.json", better),
        "settings.json": edited(made, "settings.json", lambda v: v | {"training": v["training"] | {"epochs": 90}}),
        "verdict.json": edited(made, "verdict.json", prettier),
        "report.html": open_bundle(made).files["report.html"].replace(b"FAIL", b"PASS"),
    }
    path = changed(judged, tmp_path, files)
    with pytest.raises(BadBundle) as told:
        check_bundle(path, run=judged / "first", audits="none")
    for lie in (
        "entry.json: after.retain is 0.999",
        "settings.json: training.epochs is 90; here it is 2",
        "verdict.json: retain-accuracy value is 0.999",
        "metrics of other requests is ['client-change-min']",
        "details.attack accuracy is 0.123",
        "report.html: line",
    ):
        assert lie in str(told.value)


def test_details_that_cannot_be_drawn_are_a_lie_and_no_traceback(
    judged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bent(value: dict[str, Any]) -> dict[str, Any]:
        value["audits"][0]["details"]["stages"] = {"unlearned": 3}
        return value

    monkeypatch.setattr(claims, "draw_gallery", lambda *_, **__: Gallery(()))
    path = changed(judged, tmp_path, {"verdict.json": edited(judged / "evidence.zip", "verdict.json", bent)})
    with pytest.raises(BadBundle, match=r"details of its audits .* cannot be drawn"):
        check_bundle(path, run=judged / "first", audits="none")


def test_a_verdict_that_contradicts_itself_is_refused_without_data(judged: Path) -> None:
    def passing(value: dict[str, Any]) -> dict[str, Any]:
        value["audits"][0]["outcome"] = "PASS"
        return value

    def measured(value: dict[str, Any]) -> dict[str, Any]:
        next(audit for audit in value["audits"] if audit["outcome"] == "NOT RUN")["value"] = 0.0
        return value

    def same(role: str, other: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
        return lambda value: value | {"digests": value["digests"] | {role: value["digests"][other]}}

    def unnamed(value: dict[str, Any]) -> dict[str, Any]:
        del value["digests"]["before"]
        return value

    made = judged / "evidence.zip"
    for change, lie in (
        (measured, r"C\d is NOT RUN, but has a number \(value\)"),
        (unnamed, "disagree about the verdict's model before"),
        (passing, r"C1 is PASS, but its value 0\.\d+ is above its limit"),
        (lambda v: v | {"passes": True}, r"verdict\.json: passes is True; its numbers give False"),
        (lambda v: v | {"sentence": "All is well."}, r"sentence is 'All is well\.'"),
        (lambda v: v | {"method": "exact"}, "disagree about the verdict's method"),
        (lambda v: v | {"has-reference": False}, "disagree about a reference model"),
        (all_passed, r"verdict\.json says 'passed 6 of 6'; journal\.jsonl tells of 'FAILED"),
        (lambda v: v | {"cost": v["cost"] | {"seconds": 0.0}}, "disagree about the verdict's cost"),
        (lambda v: v | {"settings": {}}, "disagree about the verdict's settings"),
        (lambda v: v | {"origin": {"data": {"digest": "0" * 64}}}, "disagree about the verdict's data"),
        (same("reference", "after"), "disagree about reference models that are no other model: 0, 1"),
        (same("reference", "before"), "disagree about reference models that are no other model: 0, 1"),
        (same("second_reference", "reference"), "disagree about reference models that are no other model: 1, 2"),
    ):
        with pytest.raises(BadBundle, match=lie):
            read_bundle(forge(made, {"verdict.json": edited(made, "verdict.json", change)}), "x.zip")


def test_a_verdict_lacks_no_audit_has_none_twice_and_keeps_their_limits(judged: Path) -> None:
    def anew(**change: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
        return lambda value: Verdict.from_json(value | change, "verdict.json").to_json()

    made = judged / "evidence.zip"
    told = json.loads(open_bundle(made).files["verdict.json"])
    audits, metrics = told["audits"], told["metrics"]
    passed = [audit for audit in audits if audit["outcome"] == "PASS"]
    lenient = [audit | ({"outcome": "PASS", "limit": 0.9} if audit["outcome"] == "FAIL" else {}) for audit in audits]
    silent = [audit | ({"outcome": "NO REFERENCE"} if audit["outcome"] == "FAIL" else {}) for audit in audits]
    empty = [audit | ({"value": None} if audit["outcome"] == "PASS" else {}) for audit in audits]
    for change, lie in (
        (anew(audits=passed), r"C[1345] is there 0 times"),
        (anew(audits=passed[:1] * 6), r"C\d is there (0|6) times"),
        (anew(audits=lenient), r"C1 has the limit 0\.9; expected 0\.082 or 0\.05 or 0\.083"),
        (anew(audits=silent), "C1 is NO REFERENCE, but a reference model was measured"),
        (anew(audits=empty), r"C\d is PASS, but has no value"),
        (anew(retention=None), "retention is missing, though audits were run"),
        (anew(metrics=[*metrics, metrics[0]]), "the metric forget-accuracy is there 2 times"),
    ):
        with pytest.raises(BadBundle, match=lie):
            read_bundle(forge(made, {"verdict.json": edited(made, "verdict.json", change)}), "x.zip")


def test_a_readme_of_somebody_else_is_refused_and_that_of_another_version_not_checked(
    judged: Path, tmp_path: Path
) -> None:
    files, made = {"README.txt": b"Certified: all audits passed.\n"}, judged / "evidence.zip"
    with pytest.raises(BadBundle, match=r"README\.txt is not the one that fedortho .* writes"):
        read_bundle(forge(made, files), "x.zip")
    files = dict(open_bundle(made).files) | files
    body = json.loads(files.pop("manifest.json")) | {"made-by": "fedortho 0.0.1"}
    (tmp_path / "x.zip").write_bytes(pack_files(files | {"manifest.json": manifest(body, files)}))
    assert any(text.startswith("README.txt, and which audits") for text in states(tmp_path / "x.zip")["not checked"])


def test_a_full_verdict_against_one_reference_is_repeated_in_full(judged: Path) -> None:
    """Its C4 and C5 were not run, but its C3 was trained."""
    quick = open_bundle(judged / "evidence.zip").verdict
    assert quick is not None
    assert claims.budget_of(quick) == "quick"
    audits = [
        replace(each, details={**each.details, RELEARNED: {}}) if each.name == "C3" else each for each in quick.audits
    ]
    assert claims.budget_of(replace(quick, audits=tuple(audits))) == "full"


def test_membership_passes_without_a_reference_model(judged: Path) -> None:
    """It compares shadow models, so that such a verdict is honest."""

    def alone(value: dict[str, Any]) -> dict[str, Any]:
        none = {"outcome": "NOT RUN"} | dict.fromkeys(("value", "limit", "unlearned", "original", "reference"))
        value["audits"] = [audit | none for audit in value["audits"]]
        value["audits"][3] |= {"outcome": "PASS", "value": 0.01, "limit": 0.1}
        value |= {"has-reference": False, "digests": {role: value["digests"][role] for role in ("before", "after")}}
        return Verdict.from_json(value, "verdict.json").to_json()

    made = judged / "evidence.zip"
    files = {"verdict.json": edited(made, "verdict.json", alone)}
    files["digests.json"] = edited(made, "digests.json", lambda value: value | {"journal": None})
    assert read_bundle(forge(made, files, without=["journal.jsonl"]), "x.zip").verdict


def test_other_entries_of_the_journal_are_proved_and_not_shown(judged: Path) -> None:
    text = open_bundle(judged / "evidence.zip").files["journal.jsonl"]
    lines = [json.loads(line) for line in text.splitlines()]
    assert [sorted(line) == ["body", "number"] for line in lines] == [False, False, True, False]
    assert b"somebody else" not in text
    assert b"class:7" not in text


def test_lines_that_do_not_lead_to_the_end_or_to_the_published_head_are_refused(judged: Path, tmp_path: Path) -> None:
    made = judged / "evidence.zip"
    first, second, other, last = open_bundle(made).files["journal.jsonl"].splitlines(keepends=True)
    body = json.loads(other)
    forged = json.dumps(body | {"body": "0" * 64}, sort_keys=True, separators=(",", ":")).encode() + b"\n"
    for lines, lie in (
        ([first, second, forged, last], r"line 4 of journal\.jsonl, entry 4, does not follow"),
        ([second, first, other, last], "is entry 1, and the line before is entry 2"),
        ([first, last.replace(b"FAILED", b"PASSED")], "its hash does not match its text"),
        ([first, other.replace(b'"number":3', b'"number":true')], "has the number True"),
        ([first, second, other.replace(b"{", b'{"body":"x",'), last], "not in the form that is written"),
    ):
        with pytest.raises(BadBundle, match=lie):
            read_bundle(forge(made, {"journal.jsonl": b"".join(lines)}), "x.zip")
    (tmp_path / "x.zip").write_bytes(forge(made, {"journal.jsonl": b"".join([first, second, forged])}))
    assert not any("lead to entry" in text for text in states(tmp_path / "x.zip")["checked"])
    (tmp_path / "x.zip").write_bytes(forge(made, {"journal.jsonl": b"".join([first, other, last])}))
    with pytest.raises(BadBundle, match=r"journal\.jsonl: "):
        check_bundle(tmp_path / "x.zip", journal=judged)
    for number in range(6):
        append_entry(tmp_path / "runs", "received", "second", f"class:{number}")
        publish_head(tmp_path / "runs", tmp_path / "head.json")
        if number < 4:
            with pytest.raises(BadBundle, match=rf"another journal than the published entry {number + 1}"):
                check_bundle(made, head=tmp_path / "head.json")
    unchecked = states(made, head=tmp_path / "head.json")["not checked"]
    assert any("published entry 6, which it does not reach" in text for text in unchecked)


def test_an_event_that_this_version_does_not_write_is_refused(judged: Path) -> None:
    *lines, last = open_bundle(judged / "evidence.zip").files["journal.jsonl"].splitlines(keepends=True)
    sealed = replace(parse_entry(last.rstrip(b"\n")), event="certified").sealed()
    files = {"journal.jsonl": b"".join([*lines, f"{sealed.line}\n".encode()])}
    end = {"journal": {"number": sealed.number, "hash": sealed.hash}}
    files["digests.json"] = edited(judged / "evidence.zip", "digests.json", lambda value: value | end)
    with pytest.raises(BadBundle, match="has the event 'certified'; expected one of received, hidden, executed"):
        read_bundle(forge(judged / "evidence.zip", files), "x.zip")


def test_accuracies_of_entry_and_verdict_are_the_same_unless_images_were_deleted(judged: Path) -> None:
    def deleted(value: dict[str, Any]) -> dict[str, Any]:
        value["copies"][0]["removed"] = 1
        return value

    made = judged / "evidence.zip"
    files = {"entry.json": edited(made, "entry.json", better)}
    with pytest.raises(BadBundle, match=r"retain-accuracy is 0\.9\d+, but entry\.json: after\.retain is 0\.999"):
        read_bundle(forge(made, files), "x.zip")
    read_bundle(forge(made, files | {"verdict.json": edited(made, "verdict.json", deleted)}), "x.zip")


def test_digests_are_hex_and_true_is_no_schema(judged: Path) -> None:
    made = judged / "evidence.zip"
    for name, change, lie in (
        ("digests.json", lambda v: v | {"data": "somebody's"}, r"digests\.json: data is .*expected 64 digits"),
        ("digests.json", lambda v: v | {"run-now": "A" * 64}, r"digests\.json: run_now is"),
        ("verdict.json", lambda v: v | {"digests": v["digests"] | {"reference": "x"}}, r"digests\.reference is 'x'"),
        ("request.json", lambda v: v | {"run": "../../evil"}, "expected the plain name"),
        ("verdict.json", lambda v: v | {"schema": True}, "schema True"),
        ("entry.json", lambda v: v | {"after": v["after"] | {"retain": 5.0}}, r"after\.retain is 5; expected a share"),
        ("entry.json", lambda v: v | {"before": v["before"] | {"forget": -0.1}}, r"before\.forget is -0\.1; expected"),
    ):
        with pytest.raises(BadBundle, match=lie):
            read_bundle(forge(made, {name: edited(made, name, change)}), "x.zip")


@pytest.mark.slow
def test_audits_without_their_reference_model_are_not_checked(judged: Path, tmp_path: Path) -> None:
    shutil.copytree(judged / "first", tmp_path / "first")
    found = states(judged / "evidence.zip", run=tmp_path / "first")
    assert not any(text.startswith("audit") for text in found["checked"])
    assert "audit C2, said to be PASS: a reference model is not here; --reference RUN" in found["not checked"]
    assert any(text.startswith("figures of report.html") for text in found["not checked"])
