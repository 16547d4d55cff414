"""Replies that are corrupted in any way are refused by client and field, and the job goes on with the others."""

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from federations import CLASS, PEAKS, RECIPE, greeted, start
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, RecordDict
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from small import SETTINGS
from torch import nn

from fedortho.engines.query import Query, Selection
from fedortho.federated.engine import FederatedEngine
from fedortho.federated.local_grid import FIRST_NODE, LocalGrid
from fedortho.federated.roster import NODES, Binding, NodesRecord, read_bindings
from fedortho.federated.server import federated_engine, local_grid
from fedortho.federated.transport import append_wire_log, read_wire_log
from fedortho.federated.wire import pack_integers, unpack_integers
from fedortho.models.patch import bind_patch
from fedortho.models.sites import find_sites
from fedortho.runs.run import load_run_data
from fedortho.storage.files import tensors_digest
from fedortho.storage.records import write_record
from fedortho.unlearning.select import kernel_patch

BAD = 2  # the client whose replies are corrupted
QUERIES = [
    Query((Selection("train", CLASS), Selection("valid")), kind) for kind in (PEAKS, replace(PEAKS, kind="right"))
]
VALUES = [None, "x", -1, 10**30, 1.5, True, [], {}, [[9, 9]], "NaN", "Infinity", {"images": 1}]
TEXTS = ["", "no json", "[]", "null", "[" * 10_000, '{"schema": 3}', '{"schema": 3, "client": 2}']


def changed_json(draw: Any, text: str) -> str:
    """The message with a key dropped, added or set to something else, at any depth; or no message at all."""
    value = json.loads(text)
    where = value
    while (nested := [key for key, each in where.items() if isinstance(each, dict)]) and draw(st.booleans()):
        where = where[draw(st.sampled_from(nested))]
    key, how = draw(st.sampled_from(sorted(where))), draw(st.sampled_from(["drop", "add", "set", "text"]))
    if how == "text":
        return str(draw(st.sampled_from(TEXTS)))
    if how == "drop":
        del where[key]
    else:
        where["more" if how == "add" else key] = draw(st.sampled_from(VALUES))
    return json.dumps(value).replace('"NaN"', "NaN").replace('"Infinity"', "Infinity")


