"""A client with images of its own, and what it keeps on its disk."""

import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small import SETTINGS, write_images

from fedortho.data.request import ForgetRequest
from fedortho.engines.engine import as_training_plan
from fedortho.engines.query import Query, Selection, Statistic
from fedortho.errors import BadCheckpoint, BadData, FedOrthoError
from fedortho.federated.client import (
    apply_patch,
    federate_settings,
    find_client,
    hello,
    keep_model,
    observe_images,
    train_local,
)
from fedortho.federated.client_state import ClientState, open_client
from fedortho.federated.messages import (
    ApplyPatch,
    Hello,
    KeepModel,
    LocalResult,
    Observe,
    PatchInfo,
    TaskInfo,
    TrainLocal,
)
from fedortho.federated.wire import pack_queries, pack_training_plan, unpack_observations
from fedortho.models.patch import bind_patch
from fedortho.models.sites import find_sites
from fedortho.models.zoo import build_model
from fedortho.storage.files import prefixed, read_tensors, tensors_digest, write_tensors
from fedortho.storage.settings import as_mapping
from fedortho.training.recipe import Recipe
from fedortho.unlearning.select import kernel_patch

TASK = TaskInfo(("ant", "bee", "cat", "dog"), (1, 8, 8), (0.5,), (0.25,))


@pytest.fixture
def client(tmp_path: Path) -> ClientState:
    own = write_images(tmp_path / "mine", {"bee": 30, "dog": 20})
    return open_client(1, replace(SETTINGS, valid=0.2), tmp_path / "store", str(own))


def network(seed: int = 0) -> torch.nn.Module:
    return build_model("small:TinyNet", num_classes=4, channels=1, seed=seed)


def keep(client: ClientState, model: torch.nn.Module) -> None:
    keep_model(client, prefixed("model.", model.state_dict()), KeepModel(TASK, True, None))


def observation(client: ClientState, queries: list[Query], least_group: int = 1, model: str = "") -> tuple[Any, Any]:
    tensors, *described = pack_queries(queries)
    return observe_images(client, tensors, Observe(TASK, model or client.record.model, *described, 1, least_group))


def test_own_images_get_the_federations_labels_by_name_and_its_normalisation(client: ClientState) -> None:
    images = client.images(TASK)
    assert sorted(set(images.train.labels.tolist())) == [1, 3], "bee and dog, not 0 and 1"
    assert (images.train.names, images.train.mean, images.train.std) == (TASK.names, TASK.mean, TASK.std)
    assert len(images.train) + len(images.valid) == 40 == len(images.rows[1]), "some images are set aside for testing"
    _, reply = hello(client, {}, Hello(TASK))
    sizes = (reply.images, reply.valid)
    assert sizes == (len(images.train), len(images.valid))
    assert (reply.client, reply.has_own_images, reply.model, reply.has_left) == (1, True, "", False)
    with pytest.raises(BadData, match="'bee'"):
        client.images(replace(TASK, names=("ant", "dog")))
    with pytest.raises(BadData, match="channels"):
        client.images(replace(TASK, shape=(3, 8, 8)))


def test_a_client_trains_answers_and_ignores_samples_of_others(client: ClientState) -> None:
    recipe = Recipe(epochs=1, batch_size=16, crop=0, ortho=0.0)
    _, plan = pack_training_plan(as_training_plan(Selection()))
    order = TrainLocal(TASK, recipe, plan, {}, align=False, frozen=(), base="", num_clients=1)
    sent = prefixed("model.", network().state_dict())
    tensors, reply = train_local(client, sent, order)
    assert isinstance(reply.result, LocalResult)
    assert reply.result.images == 32
    assert tensors.keys() == sent.keys()
    assert any(not torch.equal(tensors[name], value) for name, value in sent.items())

    keep(client, network())
    images = client.images(TASK)
    place = int((~torch.isin(images.rows[1], images.valid.rows)).nonzero()[0])
    request = ForgetRequest(samples=(f"1/{place}", "2/5"))
    queries = [Query((Selection("train", request), Selection("train", None, request)), Statistic("peaks", "all"))]
    tensors, observed = observation(client, queries)
    ((forget, retain),) = unpack_observations(tensors, queries)
    assert (forget.images, retain.images, observed.withheld) == (1, 31, 0), "sample 2/5 belongs to client 2"
    assert observation(client, queries, model="another")[1].status == "other-model"


def test_sums_by_label_never_leave_a_client(client: ClientState) -> None:
    keep(client, network())
    with pytest.raises(FedOrthoError, match="by label"):
        observation(client, [Query((Selection(),), Statistic("peaks", "all", by_label=True))], least_group=5)


def test_counts_by_label_leave_out_labels_of_few_images_and_totals_do_not(client: ClientState) -> None:
    keep(client, network())
    images = client.images(TASK)
    train, rows = images.train, images.rows
    bees, dogs = (
        [p for p, row in enumerate(rows[1].tolist()) if row in train.rows[train.labels == label].tolist()]
        for label in (1, 3)
    )
    request = ForgetRequest(samples=tuple(f"1/{place}" for place in (*bees[:6], *dogs[:2])))
    selections = (Selection("train", request),)
    queries = [Query(selections, Statistic("right", "all", by_label=by_label)) for by_label in (False, True)]
    tensors, _ = observation(client, queries, least_group=5)
    (total,), (by_label,) = unpack_observations(tensors, queries)
    assert total.counts.tolist() == [8]
    assert by_label.counts.tolist() == [0, 6, 0, 0], "counts of two dogs would reveal how each is classified"
    assert float(by_label.sums["right"][3]) == 0


class Killed(Exception):
    pass


def killed(*_: object) -> None:
    raise Killed


