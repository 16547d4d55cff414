import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedortho.data.request import ForgetRequest
from fedortho.errors import BadCheckpoint, FedOrthoError
from fedortho.models.predictions import evaluate
from fedortho.requests.forgetting import forget_run
from fedortho.requests.references import (
    case_of,
    check_reference,
    find_original,
    find_reference,
    reference_name,
    reference_settings,
    train_reference,
)
from fedortho.runs.record import Accuracies, ServedRecord
from fedortho.runs.run import Run, load_run_data, open_run
from fedortho.runs.settings import FederateSettings, TrainSettings, held_rows
from fedortho.runs.training import train_run
from fedortho.storage.files import read_json, write_json

SMALL = TrainSettings(data="digits", model="vgg-mini", epochs=1, batch_size=256, seed=5, threads=1)
ASKED = ForgetRequest.parse("class:3")


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train_run(tmp_path_factory.mktemp("runs") / "original", SMALL)


@pytest.fixture(scope="module")
def reference(original: Run, tmp_path_factory: pytest.TempPathFactory) -> Run:
    settings = reference_settings(original, ASKED, seed=6)
    return train_reference(tmp_path_factory.mktemp("references"), "one", settings)


def test_a_reference_never_met_what_must_go_and_splits_the_images_as_the_original(
    original: Run, reference: Run
) -> None:
    data, theirs = original.load_data(), reference.load_data()
    assert theirs.valid.rows.tolist() == data.valid.rows.tolist()
    assert reference.record.data.train == int((data.train.labels != 3).sum())
    confusion = evaluate(reference.load_model(), theirs.test).confusion
    assert sum(row[3] for row in confusion) == 0


def test_statistics_are_kept_of_a_model_that_will_forget_and_not_of_a_reference(original: Run, reference: Run) -> None:
    assert (original.path / "ledger.safetensors").exists()
    assert not (reference.path / "ledger.safetensors").exists()


def test_what_a_killed_training_left_in_a_finished_reference_is_removed(original: Run, reference: Run) -> None:
    left = reference.path / "checkpoint.safetensors"
    left.write_bytes(b"weights")
    assert find_reference(reference.path.parent, reference.settings, original.record.data.digest) is not None
    assert not left.exists()


def test_a_reference_is_found_by_what_it_was_made_from(original: Run, reference: Run) -> None:
    where, digest = reference.path.parent, original.record.data.digest
    spelled = ForgetRequest.parse("class:3,3")
    assert find_reference(where, reference_settings(original, spelled, seed=6), digest) is not None
    elsewhere = replace(reference_settings(original, ASKED, seed=6), data_dir="elsewhere", threads=2)
    assert find_reference(where, elsewhere, digest) is not None
    moved = replace(reference_settings(original, ASKED, seed=6), data="moved/photos")
    assert find_reference(where, moved, digest) is not None, "the digest says that these are the same images"
    otherwise = replace(reference_settings(original, ASKED, seed=6), without="class:3,3")
    assert find_reference(where, otherwise, digest) is not None, "another spelling is no other reference"
    for other in (
        reference_settings(original, ASKED, seed=7),
        replace(reference_settings(original, ASKED, seed=6), ortho=0.0),
        reference_settings(original, ForgetRequest.parse("class:4"), seed=6),
        replace(reference_settings(original, ASKED, seed=6), epochs=2),
    ):
        assert find_reference(where, other, digest) is None
    assert find_reference(where, reference_settings(original, ASKED, seed=6), "0" * 64) is None
    assert find_reference(where / "nowhere", reference_settings(original, ASKED, seed=6), digest) is None


def test_an_imported_copy_of_the_weights_is_not_taken_for_the_original(original: Run, tmp_path: Path) -> None:
    for name in ("a-copy", "original", "forgot"):
        shutil.copytree(original.path, tmp_path / name)
    record = read_json(tmp_path / "a-copy" / "run.json")
    write_json(tmp_path / "a-copy" / "run.json", record | {"settings": record["settings"] | {"epochs": 9}})
    other = {"model": record["model"] | {"digest": "0" * 64}, "parent": record["model"]["digest"]}
    write_json(tmp_path / "forgot" / "run.json", record | other)
    found = find_original(open_run(tmp_path / "forgot"))
    assert found is not None
    assert found.path.name == "original"
    assert find_original(found) is None, "it was made from none"


