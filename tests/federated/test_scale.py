"""What grows with the number of clients: nothing faster than the number itself."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from federations import grid_of, start

from fedortho.federated import client_state
from fedortho.federated.client_state import ClientRecord
from fedortho.federated.engine import FederatedEngine
from fedortho.models.zoo import build_model

CLIENTS = 30
Make = Callable[..., FederatedEngine]


def count_records(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The records of clients that are read from now on."""
    read: list[Path] = []

    def counted(kind: type[Any], path: Path) -> Any:
        read.append(path)
        return original(kind, path)

    original = client_state.read_record
    monkeypatch.setattr(client_state, "read_record", counted)
    return read


def test_sending_a_model_reads_few_records_per_client(make_engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each client read those of all others: 82 s of CPU with 2,000 clients."""
    engine = make_engine(clients=CLIENTS, least_images=1, split="iid")
    read = count_records(monkeypatch)
    engine.send_model(start(), ledger=False)
    first = len(read)
    second = build_model("small:TinyNet", num_classes=10, channels=1, seed=7)
    engine.send_model(second, ledger=False)
    store = Path(grid_of(engine)._node_config["store"])
    assert first <= CLIENTS
    assert len(read) - first <= 4 * CLIENTS, "its own, the next one's, and those of all once"
    assert len(list((store / "models").iterdir())) == 1, "the first model is gone with its last user"
    assert {client_state.read_record(ClientRecord, path).model for path in store.glob("client-*/state.json")} == {
        engine.clients[0].model
    }


def test_pulling_replies_looks_at_few_messages_each(make_engine: Make) -> None:
    engine = make_engine(clients=CLIENTS, least_images=1, split="iid")
    grid, looked = grid_of(engine), 0
    pull = grid.pull_messages

    def counted(message_ids: Iterable[str]) -> Any:
        def each() -> Iterable[str]:
            nonlocal looked
            for id_ in message_ids:
                looked += 1
                yield id_

        return pull(each())

    grid.pull_messages = counted  # type: ignore[method-assign]
    engine.hello()
    assert looked <= 2 * CLIENTS
    assert engine.transport.bytes_up == sum(sum(exchange.bytes_up.values()) for exchange in engine.transport.log)
    assert engine.transport.bytes_down == sum(sum(exchange.bytes_down.values()) for exchange in engine.transport.log)
