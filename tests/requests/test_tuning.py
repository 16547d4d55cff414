"""Tuning: an equal budget, validation images only."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import fedortho.requests.run_context as context_module
import fedortho.requests.tuning as tune_module
from fedortho.data.request import ForgetRequest
from fedortho.engines.central import CentralEngine
from fedortho.engines.engine import Engine
from fedortho.errors import BadSetting, FedOrthoError, UnknownName
from fedortho.methods import METHODS
from fedortho.methods.hyperparameters import read_settings
from fedortho.methods.method import Method
from fedortho.requests.tuning import FIXED, Attempt, Budget, TuningTrials, candidates, tune, tune_method
from fedortho.runs.run import Run, load_run_data
from fedortho.runs.settings import TrainSettings
from fedortho.runs.training import train_run
from fedortho.storage.records import read_record

REQUEST = ForgetRequest.parse("class:3")
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    settings = TrainSettings(data="digits", model="small:SmallNet", epochs=3, crop=0, flip=0.0, threads=1, device="cpu")
    return train_run(tmp_path_factory.mktemp("tune") / "run", settings)


@pytest.mark.parametrize("name", sorted(METHODS.keys() - set(FIXED)))
def test_every_method_is_given_six_different_trials_that_it_accepts(name: str) -> None:
    found = candidates(name, Budget())
    assert len({str(settings) for settings in found}) == 6
    for settings in found:
        METHODS[name](**settings)


def test_the_best_attempt_comes_first_and_no_test_image_is_needed(run: Run, tmp_path: Path) -> None:
    data = load_run_data(run.settings)
    without_test = replace(data, test=data.test.subset([]))
    seen = []
    found = tune_method(
        run, without_test, REQUEST, "ssd", Budget(images=500), watch=lambda number, _: seen.append(number)
    )
    assert seen == [0, 1, 2, 3, 4, 5]
    assert [attempt.score for attempt in found] == sorted(attempt.score for attempt in found)
    best = found[0]
    assert 0 <= best.score < 0.2
    assert best.forget <= 2 * best.score, "half of the score is how far the class is from being gone"


def test_all_that_can_be_tuned_is_and_what_was_is_not_tuned_again(run: Run, tmp_path: Path) -> None:
    data, file, budget, seen = load_run_data(run.settings), tmp_path / "tuned.json", Budget(2, 300), []

    def go(names: list[str]) -> dict[str, list[Attempt]]:
        told = lambda name, number, _: seen.append((name, number))  # noqa: E731
        return tune(
            run,
            REQUEST,
            names,
            out=file,
            data=data,
            budget=budget,
            settings={"finetune": {"batch_size": 32}},
            watch=told,
        )

    first = go(["ssd"])
    assert seen == [("ssd", 0), ("ssd", 1)]
    with pytest.raises(FedOrthoError, match="logit-mask has nothing to tune"):
        go(["ssd", "logit-mask"])
    found = go(["ssd", "finetune"])
    assert seen[2:] == [("finetune", 0), ("finetune", 1)]
    assert found["ssd"] == first["ssd"]
    with pytest.raises(FedOrthoError, match="another model, request, budget or settings"):
        tune(run, REQUEST, ["ssd"], out=file, data=data, budget=budget, settings={"ssd": {"batch_size": 16}})
    assert all(attempt.settings["batch_size"] == 32 for attempt in found["finetune"])
    best = {name: dict(attempts[0].settings) for name, attempts in found.items()}
    assert read_settings(run.settings.data, run.settings.model, str(file)) == best
    assert read_record(TuningTrials, tmp_path / "tuned.trials.json").budget == Budget(2, 300, 2, 0)
    file.unlink()  # as if killed after the trials were written
    number = len(seen)
    go(["ssd"])
    assert len(seen) == number, "nothing is tried again"
    assert read_settings(run.settings.data, run.settings.model, str(file)) == best
    with pytest.raises(FedOrthoError, match="about another model, request, budget or settings"):
        tune(run, ForgetRequest.parse("class:4"), ["ssd"], out=file, data=data, budget=budget)


def test_an_attempt_that_fails_says_why_and_never_is_the_best(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    rates, really = [], tune_module.unlearn

    def broken(model: nn.Module, engine: Engine, request: ForgetRequest, method: Method) -> nn.Module:
        rates.append(method)
        if len(rates) % 2 or len(rates) > 2:
            raise FedOrthoError("the loss diverged")
        return really(model, engine, request, method)

    monkeypatch.setattr(tune_module, "unlearn", broken)
    data = load_run_data(run.settings)
    found = tune_method(run, data, REQUEST, "ssd", Budget(trials=2, images=300))
    assert [attempt.error for attempt in found] == ["", "the loss diverged"]
    with pytest.raises(FedOrthoError, match="no settings of ssd worked, so none is best: the loss diverged"):
        tune_method(run, data, REQUEST, "ssd", Budget(trials=2, images=300))


def test_an_attempt_gets_the_model_on_the_cpu_and_the_engine_the_device(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = []

    def looking(model: nn.Module, engine: Engine, request: ForgetRequest, method: Method) -> nn.Module:
        assert isinstance(engine, CentralEngine)
        devices.extend([str(engine.device), *{weight.device.type for weight in model.parameters()}])
        raise FedOrthoError("that was all")

    monkeypatch.setattr(context_module, "choose_device", lambda _: torch.device("meta"))
    monkeypatch.setattr(tune_module, "_baseline", lambda *_: (1.0, 0.0))
    monkeypatch.setattr(tune_module, "unlearn", looking)
    with pytest.raises(FedOrthoError, match="that was all"):
        tune_method(run, load_run_data(run.settings), REQUEST, "ssd", Budget(trials=1))
    assert devices == ["meta", "cpu"]


def test_what_cannot_be_tuned_is_refused(run: Run) -> None:
    data = load_run_data(run.settings)
    with pytest.raises(FedOrthoError, match="retrain has nothing to tune; choose from"):
        tune_method(run, data, REQUEST, "retrain")
    with pytest.raises(UnknownName, match="no method 'bogus'"):
        tune_method(run, data, REQUEST, "bogus")
    with pytest.raises(FedOrthoError, match="unsir does not serve samples:1"):
        tune_method(run, data, ForgetRequest.parse("samples:1"), "unsir")
    with pytest.raises(BadSetting, match="must be at least 1"):
        Budget(trials=0)


def test_a_place_that_cannot_be_written_is_refused_before_any_trial(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "mine.json").write_text("{}")
    for place, why in ((tmp_path, "is a directory"), (tmp_path / "file" / "t.json", "cannot be written")):
        with pytest.raises(FedOrthoError, match=f"{why}.* --out"):
            tune(
                run,
                REQUEST,
                ["ssd"],
                out=place,
                data=load_run_data(run.settings),
                watch=lambda *_: pytest.fail("a trial"),
            )
    with pytest.raises(FedOrthoError, match=r"without mine.trials.json beside it; choose another --out"):
        tune(run, REQUEST, ["ssd"], out=tmp_path / "mine.json", data=load_run_data(run.settings))
    assert (tmp_path / "mine.json").read_text() == "{}"
    (tmp_path / "mine.trials.json").write_text("[]")
    with pytest.raises(FedOrthoError, match=r"mine.trials.json is \[\].*choose another --out"):
        tune(run, REQUEST, ["ssd"], out=tmp_path / "mine.json", data=load_run_data(run.settings))


@pytest.mark.parametrize("file", sorted(RESULTS.glob("tuning/*.trials.json")), ids=lambda path: path.stem)
def test_trials_of_the_benchmarks_can_be_read(file: Path) -> None:
    trials = read_record(TuningTrials, file)
    assert all(attempts == tuple(sorted(attempts, key=lambda a: a.score)) for attempts in trials.attempts.values())
