"""A federation gives what one machine gives, wherever it must: over uneven clients, some of which hold nothing."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small import SETTINGS
from torch import Tensor, nn

from fedortho.data.images import Dataset
from fedortho.data.request import EmptyGroup, ForgetRequest
from fedortho.data.sources import load_images
from fedortho.engines.central import CentralEngine
from fedortho.engines.engine import TrainingPlan, as_training_plan
from fedortho.engines.query import Query, Selection, Statistic
from fedortho.errors import FedOrthoError
from fedortho.federated import client_state
from fedortho.federated.engine import FederatedEngine
from fedortho.federated.server import federated_engine, local_grid
from fedortho.methods import METHODS, make_method
from fedortho.models.zoo import build_model
from fedortho.runs.settings import held_rows
from fedortho.storage.settings import field_help
from fedortho.training.batches import step_seed
from fedortho.training.loop import Mask
from fedortho.training.recipe import Recipe, learning_rate

REQUEST = ForgetRequest.parse("class:3")
FEW = 0.8  # as the validation share it leaves a fifth of the training images
SUMS = {  # of methods that add up sums: settings with which federated and central must give the same
    "hide": {"ratio": 0.1, "scrub": False},
    "directions": {"ratio": 0.5, "scrub": False},
    "paper": {"ratio": 0.1, "alpha": 1.0, "weighting": "pooled"},
    "ssd": {"alpha": 5.0, "batch_size": 1},  # batches of one image are the same on every partition
    "salun": {"batch_size": 1},
    "class-pruning": {"ratio": 0.1},
    "fused": {"layers": "features.3"},  # its own ranking is by local epochs, which no single machine has
    "subspace": {"images": 100_000},  # clients share a smaller limit evenly, so they draw other images
    "msg": {"batch_size": 1, "images": 100_000},
    "bad-teacher": {},
    "cf-k": {},
    "ct": {},
    "eu-k": {},
    "finetune": {},
    "scrub": {},
    "logit-mask": {},
    "neggrad": {},
    "not": {},
    "regrow": {},
    "retrain": {},
    "unsir": {"noise_images": 4, "noise_steps": 1},
}
ONE_EPOCH = {"epochs": 1, "crop": 0, "flip": 0.0, "batch_size": 32}
Federation = Callable[..., FederatedEngine]


def uneven(labels: Tensor) -> list[Tensor]:
    """Six clients: nothing, one image, no image of the class, most of everything, a few of each, six of the class."""
    is_forget, place = labels == 3, torch.arange(len(labels))
    forget, retain = place[is_forget], place[~is_forget]
    nothing = place[:0]
    few = torch.cat([forget[6:20], retain[300:340]])
    return [nothing, retain[:1], retain[1:300], torch.cat([forget[20:], retain[340:]]), few, forget[:6]]


def all_on_the_first(labels: Tensor) -> list[Tensor]:
    return [torch.arange(len(labels)), *[torch.arange(0)] * 2]


@pytest.fixture(scope="module")
def few_digits() -> Dataset:
    return load_images("digits", valid=FEW)


@pytest.fixture
def federation(
    tmp_path: Path, few_digits: Dataset, quick_net: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Federation]:
    """A federation in this process whose images lie as a function says; its clients have the trained model."""

    def make(parts: Callable[[Tensor], list[Tensor]], **changes: object) -> FederatedEngine:
        client_state._shares.cache_clear()
        monkeypatch.setattr("fedortho.runs.settings.partition", lambda labels, *_, **__: parts(labels))
        clients = len(parts(few_digits.train.store_labels))
        settings = replace(SETTINGS, model="small:QuickNet", clients=clients, valid=FEW, **changes)
        with local_grid(settings, tmp_path / "clients") as grid:
            engine = federated_engine(grid, settings, few_digits)
        engine.send_model(quick_net, ledger=False)
        return engine

    yield make
    client_state._shares.cache_clear()


def shares_of(engine: FederatedEngine, data: Dataset) -> dict[int, Tensor]:
    return held_rows(data, engine.federation, 0)


Fitted = tuple[dict[str, Tensor], TrainingPlan, Mask]


class NoTraining:
    """Trains nothing and remembers what a method asked to train."""

    def __init__(self) -> None:
        self.asked: list[Fitted] = []

    def fit(
        self, model: nn.Module, what: Selection | TrainingPlan, recipe: Recipe, *, trainable: Mask | None = None
    ) -> nn.Module:
        self.asked.append((dict(model.state_dict()), as_training_plan(what), trainable or {}))
        return model


def build(seed: int) -> nn.Module:
    return build_model("small:QuickNet", num_classes=10, channels=1, seed=seed)


def assert_alike(found: dict[str, Tensor], wanted: dict[str, Tensor], share: float = 0.0) -> None:
    """Alike to rounding; where importances are compared, all but a share of them."""
    assert found.keys() == wanted.keys()
    pairs = [(found[key].double().flatten(), value.double().flatten()) for key, value in wanted.items()]
    if pairs:
        far = torch.cat([(a - b).abs() > 1e-4 + 1e-4 * b.abs() for a, b in pairs])
        assert float(far.double().mean()) <= share


def described(plan: TrainingPlan) -> tuple[object, ...]:
    return (plan.options, plan.adapters, [(part.group, part.target, part.fraction) for part in plan.parts])


@pytest.mark.parametrize("name", sorted(SUMS))
def test_what_a_method_computes_of_sums_is_the_same_however_the_images_lie(
    few_digits: Dataset, quick_net: nn.Module, federation: Federation, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The weights, masks, adapters and plans that a method starts its training from, and the edits of the others."""
    method, results = make_method(name, SUMS[name]), []
    for engine in (CentralEngine(few_digits, build=build), federation(uneven)):
        recorder = NoTraining()
        monkeypatch.setattr(engine, "fit", recorder.fit)
        results.append((method(quick_net, engine, REQUEST).state_dict(), recorder.asked))
    (alone, plans), (together, plans_together) = results
    assert_alike(dict(together), dict(alone))
    assert plans or any(not torch.equal(alone[key], value) for key, value in quick_net.state_dict().items())
    for (state, plan, mask), (other_state, other_plan, other_mask) in zip(plans, plans_together, strict=True):
        assert_alike(other_state, state)
        assert_alike(dict(other_mask), dict(mask))
        assert described(other_plan) == described(plan)


