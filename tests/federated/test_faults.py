"""The federated engine with clients that fail, come late, lose things or leave."""

import copy
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from federations import CLASS, OTHER, PEAKS, RECIPE, greeted, grid_of, held, start
from flwr.app import Message
from torch import nn

from fedortho.data.images import Dataset
from fedortho.data.request import EmptyGroup, ForgetRequest
from fedortho.engines.engine import PlanPart, TrainingPlan
from fedortho.engines.query import Query, Selection
from fedortho.errors import FedOrthoError
from fedortho.federated.engine import FederatedEngine
from fedortho.federated.local_grid import FIRST_NODE, LocalGrid
from fedortho.federated.wire import pack_json, unpack_json
from fedortho.methods.hide import Hide
from fedortho.models.patch import bind_patch
from fedortho.models.sites import find_sites
from fedortho.models.zoo import build_model
from fedortho.runs.settings import sample_clients
from fedortho.storage.files import read_json, tensors_digest
from fedortho.training.objectives import FitOptions, Target
from fedortho.unlearning.select import kernel_patch


def test_sampled_clients_without_images_are_replaced_by_others(make_engine, few_digits: Dataset) -> None:
    engine = make_engine(clients=4, fraction=0.25, split="shards:3", rounds=1)
    one = draws(engine, RECIPE.seed)
    labels = few_digits.train.labels[held_by(engine, few_digits, one)]
    label = next(n for n in range(10) if not bool((labels == n).any()))
    only = Selection("train", ForgetRequest.parse(f"class:{label}"))
    trained = engine.fit(start(), only, replace(RECIPE, epochs=1))
    assert tensors_digest(trained.state_dict()) != tensors_digest(start().state_dict())
    first = next(exchange for exchange in engine.transport.log if exchange.kind == "train.local")
    assert list(first.bytes_up) == [one]
    assert engine.history[0].clients == 1


def draws(engine: FederatedEngine, seed: int) -> int:
    return sample_clients(engine.present(), engine.federation, seed, 0)[0]


def held_by(engine: FederatedEngine, data: Dataset, client: int) -> torch.Tensor:
    return torch.isin(data.train.rows, held(engine)[client])


class Spoiled(LocalGrid):
    """Clients that fail in some way."""

    def __init__(self, good: LocalGrid, bad: dict[int, str]) -> None:
        self.__dict__.update(good.__dict__)
        self.bad = bad

    def _answer(self, message: Message) -> Message:
        client = message.metadata.dst_node_id - FIRST_NODE
        how = self.bad.get(client) if message.metadata.message_type != "query.hello" else None
        if how == "raises":
            message = copy.deepcopy(message)  # its record is the others' too
            message.content["message"]["json"] = "no json"
            return super()._answer(message)
        reply = super()._answer(message)
        tensors, value = unpack_json(reply.content)
        if how == "shapes":
            tensors = {name: value.reshape(-1)[:1] for name, value in tensors.items()}
        elif how == "nan":
            tensors = {name: value.double() * float("nan") for name, value in tensors.items()}  # sums are integers
        elif how == "other":
            value["client"] = client + 1
        elif how == "layers":
            tensors.pop(next(iter(tensors)))
        elif how == "silly":
            value = {"schema": 1, "client": client}
        return Message(pack_json(tensors, value), reply_to=message) if how else reply


