"""Forgetting in a Flower app of one's own: its model, its loader, its strategy, on the installed Flower."""

from pathlib import Path
from typing import Any

import pytest
import torch
from once import trained_once
from small import SmallNet
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fedortho as fo
from fedortho.errors import BadData, BadSetting, FedOrthoError
from fedortho.federated import own_app
from fedortho.federated.local_grid import LocalGrid
from fedortho.federated.messages import HelloReply, TaskInfo
from fedortho.federated.own_app import agreed_task
from fedortho.storage.files import tensors_digest

pytest.importorskip("flwr")
from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

CLIENTS = 3
Sets = tuple[TensorDataset, TensorDataset]


def net() -> nn.Module:
    return SmallNet(10, 1)


@pytest.fixture(scope="module")
def parts(digits: fo.Dataset) -> list[Sets]:
    """Training and validation images of each client as floats, as a loader of PyTorch gives them."""
    split = []
    for client in range(CLIENTS):
        images = [each.subset(torch.arange(client, len(each), CLIENTS)) for each in (digits.train, digits.valid)]
        split.append(tuple(TensorDataset(each.normalise(each.pixels[each.rows]), each.labels) for each in images))
    return split  # type: ignore[return-value]  # pairs


@pytest.fixture(scope="module")
def trained(digits: fo.Dataset, tmp_path_factory: pytest.TempPathFactory) -> nn.Module:
    """The network of the app after four epochs on digits."""
    recipe = fo.Recipe(epochs=4, batch_size=32, crop=0, flip=0.0, ortho=0.0)
    return trained_once(tmp_path_factory, "digits-small", net(), lambda model: fo.fit(model, digits.train, recipe))


def plain_app() -> ClientApp:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return Message(RecordDict({"metrics": MetricRecord({"trained": 1})}), reply_to=message)

    return app


def grid_of(parts: list[Sets], store: Path, **how: Any) -> LocalGrid:
    def images(context: Context) -> Sets:
        return parts[int(context.node_config["partition-id"])]

    app = fo.unlearning_app(plain_app(), images=images, model=net, threads=1, device="cpu", **how)
    return LocalGrid(app, len(parts), {"store": str(store)})


def right(model: nn.Module, dataset: TensorDataset) -> Tensor:
    pixels, labels = dataset.tensors
    with torch.no_grad():
        return model.eval()(pixels).argmax(1) == labels


def test_an_app_of_ones_own_forgets_a_class_and_goes_on_training_as_before(
    parts: list[Sets], trained: nn.Module, tmp_path: Path
) -> None:
    seen: list[str] = []

    def listen(message: Message, context: Context, call_next: Any) -> Message:
        seen.append(message.metadata.message_type)
        return call_next(message, context)  # type: ignore[no-any-return]

    grid = grid_of(parts, tmp_path, mods=[listen])
    unlearner = fo.Unlearner(grid, trained)
    kept: list[fo.ForgetResult] = []
    method = fo.make_method("directions", {"max_retain_drop": 0.05})
    result = unlearner.forget("class:3", method, accept=kept.append)
    assert kept == [result]
    assert unlearner.confirmed == (0, 1, 2)
    assert isinstance(unlearner.metrics, MetricRecord)
    assert unlearner.metrics["clients-confirmed"] == 3
    assert unlearner.metrics["bytes-up"] == result.cost.bytes_up > 0
    labels = parts[0][0].tensors[1]
    before, after = (right(model, parts[0][0]) for model in (trained, unlearner.model))
    assert before[labels == 3].float().mean() > 0.8
    assert after[labels == 3].float().mean() < 0.05
    assert before[labels != 3].float().mean() - after[labels != 3].float().mean() < 0.08
    assert set(seen) == {"query.hello", "train.keep", "query.observe", "train.patch"}
    (reply,) = grid.send_and_receive([Message(RecordDict(), grid.get_node_ids()[0], "train")])
    assert reply.content["metrics"] == MetricRecord({"trained": 1}), "its own handler answers, without our mods"
    context = Context(1, 100, {"partition-id": 0, "store": str(tmp_path)}, RecordDict(), {})
    left = fo.retained(parts[0][0], context)
    assert len(left) == int((labels != 3).sum())
    assert 3 not in {int(left[place][1]) for place in range(len(left))}
    with pytest.raises(FedOrthoError, match="forgotten before"):
        unlearner.forget("class:3", "directions")


def test_a_node_that_missed_the_patch_gets_it_with_sync_and_older_requests_are_told(
    parts: list[Sets], trained: nn.Module, tmp_path: Path
) -> None:
    grid = grid_of(parts, tmp_path)
    unlearner = fo.Unlearner(grid, trained, timeout=0.3)
    unlearner.sync()
    grid.silent = {1}
    unlearner.forget("class:3", "logit-mask")
    assert unlearner.confirmed == (0, 2)
    grid.silent = set()
    assert unlearner.sync() == (0, 1, 2)
    trained_on = fo.Unlearner(grid, unlearner.model, forgotten=["class:3"])
    assert trained_on.sync() == (0, 1, 2)
    with pytest.raises(FedOrthoError, match="forgotten before"):
        trained_on.forget("class:3", "logit-mask")


def test_what_accept_refuses_changes_no_client(parts: list[Sets], trained: nn.Module, tmp_path: Path) -> None:
    def refuse(result: fo.ForgetResult) -> None:
        raise FedOrthoError("not good enough")

    unlearner = fo.Unlearner(grid_of(parts, tmp_path), trained)
    with pytest.raises(FedOrthoError, match="not good enough"):
        unlearner.forget("class:3", "logit-mask", accept=refuse)
    assert unlearner.forgotten is None
    assert unlearner.sync() == (0, 1, 2)
    assert tensors_digest(unlearner.model.state_dict()) == tensors_digest(trained.state_dict())