def test_every_method_but_those_that_replay_what_was_kept_is_held_to_this() -> None:
    assert SUMS.keys() == METHODS.keys() - {"federaser", "r2d"}
    assert TRAINED.keys() == {name for name in SUMS if "epochs" in field_help(METHODS[name])}


class InRounds(CentralEngine):
    """One machine that trains one epoch as client 0 of a federation does."""

    def fit(
        self, model: nn.Module, what: Selection | TrainingPlan, recipe: Recipe, *, trainable: Mask | None = None
    ) -> nn.Module:
        local = replace(recipe, lr=learning_rate(recipe, 0), schedule="constant", warmup=0.0)
        return super().fit(model, what, replace(local, seed=step_seed(recipe.seed, 0, 0)), trainable=trainable)


TRAINED = {
    "salun": {},
    "fused": {"number": 2},
    "class-pruning": {},
    "bad-teacher": {},
    "cf-k": {"k": 2},
    "ct": {},
    "eu-k": {"k": 2},
    "finetune": {},
    "msg": {},
    "neggrad": {},
    "not": {},
    "regrow": {},
    "retrain": {},
    "scrub": {},
    "unsir": {"noise_images": 32, "noise_copies": 2, "noise_steps": 1, "retain_images": 10},
}


QUICK = ("bad-teacher", "finetune", "fused", "salun", "unsir")  # the plans of the others have the same parts


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in sorted(TRAINED)]
)
def test_clients_without_images_change_nothing_of_what_is_trained(
    few_digits: Dataset, quick_net: nn.Module, federation: Federation, name: str
) -> None:
    method = make_method(name, ONE_EPOCH, TRAINED[name])
    alone = method(quick_net, InRounds(few_digits, build=build), REQUEST).state_dict()
    together = method(quick_net, federation(all_on_the_first), REQUEST).state_dict()
    assert_alike(dict(together), dict(alone))


