"""Exact forgetting on one machine: images that joined later are taken back, to the bytes of a run without them."""

import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from commands import told
from small import write_images

from fedortho.data.request import ForgetRequest
from fedortho.errors import BadCheckpoint, BadData, BadSetting, FedOrthoError
from fedortho.methods.method import CannotServe
from fedortho.methods.paper import Paper
from fedortho.requests.forgetting import forget_run
from fedortho.requests.references import check_reference, find_references, reference_settings
from fedortho.requests.rewind import CannotRewind, find_rewind, plan_rewind, rewind_run
from fedortho.runs.continuing import continued_settings, stages_of
from fedortho.runs.rounds import kept_rounds
from fedortho.runs.run import Run, open_run
from fedortho.runs.settings import TrainSettings
from fedortho.runs.training import train_run
from fedortho.storage.files import read_tensors, tensors_digest
from fedortho.training.loop import Progress

BASE = TrainSettings(
    model="small:TinyNet",
    epochs=3,
    batch_size=8,
    flip=0.5,
    crop=0,
    valid=0.2,
    threads=1,
    device="cpu",
    keep_epochs="all",
)


def folder(place: Path, name: str, classes: dict[str, int], first: int) -> str:
    """Images of these classes without splits; `first` makes them others than those of another folder."""
    made = write_images(place / f"{name}-made", {each: number + first for each, number in classes.items()})
    for each in classes:
        for file in sorted((made / "train" / each).iterdir())[:first]:
            file.unlink()
    shutil.move(made / "train", place / name)
    return str(place / name)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("central")
    write_images(place / "images", {"ant": 24, "bee": 24, "cow": 6})
    folder(place, "second", {"ant": 5, "bee": 4}, 30)
    folder(place, "third", {"bee": 4, "cow": 3}, 40)
    return place


@pytest.fixture(scope="module")
def first(place: Path) -> Run:
    return train_run(place / "first", replace(BASE, data=str(place / "images")))


def continued(run: Run, name: str, images: str, without: str = "") -> Run:
    changes = {"epochs": 2, "lr": 0.02, "new_images": images, "without": without, "keep_epochs": "all"}
    return train_run(run.path.parent / name, continued_settings(run, changes))


@pytest.fixture(scope="module")
def second(first: Run, place: Path) -> Run:
    return continued(first, "run-2", str(place / "second"))


@pytest.fixture(scope="module")
def third(second: Run, place: Path) -> Run:
    return continued(second, "run-3", str(place / "third"))


def digest(run: Run) -> str:
    return run.record.model.digest


def test_the_history_is_a_log_of_epochs_and_kept_epochs_are_those_models(first: Run) -> None:
    assert sorted(kept_rounds(first.path, "epochs")) == [1, 2], "the last one is the model"
    logged = [epoch.model for epoch in first.history()]
    kept = [tensors_digest(read_tensors(file)[0]) for file in sorted((first.path / "epochs").iterdir())]
    assert [*kept, digest(first)] == logged
    assert sum(kept_rounds(first.path, "epochs").values()) == sum(
        file.stat().st_size for file in (first.path / "epochs").iterdir()
    )


def test_new_images_follow_the_rows_that_were_there_and_nothing_else_changes(first: Run, second: Run) -> None:
    before, after = first.load_data(), second.load_data()
    assert len(after.train) == len(before.train) + 9
    assert second.record.data.first_new == len(before.train.store_labels)
    assert second.record.began_with == digest(first)
    assert after.valid.rows.tolist() == before.valid.rows.tolist(), "validation images stay those of the first run"
    assert (after.train.mean, after.train.std) == (before.train.mean, before.train.std)
    assert after.train.names == before.train.names
    assert [epoch.images for epoch in second.history()] == [len(after.train)] * 2
    assert stages_of(second) == [first, second]


