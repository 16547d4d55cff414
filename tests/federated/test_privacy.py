"""What a node gives away is its own decision: groups, queries, their number, and the memory of what it has answered."""

import shutil
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from federations import CLASS, PEAKS, RECIPE, start
from small import SETTINGS
from torch import nn

from fedortho.data.request import ForgetRequest
from fedortho.engines.query import Query, Selection, Statistic
from fedortho.federated.client import client_app
from fedortho.federated.engine import FederatedEngine
from fedortho.federated.local_grid import LocalGrid
from fedortho.federated.messages import HelloReply, KeyReply, ModelReply, ObserveReply, TrainReply
from fedortho.federated.server import federated_engine
from fedortho.runs.run import load_run_data
from fedortho.storage.settings import as_mapping, kebab


@pytest.fixture
def store(tmp_path: Path, tiny_digits: nn.Module) -> Path:
    return tmp_path / "clients"


def nodes(store: Path, model: nn.Module, **node: object) -> FederatedEngine:
    """An engine whose server wants all it can get, over nodes with these settings of their own."""
    grid = LocalGrid(client_app(as_mapping(SETTINGS)), SETTINGS.clients, {"store": str(store), **node})
    engine = federated_engine(grid, SETTINGS, load_run_data(SETTINGS))
    engine.send_model(model, ledger=False)
    return engine


def peaks(engine: FederatedEngine, model: nn.Module, *requests: str, kind: str = "peaks") -> list[int]:
    """How many images the sums are over that clients send about all images but those of each request."""
    chosen = [Selection("train", None, ForgetRequest.parse(text) if text else None) for text in requests]
    return [
        found.images for (found,) in engine.measure(model, [Query((s,), replace(PEAKS, kind=kind)) for s in chosen])
    ]


def test_sums_of_all_images_but_one_are_refused_after_those_of_all(store: Path, tiny_digits: nn.Module) -> None:
    engine = nodes(store, tiny_digits, **{"least-group": 5})
    (whole,) = peaks(engine, tiny_digits, "")
    (without,) = peaks(engine, tiny_digits, "samples:0/0")
    assert whole - without >= engine.clients[0].images, "client 0 sends nothing about all but one of its images"
    (again,) = peaks(engine, tiny_digits, "")
    assert again == whole, "the same group again tells nothing new"


def test_the_order_of_questions_and_their_statistic_do_not_help(store: Path, tiny_digits: nn.Module) -> None:
    engine = nodes(store, tiny_digits, **{"least-group": 5})
    first = peaks(engine, tiny_digits, "samples:0/0,0/1")[0]
    assert peaks(engine, tiny_digits, "", kind="peaks")[0] <= first, (
        "nor all after all but two, in one message or several"
    )
    sampled = [Query((Selection(),), replace(PEAKS, sample=many, layers="mid")) for many in (40, 39)]
    (many,), (fewer,) = engine.measure(tiny_digits, sampled)
    assert not (many.images and fewer.images and 0 < many.images - fewer.images < 5), "nor two samples of one group"


def test_the_memory_survives_the_process_and_another_model(store: Path, tiny_digits: nn.Module) -> None:
    nodes(store, tiny_digits, **{"least-group": 5}).measure(tiny_digits, [Query((Selection(),), PEAKS)])
    other = start()
    engine = nodes(store, other, **{"least-group": 5})
    (found,) = peaks(engine, other, "samples:0/0")
    assert found <= sum(info.images for info in engine.clients.values()) - engine.clients[0].images


def test_counts_by_label_are_compared_label_by_label(store: Path, tiny_digits: nn.Module) -> None:
    """Two groups that differ by one image of each of ten labels differ by ten; their counts by label by one."""
    engine = nodes(store, tiny_digits, **{"least-group": 5})
    data = load_run_data(SETTINGS)
    by_label = Statistic("right", "all", by_label=True)
    ((whole,),) = engine.measure(tiny_digits, [Query((Selection(),), by_label)])
    rows = [int(data.train.rows[(data.train.labels == label).nonzero()[0]]) for label in range(10)]
    less = ForgetRequest(samples=tuple(map(str, rows)))
    ((found,),) = engine.measure(tiny_digits, [Query((Selection("train", None, less),), by_label)])
    differences = whole.counts - found.counts
    assert not bool(((differences > 0) & (differences < 5)).any())


def test_the_larger_minimum_holds(store: Path, tiny_digits: nn.Module) -> None:
    few = Query((Selection("train", ForgetRequest.parse("samples:0/0,0/1,0/2,1/0")),), PEAKS)
    assert nodes(store, tiny_digits).measure(tiny_digits, [few])[0][0].images == 0, "a real node has a minimum of 5"
    engine = nodes(store, tiny_digits, **{"least-group": 2})
    assert engine.measure(tiny_digits, [few])[0][0].images == 3
    assert engine.tally.withheld == 1


def test_a_node_answers_only_what_it_allows(
    store: Path, tiny_digits: nn.Module, caplog: pytest.LogCaptureFixture
) -> None:
    engine = nodes(store, tiny_digits, queries="peaks,right")
    assert peaks(engine, tiny_digits, "")[0]
    with pytest.raises(Exception, match="its node's settings"):
        peaks(engine, tiny_digits, "", kind="gradient")
    with pytest.raises(Exception, match=r"train\.local"):
        engine.fit(start(), Selection(), replace(RECIPE, epochs=1))
    assert "allow" in caplog.text
    with pytest.raises(Exception, match="none of 4 nodes"):
        nodes(store, tiny_digits, queries="peaks,everything")


def test_a_node_answers_only_so_often_for_a_model(store: Path, tiny_digits: nn.Module) -> None:
    engine = nodes(store, tiny_digits, **{"query-budget": 2})
    peaks(engine, tiny_digits, "", "")
    with pytest.raises(Exception, match="its node's settings"):
        peaks(engine, tiny_digits, "")
    shutil.rmtree(store)
    other = start()
    assert peaks(nodes(store, other, **{"query-budget": 2}), other, "")[0], "another model has a budget of its own"


def test_nobody_trains_on_a_few_images(store: Path, tiny_digits: nn.Module) -> None:
    engine = nodes(store, tiny_digits, **{"least-group": 5})
    few = Selection("train", ForgetRequest(samples=("0/0", "0/1", "0/2", *(f"1/{n}" for n in range(12)))))
    engine.fit(start(), few, replace(RECIPE, epochs=1))
    assert engine.history[0].clients == 1, "client 0 has three of them"


def test_an_honest_request_is_answered_as_if_there_were_no_settings(store: Path, tiny_digits: nn.Module) -> None:
    queries = [
        Query((Selection("train", CLASS), Selection("train", None, CLASS)), PEAKS),
        Query((Selection("valid", None, CLASS),), replace(PEAKS, kind="right")),
    ]
    careful = nodes(store, tiny_digits, **{"least-group": 2}).measure(tiny_digits, queries)
    open_ = nodes(store.with_name("open"), tiny_digits, run="").measure(tiny_digits, queries)
    for mine, theirs in zip(careful, open_, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert all(torch.equal(a.sums[key], b.sums[key]) for key in b.sums)


def test_the_page_names_every_field_that_a_server_sees() -> None:
    text = (Path(__file__).parents[2] / "docs" / "privacy.md").read_text(encoding="utf-8")
    for kind in (HelloReply, TrainReply, ModelReply, ObserveReply, KeyReply):
        for each in fields(kind):
            assert f"`{kebab(each.name)}`" in text, f"{kind.__name__}.{each.name}"
