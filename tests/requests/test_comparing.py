"""Methods side by side, on one machine and in a federation; a comparison goes on where it stopped."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import told
from once import run_once
from small import SETTINGS, write_images
from torch import nn

import fedortho.requests.comparing as compare_module
import fedortho.requests.run_context as context_module
from fedortho.data.request import ForgetRequest
from fedortho.engines.central import CentralEngine
from fedortho.engines.cost import Cost
from fedortho.engines.engine import Engine
from fedortho.errors import FedOrthoError, UnknownName
from fedortho.evaluation.accuracies import accuracies_of
from fedortho.federated.server import patches_of, train_federation
from fedortho.methods import hyperparameters
from fedortho.methods.method import CannotServe, ForgetResult, Method
from fedortho.methods.retrain import Retrain
from fedortho.requests.comparing import Row, best, chosen_methods, compare, comparison_notes, comparison_table, gaps
from fedortho.requests.run_context import method_for_run, open_context
from fedortho.requests.search import Budget
from fedortho.requests.tuning import tune
from fedortho.runs.record import Accuracies
from fedortho.runs.run import Run, load_run_data, open_run
from fedortho.runs.settings import TrainSettings
from fedortho.runs.training import train_run
from fedortho.storage.files import read_json, write_json
from fedortho.storage.records import read_record

REQUEST = ForgetRequest.parse("class:3")
QUICK = {"finetune": {"epochs": 1}}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    settings = TrainSettings(data="digits", model="small:QuickNet", epochs=3, crop=0, flip=0.0, threads=1, device="cpu")
    return run_once(tmp_path_factory, tmp_path_factory.mktemp("compare") / "run", settings)


def row(name: str, forget: float, retain: float) -> Row:
    return Row("", "class:3", name, {}, Accuracies(forget, retain, 0.5), Cost(1.0, 1, 1, 1.0, 1, 1, 1), "edited")


def test_a_comparison_writes_each_method_as_it_goes_and_resumes(run: Run, tmp_path: Path) -> None:
    data, seen = load_run_data(run.settings), []

    def watch(name: str, number: int, of: int) -> None:
        seen.append((name, number, of))

    first = compare(
        run, REQUEST, ["retrain", "finetune", "logit-mask"], out=tmp_path, data=data, settings=QUICK, watch=watch
    )
    assert seen == [("retrain", 0, 3), ("finetune", 1, 3), ("logit-mask", 2, 3)]
    assert first[2].accuracies is not None
    assert first[2].accuracies.forget == 0.0
    assert first[0].cost is not None
    assert first[0].cost.images_trained == 3 * int((data.train.labels != 3).sum())
    assert first[0].cost.flops > 1e6
    assert read_record(Row, tmp_path / "retrain.json") == first[0]

    again = compare(run, REQUEST, ["retrain", "finetune"], out=tmp_path, data=data, settings=QUICK)
    assert again == first[:2], "seconds too: nothing was run again"
    other = compare(run, REQUEST, ["finetune"], out=tmp_path, data=data, settings={"finetune": {"epochs": 2}})
    assert other[0].weights != first[1].weights, "other settings are another result"


def test_a_result_file_with_other_numbers_than_its_run_is_not_shown_as_measured(
    run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    how: dict[str, Any] = {"out": tmp_path, "data": load_run_data(run.settings)}
    (first,) = compare(run, REQUEST, "logit-mask", **how)
    path = tmp_path / "logit-mask.json"
    for key, edited in {"accuracies": {"forget": 0.0, "retain": 1.0, "test": 1.0}, "weights": "0" * 64}.items():
        write_json(path, read_json(path) | {key: edited})
        (again,) = compare(run, REQUEST, "logit-mask", **how)
        assert (again.accuracies, again.weights) == (first.accuracies, first.weights), key
        assert "logit-mask.json has other numbers than the run" in caplog.messages[-1]
    assert read_record(Row, path) == again


def test_a_method_gets_the_model_on_the_cpu_and_the_engine_the_device(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = []

    def looking(model: nn.Module, engine: Engine, request: ForgetRequest, method: Method) -> nn.Module:
        assert isinstance(engine, CentralEngine)
        devices.extend([str(engine.device), *{weight.device.type for weight in model.parameters()}])
        raise CannotServe("that was all")

    monkeypatch.setattr(context_module, "choose_device", lambda _: torch.device("meta"))
    monkeypatch.setattr(compare_module, "unlearn", looking)
    compare(run, REQUEST, ["finetune"], out=tmp_path, data=load_run_data(run.settings))
    assert devices == ["meta", "cpu"]


def test_retraining_is_done_once_and_every_outcome_is_a_run_of_its_own(run: Run, tmp_path: Path) -> None:
    data, kept = load_run_data(run.settings), tmp_path / "references"
    (first,) = compare(run, REQUEST, ["retrain"], out=tmp_path / "one", data=data, references=kept)
    (reference,) = kept.iterdir()
    stamp = (reference / "model.safetensors").stat().st_mtime_ns
    again, masked = compare(run, REQUEST, ["retrain", "logit-mask"], out=tmp_path / "two", data=data, references=kept)
    assert again.weights == first.weights == open_run(reference).record.model.digest
    assert (reference / "model.safetensors").stat().st_mtime_ns == stamp
    assert first.cost is not None
    assert first.cost.images_trained == 3 * int((data.train.labels != 3).sum())
    outcome = open_run(tmp_path / "two" / "logit-mask")
    assert outcome.record.model.digest == masked.weights
    assert outcome.record.requests[-1].method == "logit-mask"
    assert accuracies_of(outcome.load_model(), data, REQUEST).forget == 0.0
    with pytest.raises(FedOrthoError, match="patches"):
        patches_of(outcome)


def test_a_reference_beside_the_run_is_not_trained_again(run: Run, tmp_path: Path) -> None:
    data, request = load_run_data(run.settings), ForgetRequest.parse("class:6")
    settings = replace(run.settings, without="class:6")
    retrained = train_run(run.path.with_name("by-hand"), settings)
    (found,) = compare(run, request, ["retrain"], out=tmp_path, data=data)
    assert found.weights == retrained.record.model.digest
    assert not list((run.path.parent / "references").glob("*without-class-6*"))


def test_what_a_run_was_trained_without_is_neither_taught_nor_counted(run: Run, tmp_path: Path) -> None:
    data = load_run_data(run.settings)
    without = train_run(tmp_path / "runs" / "run", replace(run.settings, without="class:3"))
    place = open_context(without, data)
    with place.engine() as engine:
        assert isinstance(engine, CentralEngine)
        assert all(3 not in part.labels for part in (engine.data.train, engine.data.valid))
    (row,) = compare(
        without, ForgetRequest.parse("class:5"), ["finetune"], out=tmp_path / "out", data=data, settings=QUICK
    )
    tuned = open_run(tmp_path / "out" / "finetune").load_model()
    assert accuracies_of(tuned, data, REQUEST).forget == 0.0, "the class that it never met was not taught"
    assert row.accuracies is not None
    assert row.accuracies.retain == accuracies_of(tuned, data, ForgetRequest.parse("class:5"), forgotten=REQUEST).retain

    apart = train_federation(tmp_path / "apart", replace(SETTINGS, clients=2, rounds=1, without="client:1"))
    with pytest.raises(FedOrthoError, match="was trained --without client:1, which its clients still hold"):
        compare(apart, REQUEST, ["finetune"], out=tmp_path / "o", data=load_run_data(apart.settings))


def test_data_that_moved_is_found_by_a_comparison_in_a_federation(tmp_path: Path) -> None:
    old, new = write_images(tmp_path / "old", {"ant": 40, "bee": 40}), tmp_path / "new"
    run = train_federation(tmp_path / "run", replace(SETTINGS, data=str(old), clients=2, rounds=1, split="iid"))
    old.rename(new)
    shown = told("compare", run.path, "class:bee", "--methods", "finetune", "--data-dir", new, "--out", tmp_path / "o")
    assert "finetune" in shown
    assert read_json(tmp_path / "o" / "finetune.json")["refused"] == ""


@pytest.mark.slow
def test_federaser_replays_what_a_run_kept_and_references_keep_nothing(tmp_path: Path) -> None:
    settings = replace(SETTINGS, model="small:QuickNet", clients=3, rounds=3, split="iid", keep_updates=True)
    run = train_federation(tmp_path / "run", settings)
    assert len(list((run.path / "updates").glob("round-*/client-*"))) == 9
    request = ForgetRequest.parse("client:1")
    retrained, replayed = compare(
        run, request, ["retrain", "federaser"], out=tmp_path / "out", data=load_run_data(settings)
    )
    assert retrained.accuracies is not None
    assert replayed.accuracies is not None
    assert replayed.settings["updates"] == str(run.path / "updates")
    assert replayed.settings["ortho"] == settings.ortho > 0, "it trains as the run did"
    assert replayed.settings["epochs"] == 3
    assert replayed.accuracies.test > 0.3, "it learnt from the others"
    (reference,) = (tmp_path / "references").iterdir()
    assert not (reference / "updates").exists()
    found = tune(run, request, ["federaser"], on="client:2", budget=Budget(candidates=1, trials=1, widening=0))[
        "federaser"
    ]
    assert {tuple(each.settings) for each in found.attempts} == {("lr", "ratio")}
    assert not any(each.error for each in found.attempts)


def test_the_command_shows_a_table_and_writes_results(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shown = told("compare", str(run.path), "class:3", "--methods", "retrain,ssd,logit-mask", "--out", str(out))
    for word in (
        "retrain",
        "ssd",
        "logit-mask",
        "gap",
        "seconds",
        "if kept",
        "without controls",
        "in a federation rounds",
    ):
        assert word in shown
    rows = json.loads(told("compare", str(run.path), "class:3", "--methods", "ssd", "--out", str(out), "--json"))
    assert rows[0]["accuracies"]["forget"] == read_json(out / "ssd.json")["accuracies"]["forget"]
    with pytest.raises(FedOrthoError, match="no method 'sdd'"):
        told("compare", str(run.path), "class:3", "--methods", "sdd", "--out", str(out))


def test_the_command_tunes_and_what_it_writes_can_be_compared_with(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "tuned.json"
    shown = told("tune", "paper", str(run.path), "class:3", "--out", str(file))
    assert "candidates 12, images 10,000, trials 6, widening 4, epochs 1" in shown
    assert "trial 5 on" in shown
    assert "best for paper: ratio" in shown
    trials = read_json(tmp_path / "tuned.trials.json")
    assert (trials["request"], trials["tuned-on"] == "class:3") == ("class:3", False), "it was drawn"
    ratio, out = read_json(file)["paper"]["ratio"], tmp_path / "o"
    told("compare", str(run.path), "class:3", "--methods", "paper", "--settings", str(file), "--out", str(out))
    assert read_json(out / "paper.json")["settings"]["ratio"] == ratio
    with pytest.raises(FedOrthoError, match="retrain has nothing to tune; choose from"):
        told("tune", "ssd,retrain", run.path, "class:3", "--out", file)
    with pytest.raises(FedOrthoError, match="unsir does not serve samples:1; leave it out"):
        told("tune", "unsir", run.path, "samples:1", "--out", file)
    with pytest.raises(FedOrthoError, match="digits-small:QuickNet"):
        told("compare", run.path, "class:3", "--settings", "tuned", "--out", tmp_path / "p")


def test_what_a_method_cannot_serve_is_a_line_and_not_the_end(run: Run, tmp_path: Path) -> None:
    data = load_run_data(run.settings)
    rows = tuple(map(str, data.train.rows[:20].tolist()))
    refused, served = compare(run, ForgetRequest(samples=rows), ["unsir", "logit-mask"], out=tmp_path, data=data)
    assert "unsir serves class requests only" in refused.refused
    assert comparison_table([refused, served])[1][0] == "unsir"


def test_a_method_that_fails_is_a_line_and_is_tried_again(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, really = load_run_data(run.settings), compare_module.unlearn

    def broken(model: nn.Module, engine: Engine, request: ForgetRequest, method: Method) -> ForgetResult:
        if method.name == "finetune":
            raise FedOrthoError("the loss became nan")
        return really(model, engine, request, method)

    how: dict[str, Any] = {"out": tmp_path, "data": data, "settings": QUICK}
    with monkeypatch.context() as patched:
        patched.setattr(compare_module, "unlearn", broken)
        failed, masked = compare(run, REQUEST, ["finetune", "logit-mask"], **how)
    assert failed.refused == "the loss became nan"
    assert masked.accuracies is not None, "the comparison went on"
    assert compare(run, REQUEST, ["finetune"], **how)[0].accuracies is not None, "what failed is not kept"
    with pytest.raises(FedOrthoError, match="client:0 needs a federation"):
        compare(run, "client:0", ["finetune", "logit-mask"], **how)


def test_what_a_file_of_tuned_settings_lacks_is_named(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / f"digits-{run.settings.model}.json"
    write_json(file, {"finetune": {"epochs": 1}})
    monkeypatch.setattr(hyperparameters, "TUNED", tmp_path)
    masked: dict[str, Any] = {"out": tmp_path / "out", "data": load_run_data(run.settings)}
    monkeypatch.setattr(compare_module, "_row", lambda *_: None)
    compare(run, REQUEST, ["retrain", "hide", "finetune", "logit-mask"], settings=file, **masked)
    compare(run, REQUEST, ["finetune", "ct", "msg"], settings="short", **masked)
    assert not caplog.messages, "nothing of these is tuned, or it is in the file"
    compare(run, REQUEST, ["finetune", "ct", "msg"], settings=file, **masked)
    assert f"{file} has no settings of ct, msg, which keep the published ones" in caplog.messages[0]
    compare(run, "samples:0,3", ["finetune"], settings=file, **masked)
    assert len(caplog.messages) == 1, "whom it was tuned for is known to who tuned it"
    compare(run, "samples:0,3", ["finetune"], settings="tuned", **masked)
    assert "found for a class and all images in one place" in caplog.messages[1]


@pytest.mark.slow
def test_a_federation_is_compared_in_a_copy_of_what_its_clients_keep(tmp_path: Path) -> None:
    settings = replace(SETTINGS, model="small:QuickNet", clients=2, rounds=2, split="iid")
    run = train_federation(tmp_path / "run", settings)
    before = sorted(path.read_bytes() for path in (run.path / "clients").rglob("*.json"))
    rows = compare(
        run, ForgetRequest.parse("client:1"), ["retrain", "finetune"], out=tmp_path, data=load_run_data(settings)
    )
    assert all(row.accuracies is not None and row.cost is not None and row.cost.bytes_up > 0 for row in rows)
    assert rows[0].settings["epochs"] == 2, "as many rounds as the run had"
    assert sorted(path.read_bytes() for path in (run.path / "clients").rglob("*.json")) == before


def test_methods_that_did_without_sums_of_small_groups_are_named() -> None:
    some = row("ssd", 0.0, 0.9)
    assert some.cost is not None
    rows = [row("retrain", 0.4, 0.9), replace(some, cost=replace(some.cost, withheld=3)), row("salun", 0.35, 0.88)]
    assert comparison_notes(rows)[-1].endswith("clients withheld sums (--least-group of the federation): ssd 3")
    assert not any("withheld" in note for note in comparison_notes(rows[:1]))


def test_the_nearest_to_retraining_is_best_and_less_than_retraining_is_no_win() -> None:
    rows = [row("retrain", 0.4, 0.9), row("ssd", 0.0, 0.9), row("salun", 0.35, 0.88), row("logit-mask", 0.4, 0.9)]
    assert gaps(rows)["ssd"] == pytest.approx(0.2)
    assert best(rows) == "salun", "the control is nearer, and does not compete"
    lines = comparison_table(rows)
    assert [line[0] for line in lines] == ["method", "retrain", "ssd", "salun", "logit-mask"]
    assert lines[3][4] == "3.5% *"
    assert lines[1][4] == "", "retraining is not compared with itself"
    assert best(rows[1:]) is None, "without retraining nobody knows"
    idle = replace(row("ssd", 0.4, 0.9), original="as it was", weights="as it was")
    assert best([rows[0], idle, rows[2]]) == "salun", "a model that was not changed forgot nothing"


@pytest.mark.slow
def test_as_many_passes_as_published_are_a_row_of_their_own_beside_one_pass(run: Run, tmp_path: Path) -> None:
    data, names = load_run_data(run.settings), ["logit-mask", "finetune", "bad-teacher"]
    rows = compare(run, REQUEST, names, out=tmp_path, data=data, passes="one,published")
    assert [row.label for row in rows] == ["finetune", "finetune ×5", "bad-teacher", "logit-mask"]
    assert [row.settings.get("epochs") for row in rows] == [1, 5, 1, None], "one pass is what bad-teacher publishes"
    assert rows[0].weights != rows[1].weights
    assert {path.stem for path in tmp_path.glob("*.json")} == {"finetune", "finetune-x5", "bad-teacher", "logit-mask"}
    with pytest.raises(UnknownName, match="no passes 'two'"):
        compare(run, REQUEST, names, out=tmp_path, data=data, passes="two")


def test_a_method_that_changes_nothing_is_called_so(run: Run, tmp_path: Path) -> None:
    (same,) = compare(
        run, REQUEST, ["ssd"], out=tmp_path, data=load_run_data(run.settings), settings={"ssd": {"alpha": 1e9}}
    )
    assert same.is_unchanged
    assert comparison_table([same])[1][0] == "ssd (model unchanged)"


def test_retraining_follows_the_run_and_nothing_else(run: Run) -> None:
    method = method_for_run(run, "retrain", {"epochs": 99})
    assert isinstance(method, Retrain)
    assert (method.epochs, method.lr, method.ortho) == (3, run.settings.lr, run.settings.ortho)


def test_what_is_no_result_of_a_comparison_is_neither_read_nor_deleted(run: Run, tmp_path: Path) -> None:
    (tmp_path / "ssd").mkdir()
    (tmp_path / "ssd" / "mine.txt").write_text("mine")
    for text, why in (("[]", "choose another --out"), ('{"schema": 1}', "schema 1"), (None, "exists and is no result")):
        (tmp_path / "ssd.json").unlink(missing_ok=True)
        if text is not None:
            (tmp_path / "ssd.json").write_text(text)
        with pytest.raises(FedOrthoError, match=why):
            compare(run, ForgetRequest.parse("class:3"), ["ssd"], out=tmp_path, data=load_run_data(run.settings))
    assert (tmp_path / "ssd" / "mine.txt").read_text() == "mine"


def test_names_of_methods_are_checked() -> None:
    assert chosen_methods("all")[0] == "retrain"
    with pytest.raises(UnknownName, match="no method 'sdd'; did you mean 'ssd'"):
        chosen_methods("retrain,sdd")
    for nothing in ("", ","):
        with pytest.raises(UnknownName, match=f"no method '{nothing}'; choose from bad-teacher"):
            chosen_methods(nothing)