@pytest.mark.parametrize("which", ["one", "several", "named"])
def test_images_that_joined_are_taken_back_to_the_bytes_of_a_run_that_never_had_them(
    first: Run, second: Run, place: Path, tmp_path: Path, which: str
) -> None:
    row = second.record.data.first_new
    assert row is not None
    named = next(file for file in (place / "second" / "ant").iterdir())
    request = {"one": f"samples:{row}", "several": f"samples:{row + 1},{row + 8}", "named": f"samples:{named}"}[which]
    plan = plan_rewind(second, request)
    assert (plan.begin, plan.planned, [*plan.contacts.values()]) == (3, 5, [4])
    assert "back to the end of epoch 3" in " ".join(plan.lines())
    assert "2 of 5 epochs" in " ".join(plan.lines())
    rewound = rewind_run(second, request, tmp_path / "rewound").run
    wanted = continued(first, f"check-{which}", str(place / "second"), request)
    assert digest(rewound) == digest(wanted) != digest(second)
    assert [epoch.model for epoch in rewound.history()] == [epoch.model for epoch in wanted.history()]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(13))
def test_any_images_that_joined_are_taken_back_in_random_histories(place: Path, tmp_path: Path, seed: int) -> None:
    """Random recipes, one to three further trainings, and a request for some of the images that joined in them."""
    some = random.Random(seed)
    recipe = {
        "batch_size": some.choice((4, 7, 16)), "flip": some.choice((0.0, 0.5)), "crop": some.choice((0, 1)),
        "momentum": some.choice((0.0, 0.9)), "ortho": some.choice((0.0, 0.1)), "seed": some.randrange(100),
        "valid": some.choice((0.0, 0.2)), "epochs": some.randint(1, 2), "schedule": some.choice(("cosine", "constant")),
    }  # fmt: skip
    settings = replace(BASE, data=str(place / "images"), keep_epochs=some.choice(("", "all", "2")), **recipe)
    runs = [train_run(tmp_path / "run-0", settings)]
    folders = some.sample(("second", "third"), some.choice((1, 2)))
    changes = [
        {"epochs": some.choice((1, 2)), "lr": some.choice((0.01, 0.03)), "seed": some.randrange(9)} for _ in folders
    ]
    for number, (name, change) in enumerate(zip(folders, changes, strict=True), 1):
        grown = continued_settings(runs[-1], {**change, "new_images": str(place / name)})
        runs.append(train_run(tmp_path / f"run-{number}", grown))
    last = runs[-1]
    joined = [row for row in last.load_data().train.rows.tolist() if row >= runs[1].record.data.first_new]
    request = "samples:" + ",".join(map(str, some.sample(joined, some.randint(1, 4))))
    rewound = rewind_run(last, request, tmp_path / "rewound").run
    wanted = runs[0]
    for number, (name, change) in enumerate(zip(folders, changes, strict=True), 1):
        rows = request.removeprefix("samples:").split(",")
        known = [row for row in rows if int(row) < len(runs[number].load_data().train.store_labels)]
        gone = {"without": "samples:" + ",".join(known)} if known else {}
        grown = continued_settings(wanted, {**change, "new_images": str(place / name), **gone})
        wanted = train_run(tmp_path / f"wanted-{number}", grown)
    assert digest(rewound) == digest(wanted) != digest(last)
    assert [epoch.model for epoch in rewound.history()] == [epoch.model for epoch in wanted.history()]


def test_a_request_goes_back_to_the_training_that_first_had_the_data(
    first: Run, second: Run, third: Run, place: Path, tmp_path: Path
) -> None:
    at = [third.record.data.first_new, second.record.data.first_new]
    request = f"samples:{at[0]},{at[1]}"
    plan = plan_rewind(third, request)
    assert (plan.begin, plan.planned, len(plan.stages)) == (3, 7, 2)
    rewound = rewind_run(third, request, tmp_path / "rewound").run
    between = continued(first, "chain-2", str(place / "second"), f"samples:{at[1]}")
    wanted = continued(between, "chain-3", str(place / "third"), request)
    assert digest(rewound) == digest(wanted)
    assert digest(open_run(tmp_path / "rewound-start-1")) == digest(between)
    assert plan_rewind(third, f"samples:{at[0]}").begin == 5, "what came last needs the last training only"