def test_an_edit_that_changed_nothing_is_not_taken_for_the_original_of_another(original: Run, tmp_path: Path) -> None:
    shutil.copytree(original.path, tmp_path / "original")
    for name in ("ssd", "finetune"):  # as compare writes them, one directory deeper
        served = forget_run(tmp_path / "original", "class:3", "logit-mask", out=tmp_path / "compared" / name)
        assert served.run is not None
    record = read_json(tmp_path / "compared" / "ssd" / "run.json")
    before = read_json(tmp_path / "original" / "run.json")["model"]
    shutil.copy(tmp_path / "original" / "model.safetensors", tmp_path / "compared" / "ssd")
    write_json(tmp_path / "compared" / "ssd" / "run.json", record | {"model": before})
    found = find_original(open_run(tmp_path / "compared" / "finetune"))
    assert found is not None
    assert found.path == tmp_path / "original"


def test_references_of_one_run_have_different_names(original: Run) -> None:
    several = [reference_settings(original, ASKED, seed=seed) for seed in (0, 1)]
    assert len({reference_name(original, ASKED, settings) for settings in several}) == 2


def test_what_saw_the_data_or_is_another_network_is_no_reference(original: Run, reference: Run, tmp_path: Path) -> None:
    check_reference(original, reference, ASKED)
    with pytest.raises(FedOrthoError, match="--without"):
        check_reference(original, original, ASKED)
    with pytest.raises(FedOrthoError, match="--without"):
        check_reference(original, reference, ForgetRequest.parse("class:3,4"))
    other = replace(reference, settings=replace(reference.settings, model="resnet-mini"))
    with pytest.raises(BadCheckpoint, match="resnet-mini"):
        check_reference(original, other, ASKED)
    foreign = replace(reference, record=replace(reference.record, data=replace(reference.record.data, digest="0")))
    with pytest.raises(BadCheckpoint, match="other data"):
        check_reference(original, foreign, ASKED)


def served(request: str) -> ServedRecord:
    accuracies = Accuracies(0.5, 0.5, 0.5)
    return ServedRecord(request, "hide", {}, accuracies, accuracies, 0.0)


def test_an_edited_model_is_no_reference_though_it_claims_to_have_forgotten(original: Run, reference: Run) -> None:
    claims: dict[str, Any] = {"requests": (served("class:3"),), "parent": original.record.model.digest}
    with pytest.raises(FedOrthoError, match="was edited or began with another model"):
        check_reference(original, replace(original, record=replace(original.record, **claims)), ASKED)
    with pytest.raises(FedOrthoError, match="was edited"):
        check_reference(original, replace(reference, record=replace(reference.record, **claims)), ASKED)


def test_a_reference_of_a_federation_that_went_on_begins_with_new_weights(original: Run) -> None:
    went_on = replace(original, settings=FederateSettings(data="digits", start="runs/before"))
    settings = reference_settings(went_on, ASKED)
    assert isinstance(settings, FederateSettings)
    assert settings.start == ""
    warm = replace(original, settings=replace(settings, model=original.settings.model, start="runs/before"))
    with pytest.raises(FedOrthoError, match="began with another model"):
        check_reference(original, warm, ASKED)


def test_what_went_by_other_requests_is_not_expected_to_have_stayed(original: Run) -> None:
    run = replace(original, record=replace(original.record, requests=(served("class:3"), served("class:5"))))
    case = case_of(run, ASKED, original.load_data(), original)
    assert set(case.forget_eval.labels.tolist()) == {3}
    assert set(range(10)) - set(case.retain_test.labels.tolist()) == {3, 5}


def test_a_second_reference_of_a_federation_deals_the_images_as_the_first() -> None:
    settings = FederateSettings(data="digits", clients=3, seed=1, split="dirichlet:0.5")
    data = load_run_data(settings)
    again = replace(settings, seed=9, split_seed=settings.partition_seed)
    mine, theirs = held_rows(data, settings, settings.partition_seed), held_rows(data, again, again.partition_seed)
    assert all(mine[client].equal(theirs[client]) for client in mine)


def test_training_without_what_nobody_has_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    for without, word in (("class:11", "11"), ("client:0", "client")):
        with pytest.raises(FedOrthoError, match=word):
            train_run(tmp_path / "run", replace(SMALL, without=without))
    with pytest.raises(FedOrthoError):
        open_run(tmp_path / "run")
    with pytest.raises(FedOrthoError, match="split-seed"):
        replace(SMALL, split_seed=-2)


def test_a_reference_by_another_recipe_is_not_trained_over_and_the_refusal_has_the_way_out(reference: Run) -> None:
    again = train_reference(reference.path.parent, "one", reference.settings)
    assert again.record.model.digest == reference.record.model.digest
    with pytest.raises(FedOrthoError, match=r"one was trained with other settings.*--references DIR"):
        train_reference(reference.path.parent, "one", replace(reference.settings, epochs=2))
