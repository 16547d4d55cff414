"""The federated engine against what it must equal, and against clients that fail."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from flwr.app import Message
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small import SETTINGS, TinyNet
from torch import nn

from fedortho.data import Dataset
from fedortho.engine import Ask, CentralEngine, Group
from fedortho.errors import BadCheckpoint, FedOrthoError
from fedortho.federated.flower import FlowerEngine
from fedortho.federated.inprocess import FIRST, InProcessGrid
from fedortho.federated.rounds import RunningMean
from fedortho.federated.wire import pack, unpack
from fedortho.files import read_json, tensors_digest
from fedortho.lessons import step_seed
from fedortho.methods import preset
from fedortho.methods.fedortho import plan_forgetting
from fedortho.models import build_model
from fedortho.observe import Observation
from fedortho.probe import Probe
from fedortho.prune import bind_patch, plan_edit
from fedortho.recipe import Recipe
from fedortho.request import EmptyGroup, ForgetRequest
from fedortho.sites import find_sites
from fedortho.train import fit

RECIPE = Recipe(epochs=2, batch=32, crop=0, flip=0.0)
PEAKS = Probe("peaks", "all", "channel", "stream")
CLASS = ForgetRequest.parse("class:3")
OTHER = {"features.6": (torch.tensor([2]), torch.ones(1, dtype=torch.float64))}


def grid_of(engine: FlowerEngine) -> InProcessGrid:
    assert isinstance(engine.line.grid, InProcessGrid)
    return engine.line.grid


def start() -> nn.Module:
    return build_model("small:TinyNet", classes=10, channels=1)


def centrally(digits: Dataset, model: nn.Module, asks: list[Ask]) -> list[list[Observation]]:
    found = CentralEngine(digits).measure(model, asks)
    return [[observation.collapsed() for observation in row] for row in found]


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(1, 12), st.sampled_from(["iid", "dirichlet:0.1", "dirichlet:5", "shards:2"]), st.integers(0, 10**6))
def test_pooled_statistics_equal_the_centralized_ones_for_any_partition(
    make_engine, digits: Dataset, tiny_digits: nn.Module, clients: int, split: str, seed: int
) -> None:
    # the seed moves the partition only: the validation split stays that of seed 0
    engine = make_engine(clients=clients, split=split, least_images=2, norms="fedavg", threads=1 + seed % 2)
    engine.send_model(tiny_digits, ledger=bool(seed % 2))
    asks = [Ask((Group("train", CLASS), Group("train", None, CLASS)), PEAKS)]
    (found,), (wanted,) = engine.measure(tiny_digits, asks), centrally(digits, tiny_digits, asks)
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine.images == theirs.images
        for key in theirs.sums:
            assert torch.allclose(mine.mean(key), theirs.mean(key), rtol=1e-6, atol=1e-6)


def test_right_answers_and_exact_layer_sums_equal_the_centralized_ones(
    make_engine, digits: Dataset, tiny_digits: nn.Module
) -> None:
    engine = make_engine(clients=7)
    engine.send_model(tiny_digits)
    base = replace(PEAKS, kind="right")
    asks = [Ask((Group("valid"), Group("train", CLASS)), base)]
    asks.append(Ask((Group("train", None, CLASS),), replace(PEAKS, kind="layer", norms=("features.4",))))
    for mine, theirs in zip(engine.measure(tiny_digits, asks), centrally(digits, tiny_digits, asks), strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert torch.equal(a.counts, b.counts)
            for key, value in b.sums.items():
                assert torch.allclose(a.sums[key], value, rtol=1e-6)


def test_averaging_equals_a_plain_loop_over_clients(make_engine, digits: Dataset) -> None:
    engine = make_engine()
    model = start()
    trained = engine.fit(model, Group(), RECIPE, local_epochs=1)
    current = model
    for turn in range(2):
        rate = RECIPE.rate * (1.0 if turn == 0 else 0.5)  # cosine over two rounds
        states, sizes = [], []
        for client in range(4):
            images = digits.train.subset(torch.isin(digits.train.rows, held(engine)[client]))
            local = replace(
                RECIPE, epochs=1, rate=rate, schedule="constant", seed=step_seed(0, turn, client), warmup=0.0
            )
            received = current if turn else None  # the first contact has no alignment
            states.append(fit(current, images, local, reference=received).state_dict())
            sizes.append(len(images))
        new = {}
        for name, value in states[0].items():
            if value.is_floating_point():
                new[name] = sum(s[name].double() * n for s, n in zip(states, sizes, strict=True)) / sum(sizes)
            else:
                new[name] = max(s[name] for s in states)
        current = copy.deepcopy(current)
        current.load_state_dict(new)
    for name, value in trained.state_dict().items():
        assert torch.allclose(value.double(), current.state_dict()[name].double(), rtol=1e-4, atol=1e-5), name


def held(engine: FlowerEngine) -> dict[int, torch.Tensor]:
    from fedortho.federation import held_rows
    from fedortho.runs import load_run_data

    return held_rows(load_run_data(SETTINGS), engine.federation, 0)


@given(st.lists(st.tuples(st.floats(-10, 10), st.integers(1, 1000)), min_size=1, max_size=20))
def test_a_running_mean_is_the_weighted_mean(pairs: list[tuple[float, int]]) -> None:
    mean = RunningMean()
    for value, weight in pairs:
        mean.add({"w": torch.tensor([value], dtype=torch.float64), "n": torch.tensor(weight)}, weight)
    wanted = sum(v * w for v, w in pairs) / sum(w for _, w in pairs)
    assert float(mean.state["w"]) == pytest.approx(wanted, abs=1e-9)
    assert int(mean.state["n"]) == max(w for _, w in pairs)


def test_a_killed_training_goes_on_to_the_same_bytes(make_engine, tmp_path: Path) -> None:
    whole = make_engine().fit(start(), Group(), replace(RECIPE, epochs=3))

    class Killed(Exception):
        pass

    def kill(news) -> None:
        if news.round == 1 and news.answered == 2:
            raise Killed

    engine, file = make_engine(), tmp_path / "checkpoint.safetensors"
    with pytest.raises(Killed):
        engine.fit(start(), Group(), replace(RECIPE, epochs=3), checkpoint=file, watch=kill)
    resumed = make_engine().fit(start(), Group(), replace(RECIPE, epochs=3), checkpoint=file)
    assert tensors_digest(resumed.state_dict()) == tensors_digest(whole.state_dict())
    with pytest.raises(BadCheckpoint, match="belongs to other settings"):
        make_engine().fit(start(), Group(), replace(RECIPE, epochs=3, rate=0.01), checkpoint=file)


@pytest.mark.parametrize("norms", ["local", "recalibrate"])
def test_local_norms_stay_local_and_give_another_model(make_engine, tmp_path: Path, norms: str) -> None:
    plain = make_engine().fit(start(), Group(), RECIPE)
    other = make_engine(norms=norms).fit(start(), Group(), RECIPE)
    same = tensors_digest(plain.state_dict()) == tensors_digest(other.state_dict())
    assert same == (norms == "recalibrate"), "recalibration comes after training"
    assert bool(list((tmp_path / "clients").glob("client-*/norms-1.safetensors"))) == (norms == "local")


class Spoiled(InProcessGrid):
    """Clients that fail in some way."""

    def __init__(self, good: InProcessGrid, bad: dict[int, str]) -> None:
        self.__dict__.update(good.__dict__)
        self.bad = bad

    def _answer(self, message: Message) -> Message:
        client = message.metadata.dst_node_id - FIRST
        how = self.bad.get(client) if message.metadata.message_type != "query.hello" else None
        if how == "raises":
            message = copy.deepcopy(message)  # its record is the others' too
            message.content["note"]["json"] = "no json"
            return super()._answer(message)
        reply = super()._answer(message)
        tensors, note = unpack(reply.content)
        if how == "shapes":
            tensors = {name: value.reshape(-1)[:1] for name, value in tensors.items()}
        elif how == "nan":
            tensors = {n: value * float("nan") if value.is_floating_point() else value for n, value in tensors.items()}
        elif how == "other":
            note["client"] = client + 1
        elif how == "layers":
            tensors.pop(next(iter(tensors)))
        elif how == "silly":
            note = {"client": client}
        return Message(pack(tensors, note), reply_to=message) if how else reply


@pytest.mark.parametrize("how", ["raises", "silent", "shapes", "nan", "other"])
def test_a_client_that_fails_is_named_and_the_others_go_on(
    make_engine, tiny_digits: nn.Module, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine(timeout=0.3)
    engine.send_model(tiny_digits)
    without = FlowerEngine(grid_of(engine), engine.federation, engine.about)
    engine.line.grid = Spoiled(grid_of(engine), {2: how})
    if how == "silent":
        engine.line.grid.silent = {2}
    asks = [Ask((Group("train", CLASS), Group("train", None, CLASS)), PEAKS)]
    ((gone, _),) = engine.measure(tiny_digits, asks)
    without.clients = {client: note for client, note in without.clients.items() if client != 2}
    ((expected, _),) = without.measure(tiny_digits, asks)
    assert torch.equal(gone.counts, expected.counts), "nobody is counted twice or for another"
    assert all(torch.equal(gone.sums[key], value) for key, value in expected.sums.items())
    assert list(engine.line.log[-1].failed) == [2]
    assert "client 2" in caplog.text
    trained = engine.fit(start(), Group(), replace(RECIPE, epochs=1))
    assert all(bool(torch.isfinite(value).all()) for value in trained.state_dict().values())
    assert engine.history[0].clients == 3


@pytest.mark.parametrize("how", ["shapes", "layers", "silly"])
def test_the_first_client_does_not_decide_what_fits(make_engine, tiny_digits: nn.Module, how: str) -> None:
    engine = make_engine()
    engine.send_model(tiny_digits)
    asks = [Ask((Group("train", CLASS), Group("train", None, CLASS)), PEAKS)]
    ((whole, _),) = engine.measure(tiny_digits, asks)
    engine.line.grid = Spoiled(grid_of(engine), {0: how})
    ((gone, _),) = engine.measure(tiny_digits, asks)
    assert list(engine.line.log[-1].failed) == [0]
    assert 0 < gone.images < whole.images
    engine.fit(start(), Group(), replace(RECIPE, epochs=1))
    assert engine.history[0].clients == 3


def test_a_client_that_went_away_is_named_and_messages_that_were_not_taken_are_an_error(
    make_engine, tiny_digits: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    push = engine.line.grid.push_messages  # Flower gives None for a node that is gone, and nothing if all is too large
    monkeypatch.setattr(engine.line.grid, "push_messages", lambda messages: [None, None, *push(messages)[2:]])
    assert engine.send_model(tiny_digits) == [2, 3]
    assert engine.line.log[-1].failed == dict.fromkeys([0, 1], "is no longer connected")
    monkeypatch.setattr(engine.line.grid, "push_messages", lambda messages: [])
    with pytest.raises(FedOrthoError, match="did not take 4 messages"):
        engine.send_model(tiny_digits)


def test_a_draw_is_shared_among_those_who_can_hold_it_and_is_never_too_small_to_tell() -> None:
    draws = [
        (Group("train", None, CLASS, 1024), 1000, 5),
        (Group("train", ForgetRequest.parse("client:2"), None, 1000), 100, 1000),
        (Group("train", ForgetRequest.parse("samples:2/1,3/4"), None, 1000), 100, 500),
        (Group("train", ForgetRequest.parse("class:3 client:2"), None, 1000), 100, 10),
        (Group(), 100, 0),
    ]
    for group, share, most in draws:
        assert group.on_client(2, share, 5).most == most


def test_validation_images_are_never_read_from_the_ledger_of_training_images(
    make_engine, tiny_digits: nn.Module
) -> None:
    asks, deep = [Ask((Group("valid"),), replace(PEAKS, layers="deep"))], []
    for ledger in (True, False):
        engine = make_engine(clients=1, valid=0.5)  # as many for validation as for training, label by label
        engine.send_model(tiny_digits, ledger=ledger)
        deep.append(engine.measure(tiny_digits, asks)[0][0])
    for key, value in deep[1].sums.items():
        assert torch.allclose(deep[0].sums[key], value, rtol=1e-6)


def test_the_same_images_are_looked_at_anew_for_other_layers(digits: Dataset, tiny_digits: nn.Module) -> None:
    engine = CentralEngine(digits)
    first, second = (replace(PEAKS, layers=layers) for layers in ("features.0", "features.3"))
    ((one,), (two,)) = engine.measure(tiny_digits, [Ask((Group(),), first), Ask((Group(),), second)])
    assert one.sums.keys() != two.sums.keys()


def test_too_few_answers_end_the_round_with_a_reason(make_engine, tiny_digits: nn.Module) -> None:
    engine = make_engine(timeout=0.2, quorum=0.9)
    engine.line.grid.silent = {0}
    with pytest.raises(FedOrthoError, match=r"only 3 of 4 clients answered train.local \(client 0: silent"):
        engine.fit(start(), Group(), RECIPE)


def test_an_error_text_never_reaches_the_server(make_engine, caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine()
    grid = grid_of(engine)
    (name,) = grid.push_messages([Message(pack({}, {"secret": "cat"}), FIRST, "query.observe")])
    (reply,) = grid.pull_messages([name])
    assert reply.has_error()
    assert reply.error.reason == "ClientFailed"


def test_nothing_to_train_on_is_refused_and_not_divided_by(make_engine) -> None:
    engine = make_engine()
    everything = ForgetRequest(classes=tuple(map(str, range(10))))
    with pytest.raises(FedOrthoError, match="has images to train on"):
        engine.fit(start(), Group("train", None, everything), RECIPE)


def test_small_groups_are_withheld_unless_allowed(make_engine, digits: Dataset, tiny_digits: nn.Module) -> None:
    few = ForgetRequest(samples=("0/0", "0/1", "0/2", "0/3"))
    for least, images in ((5, 0), (1, 4)):
        engine = make_engine(least_group=least, valid=0.0)
        engine.send_model(tiny_digits)
        ((gone, _),) = engine.measure(tiny_digits, [Ask((Group("train", few), Group("train", None, few)), PEAKS)])
        assert gone.images == images
        assert engine.withheld == (1 if least == 5 else 0)


def test_the_papers_weighting_is_the_weighted_mean_of_local_differences(
    make_engine, digits: Dataset, tiny_digits: nn.Module
) -> None:
    engine = make_engine(clients=3, split="shards:4")
    engine.send_model(tiny_digits)
    group, rest = Group("train", CLASS), Group("train", None, CLASS)
    ((found,),) = engine.measure(tiny_digits, [Ask((group, rest), replace(PEAKS, kind="difference"))])
    total, weights = dict.fromkeys(found.sums, 0.0), 0
    for rows in held(engine).values():
        images = digits.train.subset(torch.isin(digits.train.rows, rows))
        local = CentralEngine(replace(digits, train=images))
        ((gone, kept),) = local.measure(tiny_digits, [Ask((group, rest), PEAKS)])
        if gone.images and kept.images:
            weights += len(images)
            for key in total:
                total[key] = total[key] + len(images) * (gone.mean(key) - kept.mean(key))
    assert 0 < weights <= len(digits.train)
    for key in total:
        assert torch.allclose(found.mean(key), total[key] / weights, rtol=1e-5, atol=1e-6)


def test_the_papers_weighting_falls_back_for_a_client_and_says_so(
    make_engine, tiny_digits: nn.Module, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine()
    engine.send_model(tiny_digits)
    outcome = plan_forgetting(tiny_digits, engine, ForgetRequest.parse("client:1"), preset("paper"))
    assert outcome.patch.note["statistics"] == "pooled"
    assert "undefined for client requests" in caplog.text
    assert plan_forgetting(tiny_digits, engine, CLASS, preset("paper")).patch.note["statistics"] == "paper"


def test_one_client_and_no_federation_plan_the_same_patch(
    make_engine, digits: Dataset, digit_nets: dict[str, nn.Module]
) -> None:
    model = digit_nets["vgg-mini"]
    engine = make_engine(clients=1, model="vgg-mini")
    engine.send_model(model)
    settings = preset("robust", ratio=0.1, scrub=False)
    federated = plan_forgetting(model, engine, CLASS, settings).patch
    central = plan_forgetting(model, digits, CLASS, settings).patch
    assert federated.note["sites"] == central.note["sites"]
    for name, value in central.replaced.items():
        assert torch.allclose(federated.replaced[name], value, rtol=1e-4, atol=1e-6)


def silencing(model: nn.Module):
    sites = find_sites(model, (1, 8, 8), "all", "channel", "stream")
    chosen = {sites[-1].name: (torch.tensor([1, 4]), torch.ones(2, dtype=torch.float64))}
    return bind_patch(plan_edit(model, sites, chosen, "channel"), model, request="class:3")


def test_a_patch_is_applied_once_however_often_it_is_sent_and_a_late_client_gets_it(
    make_engine, tmp_path: Path, tiny_digits: nn.Module
) -> None:
    engine = make_engine(timeout=0.3)
    engine.send_model(tiny_digits)
    patch = silencing(tiny_digits)
    engine.line.grid.silent = {3}
    assert engine.send_patch(patch, CLASS) == [0, 1, 2]
    assert engine.send_patch(patch, CLASS, [0, 1, 2]) == [0, 1, 2]
    engine.line.grid.silent = set()
    later = FlowerEngine(grid_of(engine), engine.federation, engine.about)
    assert [note["model"] for note in later.clients.values()] == [patch.after] * 3 + [patch.before]
    later.bring_up_to_date(patch.apply(tiny_digits), [(patch, CLASS)])
    assert {note["model"] for note in later.hello().values()} == {patch.after}
    kinds = [exchange.kind for exchange in later.line.log]
    assert kinds == ["train.patch"], "the model itself did not travel"
    states = [read_json(path) for path in sorted((tmp_path / "clients").glob("client-*/state.json"))]
    assert all(len(state["gone"]) == 1 for state in states)
    models = list((tmp_path / "clients" / "models").iterdir())
    assert [path.stem for path in models] == [patch.after], "the model that knew is gone from the disks"
    with pytest.raises(FedOrthoError, match="patched away"):
        later.send_model(tiny_digits)


def test_holders_drop_what_is_forgotten_and_a_client_that_leaves_takes_no_further_part(
    make_engine, tmp_path: Path, tiny_digits: nn.Module
) -> None:
    engine = make_engine()
    engine.send_model(tiny_digits)
    patch = silencing(tiny_digits)
    request = ForgetRequest.parse("class:3 client:1")
    engine.send_patch(patch, request)
    edited = patch.apply(tiny_digits)
    later = FlowerEngine(grid_of(engine), engine.federation, engine.about)
    assert later.present() == [0, 2, 3]
    ((gone, kept),) = later.measure(edited, [Ask((Group("train", CLASS), Group()), PEAKS)])
    assert gone.images == 0
    assert kept.images == sum(note["images"] for note in later.clients.values()) > 0
    assert not (tmp_path / "clients" / "client-1" / "ledger.safetensors").exists()
    for text, message in (
        ("client:1", "has left already"),
        ("client:9", "no client 9; clients run 0 to 3"),
        ("class:11", "no class '11'"),
    ):
        with pytest.raises(FedOrthoError, match=message):
            plan_forgetting(edited, later, ForgetRequest.parse(text))
    del later.clients[2]
    with pytest.raises(FedOrthoError, match="client 2 is not connected"):
        plan_forgetting(edited, later, ForgetRequest.parse("client:2"))
    with pytest.raises(EmptyGroup, match="forgotten before"):
        plan_forgetting(edited, later, CLASS, forgotten=CLASS)


def test_a_client_that_missed_its_leaving_and_more_leaves_and_nobody_waits_for_it(
    make_engine, tmp_path: Path, tiny_digits: nn.Module
) -> None:
    engine = make_engine(timeout=0.3)
    engine.send_model(tiny_digits)
    leaving = silencing(tiny_digits)
    once = leaving.apply(tiny_digits)
    second = bind_patch(
        plan_edit(once, find_sites(once, (1, 8, 8), "all", "channel", "stream"), OTHER, "channel"), once
    )
    engine.line.grid.silent = {1}
    request = ForgetRequest.parse("client:1")
    assert engine.send_patch(leaving, request) == [0, 2, 3]
    assert engine.send_patch(second, CLASS) == [0, 2, 3]
    engine.line.grid.silent = set()
    later = FlowerEngine(grid_of(engine), engine.federation, engine.about, left=[1])
    later.bring_up_to_date(second.apply(once), [(leaving, request), (second, CLASS)])
    state = read_json(tmp_path / "clients" / "client-1" / "state.json")
    assert state["left"]
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
    assert [state["gone"] for state in states] == [[{"classes": ["3"], "clients": [], "samples": []}]] * 4
    ((gone,),) = engine.measure(patch.apply(tiny_digits), [Ask((Group("train", CLASS),), PEAKS)])
    assert not gone.images


def test_two_nodes_with_one_name_and_no_node_at_all_are_refused(make_engine, monkeypatch) -> None:
    engine = make_engine()
    grid = grid_of(engine)
    monkeypatch.setattr(grid, "get_node_ids", lambda: [FIRST, FIRST + 1, FIRST, FIRST + 2])
    with pytest.raises(FedOrthoError, match="two nodes call themselves client 0"):
        FlowerEngine(grid, engine.federation, engine.about)
    grid.silent = {0, 1, 2, 3}
    monkeypatch.undo()
    with pytest.raises(FedOrthoError, match="none of 4 nodes answered"):
        FlowerEngine(grid, replace(engine.federation, timeout=0.2), engine.about)


def test_a_request_for_resnet50s_last_stage_sends_few_bytes(make_engine) -> None:
    """The sums of both groups as they travel, for 3,072 inner kernels and 2,048 stream channels: at most 64 KB."""
    from fedortho.federated.wire import count_bytes, pack_observations

    sites = find_sites(build_model("resnet50", classes=10), (3, 32, 32), "deep", "channel", "stream")
    assert sum(site.kernels for site in sites) == 5120
    sums = {f"x:{site.name}": torch.zeros(1, site.kernels, dtype=torch.float64) for site in sites}
    seen = Observation(sums, torch.tensor([9]))
    asks = [Ask((Group(), Group()), Probe("peaks"))]
    assert 40_960 < count_bytes(pack(pack_observations([[seen, seen]], asks), {"client": 1})) < 65_536


def test_the_tiny_network_is_what_the_settings_name() -> None:
    assert isinstance(start(), TinyNet)
