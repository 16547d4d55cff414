"""Whole jobs of a federation on digits: train, forget a class and a client, train on."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small import SETTINGS, write_images

from fedortho.data.images import Dataset
from fedortho.data.request import ForgetRequest
from fedortho.engines.engine import PlanPart, TrainingPlan
from fedortho.engines.query import Query, Selection, Statistic
from fedortho.errors import FedOrthoError
from fedortho.evaluation.accuracies import accuracies_of
from fedortho.federated.engine import FederatedEngine
from fedortho.federated.local_grid import LocalGrid
from fedortho.federated.server import federated_engine, local_grid, patches_of, sync, train_federation, trainable_masks
from fedortho.federated.transport import read_wire_log
from fedortho.methods.hide import Hide
from fedortho.methods.paper import Paper
from fedortho.models.predictions import evaluate
from fedortho.requests.federated_jobs import do_job
from fedortho.requests.forgetting import forget_federated_run
from fedortho.requests.undoing import undo_run
from fedortho.runs.run import Run, open_run
from fedortho.runs.settings import held_rows
from fedortho.storage.files import read_json
from fedortho.training.objectives import FitOptions
from fedortho.training.recipe import Recipe

TRAINED = replace(SETTINGS, model="small:DeepNet", rounds=6, epochs=2, split="dirichlet:1", timeout=60.0)
CLASS = ForgetRequest.parse("class:3")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train_federation(tmp_path_factory.mktemp("federation") / "run", TRAINED)


@pytest.fixture(scope="module")
def forgot(run: Run) -> Run:
    path = run.path.with_name("forgot")
    forget_federated_run(run, CLASS, Hide(max_retain_drop=0.05), out=path)
    return open_run(path)


def engine_of(run: Run, data: Dataset) -> FederatedEngine:
    assert isinstance(run.settings, type(TRAINED))
    with local_grid(run.settings, run.path / "clients") as grid:
        return federated_engine(grid, run.settings, data)


def test_a_federation_learns_and_leaves_a_run_like_any_other(run: Run, digits: Dataset) -> None:
    assert 0.9 < run.record.result.test_accuracy < 1
    history = run.history()
    assert [entry.clients for entry in history] == [4] * 6
    assert history[-1].drift is not None
    rounds = [exchange for exchange in read_wire_log(run.path / "wire.json") if exchange.kind == "train.local"]
    size = (run.path / "model.safetensors").stat().st_size
    assert len(rounds) == 6
    assert all(size * 0.95 < up < size * 1.05 for exchange in rounds for up in exchange.bytes_up.values())
    assert not (run.path / "ledger.safetensors").exists(), "ledgers stay with the clients"
    assert len(list(run.path.glob("clients/client-*/ledger.safetensors"))) == 4


def test_a_class_is_forgotten_the_old_run_stays_and_all_clients_have_the_new_model(
    run: Run, forgot: Run, digits: Dataset
) -> None:
    before, after = (accuracies_of(r.load_model(), digits, CLASS) for r in (run, forgot))
    assert before.forget > 0.9
    assert after.forget <= 0.06
    assert after.retain > before.retain - 0.08
    assert {info.model for info in engine_of(run, digits).clients.values()} == {run.record.model.digest}
    assert {info.model for info in engine_of(forgot, digits).clients.values()} == {forgot.record.model.digest}
    (entry,) = forgot.record.requests
    assert entry.cost is not None
    assert entry.cost.exchanges <= 24, "observe; for each ratio that is tried a repair and at most three looks"
    assert sync(forgot) == [0, 1, 2, 3]


@pytest.mark.slow
def test_a_client_is_forgotten_to_the_level_of_unseen_images_and_is_gone(run: Run, digits: Dataset) -> None:
    request, path = ForgetRequest.parse("client:2"), run.path.with_name("left")
    served = forget_federated_run(run, request, Hide(max_retain_drop=0.2), out=path)
    assert served.result.chosen is not None
    assert served.result.chosen.limit > 0.5, "held-out accuracy, not nothing"
    assert served.record.after.forget < served.record.before.forget
    left = open_run(path)
    assert engine_of(left, digits).present() == [0, 1, 3]
    with pytest.raises(FedOrthoError, match="has left already"):
        forget_federated_run(left, request, Paper(), out=None)
    rows = held_rows(digits, TRAINED.federation, 0)
    assert served.record.before.forget == pytest.approx(
        evaluate(run.load_model(), digits.train.subset(torch.isin(digits.train.rows, rows[2]))).accuracy
    )


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [8, 20])
def test_more_rounds_do_not_bring_a_silenced_class_back_but_the_papers_kernels_recover(
    run: Run, forgot: Run, digits: Dataset, rounds: int
) -> None:
    recipe = Recipe(epochs=rounds, lr=0.02, schedule="constant", crop=1, flip=0.0, batch_size=64)
    plan = TrainingPlan((PlanPart(Selection("train", None, CLASS)),), FitOptions(local_epochs=1))
    model = forgot.load_model()
    mask = trainable_masks(forgot, model)
    assert mask
    trained = engine_of(forgot, digits).fit(model, plan, recipe, trainable=mask)
    assert accuracies_of(trained, digits, CLASS).forget <= 0.06
    for name, may_move in mask.items():
        assert not trained.get_parameter(name)[~may_move].any(), "what was silenced stays silent"
    assert accuracies_of(trained, digits, CLASS).retain > 0.9

    path = run.path.with_name(f"paper-{rounds}")
    forget_federated_run(run, CLASS, Paper(ratio=0.3), out=path)
    paper = open_run(path)
    ((patch, _),) = patches_of(paper)
    weak = paper.load_model()
    assert not trainable_masks(paper, weak), "weakened kernels are not held"
    again = engine_of(paper, digits).fit(weak, plan, recipe)
    name, (kernels, _) = next(iter(patch.scaled.items()))
    norms = [m.get_parameter(name)[kernels].flatten(1).norm(dim=1).mean() for m in (run.load_model(), weak, again)]
    assert norms[1] < 0.8 * norms[0]
    assert norms[2] > norms[1] + 0.5 * (norms[0] - norms[1]), "orthogonality pulls them back to length 1"


@pytest.mark.slow
def test_training_on_from_a_run_keeps_what_it_forgot(forgot: Run, digits: Dataset, tmp_path: Path) -> None:
    settings = replace(TRAINED, start=str(forgot.path), rounds=1, lr=0.01)
    further = train_federation(tmp_path / "further", settings)
    assert accuracies_of(further.load_model(), digits, CLASS).forget <= 0.06
    assert [served.request for served in further.record.requests] == ["class:3"]
    assert trainable_masks(further, further.load_model()).keys() == trainable_masks(forgot, forgot.load_model()).keys()
    engine = engine_of(further, digits)
    ((gone,),) = engine.measure(further.load_model(), [Query((Selection("train", CLASS),), Statistic("peaks"))])
    assert not gone.images, "its clients have dropped the class as well"
    more = replace(TRAINED, start=str(further.path), rounds=2)
    again = train_federation(tmp_path / "again", more)
    assert accuracies_of(again.load_model(), digits, CLASS).forget <= 0.06, "nor does the next one learn it anew"
    for changes, message in (({"split": "iid"}, "--split"), ({"seed": 4}, "--seed")):
        with pytest.raises(FedOrthoError, match=message):
            train_federation(tmp_path / "other", replace(more, **changes))


@pytest.mark.slow
def test_a_request_can_be_undone_and_the_next_one_served(run: Run, forgot: Run, tmp_path: Path) -> None:
    settings = Paper()
    forget_federated_run(forgot, ForgetRequest.parse("class:5"), settings, out=tmp_path / "two", undo=tmp_path / "undo")
    restored = undo_run(open_run(tmp_path / "two"), tmp_path / "undo", tmp_path / "one")
    assert len(patches_of(restored)) == 1
    served = forget_federated_run(restored, ForgetRequest.parse("class:6"), settings, out=tmp_path / "deep" / "other")
    assert served.run is not None
    assert sync(served.run) == [0, 1, 2, 3]
    assert sorted(path.name for path in (tmp_path / "deep").iterdir()) == ["other"]


def test_clients_that_are_elsewhere_are_not_made_up(run: Run, tmp_path: Path) -> None:
    path = shutil.copytree(run.path, tmp_path / "run", ignore=shutil.ignore_patterns("clients"))
    with pytest.raises(FedOrthoError, match=r"has no clients/.* give --backend superlink --deployment DIR"):
        forget_federated_run(open_run(path), CLASS, Paper(), out=tmp_path / "out")
    with pytest.raises(FedOrthoError, match="give --deployment DIR"):
        sync(open_run(path))


def test_a_killed_request_leaves_neither_half_of_a_run(run: Run, tmp_path: Path, monkeypatch) -> None:
    class Killed(Exception):
        pass

    def kill(*_: object) -> None:
        raise Killed

    monkeypatch.setattr(FederatedEngine, "send_patch", kill)
    with pytest.raises(Killed):
        forget_federated_run(run, CLASS, Paper(), out=tmp_path / "out")
    monkeypatch.undo()
    assert not list(tmp_path.iterdir())
    forget_federated_run(run, CLASS, Paper(), out=tmp_path / "out")
    assert sync(open_run(tmp_path / "out")) == [0, 1, 2, 3]


def test_samples_that_are_not_there_are_refused_before_anybody_is_asked(run: Run) -> None:
    for text, message in (("samples:0/99999", "no sample 0/99999"), ("samples:9/1", "no client 9; clients run 0 to 3")):
        with pytest.raises(FedOrthoError, match=message):
            forget_federated_run(run, ForgetRequest.parse(text), Paper(), out=None)


def test_what_a_run_was_trained_without_is_not_retained_by_a_later_request(run: Run) -> None:
    retrained = replace(run, settings=replace(run.settings, without="class:3"))
    served = forget_federated_run(retrained, ForgetRequest.parse("class:5"), Paper(), out=None)
    known = forget_federated_run(run, ForgetRequest.parse("class:5"), Paper(), out=None)
    assert served.result.plan is not None
    assert known.result.plan is not None
    assert served.result.plan.images_read["statistics"] == known.result.plan.images_read["statistics"]
    assert served.record.before.retain != known.record.before.retain


@pytest.mark.slow
def test_a_client_with_images_of_its_own_is_judged_by_itself(run: Run, tmp_path: Path) -> None:
    own = write_images(tmp_path / "own", {str(label): 8 for label in range(10)})
    settings = replace(TRAINED, rounds=1)
    with local_grid(settings, tmp_path / "clients") as grid:
        assert isinstance(grid, LocalGrid)
        mine = LocalGrid(grid._app, 4, {"store": str(tmp_path / "clients"), "data": str(own)})
    trained = train_federation(tmp_path / "run", settings, mine)
    for number, text in enumerate(("samples:1/3,1/4,1/5,1/6,1/7,1/8", "client:2", "class:3")):
        out = tmp_path / f"run-{number}"
        served = forget_federated_run(trained, ForgetRequest.parse(text), Paper(), mine, out=out)
        assert 0 <= served.record.after.forget <= 1
        trained = open_run(out)
    assert federated_engine(mine, settings, trained.load_data()).present() == [0, 1, 3]


@pytest.mark.slow
def test_training_without_a_request_never_sees_it(digits: Dataset, tmp_path: Path) -> None:
    run = train_federation(tmp_path / "retrained", replace(TRAINED, without="class:3 client:1", rounds=2))
    assert accuracies_of(run.load_model(), digits, CLASS).forget == 0
    log = read_wire_log(run.path / "wire.json")
    assert all(1 not in exchange.bytes_down for exchange in log if exchange.kind == "train.local")


@pytest.mark.parametrize("norms", [pytest.param("local", marks=pytest.mark.slow), "recalibrate"])
def test_statistics_are_pooled_at_the_end_where_they_are_not_averaged(norms: str, tmp_path: Path) -> None:
    run = train_federation(tmp_path / "run", replace(TRAINED, norms=norms, rounds=2))
    assert run.record.result.test_accuracy > 0.6
    states = [read_json(path) for path in run.path.glob("clients/client-*/state.json")]
    assert {state["model"] for state in states} == {run.record.model.digest}
    kinds = [exchange.kind for exchange in read_wire_log(run.path / "wire.json")]
    assert kinds == ["query.hello", *["train.local"] * 2, "query.observe", "train.keep"], "pooled once, then kept"


def test_a_job_comes_from_a_flat_configuration(run: Run, tmp_path: Path) -> None:
    grid = engine_of(run, run.load_data()).transport.grid
    config = {"do": "forget", "run": str(run.path), "out": "", "request": "class:1", "forget": '{"ratio": 0.05}'}
    do_job(grid, config)
    for changes, message in (
        ({"do": "dance"}, "no job 'dance'; choose from train, forget, rewind, sync"),
        ({"do": "train"}, "no out"),
        ({"forget": "{"}, "JSON"),
        ({"forget": "[]"}, "JSON"),
    ):
        with pytest.raises(FedOrthoError, match=message):
            do_job(grid, config | changes)


def test_a_federation_is_asked_where_its_images_lie_now(tmp_path: Path, digits: Dataset) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    write_images(old, {"ant": 40, "bee": 40, "cat": 40})
    settings = replace(SETTINGS, data=str(old), rounds=1)
    moved = train_federation(tmp_path / "run", settings)
    old.rename(new)
    served = forget_federated_run(moved.at(str(new)), ForgetRequest.parse("class:bee"), Paper(), out=tmp_path / "out")
    assert served.run is not None
    with pytest.raises(FedOrthoError):
        forget_federated_run(moved, ForgetRequest.parse("class:bee"), Paper(), out=tmp_path / "lost")
