from dataclasses import replace
from pathlib import Path

import pytest

import fedortho as fo
from fedortho.errors import BadSetting, FedOrthoError
from fedortho.evaluation.case import COUNTERFACTUALS
from fedortho.methods import METHODS, make_method
from fedortho.requests.counterfactuals import counterfactuals
from fedortho.requests.judging import JudgeOptions, judge_run
from fedortho.requests.references import case_of, check_reference, find_references
from fedortho.requests.run_context import open_context
from fedortho.runs.run import Run, open_run
from fedortho.runs.settings import TrainSettings
from fedortho.runs.training import train_run
from fedortho.storage.files import tensors_digest

SETTINGS = TrainSettings(data="digits", model="small:QuickNet", epochs=4, crop=0, flip=0.0, threads=1, device="cpu")
REQUEST = fo.ForgetRequest.parse("class:3")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An original, what fine-tuning made of it, and a reference model."""
    place = tmp_path_factory.mktemp("runs")
    original = train_run(place / "original", SETTINGS)
    train_run(place / "references" / "reference", replace(SETTINGS, without="class:3"))
    fo.forget_run(original, "class:3", method=make_method("finetune", {"epochs": 1}), out=place / "erased")
    return place


def served(runs: Path) -> tuple[Run, Run, Run]:
    return tuple(open_run(runs / name) for name in ("erased", "original", "references/reference"))  # type: ignore[return-value]


def test_only_methods_that_read_no_image_of_the_forget_set_have_counterfactuals() -> None:
    having = {name for name, kind in METHODS.items() if getattr(kind, "has_counterfactual", False)}
    assert having == {"regrow", "finetune", "not", "unsir", "eu-k", "cf-k", "ct"}
    for name in having:
        assert not {"forget", "all:"} & {word.strip(";,") for word in METHODS[name].needs.split()}


def test_a_counterfactual_is_what_the_method_makes_of_the_reference_model(runs: Path, tmp_path: Path) -> None:
    erased, original, reference = served(runs)
    record = erased.record.requests[0]
    method = make_method(record.method, record.settings)
    context = open_context(original, original.load_data())
    (made,) = counterfactuals(context, method, REQUEST, [reference], tmp_path)
    by_hand = fo.forget(reference.load_model(), original.load_data(), "class:3", method).model
    assert made.record.model.digest == tensors_digest(by_hand.state_dict())
    assert made.record.parent == reference.record.model.digest
    (again,) = counterfactuals(context, method, REQUEST, [reference], tmp_path, make=False)
    assert again.path == made.path, "it is made once"
    assert counterfactuals(context, method, REQUEST, [reference], tmp_path / "empty", make=False) == []
    assert counterfactuals(context, make_method("hide"), REQUEST, [reference], tmp_path) == []
    check_reference(erased, made, REQUEST)
    case = case_of(erased, REQUEST, original.load_data(), original, [reference, made])
    assert (len(case.references), len(case.counterfactuals)) == (1, 1)
    assert case.treated_alike.references == case.counterfactuals


def test_a_model_that_another_treatment_made_is_no_reference(runs: Path, tmp_path: Path) -> None:
    erased, original, reference = served(runs)
    context, other = open_context(original, original.load_data()), make_method("finetune", {"epochs": 2})
    (made,) = counterfactuals(context, other, REQUEST, [reference], tmp_path)
    with pytest.raises(FedOrthoError, match="edited"):
        check_reference(erased, made, REQUEST)
    with pytest.raises(FedOrthoError, match="trained with class:3"):
        check_reference(erased, erased, REQUEST)


@pytest.mark.slow
def test_verdicts_compare_with_counterfactuals_and_name_the_models_as_retrained(runs: Path) -> None:
    erased, original, reference = served(runs)
    plain = judge_run(erased, options=JudgeOptions(reference=reference.path, only=("C1",)))
    assert COUNTERFACTUALS[0] not in plain.digests, "models that the user names are compared as they are"
    missing = judge_run(erased, options=JudgeOptions(only=("C1",)))
    assert COUNTERFACTUALS[0] not in missing.digests, "nothing is trained unless --retrain allows it"
    alike = judge_run(erased, options=JudgeOptions(retrain=True, only=("C1",)))
    (made,) = map(open_run, (runs / "references").glob("reference-finetune-*"))
    assert alike.digests[COUNTERFACTUALS[0]] == made.record.model.digest
    assert alike.digests["reference"] == reference.record.model.digest
    probe, before = alike.audit("C1"), plain.audit("C1")
    assert probe is not None
    assert before is not None
    assert probe.details["as_retrained"]["reference"] == before.details["stages"]["reference"]
    assert probe.details["stages"]["unlearned"] == before.details["stages"]["unlearned"]
    assert "treated alike" in probe.finding
    assert "treated alike" in alike.sentence
    assert alike.metric("retain-accuracy") == plain.metric("retain-accuracy"), "metrics compare with the retrained"
    assert find_references(original, REQUEST)[0].path == reference.path, "a counterfactual is no reference model"


def test_a_result_that_does_not_depend_on_the_forget_set_is_called_that(runs: Path, tmp_path: Path) -> None:
    """A network of one stage is trained anew by `regrow`, so the original leaves nothing in it."""
    _, original, _ = served(runs)
    anew = fo.forget_run(original, "class:3", method="regrow", out=runs / "anew").run
    assert anew is not None
    verdict = judge_run(anew, options=JudgeOptions(retrain=True, only=("C1",)))
    assert verdict.digests[COUNTERFACTUALS[0]] == verdict.digests["after"]
    assert "byte for byte" in verdict.sentence


def test_python_takes_one_counterfactual_for_each_reference(runs: Path) -> None:
    erased, original, reference = served(runs)
    models = [run.load_model() for run in (erased, original, reference)]
    how = {"original": models[1], "reference": models[2], "counterfactual": [models[1], models[1]]}
    with pytest.raises(BadSetting, match="2 counterfactuals and 1 reference"):
        fo.judge(models[0], original.load_data(), "class:3", **how)


@pytest.mark.slow
def test_a_bundle_is_checked_against_the_counterfactuals_that_its_verdict_names(runs: Path, tmp_path: Path) -> None:
    erased, original, _ = served(runs)
    told, bundle = judge_run(erased, options=JudgeOptions(retrain=True)).audit("C1"), tmp_path / "evidence.zip"
    assert told is not None
    fo.make_bundle(erased, "class:3", bundle)

    def checked(**how: object) -> list[str]:
        found = fo.check_bundle(bundle, run=original, **how)  # type: ignore[arg-type]  # one of them
        return [claim.text for claim in found.claims if claim.state == "checked"]

    assert f"audit C1, repeated: {told.outcome}" in checked()
    (made,) = map(open_run, (runs / "references").glob("reference-finetune-*"))
    elsewhere = made.path.rename(tmp_path / "elsewhere")
    try:
        assert "the verdict's metrics, measured again, without the reference model" in checked()
        assert f"audit C1, repeated: {told.outcome}" in checked(references=[elsewhere])
    finally:
        elsewhere.rename(made.path)
