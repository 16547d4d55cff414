"""Running a table on digits and a tiny network: rows, resuming, sequences, the same numbers again, and the command."""

import json
import logging
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from small import SETTINGS
from typer.main import get_command
from typer.testing import CliRunner

from fedortho.cli.app import app
from fedortho.data.request import ForgetRequest
from fedortho.errors import BadRecord, FedOrthoError
from fedortho.evaluation.accuracies import accuracies_of
from fedortho.evaluation.case import Case
from fedortho.evaluation.metric_suite import MetricSuite
from fedortho.evaluation.model_outputs import ModelOutputs
from fedortho.experiments import measuring, runner
from fedortho.experiments.experiment import (
    PAPER_DATA,
    Experiment,
    ExperimentResults,
    MethodVariant,
    load_experiment,
    printed_rows,
    row_verdict,
    select_rows,
)
from fedortho.experiments.planning import plan_experiment
from fedortho.experiments.relations import Membership, SeedRow, over_seeds, parse_relation
from fedortho.experiments.runner import ProgressHooks, reproduce
from fedortho.requests import comparing
from fedortho.requests.comparing import Row
from fedortho.runs import training
from fedortho.runs.record import Accuracies
from fedortho.runs.run import load_run_data, open_run
from fedortho.runs.settings import TrainSettings
from fedortho.storage.files import read_json
from fedortho.storage.records import read_record

NETWORK = TrainSettings(data="digits", model="small:QuickNet", epochs=2, crop=0, flip=0.0, threads=1, device="cpu")
SAME_MODEL = ("pruning", "continuous_unlearning_comparison")  # tables that print the untouched central network
RATIOS = tuple(MethodVariant("paper", {"ratio": ratio}, {"ratio": ratio}) for ratio in (0.1, 0.4))


def experiment(**changes: Any) -> Experiment:
    claim = parse_relation("paper[ratio=max] forget < paper[ratio=min] forget")
    base = replace(load_experiment("pruning"), networks=(NETWORK,), seeds=(0,), variants=RATIOS, relations=(claim,))
    return replace(base, **changes)


def limited(seeds: str = "", methods: str = "", rows: str = "", accumulate: int = 1, **flags: bool) -> Experiment:
    assert accumulate == 1
    assert not any(flags.values())
    return select_rows(experiment(), methods, rows, seeds)


def forget(row: SeedRow) -> float:
    assert row.accuracies is not None
    return row.accuracies.forget


def timeless(results: ExperimentResults) -> ExperimentResults:
    """Without the seconds, which a clock measures."""
    return replace(results, rows=tuple(replace(row, seconds=None) for row in results.rows))


def judged_mia(path: Path) -> float:
    """The member rate that `judge` shows of a run that has forgotten class 0."""
    run = open_run(path)
    case = Case(run.load_model(), run.load_model(), (), run.load_data(), ForgetRequest.parse("class:0"))
    suite = MetricSuite(case)
    return suite.model_metrics["mia-confidence"](ModelOutputs("", case.unlearned, suite.sets)).value


def invoke(*words: str) -> str:
    result = CliRunner().invoke(app, list(words))
    if result.exception is not None:
        raise result.exception
    return result.stdout


