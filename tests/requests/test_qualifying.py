import json
from dataclasses import replace
from pathlib import Path

import pytest
from commands import told
from small import SETTINGS as FEDERATION
from torch import nn

from fedortho.audits import relearn, reset_tail
from fedortho.audits.judge import judge_case
from fedortho.audits.qualification import QUALIFICATION, ClassTrial, MethodTrial, Qualification, read_qualification
from fedortho.data.images import Dataset
from fedortho.engines.central import CentralEngine
from fedortho.errors import BadData, BadSetting, FedOrthoError
from fedortho.evaluation.case import Case
from fedortho.methods import make_method, unlearn
from fedortho.methods.method import ForgetResult, Method
from fedortho.requests import qualifying
from fedortho.requests.federated_jobs import federate_run
from fedortho.requests.forgetting import forget_run
from fedortho.requests.judging import JudgeOptions, audit_run, judge_run
from fedortho.requests.qualifying import QualifyOptions, draw_classes, qualify_run
from fedortho.requests.references import finished_runs
from fedortho.requests.run_context import method_for_run
from fedortho.runs.run import Run
from fedortho.runs.settings import FederateSettings, TrainSettings
from fedortho.runs.training import train_run
from fedortho.storage.files import read_json, write_json
from fedortho.storage.records import to_json, write_record
from fedortho.storage.settings import as_mapping

SETTINGS = TrainSettings(data="digits", model="small:QuickNet", epochs=4, crop=0, flip=0.0, threads=1, device="cpu")


