"""The federated engine against what it must equal."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from federations import CLASS, PEAKS, RECIPE, grid_of, held, start
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small import TinyNet
from torch import nn

from fedortho.data.images import Dataset
from fedortho.data.request import ForgetRequest
from fedortho.engines.central import CentralEngine
from fedortho.engines.cost import Meter
from fedortho.engines.engine import PlanPart, TrainingPlan
from fedortho.engines.query import Query, Selection, Statistic
from fedortho.errors import BadCheckpoint, BadSetting
from fedortho.federated.aggregation import RunningMean
from fedortho.federated.messages import ObserveReply
from fedortho.federated.wire import count_bytes, pack, pack_observations, unpack_json
from fedortho.methods.hide import Hide
from fedortho.methods.paper import Paper
from fedortho.models.sites import DIRECTIONS, find_sites
from fedortho.models.zoo import build_model
from fedortho.statistics.observe import Observation
from fedortho.storage.files import tensors_digest
from fedortho.training.batches import step_seed
from fedortho.training.loop import fit
from fedortho.training.objectives import FitOptions, Target


def centrally(data: Dataset, model: nn.Module, queries: list[Query]) -> list[list[Observation]]:
    found = CentralEngine(data).measure(model, queries)
    return [[observation.collapsed() for observation in row] for row in found]


@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(1, 12), st.sampled_from(["iid", "dirichlet:0.1", "dirichlet:5", "shards:2"]), st.integers(0, 10**6))
def test_pooled_statistics_equal_the_centralized_ones_for_any_partition(
    make_engine, few_digits: Dataset, tiny_digits: nn.Module, clients: int, split: str, seed: int
) -> None:
    # the seed moves the partition only: the validation split stays that of seed 0
    engine = make_engine(clients=clients, split=split, least_images=2, norms="fedavg", threads=1 + seed % 2)
    engine.send_model(tiny_digits, ledger=bool(seed % 2))
    queries = [Query((Selection("train", CLASS), Selection("train", None, CLASS)), PEAKS)]
    (found,), (wanted,) = engine.measure(tiny_digits, queries), centrally(few_digits, tiny_digits, queries)
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine.images == theirs.images
        for key in theirs.sums:
            assert torch.allclose(mine.mean(key), theirs.mean(key), rtol=1e-6, atol=1e-6)


def test_right_answers_and_exact_layer_sums_equal_the_centralized_ones(
    make_engine, few_digits: Dataset, tiny_digits: nn.Module
) -> None:
    engine = make_engine(clients=7)
    engine.send_model(tiny_digits)
    base = replace(PEAKS, kind="right")
    queries = [Query((Selection("valid"), Selection("train", CLASS)), base)]
    queries.append(Query((Selection("train", None, CLASS),), replace(PEAKS, kind="layer", norms=("features.4",))))
    for mine, theirs in zip(
        engine.measure(tiny_digits, queries), centrally(few_digits, tiny_digits, queries), strict=True
    ):
        for a, b in zip(mine, theirs, strict=True):
            assert torch.equal(a.counts, b.counts)
            for key, value in b.sums.items():
                assert torch.allclose(a.sums[key], value, rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "site"), [("small:TinyNet", "features.6"), ("small:identity_net", "layer2.1")], ids=["plain", "identity"]
)
def test_how_responses_lie_is_the_same_over_clients_as_in_one_place(
    make_engine, few_digits: Dataset, name: str, site: str
) -> None:
    engine, model = make_engine(clients=7, model=name), build_model(name, num_classes=10, channels=1)
    engine.send_model(model)
    statistic = Statistic("responses", "deep", DIRECTIONS, "stream")
    queries = [Query((Selection("train", CLASS), Selection("train", None, CLASS)), statistic)]
    (found,), (wanted,) = engine.measure(model, queries), centrally(few_digits, model, queries)
    for mine, theirs in zip(found, wanted, strict=True):
        assert f"{site}:second" in theirs.sums
        assert mine.images == theirs.images > 0
        for key in theirs.sums:
            assert torch.allclose(mine.mean(key), theirs.mean(key), rtol=1e-4, atol=1e-4)


def test_averaging_equals_a_plain_loop_over_clients(make_engine, few_digits: Dataset) -> None:
    engine = make_engine()
    model = start()
    trained = engine.fit(model, Selection(), RECIPE)
    current = model
    for turn in range(2):
        lr = RECIPE.lr * (1.0 if turn == 0 else 0.5)  # cosine over two rounds
        states, sizes = [], []
        for client in range(4):
            images = few_digits.train.subset(torch.isin(few_digits.train.rows, held(engine)[client]))
            local = replace(RECIPE, epochs=1, lr=lr, schedule="constant", seed=step_seed(0, turn, client), warmup=0.0)
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


@given(st.lists(st.tuples(st.floats(-10, 10), st.integers(1, 1000)), min_size=1, max_size=20))
def test_a_running_mean_is_the_weighted_mean(pairs: list[tuple[float, int]]) -> None:
    into = {"w": torch.zeros(1, dtype=torch.float64), "n": torch.tensor(10**6)}
    mean = RunningMean(into)
    for value, weight in pairs:
        mean.add({"w": torch.tensor([value], dtype=torch.float64), "n": torch.tensor(weight)}, weight)
    wanted = sum(v * w for v, w in pairs) / sum(w for _, w in pairs)
    assert float(into["w"]) == pytest.approx(wanted, abs=1e-9)
    assert int(into["n"]) == max(w for _, w in pairs)


def test_a_killed_training_goes_on_to_the_same_bytes(make_engine, tmp_path: Path) -> None:
    whole = make_engine().fit(start(), Selection(), replace(RECIPE, epochs=3))

    class Killed(Exception):
        pass

    def kill(news) -> None:
        if news.round == 1 and news.answered == 2:
            raise Killed

    engine, file = make_engine(), tmp_path / "checkpoint.safetensors"
    with pytest.raises(Killed):
        engine.fit(start(), Selection(), replace(RECIPE, epochs=3), checkpoint=file, watch=kill)
    after = make_engine()
    resumed = after.fit(start(), Selection(), replace(RECIPE, epochs=3), checkpoint=file)
    rounds = [exchange for exchange in after.transport.log if exchange.kind == "train.local"]
    assert [len(exchange.bytes_up) for exchange in rounds] == [4, 4, 4], (
        "what travelled before it was killed is not forgotten"
    )
    assert tensors_digest(resumed.state_dict()) == tensors_digest(whole.state_dict())
    with pytest.raises(BadCheckpoint, match="belongs to other settings"):
        make_engine().fit(start(), Selection(), replace(RECIPE, epochs=3, lr=0.01), checkpoint=file)


@pytest.mark.parametrize("norms", ["fedavg", "local", "recalibrate"])
def test_running_statistics_travel_unless_they_are_local(make_engine, norms: str) -> None:
    engine, replies = make_engine(norms=norms), []
    grid = grid_of(engine)
    pull = grid.pull_messages
    grid.pull_messages = lambda names: [replies.append(reply) or reply for reply in pull(names)]
    trained = engine.fit(start(), Selection(), RECIPE)
    sent = {name for reply in replies for name in unpack_json(reply.content)[0]}
    statistics = {f"model.{name}" for name in trained.state_dict() if name.endswith(("_mean", "_var"))}
    assert statistics
    assert sent & statistics == (set() if norms == "local" else statistics)
    changed = {n for n, value in start().state_dict().items() if not value.equal(trained.state_dict()[n])}
    assert {f"model.{name}" for name in changed} >= statistics, "averaged or pooled"


@pytest.mark.parametrize("norms", ["local", "recalibrate"])
def test_whoever_trains_gets_the_statistics_of_all_images_trained_on(
    make_engine, few_digits: Dataset, tiny_digits: nn.Module, norms: str
) -> None:
    engine = make_engine(norms=norms)
    engine.send_model(tiny_digits)  # the ledger that clients write is of another model than the one to come
    gone = ForgetRequest.parse("class:5")
    plan = TrainingPlan(
        (PlanPart(Selection("train", CLASS, gone), Target("other")), PlanPart(Selection("train", None, CLASS + gone)))
    )
    trained = engine.fit(tiny_digits, plan, RECIPE)
    kinds = [exchange.kind for exchange in engine.transport.log[-4:]]
    assert kinds == ["train.keep", "train.local", "train.local", "query.observe"]
    images = few_digits.train.subset(few_digits.train.labels != 5)
    with torch.no_grad():
        answers = trained.get_submodule("features.0")(images.normalise(images.pixels[images.rows]))
    assert torch.allclose(trained.get_buffer("features.1.running_mean"), answers.mean((0, 2, 3)), atol=0.01)
    assert torch.allclose(trained.get_buffer("features.1.running_var"), answers.var((0, 2, 3)), rtol=0.05)
    assert {info.model for info in engine.clients.values()} == {tensors_digest(tiny_digits.state_dict())}


def test_statistics_that_all_clients_withhold_are_told_of(
    make_engine, tiny_digits: nn.Module, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine(norms="local", least_group=10_000)
    trained = engine.fit(tiny_digits, Selection(), replace(RECIPE, epochs=1))
    assert torch.equal(trained.get_buffer("features.1.running_var"), tiny_digits.get_buffer("features.1.running_var"))
    assert "running statistics were not pooled" in caplog.text


def test_frozen_statistics_are_not_pooled_either(make_engine, tiny_digits: nn.Module) -> None:
    engine = make_engine(norms="local")
    trained = engine.fit(tiny_digits, TrainingPlan((PlanPart(),), FitOptions(norms="frozen")), RECIPE)
    for name, buffer in tiny_digits.named_buffers():
        assert torch.equal(trained.get_buffer(name), buffer), name


def test_a_draw_is_shared_among_those_who_can_hold_it_and_is_never_too_small_to_tell() -> None:
    draws = [
        (Selection("train", None, CLASS, 1024), 1000, 5),
        (Selection("train", ForgetRequest.parse("client:2"), None, 1000), 100, 1000),
        (Selection("train", ForgetRequest.parse("samples:2/1,3/4"), None, 1000), 100, 500),
        (Selection("train", ForgetRequest.parse("class:3 client:2"), None, 1000), 100, 10),
        (Selection(), 100, 0),
    ]
    for group, share, most in draws:
        assert group.on_client(2, share, 5).limit == most


def test_validation_images_are_never_read_from_the_ledger_of_training_images(
    make_engine, tiny_digits: nn.Module
) -> None:
    queries, deep = [Query((Selection("valid"),), replace(PEAKS, layers="deep"))], []
    for ledger in (True, False):
        engine = make_engine(clients=1, valid=0.5)  # as many for validation as for training, label by label
        engine.send_model(tiny_digits, ledger=ledger)
        deep.append(engine.measure(tiny_digits, queries)[0][0])
    for key, value in deep[1].sums.items():
        assert torch.allclose(deep[0].sums[key], value, rtol=1e-6)


def test_clients_count_the_images_they_read_and_no_kept_activations(make_engine, tiny_digits: nn.Module) -> None:
    deep = replace(PEAKS, layers="deep")
    queries = [
        Query((Selection("train", CLASS), Selection("train", None, CLASS)), deep),
        Query((Selection("valid"),), replace(deep, kind="right")),
    ]
    read = []
    for ledger in (True, False):
        engine = make_engine(clients=3)
        engine.send_model(tiny_digits, ledger=ledger)
        (sets, (valid,)) = engine.measure(tiny_digits, queries)
        read.append(engine.tally.images_read)
    assert read == [0, sum(each.images for each in sets) + valid.images]


def test_the_same_images_are_looked_at_anew_for_other_layers(few_digits: Dataset, tiny_digits: nn.Module) -> None:
    engine = CentralEngine(few_digits)
    first, second = (replace(PEAKS, layers=layers) for layers in ("features.0", "features.3"))
    ((one,), (two,)) = engine.measure(tiny_digits, [Query((Selection(),), first), Query((Selection(),), second)])
    assert one.sums.keys() != two.sums.keys()


def test_small_groups_are_withheld_unless_allowed(make_engine, few_digits: Dataset, tiny_digits: nn.Module) -> None:
    few = ForgetRequest(samples=("0/0", "0/1", "0/2", "0/3"))
    for least, images in ((5, 0), (1, 4)):
        engine = make_engine(least_group=least, valid=0.0)
        engine.send_model(tiny_digits)
        meter = Meter(engine)
        ((gone, _),) = meter.measure(
            tiny_digits, [Query((Selection("train", few), Selection("train", None, few)), PEAKS)]
        )
        assert gone.images == images
        assert engine.tally.withheld == meter.cost().withheld == (1 if least == 5 else 0)


def test_the_papers_weighting_is_the_weighted_mean_of_local_differences(
    make_engine, few_digits: Dataset, tiny_digits: nn.Module
) -> None:
    engine = make_engine(clients=3, split="shards:4")
    engine.send_model(tiny_digits)
    group, rest = Selection("train", CLASS), Selection("train", None, CLASS)
    ((found,),) = engine.measure(tiny_digits, [Query((group, rest), replace(PEAKS, kind="difference"))])
    total, weights = dict.fromkeys(found.sums, 0.0), 0
    for rows in held(engine).values():
        images = few_digits.train.subset(torch.isin(few_digits.train.rows, rows))
        local = CentralEngine(replace(few_digits, train=images))
        ((gone, kept),) = local.measure(tiny_digits, [Query((group, rest), PEAKS)])
        if gone.images and kept.images:
            weights += len(images)
            for key in total:
                total[key] = total[key] + len(images) * (gone.mean(key) - kept.mean(key))
    assert 0 < weights <= len(few_digits.train)
    for key in total:
        assert torch.allclose(found.mean(key), total[key] / weights, rtol=1e-5, atol=1e-6)


def test_the_papers_weighting_falls_back_for_a_client_and_says_so(
    make_engine, tiny_digits: nn.Module, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine()
    engine.send_model(tiny_digits)
    outcome = Paper().plan(tiny_digits, engine, ForgetRequest.parse("client:1"))
    assert outcome.patch.note["statistics"] == "pooled"
    assert "undefined for client requests" in caplog.text
    assert Paper().plan(tiny_digits, engine, CLASS).patch.note["statistics"] == "paper"


def test_one_client_and_no_federation_plan_the_same_patch(
    make_engine, few_digits: Dataset, digit_nets: dict[str, nn.Module]
) -> None:
    model = digit_nets["vgg-mini"]
    engine = make_engine(clients=1, model="vgg-mini")
    engine.send_model(model, ledger=False)  # what a ledger keeps is in half precision
    settings = Hide(ratio=0.1, scrub=False)
    federated = settings.plan(model, engine, CLASS).patch
    central = settings.plan(model, CentralEngine(few_digits), CLASS).patch
    assert federated.note["sites"] == central.note["sites"]
    for name, value in central.replaced.items():
        assert torch.allclose(federated.replaced[name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_a_request_for_resnet50s_last_stage_sends_few_bytes(make_engine) -> None:
    """The sums of both groups as they travel, for 3,072 inner kernels and 2,048 stream channels: at most 64 KB."""
    sites = find_sites(build_model("resnet50", num_classes=10), (3, 32, 32), "deep", "channel", "stream")
    assert sum(site.kernels for site in sites) == 5120
    generator = torch.Generator().manual_seed(0)
    drawn = {site.name: torch.rand(1, site.kernels, generator=generator, dtype=torch.float64) for site in sites}
    sums = {f"x:{name}": 2**15 * peaks for name, peaks in drawn.items()}  # 32 bits each
    seen = Observation(sums, torch.tensor([9]))
    queries = [Query((Selection(), Selection()), Statistic("peaks"))]
    reply = ObserveReply(1, "done", (), 0, 9, 0, 0.0, 0.0)
    assert 40_960 < count_bytes(pack(pack_observations([[seen, seen]], queries)[0], reply)) < 65_536


def test_the_tiny_network_is_what_the_settings_name() -> None:
    assert isinstance(start(), TinyNet)


def test_a_mask_costs_a_bit_for_each_weight_and_is_obeyed(
    make_engine, few_digits: Dataset, tiny_digits: nn.Module
) -> None:
    name, weight = max(tiny_digits.named_parameters(), key=lambda each: each[1].numel())
    mask = {name: torch.arange(weight.numel()).reshape(weight.shape) % 3 == 0}
    plan, engines = TrainingPlan((PlanPart(Selection("train")),)), [make_engine(clients=1) for _ in range(2)]
    for engine, trainable in zip(engines, (None, mask), strict=True):
        engine.send_model(tiny_digits)
        trained = engine.fit(tiny_digits, plan, RECIPE, trainable=trainable)
    changed = dict(trained.named_parameters())[name] != weight
    assert bool(changed[mask[name]].any())
    assert not bool(changed[~mask[name]].any())
    plain, masked = (engine.transport.bytes_down / len(rounds_of(engine)) for engine in engines)
    assert 0 < masked - plain < weight.numel() / 8 + 200, "a byte for each weight would be eight times as much"


def test_a_mask_of_another_shape_is_refused_though_it_has_as_many_bits(make_engine, tiny_digits: nn.Module) -> None:
    plan, engine, weight = TrainingPlan((PlanPart(Selection("train")),)), make_engine(clients=1), tiny_digits.fc.weight
    with pytest.raises(BadSetting, match=r"the mask names fc.weight, which the model lacks or has in another shape"):
        engine.fit(tiny_digits, plan, RECIPE, trainable={"fc.weight": torch.ones(weight.shape[::-1]) > 0})
    assert not rounds_of(engine)


def rounds_of(engine) -> list:
    return [each for each in engine.transport.log if each.kind == "train.local"]