def test_the_same_seed_gives_the_same_bytes_elsewhere_and_nothing_is_done_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = experiment(variants=(MethodVariant("retrain", {}, {}), *RATIOS))
    seen: list[str] = []
    hooks = ProgressHooks(step=lambda text, *_: seen.append(text))
    results = reproduce(both, tmp_path / "one", hooks=hooks)
    rows = results.rows
    assert timeless(reproduce(both, tmp_path / "two")) == timeless(results)
    first = tmp_path / "one" / "pruning-demo.json"
    assert read_record(ExperimentResults, first) == results
    assert [row.key["method"] for row in rows] == ["original", "retrain", "paper", "paper"]
    assert [row.key.get("ratio") for row in rows] == [None, None, 0.1, 0.4]
    assert forget(rows[1]) == 0.0, "it never saw the class"
    assert any("retrain class" in text for text in seen)
    (pair,) = results.claims[0].here
    assert pair.differences == pytest.approx([100 * (forget(rows[2]) - forget(rows[3]))])

    assert all(row.seconds is not None for row in rows[1:])
    test, train = (part.labels for part in (load_run_data(NETWORK).test, load_run_data(NETWORK).train))
    assert {row.images["forget"] for row in rows} == {int((test == 0).sum())}
    assert {row.images["retain"] for row in rows} == {int((test != 0).sum())}
    assert {row.membership.images for row in rows if row.membership} == {int((train == 0).sum())}
    assert rows[2].membership is not None
    assert rows[2].membership.member_rate == judged_mia(next((tmp_path / "one").glob("outcomes/*/*/ratio-0.1-*/paper")))

    outcomes = {path: path.stat().st_mtime_ns for path in (tmp_path / "one").rglob("*.safetensors")}
    before = first.read_bytes()
    monkeypatch.setattr(comparing, "train_references", None)
    monkeypatch.setattr(measuring, "ModelOutputs", None)
    assert reproduce(both, tmp_path / "one") == results
    assert first.read_bytes() == before

    def stop(text: str, *_: int) -> None:
        if "paper" in text:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        reproduce(both, tmp_path / "one", hooks=ProgressHooks(step=stop))
    assert first.read_bytes() == before, "a table that is complete is not replaced by a part of it"
    monkeypatch.setattr(measuring, "ModelOutputs", ModelOutputs)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "one").rglob("*.safetensors")} == outcomes
    other = reproduce(replace(both, seeds=(1,), variants=RATIOS[:1]), tmp_path / "one")
    assert other.rows[0].accuracies != rows[0].accuracies


def edit(path: Path, *keys: str | int, value: float) -> None:
    """Change one number of a JSON file."""
    whole = place = read_json(path)
    for key in keys[:-1]:
        place = place[key]
    assert place[keys[-1]] != value
    place[keys[-1]] = value
    path.write_text(json.dumps(whole))


@pytest.mark.parametrize("is_sequence", [False, True])
def test_a_cell_that_was_edited_is_refused(is_sequence: bool, tmp_path: Path) -> None:
    table = experiment(is_sequence=is_sequence, variants=RATIOS[1:])
    rows = reproduce(table, tmp_path).rows
    assert reproduce(table, tmp_path).rows == rows
    measures = next(
        tmp_path.glob("outcomes/**/*-step1-measures.json" if is_sequence else "outcomes/**/paper-measures.json")
    )
    before = measures.read_bytes()
    edit(measures, "membership", "member-rate", value=0.75)
    with pytest.raises(BadRecord, match=r"measures.json or .* has other numbers than were measured; remove both"):
        reproduce(table, tmp_path)
    measures.write_bytes(before)
    run = measures.with_name(measures.name.removesuffix("-measures.json")) / "run.json"
    edit(run, "requests", -1, "after", "forget", value=0.25)
    if is_sequence:
        with pytest.raises(BadRecord, match="has other numbers"):
            reproduce(table, tmp_path)
    else:
        assert timeless(reproduce(table, tmp_path)).rows == tuple(replace(row, seconds=None) for row in rows), (
            "the method runs again"
        )