def changed_array(draw: Any, array: Array) -> Array:
    found = array.numpy()
    lies = ["huge", "negative"] if array.dtype == "int64" else []  # other large numbers are malice, not corruption
    how = draw(st.sampled_from(["bytes", "type", "dtype", "shape", "nan", *lies]))
    if how == "bytes":
        return Array(dtype=array.dtype, shape=array.shape, stype=array.stype, data=array.data[: len(array.data) // 2])
    if how == "type":
        return Array(dtype=array.dtype, shape=array.shape, stype="pickle", data=array.data)
    if how == "shape":
        return Array(found.reshape(-1)[:1] if found.size > 1 else found.reshape(1, 1, 1))
    if how == "dtype":
        return Array(found.astype("complex64"))
    if how == "nan":
        return Array(found.astype("float32") * float("nan"))
    return Array(found * 0 + (-1 if how == "negative" else 2**30))


def corrupted(draw: Any, content: RecordDict) -> RecordDict:
    """The record of a reply, corrupted in one way."""
    text, arrays = str(content["message"]["json"]), dict(content["tensors"])  # type: ignore[arg-type,index]
    how = draw(st.sampled_from(["json", "json", "array", "drop", "rename", "more", "record"]))
    name = draw(st.sampled_from(sorted(arrays))) if arrays else ""
    if how == "record":
        return draw(st.sampled_from([RecordDict(), RecordDict({"message": ConfigRecord({"json": text})})]))
    if how == "json" or not arrays:
        text = changed_json(draw, text)
    elif how == "array":
        arrays[name] = changed_array(draw, arrays[name])
    elif how == "drop":
        del arrays[name]
    elif how == "rename":
        arrays[f"{name}x"] = arrays.pop(name)
    else:
        arrays["9.9.counts"] = arrays[name]
    return RecordDict({"tensors": ArrayRecord(arrays), "message": ConfigRecord({"json": text})})


class Corrupting(LocalGrid):
    """One client's replies to one kind of message go through a function; some replies come twice or too late."""

    def __init__(self, good: LocalGrid, action: str, change: Callable[[RecordDict], RecordDict], how: str = "") -> None:
        self.__dict__.update(good.__dict__)
        self.action, self.change, self.how = action, change, how
        self.last: Message | None = None

    def _answer(self, message: Message) -> Message:
        reply = super()._answer(message)
        if message.metadata.message_type != self.action or message.metadata.dst_node_id != FIRST_NODE + BAD:
            return reply
        if self.how == "error":
            return Message(Error(code=2, reason="x"), reply_to=message)
        return Message(self.change(copy.deepcopy(reply.content)), reply_to=message)

    def pull_messages(self, message_ids: Any) -> list[Message]:
        found = super().pull_messages(message_ids)
        if self.how in ("twice", "stale"):
            late = found if self.how == "twice" else [] if self.last is None else [self.last]
            self.last = found[0] if found else self.last
            return [*late, *found]
        return found


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory, tiny_digits: nn.Module) -> FederatedEngine:
    data = load_run_data(SETTINGS)
    with local_grid(SETTINGS, tmp_path_factory.mktemp("corruption") / "clients") as grid:
        engine = federated_engine(grid, SETTINGS, data)
    engine.send_model(tiny_digits)
    return engine


def over(honest: FederatedEngine, grid: LocalGrid) -> FederatedEngine:
    """An engine over another grid that knows the same clients."""
    engine = FederatedEngine(grid, honest.federation, honest.task)
    engine.clients, engine.transport.nodes = dict(honest.clients), dict(honest.transport.nodes)
    return engine


def outcome(engine: FederatedEngine, action: str, model: nn.Module) -> Any:
    """What an exchange comes to: digests of sums or of a model, or the clients that took part."""
    if action == "query.hello":
        return sorted(engine.hello())
    if action == "train.keep":
        return engine.send_model(model, ledger=False)
    if action == "train.patch":
        sites = find_sites(model, (1, 8, 8), "all", "channel", "stream")
        nothing = {sites[-1].name: (torch.tensor([1]), torch.zeros(1, dtype=torch.float64))}
        return engine.send_patch(bind_patch(kernel_patch(model, sites, nothing, "channel"), model), None)
    if action == "train.local":
        return tensors_digest(engine.fit(start(), Selection(), replace(RECIPE, epochs=1)).state_dict())
    measured = engine.measure(model, QUERIES)
    return [tensors_digest({**each.sums, "counts": each.counts}) for row in measured for each in row]


ACTIONS = ["query.hello", "train.keep", "train.patch", "query.observe", "train.local"]


@pytest.fixture(scope="module")
def expected(honest: FederatedEngine, tiny_digits: nn.Module) -> dict[str, tuple[Any, Any]]:
    """Of each exchange what it comes to with all clients, and without the bad one."""
    found = {}
    for action in ACTIONS:
        whole = outcome(over(honest, honest.transport.grid), action, tiny_digits)  # type: ignore[arg-type]
        failing = Corrupting(honest.transport.grid, action, lambda content: content, "error")  # type: ignore[arg-type]
        found[action] = (whole, outcome(over(honest, failing), action, tiny_digits))
        assert found[action][0] != found[action][1]
    return found


@pytest.mark.parametrize("action", ACTIONS)
@settings(
    max_examples=3,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
    database=None,
    phases=[Phase.generate],
)
@given(data=st.data())
def test_a_corrupted_reply_counts_as_none_or_as_it_was(
    honest: FederatedEngine, expected: dict[str, Any], tiny_digits: nn.Module, action: str, data: st.DataObject
) -> None:
    grid = Corrupting(honest.transport.grid, action, lambda content: corrupted(data.draw, content))  # type: ignore[arg-type]
    engine = over(honest, grid)
    got = outcome(engine, action, tiny_digits)
    assert got in expected[action]
    if got != expected[action][0] and action != "query.hello":  # nodes without a number have none to be named by
        assert list(engine.transport.log[-1].failed) == [BAD]


@pytest.mark.parametrize("how", ["twice", "stale"])
@pytest.mark.parametrize("action", ["train.keep", "query.observe"])
def test_a_reply_counts_once_and_an_old_one_never(
    honest: FederatedEngine, expected: dict[str, Any], tiny_digits: nn.Module, action: str, how: str
) -> None:
    engine = over(honest, Corrupting(honest.transport.grid, action, lambda content: content, how))  # type: ignore[arg-type]
    assert outcome(engine, action, tiny_digits) == expected[action][0]


def with_counts(content: RecordDict, name: str, change: Callable[[Any], Any]) -> RecordDict:
    arrays = dict(content["tensors"])  # type: ignore[arg-type]
    arrays[name] = Array(change(arrays[name].numpy()))
    return RecordDict({"tensors": ArrayRecord(arrays), "message": content["message"]})


def more_right(sums: Any) -> Any:
    return pack_integers(unpack_integers(torch.from_numpy(sums.copy()), 1) + 1000).numpy()


@pytest.mark.parametrize(
    ("name", "change", "telling"),
    [
        ("0.1.counts", lambda counts: counts * 0 + 400, "0.1.counts is 400; expected at most"),
        ("0.0.counts", lambda counts: counts.astype("float64") * float("nan"), "0.0.counts is float64"),
        ("0.0.counts", lambda counts: counts * 0, "0.0.counts is 0"),
        ("1.1.sums.right", more_right, "1.1.sums.right is below 0 or above its count"),
        ("1.1.sums.right", lambda sums: sums[:-1], "integers of 8 bits from"),
        ("1.1.sums.right", lambda sums: sums.astype("int64"), "1.1.sums.right is int64"),
    ],
)
def test_a_refusal_names_the_client_and_the_field(
    honest: FederatedEngine, tiny_digits: nn.Module, name: str, change: Any, telling: str
) -> None:
    grid = Corrupting(honest.transport.grid, "query.observe", lambda content: with_counts(content, name, change))  # type: ignore[arg-type]
    engine = over(honest, grid)
    engine.measure(tiny_digits, QUERIES)
    assert telling in engine.transport.log[-1].failed[BAD]


class Hasty(Corrupting):
    """The last client's reply comes first, and waits for its turn."""

    def pull_messages(self, message_ids: Any) -> list[Message]:
        return super().pull_messages(list(message_ids)[::-1])


def test_an_early_reply_with_numbers_of_a_kind_that_no_file_holds_is_refused(
    honest: FederatedEngine, expected: dict[str, Any], tiny_digits: nn.Module
) -> None:
    def complex_counts(content: RecordDict) -> RecordDict:
        return with_counts(content, "0.0.counts", lambda counts: counts.astype("complex128"))

    engine = over(honest, Hasty(honest.transport.grid, "query.observe", complex_counts))  # type: ignore[arg-type]
    assert outcome(engine, "query.observe", tiny_digits) == expected["query.observe"][1]
    assert list(engine.transport.log[-1].failed) == [BAD]


def test_a_client_cannot_weigh_more_in_the_average_than_its_images(
    honest: FederatedEngine, tiny_digits: nn.Module
) -> None:
    def heavier(content: RecordDict) -> RecordDict:
        value = json.loads(str(content["message"]["json"]))
        value["result"]["images"] = 10**6
        return RecordDict({"tensors": content["tensors"], "message": ConfigRecord({"json": json.dumps(value)})})

    engine = over(honest, Corrupting(honest.transport.grid, "train.local", heavier))  # type: ignore[arg-type]
    engine.fit(start(), Selection(), replace(RECIPE, epochs=1))
    assert "result.images is 1000000" in engine.transport.log[-1].failed[BAD]


def test_a_node_with_a_foreign_number_or_one_of_another_is_refused_and_the_others_go_on(
    honest: FederatedEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def renamed(number: int) -> FederatedEngine:
        def change(content: RecordDict) -> RecordDict:
            value = json.loads(str(content["message"]["json"])) | {"client": number}
            return RecordDict({"tensors": ArrayRecord(), "message": ConfigRecord({"json": json.dumps(value)})})

        return over(honest, Corrupting(honest.transport.grid, "query.hello", change))  # type: ignore[arg-type]

    assert sorted(renamed(9).hello()) == [0, 1, 3]
    assert "calls itself client 9; clients run 0 to 3" in caplog.text
    engine = renamed(1)
    assert sorted(engine.hello()) == [0, 3], "nobody knows which of two is client 1"
    assert "two nodes" in engine.transport.log[-1].failed[1]
    append_wire_log(tmp_path / "wire.json", engine.transport.log)
    assert read_wire_log(tmp_path / "wire.json")[-1].failed, "nodes without a number are not in the log"
    bound = renamed(1)
    bound.known = honest.bindings()
    assert sorted(bound.hello()) == [0, 1, 3], "who was client 1 before is client 1"
    assert "which was another node with another store" in caplog.text


def test_numbers_of_nodes_beyond_signed_integers_are_kept_and_older_files_are_read(tmp_path: Path) -> None:
    node = 2**64 - 1  # Flower draws them below 2**64
    write_record(tmp_path / NODES, NodesRecord({0: Binding(str(node), "a", "b")}))
    assert read_bindings(tmp_path) == {0: Binding(str(node), "a", "b")}
    old = {"schema": 1, "clients": {"0": {"node": node, "identity": "a", "data": "b"}}}
    (tmp_path / NODES).write_text(json.dumps(old))
    assert read_bindings(tmp_path) == {0: Binding(str(node), "a", "b")}


def test_a_node_that_returns_between_rounds_takes_part_again(
    honest: FederatedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = [FIRST_NODE, FIRST_NODE + 1, FIRST_NODE + 3]
    grid = Corrupting(honest.transport.grid, "", lambda content: content)  # type: ignore[arg-type]
    monkeypatch.setattr(grid, "get_node_ids", lambda: list(nodes))
    engine = FederatedEngine(grid, replace(honest.federation, timeout=0.1), honest.task)
    engine.hello()
    back = Selection()
    engine.fit(start(), back, replace(RECIPE, epochs=2), keep=lambda *_: nodes.append(FIRST_NODE + BAD))
    assert [entry.clients for entry in engine.history] == [3, 4]


def test_a_new_training_is_told_what_the_stores_have_forgotten(honest: FederatedEngine) -> None:
    engine = greeted(honest)
    engine.clients[1] = replace(engine.clients[1], forgotten=(CLASS,))
    with pytest.raises(Exception, match=r"1 clients have forgotten class:3.*--without 'class:3'"):
        engine.check_forgotten(None)
    engine.check_forgotten(CLASS)
