"""Strategies of the installed Flower in our rounds: what they make, what is repeatable, and what is refused."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from federations import RECIPE, start
from flwr.serverapp import strategy as flower
from small import SETTINGS

from fedortho.engines.query import Selection
from fedortho.errors import BadSetting, FedOrthoError, UnknownName
from fedortho.federated import strategies
from fedortho.federated.server import train_federation
from fedortho.federated.strategies import REPEATABLE, is_repeatable, load_strategy
from fedortho.requests.rewind import CannotRewind, plan_rewind, rewind_run
from fedortho.runs.run import open_run
from fedortho.storage.files import read_tensors, tensors_digest

FLOWER = "flwr.serverapp.strategy:"
ROBUST = ("FedMedian", "FedTrimmedAvg(beta=0.3)", "Krum(num_malicious_nodes=1)", "Bulyan(num_malicious_nodes=0)")
STATEFUL = ("FedAdam", "FedYogi", "FedAdagrad", "FedAvgM(server_momentum=0.9)")


def trained(make_engine, strategy: str, rounds: int = 1, **given: Any) -> dict[str, torch.Tensor]:
    model = make_engine(strategy=strategy).fit(start(), Selection(), replace(RECIPE, epochs=rounds), **given)
    return dict(model.state_dict())


def test_the_median_is_that_of_the_clients_models(make_engine, tmp_path: Path) -> None:
    made = trained(make_engine, FLOWER + "FedMedian", updates=tmp_path)
    files = sorted((tmp_path / "round-00000").glob("client-*.safetensors"))
    sent = [read_tensors(file)[0] for file in files]
    assert len(sent) == SETTINGS.clients
    for name, value in made.items():
        values = np.stack([state[name].numpy() for state in sent])
        wanted = np.median(values, axis=0) if value.is_floating_point() else values.max(axis=0)
        assert torch.equal(value, torch.from_numpy(np.asarray(wanted)).to(value.dtype)), name


def test_averaging_by_flower_is_ours_up_to_rounding(make_engine) -> None:
    ours, flowers = (trained(make_engine, strategy) for strategy in ("", FLOWER + "FedAvg"))
    assert all(torch.allclose(ours[name], flowers[name], atol=1e-5) for name in ours)


QUICK = ("FedAdam",)  # a killed training of FedMedian ends with the same bytes below
ALL = (*ROBUST, "MultiKrum(num_nodes_to_select=2)", *STATEFUL)


@pytest.mark.parametrize(
    "strategy", [each if each in QUICK else pytest.param(each, marks=pytest.mark.slow) for each in ALL]
)
def test_a_strategy_trains_and_comes_to_the_same_bytes_again(make_engine, strategy: str) -> None:
    before, state = tensors_digest(start().state_dict()), random.getstate()
    first, second = (tensors_digest(trained(make_engine, FLOWER + strategy, rounds=2)) for _ in range(2))
    assert first == second != before
    assert random.getstate() == state, "the generator of this process is put back"


def test_a_strategy_draws_among_the_clients_of_a_round_by_the_seed(make_engine) -> None:
    strategy = FLOWER + "FedAvg(fraction_train=0.5)"
    engines = [make_engine(strategy=strategy) for _ in range(2)]
    for engine in engines:
        random.random()  # whatever the process has drawn before
        engine.fit(start(), Selection(), RECIPE)
    first, second = ([each.drawn for each in engine.log] for engine in engines)
    assert first == second
    assert {len(drawn) for drawn in first} == {2}


@pytest.mark.parametrize(("strategy", "rounds"), [("FedMedian", 2), pytest.param("FedAdam", 3, marks=pytest.mark.slow)])
def test_a_killed_training_goes_on_only_where_nothing_is_lost(
    make_engine, tmp_path: Path, strategy: str, rounds: int
) -> None:
    recipe, file = replace(RECIPE, epochs=3), tmp_path / "checkpoint.safetensors"
    whole = make_engine(strategy=FLOWER + strategy).fit(start(), Selection(), recipe)

    def kill(news: Any) -> None:
        if news.round == 1 and news.answered == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_engine(strategy=FLOWER + strategy).fit(start(), Selection(), recipe, checkpoint=file, watch=kill)
    done = []
    after = make_engine(strategy=FLOWER + strategy)
    resumed = after.fit(start(), Selection(), recipe, checkpoint=file, keep=lambda number, _: done.append(number))
    assert len(done) == rounds
    assert tensors_digest(resumed.state_dict()) == tensors_digest(whole.state_dict())


class Wrong(flower.FedAvg):
    """A strategy that ends a round in another way than with a model of the network."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way

    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        arrays, metrics = super().aggregate_train(server_round, replies)
        if self.way == "none" or arrays is None:
            return None, None
        if self.way == "raises":
            raise ZeroDivisionError("division by zero")
        name = next(iter(arrays))
        if self.way == "missing":
            del arrays[name]
        else:
            arrays[name] = type(arrays[name])(arrays[name].numpy() * np.nan)
        return arrays, metrics