@pytest.mark.parametrize("how", [pytest.param("raises", marks=pytest.mark.slow), "silent", "shapes", "nan", "other"])
def test_a_client_that_fails_is_named_and_the_others_go_on(
    make_engine, tiny_digits: nn.Module, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine(timeout=0.3)
    engine.send_model(tiny_digits)
    without = greeted(engine)
    engine.transport.grid = Spoiled(grid_of(engine), {2: how})
    if how == "silent":
        engine.transport.grid.silent = {2}
    queries = [Query((Selection("train", CLASS), Selection("train", None, CLASS)), PEAKS)]
    ((gone, _),) = engine.measure(tiny_digits, queries)
    without.clients = {client: info for client, info in without.clients.items() if client != 2}
    ((expected, _),) = without.measure(tiny_digits, queries)
    assert torch.equal(gone.counts, expected.counts), "nobody is counted twice or for another"
    assert all(torch.equal(gone.sums[key], value) for key, value in expected.sums.items())
    assert list(engine.transport.log[-1].failed) == [2]
    assert "client 2" in caplog.text
    trained = engine.fit(start(), Selection(), replace(RECIPE, epochs=1))
    assert all(bool(torch.isfinite(value).all()) for value in trained.state_dict().values())
    assert engine.history[0].clients == 3


@pytest.mark.parametrize(
    "how", ["shapes", *(pytest.param(each, marks=pytest.mark.slow) for each in ("layers", "silly"))]
)
def test_the_first_client_does_not_decide_what_fits(make_engine, tiny_digits: nn.Module, how: str) -> None:
    engine = make_engine()
    engine.send_model(tiny_digits)
    queries = [Query((Selection("train", CLASS), Selection("train", None, CLASS)), PEAKS)]
    ((whole, _),) = engine.measure(tiny_digits, queries)
    engine.transport.grid = Spoiled(grid_of(engine), {0: how})
    ((gone, _),) = engine.measure(tiny_digits, queries)
    assert list(engine.transport.log[-1].failed) == [0]
    assert 0 < gone.images < whole.images
    engine.fit(start(), Selection(), replace(RECIPE, epochs=1))
    assert engine.history[0].clients == 3


def test_replies_that_come_early_wait_in_a_file_that_a_kill_would_remove(
    make_engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = make_engine().fit(start(), Selection(), replace(RECIPE, epochs=1))
    engine, place = make_engine(), tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    pull, left = engine.transport.grid.pull_messages, []
    monkeypatch.setattr(engine.transport.grid, "pull_messages", lambda ids: pull(reversed(list(ids))))
    how = {"watch": lambda news: left.extend(place.rglob("*"))}
    trained = engine.fit(start(), Selection(), replace(RECIPE, epochs=1), **how)
    assert left == []
    assert tensors_digest(trained.state_dict()) == tensors_digest(expected.state_dict())


def test_a_client_that_went_away_is_named_and_messages_that_were_not_taken_are_an_error(
    make_engine, tiny_digits: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    push = (
        engine.transport.grid.push_messages
    )  # Flower gives None for a node that is gone, and nothing if all is too large
    monkeypatch.setattr(engine.transport.grid, "push_messages", lambda messages: [None, None, *push(messages)[2:]])
    assert engine.send_model(tiny_digits) == [2, 3]
    assert engine.transport.log[-1].failed == dict.fromkeys([0, 1], "is no longer connected")
    monkeypatch.setattr(engine.transport.grid, "push_messages", lambda messages: [])
    with pytest.raises(FedOrthoError, match="4 messages"):
        engine.send_model(tiny_digits)


def test_too_few_answers_end_the_round_with_a_reason(make_engine, tiny_digits: nn.Module) -> None:
    engine = make_engine(timeout=0.2, quorum=0.9)
    engine.transport.grid.silent = {0}
    with pytest.raises(FedOrthoError, match=r"client 0: silent"):
        engine.fit(start(), Selection(), RECIPE)


def test_an_error_text_never_reaches_the_server(make_engine, caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine()
    grid = grid_of(engine)
    (name,) = grid.push_messages([Message(pack_json({}, {"secret": "cat"}), FIRST_NODE, "query.observe")])
    (reply,) = grid.pull_messages([name])
    assert reply.has_error()
    assert reply.error.reason == "ClientFailed"


def test_nothing_to_train_on_is_refused_and_not_divided_by(make_engine) -> None:
    engine = make_engine()
    everything = ForgetRequest(classes=tuple(map(str, range(10))))
    with pytest.raises(FedOrthoError, match="images to train on"):
        engine.fit(start(), Selection("train", None, everything), RECIPE)


def test_a_client_with_a_single_image_is_passed_over_like_one_without(make_engine) -> None:
    engine = make_engine(valid=0.0)
    three = Selection("train", ForgetRequest(samples=("0/0", "1/0", "1/1")))
    engine.fit(start(), three, replace(RECIPE, epochs=1))
    assert (engine.history[0].clients, engine.history[0].images) == (1, 2)
    assert not engine.transport.log[-1].failed
    with pytest.raises(FedOrthoError, match="images to train on"):
        engine.fit(start(), Selection("train", ForgetRequest(samples=("0/0",))), RECIPE)


@pytest.mark.slow
def test_nobody_fails_over_the_few_images_that_it_is_to_forget(make_engine) -> None:
    engine = make_engine(clients=20, split="dirichlet:0.3", least_images=2, model="vgg-mini")
    net = build_model("vgg-mini", num_classes=10, channels=1)
    wrong, rest = PlanPart(Selection("train", CLASS), Target("other")), PlanPart(Selection("train", None, CLASS))
    engine.fit(net, TrainingPlan((wrong, rest), FitOptions("turns")), replace(RECIPE, epochs=1, ortho=0.0))
    assert not engine.transport.log[-1].failed


def silencing(model: nn.Module):
    sites = find_sites(model, (1, 8, 8), "all", "channel", "stream")
    chosen = {sites[-1].name: (torch.tensor([1, 4]), torch.ones(2, dtype=torch.float64))}
    return bind_patch(kernel_patch(model, sites, chosen, "channel"), model, request="class:3")


def test_a_patch_is_applied_once_however_often_it_is_sent_and_a_late_client_gets_it(
    make_engine, tmp_path: Path, tiny_digits: nn.Module
) -> None:
    engine = make_engine(timeout=0.3)
    engine.send_model(tiny_digits)
    patch = silencing(tiny_digits)
    engine.transport.grid.silent = {3}
    assert engine.send_patch(patch, CLASS) == [0, 1, 2]
    assert engine.send_patch(patch, CLASS, [0, 1, 2]) == [0, 1, 2]
    engine.transport.grid.silent = set()
    later = greeted(engine)
    assert [info.model for info in later.clients.values()] == [patch.after] * 3 + [patch.before]
    later.bring_up_to_date(patch.apply(tiny_digits), [(patch, CLASS)])
    assert {info.model for info in later.hello().values()} == {patch.after}
    kinds = [exchange.kind for exchange in later.transport.log]
    assert kinds == ["query.hello", "train.patch", "query.hello"], "the model itself did not travel"
    states = [read_json(path) for path in sorted((tmp_path / "clients").glob("client-*/state.json"))]
    assert all(len(state["forgotten"]) == 1 for state in states)
    models = list((tmp_path / "clients" / "models").iterdir())
    assert [path.stem for path in models] == [patch.after], "the model that knew is gone from the disks"
    with pytest.raises(FedOrthoError, match="refuses"):
        later.send_model(tiny_digits)


def test_clients_stop_using_forgotten_images_and_a_client_that_leaves_takes_no_further_part(
    make_engine, tmp_path: Path, tiny_digits: nn.Module
) -> None:
    engine = make_engine()
    engine.send_model(tiny_digits)
    patch = silencing(tiny_digits)
    request = ForgetRequest.parse("class:3 client:1")
    engine.send_patch(patch, request)
    edited = patch.apply(tiny_digits)
    later = greeted(engine)
    assert later.present() == [0, 2, 3]
    ((gone, kept),) = later.measure(edited, [Query((Selection("train", CLASS), Selection()), PEAKS)])
    assert gone.images == 0
    assert kept.images == sum(info.images for info in later.clients.values()) > 0
    assert not (tmp_path / "clients" / "client-1" / "ledger.safetensors").exists()
    for text, message in (
        ("client:1", "has left already"),
        ("client:9", "no client 9; clients run 0 to 3"),
        ("class:11", "no class '11'"),
    ):
        with pytest.raises(FedOrthoError, match=message):
            Hide().plan(edited, later, ForgetRequest.parse(text))
    del later.clients[2]
    with pytest.raises(FedOrthoError, match="client 2 is not connected"):
        Hide().plan(edited, later, ForgetRequest.parse("client:2"))
    with pytest.raises(EmptyGroup, match="forgotten before"):
        Hide().plan(edited, later, CLASS, CLASS)


def test_a_client_that_missed_its_leaving_and_more_leaves_and_nobody_waits_for_it(
    make_engine, tmp_path: Path, tiny_digits: nn.Module
) -> None:
    engine = make_engine(timeout=0.3)
    engine.send_model(tiny_digits)
    leaving = silencing(tiny_digits)
    once = leaving.apply(tiny_digits)
    second = bind_patch(
        kernel_patch(once, find_sites(once, (1, 8, 8), "all", "channel", "stream"), OTHER, "channel"), once
    )
    engine.transport.grid.silent = {1}
    request = ForgetRequest.parse("client:1")
    assert engine.send_patch(leaving, request) == [0, 2, 3]
    assert engine.send_patch(second, CLASS) == [0, 2, 3]
    engine.transport.grid.silent = set()
    later = greeted(engine, left=[1])
    later.bring_up_to_date(second.apply(once), [(leaving, request), (second, CLASS)])
    state = read_json(tmp_path / "clients" / "client-1" / "state.json")
    assert state["has-left"]
    assert not state["model"]
    assert later.present() == [0, 2, 3]
    with pytest.raises(EmptyGroup, match="client 1 has left already"):
        later.check(request, None)


def test_a_client_that_lost_its_disk_is_told_what_was_forgotten(
    make_engine, tmp_path: Path, tiny_digits: nn.Module
) -> None:
    engine = make_engine()
    patch = silencing(tiny_digits)
    engine.bring_up_to_date(patch.apply(tiny_digits), [(patch, CLASS)])
    states = [read_json(path) for path in (tmp_path / "clients").glob("client-*/state.json")]
    assert [state["forgotten"] for state in states] == [[{"classes": ["3"], "clients": [], "samples": []}]] * 4
    ((gone,),) = engine.measure(patch.apply(tiny_digits), [Query((Selection("train", CLASS),), PEAKS)])
    assert not gone.images


def test_a_client_that_outweighs_all_others_is_named(make_engine, caplog: pytest.LogCaptureFixture) -> None:
    make_engine(clients=4)
    assert "mostly its model" not in caplog.text
    engine = make_engine(clients=4)
    greet = engine.transport.greet
    engine.transport.greet = lambda *args: {
        c: replace(r, images=10**9 if c == 2 else 5) for c, r in greet(*args).items()
    }
    engine.hello()
    assert "client 2 says that it holds 1000000000 of all 1000000015 images" in caplog.text


def test_two_nodes_with_one_name_are_refused_and_no_node_at_all_is_an_error(make_engine, monkeypatch) -> None:
    engine = make_engine()
    grid = grid_of(engine)
    monkeypatch.setattr(grid, "get_node_ids", lambda: [FIRST_NODE, FIRST_NODE + 1, FIRST_NODE, FIRST_NODE + 2])
    assert sorted(greeted(engine).clients) == [1, 2]
    grid.silent = {0, 1, 2, 3}
    monkeypatch.undo()
    with pytest.raises(FedOrthoError, match="none of 4 nodes answered"):
        FederatedEngine(grid, replace(engine.federation, timeout=0.2), engine.task).hello()
