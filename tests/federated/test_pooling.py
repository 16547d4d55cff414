"""Sums of clients that lie are bounded, and of honest ones as they were."""

from dataclasses import replace

import pytest
import torch
from federations import CLASS, PEAKS, greeted, grid_of
from malice import Hostile
from torch import nn

from fedortho.engines.query import Query, Selection, Statistic
from fedortho.federated.engine import FederatedEngine
from fedortho.federated.pooling import Pool, blank_observations, model_limits
from fedortho.statistics.observe import Observation

QUERIES = [Query((Selection("train", CLASS), Selection("train", None, CLASS)), PEAKS)]


def engine_with(honest: FederatedEngine, pooling: str, attack: str = "", liars: int = 1) -> FederatedEngine:
    engine = FederatedEngine(
        Hostile(grid_of(honest), range(liars), attack), replace(honest.federation, pooling=pooling), honest.task
    )
    engine.hello()
    return engine


def distance(a: list[list[Observation]], b: list[list[Observation]]) -> float:
    """The largest distance of means of the retain set, in parts of its length."""
    pairs = [(a[0][1].mean(key), b[0][1].mean(key)) for key in b[0][1].sums]
    return max(float((one - other).norm() / other.norm()) for one, other in pairs)


def test_of_honest_clients_bounds_change_nothing(make_engine, tiny_digits: nn.Module) -> None:
    honest = make_engine()
    honest.send_model(tiny_digits)
    plain, bounded, trimmed = (
        engine_with(honest, how).measure(tiny_digits, QUERIES) for how in ("sum", "bounded", "trimmed")
    )
    for one, other in zip(plain[0], bounded[0], strict=True):
        assert torch.equal(one.counts, other.counts)
        assert all(torch.equal(one.sums[key], other.sums[key]) for key in one.sums), "bit for bit"
    assert distance(trimmed, plain) < 0.2


@pytest.mark.parametrize("attack", ["scaled sums", "sign flips"])
def test_one_liar_moves_the_mean_without_bounds_and_little_with_them(
    make_engine, tiny_digits: nn.Module, attack: str, caplog: pytest.LogCaptureFixture
) -> None:
    honest = make_engine()
    honest.send_model(tiny_digits)
    truth = greeted(honest).measure(tiny_digits, QUERIES)
    moved = {
        how: distance(engine_with(honest, how, attack).measure(tiny_digits, QUERIES), truth)
        for how in ("sum", "bounded", "trimmed")
    }
    assert moved["trimmed"] < 0.3
    if attack == "scaled sums":
        assert moved["sum"] > 50
        assert moved["bounded"] < 0.3
        assert "client 0" in caplog.text
    engine = engine_with(honest, "bounded", attack)
    engine.measure(tiny_digits, QUERIES)
    if attack == "scaled sums":
        assert "beyond what the model can produce" in engine.transport.log[-1].failed[0]
    else:
        assert max(engine.apart, key=engine.apart.__getitem__) == 0, "it stands apart"


def test_no_image_gives_more_than_the_limits_and_more_is_refused(make_engine, tiny_digits: nn.Module, digits) -> None:
    engine = make_engine()
    limits = model_limits(tiny_digits, engine.task, QUERIES)
    ((_, real), *_) = greeted_peaks(engine, tiny_digits)
    for key, most in limits[(0, 1)].items():
        assert bool((real.mean(key) <= most).all())
    blank = blank_observations(tiny_digits, engine.task, QUERIES)
    pool = Pool("bounded", blank, QUERIES, tiny_digits, engine.task)
    sums = {key: 2 * most.unsqueeze(0) for key, most in limits[(0, 1)].items()}
    with pytest.raises(Exception, match="beyond what the model can produce"):
        pool.add(0, [[None, Observation(sums, torch.tensor([1]))]])


def greeted_peaks(engine: FederatedEngine, model: nn.Module) -> list[list[Observation]]:
    engine.send_model(model)
    return engine.measure(model, QUERIES)


def test_clients_beyond_the_sample_are_bounded_one_by_one(make_engine, tiny_digits: nn.Module, monkeypatch) -> None:
    honest = make_engine()
    honest.send_model(tiny_digits)
    truth = honest.measure(tiny_digits, QUERIES)
    monkeypatch.setattr("fedortho.federated.pooling.SAMPLE", 3)
    assert distance(engine_with(honest, "bounded").measure(tiny_digits, QUERIES), truth) == 0


def test_moments_that_no_values_have_are_refused(make_engine, tiny_digits: nn.Module) -> None:
    honest = make_engine()
    honest.send_model(tiny_digits)
    norms = tuple(name for name, m in tiny_digits.named_modules() if isinstance(m, nn.BatchNorm2d))
    moments = [Query((Selection(),), Statistic("moments", "all", "conv", "conv", norms=norms))]
    assert engine_with(honest, "bounded").measure(tiny_digits, moments)[0][0].images
    for attack in ("scaled sums", "sign flips"):
        engine = engine_with(honest, "bounded", attack)
        engine.measure(tiny_digits, moments)
        assert "is below the square of its mean" in engine.transport.log[-1].failed[0]
