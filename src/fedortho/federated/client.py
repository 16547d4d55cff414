"""The Flower client app: it hands messages to the client's handlers, and the text of errors stays on this machine."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedortho.errors import FedOrthoError
from fedortho.federated.client_handlers import HANDLERS, handle
from fedortho.federated.client_state import ClientState, open_client
from fedortho.federated.messages import Reply
from fedortho.federated.node_policy import read_policy
from fedortho.federated.wire import Json, Tensors, pack, unpack_json
from fedortho.runs.settings import FederateSettings
from fedortho.storage.settings import field_types, make_settings
from fedortho.storage.trusted_code import check_trusted

if TYPE_CHECKING:
    from flwr.app import Context, Message
    from flwr.clientapp import ClientApp
    from flwr.clientapp.typing import Mod


logger = logging.getLogger(__name__)
Config = Mapping[str, Any]


class ClientFailed(Exception):
    """All that the server learns of an error on a client; the error's text might describe somebody's images."""


def client_app(config: Config | None = None) -> "ClientApp":
    """The app; its settings come from `config`, or from the run's configuration without one."""

    def find(context: "Context") -> ClientState:
        given = config or settled(context.run_config, context.run_id, context.node_config.get("num-partitions", 0))
        if context.run_config.get("clients") == 0:  # of Flower's simulation, whose nodes have no configuration
            given = {**given, "store": given["store"] or str(Path(str(given["run"] or given["out"])) / "clients")}
        return find_client(context.node_config, given)

    return flower_app(find)


def flower_app(find: "Callable[[Context], ClientState]", mods: "Sequence[Mod]" = ()) -> "ClientApp":
    """An app whose client is the one that `find` finds for the context of a message."""
    from flwr.clientapp import ClientApp

    app = ClientApp(mods=list(mods))
    for action in HANDLERS:
        kind, _, name = action.partition(".")
        register = app.query if kind == "query" else app.train
        register(name)(_flower_handler(action, find))
    return app


def _flower_handler(action: str, find: "Callable[[Context], ClientState]") -> "Callable[[Message, Context], Message]":
    def on_message(message: "Message", context: "Context") -> "Message":
        from flwr.app import Message

        client, received = context.node_config.get("partition-id"), unpack_json(message.content)
        reply = client_reply(action, lambda: find(context), client, *received)
        return Message(pack(*reply), reply_to=message)

    return on_message


def client_reply(
    action: str, find: Callable[[], ClientState], client: object, tensors: Tensors, value: Json
) -> tuple[Tensors, Reply]:
    """The reply of the client that is found; errors are logged here, with its number, and become ClientFailed."""
    try:
        return handle(find(), action, tensors, value)
    except Exception as error:
        if isinstance(error, FedOrthoError):  # its text says it all; no traceback
            logger.error("client %s, %s: %s", client, action, error)
        else:
            logger.exception("client %s: %s failed", client, action)
        raise ClientFailed("failed; the client's own log says why") from None


def settled(config: Config, run_id: int, clients: Any) -> dict[str, Any]:
    """A run's configuration; with 0 clients, as `flwr run app` has it, there are as many as nodes, and out is given."""
    if config.get("clients") != 0:
        return dict(config)
    out = config["out"] or str(Path.home() / "fedortho-runs" / f"run-{run_id}")
    return {**config, "clients": int(clients), "out": out}


def find_client(node: Config, config: Config) -> ClientState:
    """The client that a node's configuration describes, with the record in its store."""
    client = partition_id(node)
    store = node.get("store") or config.get("store")
    if not store:
        raise FedOrthoError("the node's configuration has no store; give the node store=DIRECTORY, see docs/deploy.md")
    run = node.get("run") or (config.get("run") if config.get("store") else "")  # only of clients simulated here
    state = open_client(client, federate_settings(config), Path(str(store)), str(node.get("data", "")))
    is_simulated = bool(config.get("store")) or "run" in node
    return replace(state, run=str(run or ""), policy=read_policy(node, is_simulated=is_simulated))


def partition_id(node: Config) -> int:
    """The number of the client that a node's configuration describes."""
    if "partition-id" not in node:
        raise FedOrthoError("the node's configuration has no partition-id; see docs/deploy.md")
    return int(node["partition-id"])


def federate_settings(config: Config) -> FederateSettings:
    """The settings among the keys of a run's configuration; other keys belong to the server's job.

    Code that they name runs only if this machine's user trusts it: no machine imports what another one names.
    """
    known = field_types(FederateSettings)
    settings = make_settings(FederateSettings, {k: v for k, v in config.items() if k.replace("-", "_") in known})
    check_trusted("the federation's configuration", *settings.code)
    return settings