@pytest.fixture(autouse=True)
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Relearning and reset tails as short as they can be: what they find is not tested here."""
    monkeypatch.setattr(relearn, "STEPS", 2)
    monkeypatch.setattr(reset_tail, "TAILS", 1)
    for name in ("STEPS", "MOST_STEPS"):
        monkeypatch.setattr(reset_tail, name, 2)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train_run(tmp_path_factory.mktemp("runs") / "original", SETTINGS)


def candidates(run: Run) -> tuple[Method, ...]:
    """One that forgets nothing, and one that cannot fail to: retraining, with another seed than the references."""
    return make_method("logit-mask"), make_method("retrain", as_mapping(method_for_run(run, "retrain")), {"seed": 9})


def options(run: Run, **changes: object) -> QualifyOptions:
    how = QualifyOptions(classes=1, choosing=1, references=1, candidates=candidates(run), device="cpu")
    return replace(how, **changes)  # type: ignore[arg-type]  # names of fields


def test_classes_are_drawn_by_the_seed_and_the_model_and_do_not_overlap(run: Run) -> None:
    drawn = draw_classes(run, QualifyOptions(classes=3, choosing=2))
    assert drawn == draw_classes(run, QualifyOptions(classes=3, choosing=2))
    assert drawn != draw_classes(run, QualifyOptions(classes=3, choosing=2, seed=1))
    assert len({*drawn.choosing, *drawn.confirming}) == 5


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"classes": 9}, "10 classes are asked for, 9 to confirm and 1 to choose; expected at most 9"),
        ({"classes": 0}, "classes is 0; expected at least 1"),
        ({"choosing": 0}, "choosing is 0; expected at least 1"),
        ({"references": 0}, "references is 0; expected at least 1"),
    ],
)
def test_impossible_numbers_are_refused_by_name_before_anything_is_written(
    run: Run, wrong: dict[str, int], told: str
) -> None:
    with pytest.raises(BadSetting, match=told):
        qualify_run(run, options(run, **wrong))
    assert not (run.path / QUALIFICATION).exists()


def test_a_method_is_chosen_on_validation_images_and_confirmed_on_other_classes(run: Run) -> None:
    steps: list[str] = []
    found = qualify_run(run, options(run, on_step=steps.append))
    hidden, *retrained = found.tried
    assert (hidden.method, hidden.passed) == ("logit-mask", False), "a probe still finds the class"
    assert [trial.split for tried in found.tried for trial in tried.classes] == ["valid"] * len(found.tried)
    assert found == read_qualification(run.path)
    assert any("logit-mask" in step for step in steps)
    for tried in retrained:
        assert tried.classes[0].references != (tried.classes[0].model,), "no model is its own reference"
    if found.chosen is not None:  # whether two retrained digits networks agree is for the audits to say
        assert found.confirmed is not None
        assert [trial.split for trial in found.confirmed.classes] == ["test"]
        assert {trial.request for trial in found.confirmed.classes}.isdisjoint(found.choosing)
    again: list[str] = []
    assert qualify_run(run, options(run, on_step=again.append)) == found
    assert not again, "nothing is tried twice"


def test_another_draw_does_not_replace_a_qualification(run: Run) -> None:
    qualify_run(run, options(run))
    with pytest.raises(FedOrthoError, match="remove it"):
        qualify_run(run, options(run, seed=1))


def test_a_qualification_is_confirmed_by_the_method_that_was_chosen_whatever_is_a_candidate_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, seen = train_run(tmp_path / "run", replace(SETTINGS, epochs=1)), list[Method]()

    def passed(*words: object) -> ClassTrial:
        seen.append(words[2])  # type: ignore[arg-type]  # the method
        return ClassTrial(str(words[3]), str(words[4]), {"C1": "PASS"}, "m", ("r",), 0.0, 0.9, 0.9, 1.0, 10.0)

    monkeypatch.setattr(qualifying, "_trial", passed)
    before, now = (make_method("finetune", {"epochs": epochs}) for epochs in (1, 2))
    begun = draw_classes(run, QualifyOptions(classes=1))
    tried = MethodTrial("finetune", as_mapping(before), (passed(0, 0, before, begun.choosing[0], "valid"),))
    write_record(run.path / QUALIFICATION, replace(begun, tried=(tried,)))
    found = qualify_run(run, QualifyOptions(classes=1, candidates=(now,), device="cpu"))
    assert found.is_finished
    assert seen == [before, before]
    assert qualify_run(run, QualifyOptions(classes=1, candidates=(now,), device="cpu")) == found


def test_a_record_that_was_changed_is_refused(run: Run) -> None:
    qualify_run(run, options(run))
    path = run.path / QUALIFICATION
    kept = read_json(path)
    write_json(path, kept | {"confirmed": {"method": 3}})
    with pytest.raises(FedOrthoError, match="qualify again"):
        qualify_run(run, options(run))
    write_json(path, kept)


def test_a_dry_run_shows_the_draw_and_refuses_what_cannot_be_qualified(run: Run, tmp_path: Path) -> None:
    words = ("qualify", run.path, "--classes", 1, "--dry-run")
    drawn = draw_classes(run, QualifyOptions(classes=1))
    assert f"{drawn.choosing[0]} to choose, {drawn.confirming[0]} to confirm" in told(*words)
    assert json.loads(told(*words, "--json")) == to_json(drawn)
    seen = train_run(tmp_path / "seen", replace(SETTINGS, epochs=1, valid=0.0))
    with pytest.raises(BadData, match="no validation images, on which qualify chooses"):
        qualify_run(seen, options(run))
    assert not (tmp_path / "references").exists(), "nothing was trained"


def test_a_federation_that_cannot_be_qualified_is_refused_before_anything_is_trained(run: Run, tmp_path: Path) -> None:
    deployed = replace(run, path=tmp_path, settings=FEDERATION)
    with pytest.raises(FedOrthoError, match="has no clients/: its clients are not simulated here; qualify serves"):
        qualify_run(deployed, options(run))
    assert draw_classes(deployed, QualifyOptions()), "who checks a bundle may have the run without its clients"
    (tmp_path / "clients").mkdir()
    lacking = replace(deployed, settings=replace(FEDERATION, without="class:1"))
    with pytest.raises(FedOrthoError, match="without class:1, which its clients still hold; qualify the federation"):
        qualify_run(lacking, options(run))
    assert not (tmp_path / QUALIFICATION).exists()


def test_a_run_that_has_forgotten_is_not_qualified(run: Run, tmp_path: Path) -> None:
    forgot = forget_run(run, "class:1", "logit-mask", out=tmp_path / "forgot", device="cpu").run
    assert forgot is not None
    with pytest.raises(FedOrthoError, match="forgotten before"):
        qualify_run(forgot, options(run))


@pytest.fixture
def forgot(tmp_path: Path) -> Run:
    """A run that has forgotten a class by a mask of its logit, beside its original, which has no references."""
    original = train_run(tmp_path / "runs" / "original", replace(SETTINGS, epochs=1))
    served = forget_run(original, "class:1", "logit-mask", out=tmp_path / "runs" / "forgot", device="cpu").run
    assert served is not None
    return served


def chosen(tried: MethodTrial) -> MethodTrial:
    """The method as it was chosen, on validation images of class 3."""
    (passed,) = tried.classes
    return replace(tried, classes=(replace(passed, request="class:3", split="valid"),))


def qualified(forgot: Run, **changes: object) -> Qualification:
    """A finished qualification of the method and the model of this run."""
    record, original = forgot.record.requests[0], forgot.path.with_name("original")
    passed = ClassTrial("class:2", "test", {"C1": "PASS"}, "m", ("r",), 0.0, 0.9, 0.9, 1.0, 10.0)
    tried = MethodTrial(record.method, record.settings, (passed,))
    found = Qualification(
        record.model_before or "", forgot.record.data.digest, 0, ("class:3",), ("class:2",), (chosen(tried),), tried
    )
    found = replace(found, **changes)  # type: ignore[arg-type]  # names of fields
    write_record(original / QUALIFICATION, found)
    return found


def test_a_later_request_reads_qualified_and_never_passes(forgot: Run) -> None:
    qualified(forgot)
    verdict = judge_run(forgot, options=JudgeOptions(device="cpu"))
    assert verdict.label.startswith("QUALIFIED on 1 of 1")
    assert "no reference for this class" in verdict.sentence
    assert not verdict.passes
    limited = {result.name for result in verdict.audits if result.limit is not None}
    assert {"C2", "C6"} <= limited, "audits with an absolute limit have one without a reference"


def test_a_federation_is_qualified_against_federations_that_never_saw_the_class(tmp_path: Path) -> None:
    run = federate_run(tmp_path / "original", FEDERATION)
    assert run is not None
    retraining = make_method("retrain", as_mapping(method_for_run(run, "retrain")), {"seed": 9})
    found = qualify_run(run, options(run, candidates=(retraining,)))
    trial = found.tried[0].classes[0]
    references = {each.settings.without: each for each in finished_runs(tmp_path / "references")}
    assert isinstance(references[trial.request].settings, FederateSettings)
    assert trial.references == (references[trial.request].record.model.digest,)
    assert (trial.forget, trial.split) == (0.0, "valid")
    served = forget_run(run, "class:1", "logit-mask", out=tmp_path / "forgot", device="cpu").run
    assert served is not None
    qualified(served)
    assert judge_run(served, options=JudgeOptions(device="cpu")).label.startswith("QUALIFIED on 1 of 1")


@pytest.mark.slow
def test_a_qualification_speaks_for_its_own_model_method_and_settings_only(forgot: Run) -> None:
    own = qualified(forgot).confirmed
    assert own is not None
    other = replace(own, settings={"strength": 3.0})
    differing = {"tried": (chosen(other),), "confirmed": other}
    for changes in ({"original": "0" * 64}, {"data": "0" * 64}, differing, {"confirmed": None}):
        qualified(forgot, **changes)
        verdict = judge_run(forgot, options=JudgeOptions(device="cpu"))
        assert verdict.qualification is None
        assert "QUALIFIED" not in verdict.label


def test_no_request_is_qualified_by_some_of_the_audits_that_have_a_limit(forgot: Run) -> None:
    qualified(forgot)
    for name in ("C2", "C6"):
        verdict = audit_run(forgot, options=JudgeOptions(only=(name,), device="cpu"))
        assert verdict.audit(name) is not None
        assert not verdict.is_qualified, f"{name} alone was run"
        assert verdict.label.startswith("no reference")


def test_a_failed_drawn_class_or_a_number_beyond_its_limit_is_not_qualified(forgot: Run) -> None:
    found = qualified(forgot)
    verdict = judge_run(forgot, options=JudgeOptions(device="cpu"))
    assert found.confirmed is not None
    failed = replace(found.confirmed.classes[0], outcomes={"C1": "PASS", "C3": "FAIL"})
    assert not replace(
        verdict, qualification=replace(found, confirmed=replace(found.confirmed, classes=(failed,)))
    ).is_qualified
    beyond = tuple(replace(audit, value=0.5, limit=0.02) if audit.name == "C2" else audit for audit in verdict.audits)
    assert not replace(verdict, audits=beyond).is_qualified
    assert verdict.is_qualified


@pytest.mark.slow
def test_images_that_the_run_was_trained_without_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = train_run(tmp_path / "run", replace(SETTINGS, epochs=1, without="class:0 samples:41"))
    seen, judged = list[Dataset](), list[Case]()

    def watched(model: nn.Module, engine: CentralEngine, *rest: object) -> ForgetResult:
        seen.append(engine.data)
        return unlearn(model, engine, *rest)  # type: ignore[arg-type]  # as it was called

    def judge(case: Case, *rest: object, **how: object) -> object:
        judged.append(case)
        return judge_case(case, *rest, **how)  # type: ignore[arg-type]  # as it was called

    monkeypatch.setattr(qualifying, "unlearn", watched)
    monkeypatch.setattr(qualifying, "judge_case", judge)
    qualify_run(run, options(run, candidates=(make_method("logit-mask"),)))
    assert seen
    for data in seen:
        assert 0 not in data.train.labels
        assert 0 not in data.valid.labels
        assert 41 not in data.train.rows
    assert [str(case.forgotten) for case in judged] == ["class:0 samples:41"] * len(judged)
