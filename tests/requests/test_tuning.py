"""Tuning: an equal budget, validation images only."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from once import run_once
from torch import nn

import fedortho.requests.run_context as context_module
import fedortho.requests.tuning as tune_module
from fedortho.data.request import ForgetRequest
from fedortho.engines.central import CentralEngine
from fedortho.engines.engine import Engine
from fedortho.errors import BadSetting, Busy, FedOrthoError, UnknownName
from fedortho.evaluation.shadow_limit import ShadowLimit
from fedortho.methods import METHODS
from fedortho.methods.hyperparameters import read_settings
from fedortho.methods.method import Method
from fedortho.requests.run_context import RunContext, open_context
from fedortho.requests.search import FIXED, GRIDS, Attempt, Budget, GridSearch, Search, grid_of
from fedortho.requests.tuning import TuningTrials, stand_in, tune, tune_method
from fedortho.runs.run import Run, load_run_data
from fedortho.runs.settings import TrainSettings
from fedortho.storage.files import locked, read_json
from fedortho.storage.records import read_record

REQUEST = ForgetRequest.parse("class:3")
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    settings = TrainSettings(data="digits", model="small:QuickNet", epochs=3, crop=0, flip=0.0, threads=1, device="cpu")
    return run_once(tmp_path_factory, tmp_path_factory.mktemp("tune") / "run", settings)


@pytest.fixture(scope="module")
def context(run: Run) -> RunContext:
    return open_context(run, load_run_data(run.settings))


def pretend(monkeypatch: pytest.MonkeyPatch, score_of: Any) -> list[tuple[Mapping[str, Any], int]]:
    """Replace trials by a function of their settings and images; returns the list of what was tried."""
    tried = []

    def attempt(context: RunContext, request: Any, name: str, settings: Mapping[str, Any], *_: Any) -> Attempt:
        images = len(context.data.train)
        tried.append((dict(settings), images))
        return Attempt(dict(settings), images, 0.0, 0.9, score_of(settings, images))

    monkeypatch.setattr(tune_module, "_attempt", attempt)
    monkeypatch.setattr(tune_module, "_baseline", lambda *_: (1.0, 0.0))
    return tried


@pytest.mark.parametrize("name", sorted(METHODS.keys() - set(FIXED)))
def test_every_grid_fits_the_same_budget_and_holds_values_that_the_method_accepts(name: str) -> None:
    grid = grid_of(name)
    sizes = [len(values) for values in grid.values()]
    assert 5 <= torch.tensor(sizes).prod() <= Budget().candidates
    for key, values in grid.items():
        assert list(values) == sorted(set(values))
        for value in values:
            METHODS[name](**{key: value})


def test_the_papers_alpha_is_never_tuned_and_searches_that_were_bound_are_wider() -> None:
    assert "alpha" not in GRIDS["paper"]
    assert 0.001 in GRIDS["unsir"]["repair_lr"]
    assert GRIDS["fused"]["lr"][-1] > 0.5
    assert len(GRIDS["ssd"]["lam"]) > 1


def test_a_search_that_binds_goes_beyond_its_grid_at_the_reported_size(
    context: RunContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported = len(context.data.train)
    tried = pretend(monkeypatch, lambda settings, _: abs(settings["lr"] - 0.9))
    found = tune_method(context, REQUEST, "finetune", Budget(images=500))
    assert [images for _, images in tried] == [500] * 5 + [reported] * 5, "two of the grid, three beyond it"
    assert found.best is not None
    assert found.best.settings["lr"] == 1.11, "0.1 is the edge of the grid, steps are factors"
    assert found.choices["lr"].highest == 3.7
    assert found.choices["lr"].inside
    worse = pretend(monkeypatch, lambda settings, _: abs(settings["lr"] - 1e6))
    bound = tune_method(context, REQUEST, "finetune", Budget(images=500))
    assert len(worse) == 5 + 6 + 4, "no method gets more: the grid, the trials and those beyond the edge"
    assert not bound.choices["lr"].inside
    assert not bound.settled


def test_trials_beyond_the_budget_are_only_for_a_best_value_at_the_edge(
    context: RunContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    edge = pretend(monkeypatch, lambda settings, _: abs(settings["lr"] - 1.0))
    found = tune_method(context, REQUEST, "finetune", Budget(images=500, trials=2))
    assert [settings["lr"] for settings, _ in edge[5:]] == [0.1, 0.03, 0.333, 1.11, 3.7]
    assert found.choices["lr"].inside
    perfect = pretend(monkeypatch, lambda settings, _: 0.0 if settings["lr"] == 0.1 else 1.0)
    tune_method(context, REQUEST, "finetune", Budget(images=500, trials=2))
    assert len(perfect) == 5 + 2, "a score of 0 cannot be improved"
    inner = pretend(monkeypatch, lambda settings, _: abs(settings["lr"] - 0.02))
    found = tune_method(context, REQUEST, "finetune", Budget(images=500, trials=2))
    assert len(inner) == 5 + 2, "its neighbours are left untried, and it is not called settled"
    assert not found.settled


def test_the_chosen_value_was_measured_at_the_reported_size_beside_its_neighbours(
    context: RunContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported = len(context.data.train)
    best = {500: 0.1, reported: 0.003}  # fewer images, fewer steps: a higher rate seems best
    tried = pretend(monkeypatch, lambda settings, images: abs(settings["lr"] - best[images]))
    found = tune_method(context, REQUEST, "finetune", Budget(images=500))
    assert found.best is not None
    assert (found.best.settings["lr"], found.best.images) == (0.003, reported)
    assert found.settled
    assert {settings["lr"] for settings, images in tried if images == reported} >= {0.001, 0.003, 0.01}


def test_of_equal_settings_the_one_that_was_better_on_fewer_images_is_chosen_not_the_weakest() -> None:
    search = GridSearch("ssd", Budget(), 100, 1000)
    for alpha, images, score, retain in (
        (50.0, 100, 0.0, 0.80),
        (100.0, 100, 0.003, 0.82),
        (50.0, 1000, 0.0, 0.80),
        (100.0, 1000, 0.0, 0.82),  # retains more, and is nearer to what forgets nothing
        (200.0, 1000, 0.4, 0.83),
    ):
        search.made.append(Attempt({"alpha": alpha, "lam": 1.0}, images, 2 * score, retain, score))
    best = search.result().best
    assert best is not None
    assert best.settings["alpha"] == 50.0


def test_a_value_at_the_limit_of_a_setting_is_no_edge_of_the_search(
    context: RunContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, lambda settings, _: 1 - settings["ratio"])
    found = tune_method(context, REQUEST, "paper", Budget(images=500))
    assert found.choices["ratio"].value == 1.0, "a step from 0.8 leads beyond 1, which is allowed itself"
    assert found.choices["ratio"].inside
    pretend(monkeypatch, lambda settings, _: 1 - settings["beta"])
    beta = tune_method(context, REQUEST, "neggrad", Budget(images=500)).choices["beta"]
    assert 0.98 < beta.value < 1, "its steps approach 1"


def test_a_value_between_the_grid_and_the_limit_of_a_setting_is_an_edge_of_the_search(
    context: RunContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, lambda settings, _: 1 - settings["ratio"] + abs(settings["lr"] - 0.013))
    found = tune_method(context, REQUEST, "salun", Budget(images=500, trials=2, widening=0))
    assert found.choices["ratio"].value == 0.8
    assert not found.choices["ratio"].inside, "1 was not tried"


def test_between_an_unchanged_model_and_a_ruined_one_a_search_looks_further() -> None:
    search = GridSearch("ssd", Budget(), 1000, 1000)
    while (step := search.following()) is not None:
        alpha, is_unchanged = step[0]["alpha"], step[0]["alpha"] > 9
        score = 0.04 if is_unchanged else 0.01 + (9 - alpha) / 18
        search.made.append(Attempt(step[0], step[1], 0.5, 0.9, score, unchanged=is_unchanged))
    found = search.result()
    assert found.best is not None
    assert 7 < found.best.settings["alpha"] < 9, "3 ruins the model and 10 leaves it as it was"
    assert len(search.made) <= 12 + Budget().trials


def test_settings_that_leave_the_model_as_it_was_are_never_inside(context: RunContext) -> None:
    attempts = {
        alpha: tune_module._attempt(context, REQUEST, "ssd", {"alpha": alpha, "lam": 0.3}, Budget(), 0.9, 0.0)
        for alpha in (1.0, 1e9)
    }
    assert [attempt.unchanged for attempt in attempts.values()] == [False, True]
    search = GridSearch("ssd", Budget(), 1000, 1000)
    for alpha, score in ((3.0, 0.5), (10.0, 0.1), (30.0, 0.2)):
        search.made.append(Attempt({"alpha": alpha, "lam": 0.3}, 1000, 0.5, 0.9, score, unchanged=alpha == 10.0))
    assert not search.result().choices["alpha"].inside


def test_no_value_is_inside_if_all_of_them_do_the_same(context: RunContext, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, lambda *_: 0.4)
    found = tune_method(context, REQUEST, "ssd", Budget(images=500))
    assert not found.choices["alpha"].inside, "it changed nothing, so nothing was found"


def test_retaining_more_than_before_is_not_punished(context: RunContext, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune_module, "_baseline", lambda *_: (0.5, 0.0))
    monkeypatch.setattr(tune_module, "_measured", lambda *_: (0.0, 0.9))
    found = tune_method(context, REQUEST, "paper", Budget(candidates=1, trials=1, widening=0))
    assert found.best is not None
    assert found.best.score == 0.0


def test_trials_are_the_run_that_is_reported(context: RunContext) -> None:
    found = tune_method(context, REQUEST, "finetune", Budget(candidates=1, images=300, trials=1, widening=0))
    assert [attempt.images for attempt in found.attempts] == [300, len(context.data.train)]
    assert found.best is not None
    assert found.best.settings == {"lr": 0.001, "epochs": 1}
    assert 0 <= found.best.score <= 1


@pytest.mark.slow
def test_no_test_image_is_needed(context: RunContext) -> None:
    without_test = replace(context, data=replace(context.data, test=context.data.test.subset([])))
    found = tune_method(without_test, REQUEST, "ssd", Budget(images=500))
    assert found.best is not None
    assert found.best.score == min(attempt.score for attempt in found.attempts if attempt.images > 500) < 0.2
    assert found.best.forget <= 2 * found.best.score, "half of the score is how far the class is from being gone"


def test_a_search_serves_another_request_than_the_one_it_is_for(context: RunContext) -> None:
    for seed in range(5):
        assert stand_in(REQUEST, context, seed).classes[0] in set("012456789")
    rows = context.data.train.rows[:30].tolist()
    asked = ForgetRequest(samples=tuple(map(str, rows)))
    drawn = stand_in(asked, context, 0)
    assert drawn == stand_in(asked, context, 0) != stand_in(asked, context, 1)
    assert not set(drawn.samples) & set(asked.samples)
    assert asked.split(context.data.train)[0].labels.sort().values.tolist() == (
        drawn.split(context.data.train)[0].labels.sort().values.tolist()
    )
    with pytest.raises(FedOrthoError, match="no training image has the id 99999"):
        stand_in(ForgetRequest.parse("samples:99999"), context, 0)
    clients = {0: torch.tensor(rows[:10]), 1: torch.tensor(rows[10:20]), 2: torch.tensor(rows[20:])}
    assert stand_in(ForgetRequest(clients=(1,)), replace(context, clients=clients), 0).clients[0] in (0, 2)
    with pytest.raises(FedOrthoError, match=r"no other request like client:1 .*--on"):
        stand_in(ForgetRequest(clients=(1,)), replace(context, clients={1: clients[1]}), 0)


def test_samples_are_forgotten_completely_on_fewer_images_and_wanted_as_unseen_ones(context: RunContext) -> None:
    request = ForgetRequest(samples=tuple(map(str, context.data.train.rows[:20].tolist())))
    fewer = tune_module._on_fewer_images(context, request, 100, 0).data.train
    assert len(fewer) == 100
    assert int(request.mask(fewer).sum()) == 20
    _, wanted = tune_module._baseline(context, request)
    assert 0.5 < wanted < 1


def test_images_of_a_class_are_wanted_at_0_beside_samples_too(context: RunContext) -> None:
    train = context.data.train
    samples = tuple(map(str, train.rows[train.labels == 5][:20].tolist()))
    _, unseen = tune_module._baseline(context, ForgetRequest(samples=samples))
    number = int((train.labels == 3).sum())
    _, wanted = tune_module._baseline(context, ForgetRequest(("3",), samples=samples))
    assert wanted == pytest.approx(20 * unseen / (20 + number))


def test_all_that_can_be_tuned_is_and_what_was_is_not_tuned_again(run: Run, tmp_path: Path) -> None:
    data, file, budget, seen = load_run_data(run.settings), tmp_path / "tuned.json", Budget(2, 300, 1, 0), []

    def go(names: list[str]) -> dict[str, Search]:
        told = lambda name, number, _: seen.append((name, number))  # noqa: E731
        base = {"finetune": {"batch_size": 32}}
        return tune(run, REQUEST, names, on="class:4", out=file, data=data, budget=budget, settings=base, watch=told)

    first = go(["ssd"])
    assert seen == [("ssd", 0), ("ssd", 1), ("ssd", 2)]
    with pytest.raises(FedOrthoError, match="logit-mask has nothing to tune"):
        go(["ssd", "logit-mask"])
    found = go(["ssd", "finetune"])
    assert seen[3:] == [("finetune", 0), ("finetune", 1), ("finetune", 2)]
    assert found["ssd"] == first["ssd"]
    with pytest.raises(FedOrthoError, match="another model, request, budget or settings"):
        tune(run, REQUEST, ["ssd"], out=file, data=data, budget=budget, settings={"ssd": {"batch_size": 16}})
    assert all(attempt.settings["batch_size"] == 32 for attempt in found["finetune"].attempts)
    best = {name: dict(search.best.settings) for name, search in found.items() if search.best is not None}
    assert read_settings(run.settings.data, run.settings.model, str(file)) == best
    written = read_record(TuningTrials, tmp_path / "tuned.trials.json")
    assert (written.request, written.tuned_on, written.budget) == ("class:3", "class:4", budget)
    file.unlink()  # as if killed after the trials were written
    number = len(seen)
    go(["ssd"])
    assert len(seen) == number, "nothing is tried again"
    assert read_settings(run.settings.data, run.settings.model, str(file)) == best
    with pytest.raises(FedOrthoError, match="about another model, request, budget or settings"):
        tune(run, REQUEST, ["ssd"], on="class:5", out=file, data=data, budget=budget)


def test_a_search_that_was_killed_goes_on_after_its_last_attempt(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, file = load_run_data(run.settings), tmp_path / "tuned.json"
    tried = pretend(monkeypatch, lambda settings, _: abs(settings["lr"] - 0.01))

    def kill(_: str, number: int, __: Attempt) -> None:
        if number == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tune(run, REQUEST, ["finetune"], out=file, data=data, budget=Budget(images=500), watch=kill)
    assert not file.exists()
    again = tune(run, REQUEST, ["finetune"], out=file, data=data, budget=Budget(images=500))
    alone = tune(run, REQUEST, ["finetune"], data=data, budget=Budget(images=500))
    assert again == alone
    assert len(tried) == 2 * len(alone["finetune"].attempts), "none was made twice"
    assert read_json(file)["finetune"]["lr"] == 0.01


def test_two_processes_tune_different_methods_and_none_twice(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, file = load_run_data(run.settings), tmp_path / "tuned.json"
    tried = pretend(monkeypatch, lambda settings, _: 0.1)
    with locked(file.with_suffix(".finetune")), pytest.raises(Busy, match=r"is tuning finetune into .*tuned.json"):
        tune(run, REQUEST, ["finetune", "not"], out=file, data=data, budget=Budget(2, 300, 1, 0))
    assert len(tried) == 3
    assert set(read_json(file)) == {"not"}


def test_a_method_that_another_process_finished_meanwhile_is_no_error(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, file, budget = load_run_data(run.settings), tmp_path / "tuned.json", Budget(2, 300, 1, 0)
    pretend(monkeypatch, lambda settings, _: 0.1)

    def finish_finetune(name: str, *_: object) -> None:
        if name == "not" and "finetune" not in (read_json(file) if file.exists() else {}):
            held.close()  # the other process ends its search and gives the lock back
            tune(run, REQUEST, ["finetune"], out=file, data=data, budget=budget)

    with ExitStack() as held:
        held.enter_context(locked(file.with_suffix(".finetune")))
        found = tune(run, REQUEST, ["finetune", "not"], out=file, data=data, budget=budget, watch=finish_finetune)
    assert set(found) == set(read_json(file)) == {"finetune", "not"}


def test_an_attempt_that_fails_says_why_and_never_is_the_best(
    context: RunContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates, really = [], tune_module.unlearn

    def broken(model: nn.Module, engine: Engine, request: ForgetRequest, method: Method) -> nn.Module:
        rates.append(method)
        if len(rates) % 2 or len(rates) > 2:
            raise FedOrthoError("the loss diverged")
        return really(model, engine, request, method)

    monkeypatch.setattr(tune_module, "unlearn", broken)
    found = tune_method(context, REQUEST, "ssd", Budget(candidates=2, trials=1, widening=0))
    assert [attempt.error for attempt in found.attempts] == ["the loss diverged", "", "the loss diverged"]
    assert found.best == found.attempts[1]
    with pytest.raises(FedOrthoError, match="no settings of ssd worked, so none is best: the loss diverged"):
        tune_method(context, REQUEST, "ssd", Budget(candidates=2, images=300))


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
        tune_method(
            open_context(run, load_run_data(run.settings)), REQUEST, "ssd", Budget(candidates=1, trials=1, widening=0)
        )
    assert devices[:2] == ["meta", "cpu"]


def test_what_cannot_be_tuned_is_refused(context: RunContext) -> None:
    with pytest.raises(FedOrthoError, match="retrain has nothing to tune; choose from"):
        tune_method(context, REQUEST, "retrain")
    with pytest.raises(UnknownName, match="no method 'bogus'"):
        tune_method(context, REQUEST, "bogus")
    with pytest.raises(FedOrthoError, match="unsir does not serve samples:1"):
        tune_method(context, ForgetRequest.parse("samples:1"), "unsir")
    with pytest.raises(BadSetting, match="must be 1 or more"):
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
    assert all(search.attempts for search in read_record(TuningTrials, file).searches.values())


def test_what_a_run_did_not_keep_cannot_be_tuned(run: Run) -> None:
    with pytest.raises(FedOrthoError, match=r"federaser replays what .* did not keep; leave it out"):
        tune(run, "client:1", ["federaser"], on="client:0")


def test_the_accuracy_wanted_on_samples_can_come_from_shadow_models(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    limit, wanted = ShadowLimit(0.25, 0.3, 0.5, 0.6, 20, 8), list[float]()

    def attempt(context: RunContext, request: Any, name: str, settings: Any, budget: Budget, *aims: float) -> Attempt:
        wanted.append(aims[1])
        return Attempt(dict(settings), len(context.data.train), 0.0, 0.9, 0.1)

    monkeypatch.setattr(tune_module, "_attempt", attempt)
    trained: list[ForgetRequest] = []
    monkeypatch.setattr(tune_module, "estimate_limit", lambda _, on, **__: trained.append(on) or limit)
    rows = run.load_data().train.rows[:4].tolist()
    request, few = "samples:" + ",".join(map(str, rows)), Budget(candidates=1, trials=1, widening=0)
    tune(run, request, ["finetune"], budget=few, shadows=8, out=tmp_path / "tuned.json")
    assert set(wanted) == {0.25}
    assert read_json(tmp_path / "tuned.trials.json")["wanted"] == 0.25
    tune(run, request, ["not"], budget=few, shadows=8, out=tmp_path / "tuned.json")
    assert set(wanted) == {0.25}
    assert len(trained) == 1, "the shadow models of the first call served the second"
    with pytest.raises(FedOrthoError, match="about another model, request, budget or settings"):
        tune(run, request, ["finetune"], budget=few, out=tmp_path / "tuned.json")
    wanted.clear()
    tune(run, request, ["finetune"], budget=few)
    assert set(wanted) != {0.25}