@pytest.mark.parametrize("kind", ["fisher", "fisher-abs", "gradient"])
def test_an_empty_selection_counts_no_batch(
    few_digits: Dataset, quick_net: nn.Module, federation: Federation, kind: str
) -> None:
    """SSD divides by the number of batches: one for each client without forget images would dilute its importances."""
    engine = federation(uneven)
    query = Query((Selection("train", REQUEST),), Statistic(kind, batch_size=8))
    ((found,),) = engine.measure(quick_net, [query])
    forget = few_digits.train.rows[few_digits.train.labels == 3]
    held = [int(torch.isin(forget, rows).sum()) for rows in shares_of(engine, few_digits).values()]
    assert held.count(0) == 3
    assert int(found.counts) == sum(-(-number // 8) for number in held)


def test_clients_without_images_take_no_share_of_a_limit(quick_net: nn.Module, federation: Federation) -> None:
    query = Query((Selection(limit=60),), Statistic("averages", layers="all", tap="relu"))
    ((found,),) = federation(all_on_the_first).measure(quick_net, [query])
    assert found.images == 60


def train_exchanges(engine: FederatedEngine) -> list[set[int]]:
    return [set(exchange.bytes_down) for exchange in engine.transport.log if exchange.kind == "train.local"]


@pytest.mark.parametrize(("name", "text"), [("salun", "client:4"), ("neggrad", "samples"), ("bad-teacher", "client:4")])
def test_whoever_holds_the_forget_set_trains_in_every_round(
    few_digits: Dataset, quick_net: nn.Module, federation: Federation, name: str, text: str
) -> None:
    engine = federation(lambda labels: list(torch.arange(len(labels)).tensor_split(6)), fraction=0.34)
    if text == "samples":
        own = shares_of(engine, few_digits)[4]
        rows = own[torch.isin(own, few_digits.train.rows)][:5].tolist()
        text = f"samples:{','.join(map(str, rows))}"
    make_method(name, ONE_EPOCH, {"epochs": 3, "batch_size": 64})(quick_net, engine, ForgetRequest.parse(text))
    rounds = train_exchanges(engine)
    assert all(4 in clients for clients in rounds)
    assert [len(clients) for clients in rounds] == [2] * 3, "the share of the clients stays what it is"
    assert len({client for clients in rounds for client in clients}) > 2


def test_the_noise_of_unsir_is_shared_out(quick_net: nn.Module, few_digits: Dataset, federation: Federation) -> None:
    """Over the clients of a round there are as many noise images per own image as on one machine, none twice."""
    engine = federation(uneven)
    sent: dict[int, Sequence[int]] = {}
    contents = engine._train_contents

    def spied(current: nn.Module, job: object, number: int, sampled: Sequence[int]) -> object:
        records = contents(current, job, number, sampled)  # type: ignore[arg-type]
        for client, record in records.items():
            arrays = record["tensors"]
            if "given.0.rows" in arrays:
                pixels = torch.from_numpy(arrays["given.0.pixels"].numpy())
                rows = torch.from_numpy(arrays["given.0.rows"].numpy())
                sent[client] = [hash(pixels[row].numpy().tobytes()) for row in rows.tolist()]
        return records

    engine._train_contents = spied  # type: ignore[method-assign]
    method = make_method("unsir", ONE_EPOCH, {"noise_images": 50, "noise_copies": 2, "noise_steps": 1})
    method(quick_net, engine, REQUEST)
    images = {client: info.images for client, info in engine.clients.items()}
    assert sum(map(len, sent.values())) == 100
    for client, noise in sent.items():
        assert len(noise) == pytest.approx(100 * images[client] / len(few_digits.train), abs=1)
    everything = [image for noise in sent.values() for image in noise]
    assert all(everything.count(image) == 2 for image in everything), "every copy is somewhere, and only there"
    shared = sum(len(set(sent[a]) & set(sent[b])) for a in sent for b in sent if a < b)
    assert shared <= len(sent) - 1, "copies of one image lie together"


def test_a_draw_of_fewer_clients_gets_less_of_the_noise(federation: Federation, quick_net: nn.Module) -> None:
    engine = federation(lambda labels: list(torch.arange(len(labels)).tensor_split(6)), fraction=0.34)
    plan = TrainingPlan(as_training_plan(Selection()).parts)
    shares = engine._given_shares(plan, [1, 4])
    total = sum(info.images for info in engine.clients.values())
    both = engine.clients[1].images + engine.clients[4].images
    assert shares[1][0] == 0
    assert shares[1][1] == shares[4][0]
    assert shares[4][1] == pytest.approx(both / total)


def test_clients_without_forget_images_send_no_tensors(quick_net: nn.Module, federation: Federation) -> None:
    engine = federation(uneven)
    make_method("salun", ONE_EPOCH)(quick_net, engine, REQUEST)
    (asked,) = [exchange for exchange in engine.transport.log if exchange.kind == "query.observe"]
    whole = 4 * sum(weight.numel() for weight in quick_net.parameters())
    assert {client for client, size in asked.bytes_up.items() if size > whole} == {3, 4, 5}
    assert all(asked.bytes_up[client] < 500 for client in (0, 1, 2))


def test_a_teacher_travels_once_and_the_clients_own_model_never(quick_net: nn.Module, federation: Federation) -> None:
    engine = federation(uneven)
    make_method("bad-teacher", ONE_EPOCH, {"epochs": 2})(quick_net, engine, REQUEST)
    kept = next(exchange for exchange in engine.transport.log if exchange.kind == "train.keep")
    rounds = [exchange for exchange in engine.transport.log if exchange.kind == "train.local"]
    for client in range(6):
        one = kept.bytes_down[client]
        first, *later = [exchange.bytes_down[client] / one for exchange in rounds]
        assert 1.9 < first < 2.2, "the model and the bad teacher; the good one is the client's own model"
        assert all(0.9 < size < 1.2 for size in later)


@pytest.mark.parametrize("name", ["eu-k", "cf-k"])
def test_frozen_layers_that_clients_have_do_not_travel(quick_net: nn.Module, federation: Federation, name: str) -> None:
    engine = federation(all_on_the_first)
    make_method(name, ONE_EPOCH, {"k": 1, "epochs": 2})(quick_net, engine, REQUEST)
    (kept,) = [exchange for exchange in engine.transport.log if exchange.kind == "train.keep"]
    for exchange in [each for each in engine.transport.log if each.kind == "train.local"]:
        up = exchange.bytes_up[0]
        assert up < 0.95 * kept.bytes_down[0]
        assert all(size == pytest.approx(up, abs=5_000) for size in exchange.bytes_down.values())


def test_a_client_that_lost_its_teachers_is_sent_them_again(
    quick_net: nn.Module, federation: Federation, tmp_path: Path
) -> None:
    engine, average = federation(uneven, quorum=0.1), FederatedEngine._average

    def robbed(*arguments: object) -> object:
        number = arguments[3]
        if number == 1:
            for path in tmp_path.glob("clients/client-3/teachers/*"):
                path.unlink()
        return average(*arguments)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(FederatedEngine, "_average", robbed)
        make_method("bad-teacher", ONE_EPOCH, {"epochs": 3})(quick_net, engine, REQUEST)
    rounds = [exchange for exchange in engine.transport.log if exchange.kind == "train.local"]
    assert [3 in exchange.failed for exchange in rounds] == [False, True, False]
    assert rounds[2].bytes_down[3] == pytest.approx(rounds[0].bytes_down[3], rel=0.01)
    assert list(tmp_path.glob("clients/client-3/teachers/*"))
    engine.hello()
    assert not list(tmp_path.glob("clients/client-*/teachers/*")), "no teacher outlives its training"


@pytest.mark.parametrize("text", ["samples:{valid},{train}", "samples:999999", "samples:4/9999", "client:6"])
def test_a_federation_refuses_the_samples_and_clients_that_one_machine_refuses(
    few_digits: Dataset, quick_net: nn.Module, federation: Federation, text: str
) -> None:
    engine = federation(uneven)
    request = ForgetRequest.parse(text.format(valid=int(few_digits.valid.rows[0]), train=int(few_digits.train.rows[0])))
    central = CentralEngine(few_digits, clients=shares_of(engine, few_digits))
    errors = []
    for each in (central, engine):
        with pytest.raises(FedOrthoError) as told:
            make_method("ssd")(quick_net, each, request)
        errors.append((told.type, str(told.value)))
    assert errors[0] == errors[1]
    if "samples" in text and "/" not in text:
        assert errors[0][0] is EmptyGroup
