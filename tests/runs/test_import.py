"""Models that were trained elsewhere: their preprocessing, held-out images, references, and code that a run names."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from commands import told
from once import made_once
from PIL import Image
from small import SETTINGS
from torch import Tensor, nn

import fedortho as fo
from fedortho.data.images import images_from_tensors
from fedortho.data.request import ForgetRequest
from fedortho.data.sources import load_images
from fedortho.engines.central import CentralEngine
from fedortho.engines.query import Query, Selection, Statistic
from fedortho.errors import BadData, BadSetting, FedOrthoError
from fedortho.federated.client import client_reply, find_client
from fedortho.methods.method import CannotServe
from fedortho.models.predictions import accuracy
from fedortho.requests import climbing
from fedortho.requests.references import check_reference, find_references
from fedortho.runs.run import open_run
from fedortho.runs.settings import ImportSettings, TrainSettings
from fedortho.runs.training import _measure_scales, import_run, train_run
from fedortho.storage.journal import read_journal
from fedortho.storage.settings import as_mapping

HOW = {"data": "digits", "model": "small:SmallNet", "device": "cpu"}
TRAINED = TrainSettings(**HOW, epochs=4, scale="0-1", crop=0, flip=0.0, ortho=0.0, lr=0.1, threads=1)  # type: ignore[arg-type]  # words
HELD_OUT = ImportSettings(**HOW, scale="0-1", valid_from_test=0.5)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network that was trained on pixels / 255."""
    place = made_once(tmp_path_factory, "trained-on-0-1", lambda place: train_run(place / "run", TRAINED))
    return place / "run" / "model.safetensors"


