"""Masked sums: each message is noise, the total is that of the open sums, and a dropout repeats the exchange."""

from dataclasses import replace

import pytest
import torch
from federations import CLASS, PEAKS, greeted, grid_of
from flwr.app import Error, Message
from torch import nn

from fedortho.engines.query import Query, Selection
from fedortho.errors import FedOrthoError
from fedortho.federated.engine import FederatedEngine
from fedortho.federated.local_grid import FIRST_NODE, LocalGrid
from fedortho.federated.masking import draw_key, mask
from fedortho.federated.wire import unpack_json
from fedortho.methods.hide import Hide
from fedortho.statistics.observe import Observation
from fedortho.storage.files import tensors_digest

QUERIES = [
    Query((Selection("train", CLASS), Selection("train", None, CLASS)), PEAKS),
    Query((Selection("valid"),), replace(PEAKS, kind="right", by_label=True)),
]


class Watching(LocalGrid):
    """Keeps the replies to queries as the server sees them; some clients vanish after they have sent their keys."""

    def __init__(self, good: LocalGrid, vanishing: set[int]) -> None:
        self.__dict__.update(good.__dict__)
        self.last: Message | None = None
        self.vanishing, self.seen = vanishing, list[tuple[int, dict[str, torch.Tensor], dict[str, object]]]()

    def _answer(self, message: Message) -> Message:
        client = message.metadata.dst_node_id - FIRST_NODE
        if message.metadata.message_type == "query.observe" and client in self.vanishing:
            self.vanishing.discard(client)
            self.silent = {client}
            return Message(Error(code=5, reason="gone"), reply_to=message)
        reply = super()._answer(message)
        self.last = message if message.metadata.message_type == "query.observe" else self.last
        if message.metadata.message_type == "query.observe" and not reply.has_error():
            self.seen.append((client, *unpack_json(reply.content)))
        return reply


def masked(honest: FederatedEngine, *vanishing: int) -> FederatedEngine:
    settings = replace(honest.federation, sums="masked", timeout=1.0)
    engine = FederatedEngine(Watching(grid_of(honest), set(vanishing)), settings, honest.task)
    engine.hello()
    return engine


def same(one: list[list[Observation]], other: list[list[Observation]]) -> bool:
    pairs = [(a, b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True)]
    return all(
        torch.equal(a.counts, b.counts) and all(torch.equal(a.sums[key], b.sums[key]) for key in b.sums)
        for a, b in pairs
    )


def test_the_total_is_the_open_one_bit_for_bit_and_costs_are_too(make_engine, tiny_digits: nn.Module) -> None:
    honest = make_engine()
    honest.send_model(tiny_digits)
    plain, secret = greeted(honest), masked(honest)
    assert same(secret.measure(tiny_digits, QUERIES), plain.measure(tiny_digits, QUERIES))
    for name in ("images_read", "images_trained", "withheld"):
        assert getattr(secret.tally, name) == getattr(plain.tally, name)


def test_what_the_server_sees_of_a_client_is_uniform_and_tells_nothing_else(
    make_engine, tiny_digits: nn.Module
) -> None:
    honest = make_engine()
    honest.send_model(tiny_digits)
    engine = masked(honest)
    engine.measure(tiny_digits, QUERIES)
    grid = engine.transport.grid
    assert isinstance(grid, Watching)
    assert [client for client, _, _ in grid.seen] == [0, 1, 2, 3], "all answer, also those with nothing"
    for _, tensors, value in grid.seen:
        assert list(tensors) == ["masked"]
        known = {key: each for key, each in value.items() if key not in ("schema", "client", "status")}
        assert not any(known.values()), "no counts, no costs, no empty groups"
        digits = tensors["masked"].view(torch.uint8).long()
        expected = len(digits) / 256
        chi = float(((torch.bincount(digits, minlength=256) - expected) ** 2 / expected).sum())
        assert 150 < chi < 380, "of 255 degrees of freedom: uniform bytes"
    sizes = {len(tensors["masked"]) for _, tensors, _ in grid.seen}
    assert len(sizes) == 1


def test_masks_cancel_and_an_exchange_of_two_or_with_a_foreign_key_is_refused() -> None:
    pairs = {client: draw_key() for client in range(5)}
    keys = {client: public for client, (_, public) in pairs.items()}
    values = [torch.randint(-(2**40), 2**40, (7,)) for _ in pairs]
    total = sum(mask(values[c], c, private, keys, "x") for c, (private, _) in pairs.items())
    assert torch.equal(total, sum(values))
    for others in ({0: keys[0], 1: keys[1]}, {**keys, 0: keys[1]}):
        with pytest.raises(FedOrthoError, match="refused"):
            mask(values[0], 0, pairs[0][0], others, "x")


def test_a_dropout_repeats_the_exchange_without_that_client(make_engine, tiny_digits: nn.Module) -> None:
    honest = make_engine()
    honest.send_model(tiny_digits)
    engine = masked(honest, 2)
    found = engine.measure(tiny_digits, QUERIES)
    without = greeted(honest)
    without.clients = {client: info for client, info in without.clients.items() if client != 2}
    assert same(found, without.measure(tiny_digits, QUERIES))
    kinds = [exchange.kind for exchange in engine.transport.log]
    assert kinds == ["query.hello", "query.key", "query.observe", "query.key", "query.observe"]


def test_a_key_serves_once(make_engine, tiny_digits: nn.Module) -> None:
    honest = make_engine()
    honest.send_model(tiny_digits)
    engine = masked(honest)
    engine.measure(tiny_digits, QUERIES)
    grid = engine.transport.grid
    assert isinstance(grid, Watching)
    assert grid.last is not None
    (again,) = grid.send_and_receive([Message(grid.last.content, grid.last.metadata.dst_node_id, "query.observe")])
    assert again.has_error(), "two answers with one mask would tell their difference"


def test_a_request_on_masked_sums_ends_with_the_same_model(make_engine, tiny_digits: nn.Module) -> None:
    honest = make_engine()
    honest.send_model(tiny_digits)
    method = Hide(ratio=0.1)
    plans = [method.plan(tiny_digits, engine, CLASS) for engine in (greeted(honest), masked(honest))]
    models = [plan.patch.apply(tiny_digits) for plan in plans]
    assert tensors_digest(models[0].state_dict()) == tensors_digest(models[1].state_dict())
    with pytest.raises(FedOrthoError, match="cannot be masked"):
        masked(honest).measure(tiny_digits, [Query((Selection(),), replace(PEAKS, kind="gradient"))])