def reopened(client: ClientState) -> ClientState:
    return open_client(client.client, client.settings, client.store, client.own_data)


def send_patch(client: ClientState, model: torch.nn.Module, request: str) -> None:
    sites = find_sites(model, (1, 8, 8), "all", "channel", "stream")
    chosen = {sites[-1].name: (torch.tensor([1]), torch.ones(1, dtype=torch.float64))}
    patch = bind_patch(kernel_patch(model, sites, chosen, "channel"), model)
    tensors, info = patch.packed()[0], PatchInfo(patch.before, patch.after)
    apply_patch(client, tensors, ApplyPatch(info, ForgetRequest.parse(request)))


def test_a_client_killed_while_it_takes_a_model_still_answers(
    client: ClientState, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(client, network())
    monkeypatch.setattr(ClientState, "_remove_unused", killed)
    with pytest.raises(Killed):
        keep(client, network(seed=9))
    monkeypatch.undo()
    _, reply = observation(reopened(client), [Query((Selection(),), Statistic("peaks", "all"))])
    assert (reply.status, reply.withheld) == ("done", 0), "no ledger of another model is left"


@pytest.mark.parametrize(("request_text", "step"), [("class:dog", "_remove_unused"), ("client:1", "leave")])
def test_a_client_killed_while_it_forgets_keeps_no_old_model(
    client: ClientState, monkeypatch: pytest.MonkeyPatch, request_text: str, step: str
) -> None:
    model = network()
    keep(client, model)
    monkeypatch.setattr(ClientState, step, killed)
    with pytest.raises(Killed):
        send_patch(client, model, request_text)
    monkeypatch.undo()
    _, reply = hello(reopened(client), {}, Hello(TASK))
    models = [path.stem for path in (client.store / "models").iterdir()]
    assert models == ([reply.model] if request_text == "class:dog" else [])


def test_the_ledger_of_a_client_has_no_sums_of_forgotten_images(client: ClientState) -> None:
    model = network()
    keep(client, model)
    send_patch(client, model, "class:dog")
    tensors, _ = read_tensors(client.ledger_path)
    assert tensors["counts"].tolist() == [0, len(client.images().train), 0, 0]
    assert not any(bool(value[3].any()) for name, value in tensors.items() if name.startswith("sums."))
    assert set(tensors["kept.labels"].tolist()) == {1}, "nor activations of them, for training or validation"


def test_a_file_with_another_model_is_refused_and_a_lost_one_is_missed(client: ClientState) -> None:
    keep(client, network())
    path = client.model_path(client.record.model)
    client.ledger_path.unlink()
    write_tensors(path, network(seed=9).state_dict())
    with pytest.raises(BadCheckpoint, match="another model"):
        observation(client, [Query((Selection(),), Statistic("peaks", "all"))])
    path.unlink()
    assert hello(client, {}, Hello(TASK))[1].model == "", "so the server sends it again"


def test_a_damaged_record_is_named_and_does_not_harm_other_clients_of_the_store(client: ClientState) -> None:
    damaged = client.store / "client-0" / "state.json"
    damaged.parent.mkdir(parents=True)
    for text in ("[]", '{"model": ""}', "{", '{"schema": 1, "model": 3}'):
        damaged.write_text(text)
        with pytest.raises(BadCheckpoint, match=r"client-0/state\.json"):
            open_client(0, client.settings, client.store, client.own_data)
        keep(client, network(seed=len(text)))
    assert len(list((client.store / "models").iterdir())) == 1


def test_a_node_without_number_or_store_is_refused_by_name() -> None:
    config = as_mapping(SETTINGS) | {"do": "train", "store": ""}
    assert federate_settings(config) == SETTINGS
    with pytest.raises(FedOrthoError, match="partition-id"):
        find_client({}, config)
    with pytest.raises(FedOrthoError, match="store"):
        find_client({"partition-id": 0}, config)
    assert find_client({"partition-id": 0, "store": "here", "data": "mine"}, config).own_data == "mine"


def test_a_server_writes_and_reads_no_file_beside_those_of_the_client(client: ClientState, tmp_path: Path) -> None:
    weights = network().state_dict()
    with pytest.raises(BadCheckpoint, match="another model"):
        client.teacher_weights("../../../outside", weights)
    assert not list(tmp_path.rglob("outside*")), "nothing was written"
    with pytest.raises(BadCheckpoint, match="another model"):
        client.teacher_weights("0" * 64, weights)
    assert client.teacher_weights(tensors_digest(weights), weights).keys() == weights.keys()
    write_tensors(tmp_path / "foreign.safetensors", weights)
    plan = pack_training_plan(as_training_plan(Selection()))[1]
    order = TrainLocal(TASK, Recipe(), plan, {}, align=False, frozen=(), base="../../foreign", num_clients=1)
    with pytest.raises(FedOrthoError, match="does not have"):
        train_local(client, {}, order)


def test_the_private_key_of_an_exchange_is_never_readable_by_others(
    client: ClientState, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "chmod", lambda path, mode: None)  # the mode that the file begins with
    client.keep_key("exchange", "secret")
    assert stat.S_IMODE((client.folder / "key.json").stat().st_mode) == 0o600
    assert client.take_key("exchange") == "secret"


def test_a_model_that_is_sent_is_counted_by_its_weights_and_not_by_the_name_it_is_given(client: ClientState) -> None:
    sent = prefixed("model.", network().state_dict())
    tensors, *described = pack_queries([Query((Selection("train"),), Statistic("right", "all"))])
    honest = Observe(TASK, tensors_digest(network().state_dict()), *described, 1, 1)
    assert observe_images(client, tensors | sent, honest)[1].status == "done"
    with pytest.raises(FedOrthoError, match="another model"):
        observe_images(client, tensors | sent, replace(honest, model="0" * 64))