@pytest.mark.parametrize("request_text", [pytest.param("class:cow", marks=pytest.mark.slow), "samples:1"])
def test_data_of_the_first_epoch_means_to_repeat_everything_and_the_plan_says_so(
    third: Run, place: Path, tmp_path: Path, request_text: str
) -> None:
    plan = plan_rewind(third, request_text)
    assert (plan.begin, len(plan.stages)) == (0, 3)
    assert "back to the start: all 7 epochs are trained again" in " ".join(plan.lines())
    assert "normalised by mean and deviation" in " ".join(plan.lines())
    if request_text != "class:cow":
        return
    rewound = rewind_run(third, request_text, tmp_path / "rewound").run
    one = train_run(place / "all-1", replace(BASE, data=str(place / "images"), without="class:cow"))
    two = continued(one, "all-2", str(place / "second"))
    assert two.settings.without == "class:cow", "what a run was trained without stays left out"
    assert digest(rewound) == digest(continued(two, "all-3", str(place / "third")))


def test_what_saves_nothing_is_not_begun_by_default(third: Run) -> None:
    with pytest.raises(CannotServe, match=r"samples:1 has no level by default.*--level exact \(retraining"):
        forget_run(third, "samples:1")
    assert "ways to serve samples:1" in told("forget", third.path, "samples:1", "--dry-run")
    assert "all 7 epochs" in told("forget", third.path, "samples:1", "--level", "exact", "--dry-run")


def test_a_run_that_had_the_data_from_the_start_is_retrained(first: Run, tmp_path: Path) -> None:
    assert find_rewind(first, ForgetRequest.parse("samples:1")) is None
    with pytest.raises(CannotRewind, match=r"had samples:1 in its first epoch.* retraining"):
        plan_rewind(first, "samples:1")
    served = forget_run(first, "samples:1", level="exact", out=tmp_path / "out", purge=False)
    wanted = train_run(tmp_path / "wanted", replace(first.settings, without="samples:1"))
    assert (served.record.method, served.record.model_after) == ("retrain", digest(wanted))


def test_forgetting_by_default_is_the_rewind_and_its_cost_is_that_of_the_repeated_epochs(
    second: Run, tmp_path: Path
) -> None:
    request = f"samples:{second.record.data.first_new}"
    served = forget_run(second, request, out=tmp_path / "out")
    assert served.rewind is not None
    assert served.record.method == "rewind"
    assert served.record.cost is not None
    assert served.record.cost.images_trained == 2 * (len(second.load_data().train) - 1)
    with pytest.raises(FedOrthoError, match="a rewind has no undo"):
        forget_run(second, request, level="exact", out=tmp_path / "other", undo=tmp_path / "undo")
    with pytest.raises(CannotServe, match="was continued"):
        forget_run(second, request, "retrain", out=tmp_path / "other")


def test_earlier_requests_are_taken_back_too_and_what_had_the_data_is_deleted(
    first: Run, second: Run, place: Path, tmp_path: Path
) -> None:
    for run in (first, second):
        shutil.copytree(run.path, tmp_path / run.path.name)
    row = second.record.data.first_new
    assert row is not None
    forget_run(tmp_path / "run-2", f"samples:{row}", Paper(), out=tmp_path / "edited", purge=False)
    rewound = rewind_run(tmp_path / "edited", f"samples:{row + 1}", tmp_path / "rewound", purge=True)
    assert digest(rewound.run) == digest(continued(first, "both", str(place / "second"), f"samples:{row},{row + 1}"))
    assert {str(path.relative_to(tmp_path)) for path in rewound.deleted} == {
        *(f"{name}/{file}" for name in ("run-2", "edited") for file in ("model.safetensors", "ledger.safetensors")),
        "run-2/epochs",
        "edited/patches",
    }
    assert not any(path.exists() for path in rewound.deleted)
    assert (tmp_path / "first" / "model.safetensors").exists(), "it never met the data"


def test_a_killed_rewind_goes_on_to_the_same_bytes(second: Run, tmp_path: Path) -> None:
    request = f"samples:{second.record.data.first_new}"

    class Killed(Exception):
        pass

    def kill(news: Progress) -> None:
        if len(news.history) == 1:
            raise Killed

    with pytest.raises(Killed):
        rewind_run(second, request, tmp_path / "out", watch=kill)
    resumed = rewind_run(second, request, tmp_path / "out").run
    assert digest(resumed) == digest(rewind_run(second, request, tmp_path / "whole").run)
    assert len(resumed.history()) == 2
    assert sorted(kept_rounds(resumed.path, "epochs")) == [1]