def test_a_patch_that_too_few_clients_take_is_served_and_the_others_get_it_later(
    parts: list[Sets], trained: nn.Module, tmp_path: Path
) -> None:
    grid = grid_of(parts, tmp_path)
    unlearner = fo.Unlearner(grid, trained, timeout=0.3)
    kept: list[fo.ForgetResult] = []

    def accept(result: fo.ForgetResult) -> None:
        kept.append(result)
        grid.silent = {0, 1}

    with pytest.raises(FedOrthoError, match=r"only 1 of 3 clients answered train\.patch"):
        unlearner.forget("class:3", "logit-mask", accept=accept)
    grid.silent = set()
    assert unlearner.sync() == (0, 1, 2), "no client refuses the model of the unlearner"
    assert tensors_digest(unlearner.model.state_dict()) == kept[0].patch.after


def test_a_partitioner_of_flwr_datasets_and_a_loader_are_images(
    parts: list[Sets], trained: nn.Module, tmp_path: Path
) -> None:
    class Partitioner:
        num_partitions = CLIENTS

        def load_partition(self, partition_id: int) -> DataLoader[Any]:
            return DataLoader(parts[partition_id][0], batch_size=64, shuffle=True)

    app = fo.unlearning_app(plain_app(), images=Partitioner(), model=net, threads=1, device="cpu")
    unlearner = fo.Unlearner(LocalGrid(app, CLIENTS, {"store": str(tmp_path)}), trained)
    unlearner.forget("class:3", "logit-mask")
    assert unlearner.confirmed == (0, 1, 2)
    with pytest.raises(FedOrthoError, match="choose the level hide"):
        unlearner.forget("client:1")
    with pytest.raises(BadSetting, match="train again without"):
        unlearner.forget("client:1", level="exact")


def told(names: tuple[str, ...], shape: tuple[int, int, int] = (1, 8, 8)) -> HelloReply:
    return HelloReply(0, 9, True, "", False, task=TaskInfo(names, shape, (0.0,), (1.0,)))


NUMBERS = tuple(map(str, range(10)))


def test_classes_are_agreed_by_name_and_by_the_models_outputs() -> None:
    assert agreed_task({0: told(NUMBERS[:7]), 1: told(NUMBERS[:9])}, net()).names == NUMBERS, "nobody has a nine"
    words = tuple("abcdefghij")
    assert agreed_task({0: told(("b", "c")), 1: told(words)}, net()).names == words
    assert agreed_task({0: told(("b", "c"))}, net(), words).names == words
    with pytest.raises(BadData, match=r"client 0 has a class 'z'.*give names="):
        agreed_task({0: told(("z",)), 1: told(words)}, net())
    with pytest.raises(BadSetting, match="10 outputs and the clients 2 classes"):
        agreed_task({0: told(("b", "c"))}, net())
    with pytest.raises(BadData, match=r"client 1 has images of shape \(1, 9, 9\)"):
        agreed_task({0: told(NUMBERS), 1: told(NUMBERS, (1, 9, 9))}, net())
    with pytest.raises(FedOrthoError, match="wrap the client app"):
        agreed_task({}, net())


def test_the_app_of_the_repository_runs_with_flowers_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As `flwr run app` runs it: two nodes that have nothing but their number, and no setting is given."""
    from fedortho.federated.client import client_app
    from fedortho.requests.federated_jobs import app_config, server_app

    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    config = app_config() | {"model": "small:TinyNet", "rounds": 1, "epochs": 1, "device": "cpu"}
    grid = LocalGrid(client_app(), 2, run_config=config)
    server_app()(grid, Context(1, 1, {}, RecordDict(), config))
    run = fo.open_run(tmp_path / "fedortho-runs" / "run-1")
    assert isinstance(run.settings, fo.FederateSettings)
    assert run.settings.clients == 2
    assert len(list((run.path / "clients").glob("client-*/state.json"))) == 2
    wrong = config | {"do": "dance"}
    with pytest.raises(FedOrthoError, match="dance"):
        server_app()(grid, Context(1, 1, {}, RecordDict(), wrong))
    assert "no job 'dance'; choose from" in caplog.text


def test_all_clients_train_in_a_round_unless_a_fraction_is_given(
    parts: list[Sets], trained: nn.Module, tmp_path: Path
) -> None:
    method = fo.make_method("finetune", {"epochs": 1, "crop": 0, "flip": 0.0})
    retained = sorted(int((train.tensors[1] != 3).sum()) for train, _ in parts)
    result = fo.Unlearner(grid_of(parts, tmp_path / "all"), trained).forget("class:3", method)
    assert result.cost.images_trained == sum(retained)
    result = fo.Unlearner(grid_of(parts, tmp_path / "one"), trained, fraction=0.3).forget("class:3", method)
    assert result.cost.images_trained in retained
    with pytest.raises(BadSetting, match="fraction"):
        fo.Unlearner(grid_of(parts, tmp_path / "none"), trained, fraction=0.0)


def test_erase_takes_ten_rounds_or_5_percent_of_those_of_the_training(
    parts: list[Sets], trained: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = []

    def note(_model: nn.Module, _engine: Any, _request: Any, method: Any, **_: Any) -> None:
        rounds.append(method.epochs)
        raise FedOrthoError("enough")

    monkeypatch.setattr(own_app, "unlearn", note)
    unlearner = fo.Unlearner(grid_of(parts, tmp_path), trained)
    for how in ({}, {"level": "erase", "trained_rounds": 120}, {"trained_rounds": 3}):
        with pytest.raises(FedOrthoError, match="enough"):
            unlearner.forget("class:3", **how)
    assert rounds == [10, 6, 4]