def test_networks_and_references_that_were_trained_elsewhere_are_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = experiment(variants=(MethodVariant("retrain", {}, {}), *RATIOS[:1]))
    results = reproduce(table, tmp_path / "one")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for folder in ("networks", "references"):
        for path in (tmp_path / "one" / folder).iterdir():
            path.rename(elsewhere / f"my-{folder}-{path.name}")
    (plan,) = plan_experiment(replace(table, seeds=(0, 1)), tmp_path / "one", networks=elsewhere)
    assert (plan.networks, plan.references, plan.trained) == (2, 2, 2), "those of seed 0"
    assert "2 networks and 2 reference models (2 of them trained before), 6 cells" in plan.text
    monkeypatch.setattr(training, "fit", lambda *_, **__: pytest.fail("it was trained before"))

    def killed(run: Path, to: Path, **_: Any) -> None:
        to.mkdir(parents=True, exist_ok=True)
        (to / "run.json").write_bytes((run / "run.json").read_bytes())
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(runner.shutil, "copytree", killed)
        with pytest.raises(KeyboardInterrupt):
            reproduce(table, tmp_path / "two", networks=elsewhere)
    assert not list((tmp_path / "two").glob("networks/*")), "half of a copy is no run"
    assert timeless(reproduce(table, tmp_path / "two", networks=elsewhere)) == timeless(results)
    (plan,) = plan_experiment(table, tmp_path / "two")
    assert plan.trained == 2, "what is in --out is not repeated"
    for start in (reproduce, plan_experiment):
        with pytest.raises(FedOrthoError, match="nowhere is no directory"):
            start(table, tmp_path / "two", networks=tmp_path / "nowhere")


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Nothing is trained or edited: what is tested is where outcomes and tables are written."""
    seen: list[Path] = []
    zero = Accuracies(0.0, 0.0, 0.0)

    def served(run: Any, data: Any, request: Any, variant: Any, out: Path) -> Any:
        seen.append(out)
        record = SimpleNamespace(requests=[SimpleNamespace(after=zero, all_forgotten={}, cost=None)])
        return SimpleNamespace(path=run.path, settings=run.settings, record=record)

    def compared(run: Any, request: Any, methods: Any, *, out: Path, **how: Any) -> list[Row]:
        seen.append(out)
        return [Row("", str(request), methods[0], {}, zero)]

    run = SimpleNamespace(path=Path("network"), settings=NETWORK, load_data=lambda: SimpleNamespace(test=range(9)))
    for name, stub in {"trained": lambda *_: run, "_served": served, "compare": compared}.items():
        monkeypatch.setattr(runner, name, stub)
    monkeypatch.setattr(runner, "_original_accuracies", lambda *_: zero)
    measures = measuring.OutcomeMeasures("", Membership("confidence", 0.0, 0.5, 0.5, 1), {})
    monkeypatch.setattr(runner, "measure_outcome", lambda *_: measures)
    return seen


@pytest.mark.usefixtures("places")
def test_a_narrowed_run_leaves_the_table_of_the_whole_run_alone(tmp_path: Path) -> None:
    reproduce(experiment(), tmp_path)
    before = (tmp_path / "pruning-demo.json").read_bytes()
    for flag, value in {"rows": "ratio=0.4", "methods": "paper", "seeds": "0"}.items():
        narrowed = reproduce(limited(**{flag: value}), tmp_path)
        assert (tmp_path / "pruning-demo.json").read_bytes() == before, flag
        assert read_record(ExperimentResults, tmp_path / f"pruning-demo-{flag}-{value}.json") == narrowed
        assert narrowed.command.endswith(f"--{flag} {value}")


@pytest.mark.usefixtures("places")
def test_the_papers_scale_refuses_other_data_unless_it_is_named_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = load_run_data(NETWORK)  # digits: 10 classes, 1,797 images
    monkeypatch.setattr(runner, "load_run_data", lambda *_, **__: half)
    table = replace(experiment(), scale="paper", networks=(replace(NETWORK, data="cifar10"),))
    message = r"cifar10 here has 10 classes, 1,\d+ training and \d+ test images; the paper's has 10 classes, 50,000 "
    with pytest.raises(FedOrthoError, match=message + r"training and 10,000 test images; .*--other-data"):
        reproduce(table, tmp_path)
    assert not list(tmp_path.iterdir())
    named = replace(table, limits={"other-data": ""})
    results = reproduce(named, tmp_path)
    assert results.data["cifar10"].train == len(half.train)
    assert f"{len(half.valid)} more held out for validation (the paper has no hold-out)" in results.data["cifar10"].text
    assert {row_verdict(named, row) for row in over_seeds(results.rows)} == {"other data"}
    assert [path.name for path in tmp_path.iterdir()] == ["pruning-paper-other-data.json"]
    monkeypatch.setitem(PAPER_DATA, "cifar10", (10, len(half.known_rows), len(half.test)))
    assert reproduce(table, tmp_path).data == results.data, "the same counts are accepted"


def test_other_data_is_a_word_of_the_papers_scale() -> None:
    assert load_experiment("pruning", "paper", other_data=True).command.endswith("--scale paper --other-data")
    with pytest.raises(FedOrthoError, match="--other-data is for --scale paper; at scale demo"):
        load_experiment("pruning", other_data=True)


@pytest.mark.parametrize("is_sequence", [False, True])
def test_another_setting_of_a_variant_is_another_outcome(is_sequence: bool, tmp_path: Path, places: list[Path]) -> None:
    base = experiment(is_sequence=is_sequence, requests=("class:0", "class:1"))
    for alpha in (1.0, 0.5, 1.0):  # a setting that the table does not vary
        variant = MethodVariant("paper", {"ratio": 0.4, "alpha": alpha}, {"ratio": 0.4})
        reproduce(replace(base, variants=(variant,)), tmp_path)
    assert places[:2] == places[4:]
    assert not set(places[:2]) & set(places[2:4])


@pytest.mark.usefixtures("places")
def test_before_a_sequence_all_classes_are_retained_as_in_the_paper(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "_original_accuracies", lambda *_: Accuracies(0.9, 0.7, 0.8))
    steps = experiment(is_sequence=True, requests=("class:0", "class:1"))
    original, *_ = reproduce(steps, tmp_path).rows
    assert original.values["retain"] == 80.0
    assert original.images["retain"] == 9
    monkeypatch.setattr("fedortho.cli.methods.load_experiment", lambda *_, **__: steps)
    assert "retain: all classes at step 0, then those that are left" in invoke("reproduce", "x", "--out", str(tmp_path))
    first, last = (printed_rows(name)[0 if name == "pruning" else 6].values[0] for name in SAME_MODEL)
    assert round((99 * first["retain"] + first["forget"]) / 100, 2) == last["retain"], "the printed one has all classes"


@pytest.mark.slow
def test_requests_of_a_sequence_are_served_one_after_the_other(tmp_path: Path) -> None:
    steps = experiment(is_sequence=True, requests=("class:0", "class:1", "class:2"), variants=RATIOS[1:])
    original, *rows = reproduce(steps, tmp_path).rows
    assert original.key["step"] == 0
    names = ["class:0", "class:1", "class:2"]
    assert [list(row.forgotten) for row in rows] == [names[:1], names[:2], names]
    last = open_run(next(tmp_path.glob("outcomes/*/*step3")))
    model, data = last.load_model(), last.load_data()
    told = {word: accuracies_of(model, data, word).forget for word in ("class:0", "class:1", "class:2")}
    assert rows[-1].forgotten == told, "earlier classes are measured on the last model"
    assert reproduce(steps, tmp_path).rows == (original, *rows)
    others = reproduce(replace(steps, requests=("class:5", "class:1")), tmp_path).rows
    assert set(others[-1].forgotten) == {"class:5", "class:1"}, "other requests are other outcomes"


@pytest.mark.slow
def test_a_federation_forgets_one_after_the_other_and_by_client_and_samples(tmp_path: Path) -> None:
    network = replace(SETTINGS, model="small:QuickNet", clients=3, rounds=1, split="iid")
    steps = experiment(networks=(network,), is_sequence=True, requests=("class:0", "class:1"), variants=RATIOS[:1])
    rows = reproduce(steps, tmp_path).rows
    assert [row.key["step"] for row in rows] == [0, 1, 2]
    assert list(rows[-1].forgotten) == ["class:0", "class:1"]
    asked = experiment(networks=(network,), requests=("client:0", "first 10 of class:0"), variants=RATIOS[:1])
    rows = reproduce(asked, tmp_path).rows
    assert [(row.key["request"], row.key["method"]) for row in rows] == [
        (kind, method) for kind in ("client", "samples") for method in ("original", "paper")
    ]
    assert len(list((tmp_path / "networks").glob("digits-*"))) == 1, "the two experiments share it"


@pytest.mark.slow
def test_fine_tuning_can_train_all_clients_of_a_federation_that_trains_few(tmp_path: Path) -> None:
    network = replace(SETTINGS, model="small:QuickNet", clients=3, rounds=1, fraction=0.1, split="iid")
    everyone = MethodVariant("finetune", {"epochs": 1}, {}, fraction=1.0)
    reproduce(experiment(networks=(network,), variants=(everyone,)), tmp_path)
    stored = read_record(Row, next((tmp_path / "outcomes").rglob("finetune.json")))
    train = load_run_data(network).train
    assert stored.cost is not None
    assert stored.cost.images_trained == network.epochs * int((train.labels != 0).sum())


@pytest.mark.slow
def test_what_a_method_refuses_is_a_row_and_not_the_end(tmp_path: Path) -> None:
    hard = MethodVariant("hide", {"target": 0.0, "max-retain-drop": 0.0, "scrub": False}, {})
    rows = reproduce(experiment(variants=(hard, *RATIOS[:1])), tmp_path).rows
    assert rows[1].refused
    assert rows[1].accuracies is None
    assert rows[2].accuracies is not None
    steps = experiment(is_sequence=True, requests=("class:0", "class:1"), variants=(hard,))
    rows = reproduce(steps, tmp_path).rows
    assert [row.key["step"] for row in rows] == [0, 1], "the next request would start from nothing"
    with pytest.raises(FedOrthoError, match="ssd serves no sequence"):
        reproduce(replace(steps, variants=(MethodVariant("ssd", {}, {}),)), tmp_path)


def test_the_command_lists_runs_and_explains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = invoke("reproduce")
    for name in ("unlearning_iid_non_iid: ", "unlearning_res50: ", "pruning: ", "continuous_unlearning_comparison: "):
        assert name in told
    monkeypatch.setattr("fedortho.cli.methods.load_experiment", lambda name, scale="demo", **limits: limited(**limits))
    told = invoke("reproduce", "pruning", "--seeds", "0,1", "--rows", "ratio=0.4", "--out", str(tmp_path))
    for text in (
        "forget",
        "(paper)",
        "92.00",
        "not printed",
        "other setting",
        "±",
        "no such rows",
        "seeds 0, 1",
        "the paper has no hold-out",
        "MIA confidence",
        "on images of known membership it is right for",
        "seconds",
    ):
        assert text in told
    told = invoke("reproduce", "pruning", "--seeds", "0", "--out", str(tmp_path))
    assert "±" not in told, "one seed has no spread"
    assert "(1 seed)" in told
    value = json.loads(invoke("reproduce", "pruning", "--seeds", "0", "--out", str(tmp_path), "--json"))
    assert value == read_json(tmp_path / "pruning-demo-seeds-0.json")
    assert value["command"] == "fedortho reproduce pruning --scale demo --seeds 0"
    assert [row["key"]["method"] for row in value["rows"]] == ["original", "paper", "paper"]


def test_missing_data_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    networks = (NETWORK, replace(NETWORK, data="cifar10"))
    with pytest.raises(FedOrthoError, match=r"cifar10: there is no directory .*--data-dir must hold"):
        reproduce(experiment(networks=networks), tmp_path / "out", data_dir=str(tmp_path))
    assert not (tmp_path / "out").exists()
    with pytest.raises(FedOrthoError, match="--data-dir must hold cifar10/train"):
        invoke("reproduce", "strength", "--scale", "small", "--data-dir", str(tmp_path), "--out", str(tmp_path / "out"))


def test_a_warning_advises_no_flag_that_the_command_lacks(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    guessing = replace(NETWORK, epochs=1, lr=1e-9)
    reproduce(experiment(networks=(guessing,), variants=RATIOS[1:]), tmp_path)
    assert "at least as strongly to the retain set" in caplog.text
    assert "no better than guessing" in caplog.text
    flags = {word for parameter in get_command(app).commands["reproduce"].params for word in parameter.opts}  # type: ignore[attr-defined]  # a group
    assert set(re.findall(r"--[a-z-]+", caplog.text)) <= flags


def test_a_warning_is_heard_again_once_the_table_is_done(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(FedOrthoError, match="--data-dir must hold"):
        invoke("reproduce", "strength", "--scale", "small", "--data-dir", str(tmp_path), "--out", str(tmp_path / "out"))
    for _ in range(2):
        logging.getLogger("fedortho").warning("the edit undoes a conv edit")
    assert len(caplog.messages) == 2