def test_an_image_that_its_owner_has_deleted_is_taken_back_by_its_row(
    first: Run, second: Run, place: Path, tmp_path: Path
) -> None:
    row = second.record.data.first_new
    wanted = continued(first, "check-deleted", str(place / "second"), f"samples:{row}")
    edited = forget_run(second, f"samples:{row}", Paper(), out=second.path.parent / "edited-2", purge=False).run
    assert edited is not None
    name = second.load_data().train.ids.files[row]
    file = (place / "images" / name).resolve()
    kept = file.read_bytes()
    file.unlink()
    try:
        other = f"samples:{row + 1}"
        rewound = rewind_run(edited, other, tmp_path / "rewound").run
    finally:
        file.write_bytes(kept)
    assert digest(rewound) == digest(continued(first, "check-both", str(place / "second"), f"samples:{row},{row + 1}"))
    assert digest(rewound) != digest(wanted)


def test_what_cannot_be_continued_is_refused(first: Run, second: Run, place: Path, tmp_path: Path) -> None:
    with pytest.raises(BadSetting, match="--continue RUN"):
        replace(BASE, new_images="somewhere")
    with pytest.raises(BadSetting, match="keep-epochs is 'some'; expected all, powers or a number"):
        replace(BASE, keep_epochs="some")
    new = folder(tmp_path, "dogs", {"dog": 2}, 0)
    with pytest.raises(BadData, match="class 'dog' of the new images is not among the 3 classes"):
        continued(first, "dogs", new)
    with pytest.raises(FedOrthoError, match=r"model is 'small:SmallNet'; .* has 'small:TinyNet'"):
        train_run(tmp_path / "other", replace(second.settings, model="small:SmallNet"))
    edited = forget_run(first, "class:cow", Paper(), out=tmp_path / "edited").run
    assert edited is not None
    with pytest.raises(FedOrthoError, match=r"has forgotten class:cow.* could bring it back"):
        continued_settings(edited, {})
    shutil.copytree(second.path, tmp_path / "alone")
    lost = open_run(tmp_path / "alone")
    lost = replace(lost, settings=replace(lost.settings, start=str(tmp_path / "gone")))
    with pytest.raises(BadCheckpoint, match=r"continued .*gone, whose model is needed"):
        plan_rewind(lost, f"samples:{second.record.data.first_new}")


def test_a_reference_of_a_continued_run_continues_the_same_run(first: Run, second: Run, place: Path) -> None:
    row = second.record.data.first_new
    new, old = ForgetRequest.parse(f"samples:{row}"), ForgetRequest.parse("samples:1")
    assert reference_settings(second, new).start == second.settings.start
    with pytest.raises(CannotServe, match="forget --level exact"):
        reference_settings(second, old)
    assert find_references(second, old) == []
    wanted = continued(first, "reference", str(place / "second"), str(new))
    check_reference(second, wanted, new)
    trained_with_it = continued(first, "no-reference", str(place / "second"), "samples:1")
    with pytest.raises(FedOrthoError, match="began with another model"):
        check_reference(second, trained_with_it, old)


def test_the_commands_continue_and_take_back(first: Run, second: Run, place: Path, tmp_path: Path) -> None:
    words = ("train", "--continue", first.path, "--new-images", place / "second", "--epochs", 2, "--lr", 0.02)
    shown = told(*words, "--keep-epochs", "all", "--out", tmp_path / "run")
    assert digest(open_run(tmp_path / "run")) == digest(second)
    assert "epochs kept: 1" in shown
    assert f"images from row {second.record.data.first_new} on joined" in shown
    request = f"samples:{second.record.data.first_new}"
    assert "back to the end of epoch 3" in told("forget", tmp_path / "run", request, "--dry-run")
    shown = told("forget", tmp_path / "run", request, "--out", tmp_path / "left")
    assert f"the same as train --without {request}" in shown
    wanted = continued(first, "by-command", str(place / "second"), request)
    assert digest(open_run(tmp_path / "left")) == digest(wanted)


def test_a_rewind_trains_on_the_device_that_is_given(second: Run, tmp_path: Path) -> None:
    request = f"samples:{second.record.data.first_new}"
    plan = plan_rewind(second.at(device="cuda:99"), request)
    assert {plan.settings.device, *(stage.settings.device for stage in plan.stages)} == {"cuda:99"}
    with pytest.raises(BadSetting, match="the device cuda:99 is not available"):
        forget_run(second, request, level="exact", out=tmp_path / "out", device="cuda:99")