@pytest.fixture(scope="module")
def imported(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_once(tmp_path_factory, "imported", lambda place: import_run(place / "run", weights, HELD_OUT)) / "run"


def test_with_two_classes_an_accuracy_near_that_of_a_guess_is_asked_about_too() -> None:
    class Bright(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            right = x.mean((1, 2, 3)) > 0.5  # the bright images of class 1; class 0 has none
            return torch.stack([(~right).float(), right.float()], 1)

    levels = torch.cat([torch.full((300,), 40), torch.full((180,), 40), torch.full((120,), 200)]).to(torch.uint8)
    images = images_from_tensors(levels.view(-1, 1, 1, 1).expand(-1, 1, 4, 4).contiguous(), torch.arange(600) // 300)
    with pytest.raises(BadSetting, match=r"0-1 70\.0%.*--scale 0-1"):
        _measure_scales(Bright(), images, torch.device("cpu"), Path("two.pt"))


def test_a_preprocessing_that_matters_is_asked_for_and_kept(weights: Path, imported: Path, tmp_path: Path) -> None:
    settings = ImportSettings(**HOW, valid_from_test=0.5)
    with pytest.raises(
        BadSetting, match=r"by preprocessing: 0-1 \d\d\.\d%, .*data .*trained with: --scale 0-1 \(else"
    ) as refusal:
        import_run(tmp_path / "run", weights, settings)
    assert "\n" not in str(refusal.value)
    assert not (tmp_path / "run").exists()
    run = open_run(imported)
    data, model = run.load_data(), run.load_model()
    assert run.record.result.test_accuracy == accuracy(model, data.test) > 0.85
    assert (data.train.mean, data.train.std) == ((0.0,), (1.0,))
    plain = load_images("digits")
    assert accuracy(model, plain.test) < 0.7, "as it was imported before"


def test_without_a_measurable_difference_the_statistics_of_the_data_are_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    torch.save(fo.build_model("small:SmallNet", num_classes=10, channels=1).state_dict(), tmp_path / "blank.pt")
    run = import_run(tmp_path / "run", tmp_path / "blank.pt", ImportSettings(**HOW))
    assert "no measurable difference, so data is taken" in caplog.text
    assert "check the preprocessing, --model and the order of the classes" in caplog.text, "it knows nothing"
    assert run.settings.scale == "data"


def test_numbers_say_which_validation_images_they_are_about(
    weights: Path, imported: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert open_run(imported).record.data.valid_source == "50% of the test split, which is without them"
    assert "has probably seen" not in caplog.text
    run = import_run(tmp_path / "run", weights, replace(HELD_OUT, valid_from_test=0.0))
    assert run.record.data.valid_source == "part of the training split, probably seen in training"
    assert "--valid DIR or --valid-from-test 0.5" in caplog.text
    assert open_run(weights.parent).record.data.valid_source == "part of the training split"


def test_validation_images_of_the_test_split_are_never_taken_for_training_images(imported: Path) -> None:
    run = open_run(imported)
    data, whole = run.load_data(), load_images("digits", valid=0.0)
    assert len(data.train) == len(whole.train), "nothing is split off"
    assert len(data.valid) + len(data.test) == len(whole.test)
    used = torch.cat([data.valid.rows + len(data.valid.pixels), data.test.rows])
    assert used.sort().values.tolist() == whole.test.rows.tolist(), "each test image once"
    rows = torch.arange(len(data.valid.pixels))
    assert torch.isin(rows, data.train.rows).any(), "their rows in the store are those of training images"
    named = ForgetRequest(samples=tuple(map(str, data.train.rows[:300].tolist())))
    assert not named.mask(data.valid).any()
    assert len(Selection("valid", exclude=named).select(data.valid)) == len(data.valid)
    model = run.load_model()
    engine = CentralEngine(data)
    ((valid,), (train,)) = engine.measure(
        model, [Query((Selection(split),), Statistic("peaks")) for split in ("valid", "train")]
    )
    assert valid.images == len(data.valid)
    swapped = replace(data, train=data.valid)
    ((alone,),) = CentralEngine(swapped).measure(model, [Query((Selection(),), Statistic("peaks"))])
    assert all(torch.equal(valid.sums[key], alone.sums[key]) for key in alone.sums)
    assert not all(torch.equal(valid.sums[key], train.sums[key]) for key in alone.sums)


def test_validation_images_may_come_from_a_directory(weights: Path, tmp_path: Path) -> None:
    digits, place = load_images("digits"), tmp_path / "held-out"
    for number, row in enumerate(digits.test.rows[:60].tolist()):
        folder = place / digits.test.names[int(digits.test.store_labels[row])]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(digits.test.pixels[row, 0].numpy()).save(folder / f"{number}.png")
    settings = replace(HELD_OUT, valid_from_test=0.0, valid=str(place))
    run = import_run(tmp_path / "run", weights, settings)
    data = run.load_data()
    assert (len(data.valid), len(data.train)) == (60, len(digits.train) + len(digits.valid))
    assert run.record.data.valid_source == f"images of {place}"
    assert accuracy(run.load_model(), data.valid) == run.record.result.valid_accuracy > 0.8
    Image.new("L", (8, 8), 7).save(next(place.glob("*/0.png")))
    with pytest.raises(BadData, match="is not the data that"):
        run.load_data()
    (place / "eleven").mkdir()
    Image.new("L", (8, 8), 7).save(place / "eleven" / "x.png")
    with pytest.raises(BadData, match="class 'eleven' of the test split is not among the 10 classes"):
        import_run(tmp_path / "other", weights, settings)
    with pytest.raises(BadSetting, match="contradict each other"):
        import_run(tmp_path / "other", weights, replace(settings, valid_from_test=0.5))


def test_validation_images_of_the_test_split_stay_apart_after_images_were_deleted(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    for number in range(60):
        folder = tmp_path / "photos" / ("test" if number % 2 else "train") / "abc"[number % 3]
        folder.mkdir(parents=True, exist_ok=True)
        pixels = torch.randint(0, 256, (8, 8), dtype=torch.uint8, generator=generator)
        Image.fromarray(pixels.numpy()).save(folder / f"{number}.png")
    torch.save(fo.build_model("small:SmallNet", num_classes=3, channels=1).state_dict(), tmp_path / "blank.pt")
    settings = replace(HELD_OUT, data=str(tmp_path / "photos"), scale="-1-1", without="class:a")
    run = import_run(tmp_path / "run", tmp_path / "blank.pt", settings)
    before = run.load_data()
    for folder in tmp_path.glob("photos/*/a"):
        shutil.rmtree(folder)
    after = run.load_data()
    assert after.valid.rows.tolist() == before.valid.rows[before.valid.labels != 0].tolist()
    assert after.test.rows.tolist() == before.test.rows[before.test.labels != 0].tolist()
    assert torch.equal(after.valid.pixels[after.valid.rows], before.valid.pixels[after.valid.rows])
    assert (after.train.mean, after.train.std) == ((0.5,), (0.5,))


def test_an_imported_model_forgets_and_is_judged_by_a_reference_from_elsewhere(
    weights: Path, imported: Path, tmp_path: Path
) -> None:
    run = open_run(shutil.copytree(imported, tmp_path / "runs" / "original"))
    reference = train_run(tmp_path / "elsewhere", replace(TRAINED, without="class:3", epochs=2))
    fo.forget_run(run, "class:3", "hide", out=tmp_path / "runs" / "forgot")
    options = fo.JudgeOptions(audit="none", retrain=True, device="cpu")
    with pytest.raises(CannotServe, match=r"untrained network, no reference; .*--recipe FILE.toml .*--without REQUEST"):
        fo.judge_run(tmp_path / "runs" / "forgot", options=options)
    assert not list((tmp_path / "runs").glob("references/*"))
    brought = import_run(
        tmp_path / "runs" / "brought",
        reference.path / "model.safetensors",
        replace(HELD_OUT, without="class:3", valid_from_test=0.0),
    )
    assert brought.settings.without == "class:3"
    assert [found.path.name for found in find_references(run, ForgetRequest.parse("class:3"))] == ["brought"]
    assert find_references(run, ForgetRequest.parse("class:4")) == []
    verdict = fo.judge_run(tmp_path / "runs" / "forgot", options=options)
    assert verdict.digests["reference"] == reference.record.model.digest
    retrain, *_ = fo.compare(run, "class:3", "retrain,hide", out=tmp_path / "compared", references=tmp_path / "runs")
    assert (retrain.weights, retrain.cost) == (reference.record.model.digest, None), "its cost is not known"
    other = import_run(
        tmp_path / "other", reference.path / "model.safetensors", replace(HELD_OUT, without="class:3", scale="data")
    )
    with pytest.raises(FedOrthoError, match="another preprocessing"):
        check_reference(run, other, ForgetRequest.parse("class:3"))


def test_with_a_recipe_references_of_an_imported_model_are_trained(
    weights: Path, imported: Path, tmp_path: Path
) -> None:
    recipe = fo.Recipe(epochs=1, crop=0, flip=0.0, ortho=0.0, lr=0.1, seed=3)
    run = import_run(tmp_path / "run", weights, HELD_OUT, recipe)
    assert (run.settings.epochs, run.settings.seed, run.settings.partition_seed) == (1, 3, 0)
    assert run.load_data().valid.rows.tolist() == open_run(imported).load_data().valid.rows.tolist()
    fo.forget_run(run, "class:3", "hide", out=tmp_path / "forgot")
    verdict = fo.judge_run(tmp_path / "forgot", options=fo.JudgeOptions(audit="none", retrain=True, device="cpu"))
    (reference,) = (tmp_path / "references").iterdir()
    trained = open_run(reference)
    assert verdict.digests["reference"] == trained.record.model.digest
    assert (trained.settings.scale, trained.settings.epochs, trained.settings.without) == ("0-1", 1, "class:3")
    later = open_run(imported).at(recipe=recipe)
    assert (later.settings.epochs, later.settings.partition_seed) == (1, 0)


def test_a_training_of_no_epochs_is_refused(tmp_path: Path) -> None:
    for settings in (replace(TRAINED, epochs=0), replace(SETTINGS, rounds=0)):
        with pytest.raises(BadSetting, match="at least 1: the network would stay untrained"):
            fo.train_run(tmp_path / "run", settings)
    assert not (tmp_path / "run").exists()


@pytest.fixture
def stranger(imported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Somebody else's run, whose network leaves a trace when it is built."""
    monkeypatch.delenv("FEDORTHO_TRUST_CODE")
    monkeypatch.setenv("FEDORTHO_STATE", str(tmp_path / "state"))
    monkeypatch.syspath_prepend(tmp_path / "modules")
    (tmp_path / "modules").mkdir()
    code = f"from pathlib import Path\nPath({str(tmp_path / 'harm')!r}).touch()\nfrom small import SmallNet\n"
    (tmp_path / "modules" / "strangers_net.py").write_text(code)
    record = json.loads((imported / "run.json").read_text())
    record["settings"]["model"] = "strangers_net:SmallNet"
    shutil.copytree(imported, tmp_path / "run")
    (tmp_path / "run" / "run.json").write_text(json.dumps(record))
    return tmp_path / "run"


def test_code_that_somebody_elses_run_names_is_run_only_when_trusted(stranger: Path, tmp_path: Path) -> None:
    with pytest.raises(FedOrthoError, match=r"names strangers_net:SmallNet, .*strangers_net.py; .*--trust-code"):
        open_run(stranger)
    record = json.loads((stranger / "run.json").read_text())
    record["settings"] |= {"model": "vgg-mini", "scale": "", "transform": "strangers_net:SmallNet"}
    (stranger / "run.json").write_text(json.dumps(record))
    with pytest.raises(FedOrthoError, match="names strangers_net:SmallNet"):
        open_run(stranger)
    assert not (tmp_path / "harm").exists()
    open_run(stranger, trust_code=True)
    open_run(stranger)


def test_a_client_runs_no_code_that_the_server_names(stranger: Path, tmp_path: Path) -> None:
    config = as_mapping(replace(SETTINGS, model="strangers_net:SmallNet"))
    with pytest.raises(FedOrthoError, match="the federation's configuration names strangers_net:SmallNet"):
        find_client({"partition-id": 0, "store": str(tmp_path / "store")}, config)
    with pytest.raises(Exception, match="the client's own log says why"):
        client_reply("query.hello", {"partition-id": 0, "store": str(tmp_path / "store")}, config, {}, {})
    assert not (tmp_path / "harm").exists()


def test_a_name_that_the_user_trains_with_is_trusted(stranger: Path, tmp_path: Path) -> None:
    run = train_run(tmp_path / "own", replace(TRAINED, model="strangers_net:SmallNet", epochs=1))
    assert open_run(tmp_path / "own").record.model.digest == run.record.model.digest
    open_run(stranger)


@pytest.mark.parametrize("words", [("--retrain",), ("--retrain", "--dry-run"), ("--level", "exact")])
def test_what_needs_the_recipe_of_an_imported_model_is_refused_before_anything_is_done(
    imported: Path, tmp_path: Path, words: tuple[str, ...]
) -> None:
    run = shutil.copytree(imported, tmp_path / "runs" / "original")
    with pytest.raises(CannotServe, match=r"untrained network, no reference; .*--recipe FILE.toml"):
        told("forget", run, "class:3", *words)
    assert [path.name for path in run.parent.iterdir()] == ["original"]
    (tmp_path / "recipe.toml").write_text("epochs = 1\n")
    plan = told("forget", run, "class:3", *words, "--recipe", tmp_path / "recipe.toml", "--dry-run")
    assert "--level" in words or "(2 epochs; the level exact costs no more" in plan


@pytest.mark.slow
def test_an_imported_model_climbs_without_retraining_where_a_reference_is_given(
    imported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = open_run(shutil.copytree(imported, tmp_path / "runs" / "original"))
    torch.save(fo.build_model("small:SmallNet", num_classes=10, channels=1).state_dict(), tmp_path / "other.pt")
    without = replace(HELD_OUT, without="class:3")
    reference = import_run(tmp_path / "runs" / "brought", tmp_path / "other.pt", without)
    plan = told("forget", run.path, "class:3", "--until", "passed", "--dry-run")
    assert "hide, by" in plan
    assert "exact, by" not in plan
    monkeypatch.setattr(climbing._Validation, "check", fail)
    tried: list[str] = []
    with pytest.raises(climbing.NotPassed, match=r"C1 FAIL; the last level is retraining, which needs --recipe"):
        climbing.forget_until_passed(
            run,
            "class:3",
            fo.JudgeOptions(reference=reference.path, device="cpu"),
            out=tmp_path / "runs" / "new",
            on_attempt=lambda attempt: tried.append(attempt.level),
        )
    assert tried == ["hide"], "erase was the last, and a network of one stage has no deeper one"
    assert not (tmp_path / "runs" / "new").exists()


def fail(*_: object) -> None:
    raise climbing.NotPassed("C1 FAIL")


def test_ways_to_forget_samples_of_an_imported_model_are_in_the_order_of_passes(imported: Path) -> None:
    listed = told("forget", imported, "samples:0", "--dry-run").splitlines()
    passes = [float(line.split(" (")[1].split()[0]) for line in listed if "passes over" in line]
    assert len(passes) > 5
    assert passes == sorted(passes)
    with pytest.raises(CannotServe, match=r"; \d+ more that --dry-run lists; --level exact"):
        told("forget", imported, "samples:0")
    plan = told("forget", imported, "class:3", "--dry-run")
    assert "(10 passes, 50% of the images flipped left to right;" in plan
    assert "): 10 passes over the training images" in plan
    assert "--retrain trains one by the training that --recipe FILE names" in plan


@pytest.mark.parametrize(
    ("request_", "why"),
    [("client:1", "needs a federation; this model was trained without clients"), ("samples:99999", "the id 99999")],
)
def test_what_a_run_does_not_have_is_refused_before_ways_are_listed(imported: Path, request_: str, why: str) -> None:
    for words in (("--dry-run",), ()):
        with pytest.raises(FedOrthoError, match=why):
            told("forget", imported, request_, *words)


def test_a_request_that_cannot_be_hidden_first_for_another_reason_has_an_end_in_the_journal(
    imported: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(imported, tmp_path / "runs" / "original")
    with pytest.raises(FedOrthoError, match="the retain set is empty"):
        told("forget", run, "class:0,1,2,3,4,5,6,7,8,9", "--out", tmp_path / "runs" / "none")
    assert [entry.event for entry in read_journal(run.parent).entries] == ["received", "refused"]