@pytest.mark.parametrize(
    ("strategy", "telling"),
    [
        (FLOWER + "FedProx(proximal_mu=0.1)", "FedProx tells clients 'proximal-mu'"),
        (FLOWER + "FedMedian(min_available_nodes=9)", "waits for more than the 4 clients of this round"),
        (__name__ + ":Wrong(way='none')", "Wrong made no model of 4 replies in round 1"),
        (__name__ + ":Wrong(way='raises')", "Wrong failed in round 1: ZeroDivisionError: division by zero"),
        (__name__ + ":Wrong(way='missing')", "its model has other tensors"),
        (__name__ + ":Wrong(way='nan')", "is not finite"),
    ],
)
def test_what_cannot_be_carried_out_is_refused_by_name(
    make_engine, strategy: str, telling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strategies, "MOST_LOOKS", 2)  # Flower waits for seconds between two looks
    with pytest.raises(FedOrthoError, match=telling.replace("(", r"\(")):
        trained(make_engine, strategy)


@pytest.mark.parametrize(
    ("text", "error", "telling"),
    [
        ("FedMedian", UnknownName, "package.module:function"),
        (FLOWER + "FedNothing", UnknownName, "FedNothing"),
        (FLOWER + "FedTrimmedAvg(0.3)", BadSetting, "name=value"),
        (FLOWER + "FedTrimmedAvg(beta=open('x'))", BadSetting, "name=value"),
        (FLOWER + "FedTrimmedAvg(beta=0.9)", BadSetting, "beta"),
        (FLOWER + "FedMedian(betta=1)", BadSetting, "betta"),
        ("collections:OrderedDict", BadSetting, "configure_train"),
    ],
)
def test_a_text_that_names_no_strategy_is_refused(text: str, error: type[FedOrthoError], telling: str) -> None:
    with pytest.raises(error, match=telling):
        load_strategy(text)


@pytest.mark.slow
def test_all_that_are_repeatable_exist_and_keep_nothing_from_round_to_round(make_engine) -> None:
    for name in REPEATABLE:
        engine = make_engine(strategy=FLOWER + name)
        engine.fit(start(), Selection(), replace(RECIPE, epochs=1))
        assert vars(engine._strategy) == vars(load_strategy(FLOWER + name)), name
    assert [is_repeatable(each) for each in ("", FLOWER + "Krum(num_malicious_nodes=1)", FLOWER + "FedAdam")] == [
        True,
        True,
        False,
    ]


@pytest.fixture(scope="module")
def settings() -> Any:
    return replace(SETTINGS, rounds=3, fraction=0.5, keep_rounds="all", valid=0.1, timeout=60.0)


def untouched(drawn: Sequence[Sequence[int]]) -> int:
    return next(client for client in range(SETTINGS.clients) if client not in drawn[0])


def test_a_run_records_its_strategy_and_rewinds_to_the_same_bytes_where_it_is_repeatable(
    settings: Any, tmp_path: Path, own_cache: Path
) -> None:
    strategy = FLOWER + "FedMedian"
    run = train_federation(tmp_path / "run", replace(settings, strategy=strategy))
    assert open_run(run.path).settings.strategy == strategy
    plan = plan_rewind(run, f"client:{untouched([(0, 1)])}")
    rewound = rewind_run(run, plan.request, tmp_path / "rewound").run
    without = train_federation(tmp_path / "without", replace(settings, strategy=strategy, without=str(plan.request)))
    assert rewound.record.model.digest == without.record.model.digest


@pytest.mark.slow
def test_a_strategy_that_keeps_state_is_not_rewound(settings: Any, tmp_path: Path, own_cache: Path) -> None:
    run = train_federation(tmp_path / "run", replace(settings, strategy=FLOWER + "FedAdam"))
    with pytest.raises(CannotRewind, match="FedAdam, which may keep state between rounds; only retraining is exact"):
        plan_rewind(run, "client:1")
