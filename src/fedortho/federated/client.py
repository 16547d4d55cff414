"""The Flower client app: it hands messages to the holder of the images, and its errors stay on this machine."""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedortho.errors import FedOrthoError
from fedortho.federated.client_state import ACTIONS, ClientState, Reply, act
from fedortho.federated.wire import Note, Tensors, pack, unpack
from fedortho.runs.settings import FederateSettings
from fedortho.storage.settings import field_types, make_settings

if TYPE_CHECKING:
    from flwr.app import Context, Message
    from flwr.clientapp import ClientApp


logger = logging.getLogger(__name__)
Config = Mapping[str, Any]


class ClientFailed(Exception):
    """All that a server learns of an error here; the text itself might tell of somebody's images."""


def client_app(config: Config | None = None) -> "ClientApp":
    """The app; its settings come from `config`, or from the run's configuration if there is none."""
    from flwr.clientapp import ClientApp

    app = ClientApp()
    for action in ACTIONS:
        kind, _, name = action.partition(".")
        register = app.query if kind == "query" else app.train
        register(name)(_handler(action, config))
    return app


def _handler(action: str, config: Config | None) -> "Callable[[Message, Context], Message]":
    def handle(message: "Message", context: "Context") -> "Message":
        from flwr.app import Message

        reply = answered(action, context.node_config, config or context.run_config, *unpack(message.content))
        return Message(pack(*reply), reply_to=message)

    return handle


def answered(action: str, node: Config, config: Config, tensors: Tensors, note: Note) -> Reply:
    """What the client that a node's configuration describes answers; the text of an error goes to its own log only."""
    try:
        return act(client_state_of(node, config), action, tensors, note)
    except Exception as error:
        client = node.get("partition-id")
        if isinstance(error, FedOrthoError):  # one line says it all
            logger.error("client %s, %s: %s", client, action, error)
        else:
            logger.exception("client %s: %s failed", client, action)
        raise ClientFailed("failed; the client's own log says why") from None


def client_state_of(node: Config, config: Config) -> ClientState:
    """The client that a node's configuration describes."""
    if "partition-id" not in node:
        raise FedOrthoError("the node's configuration lacks partition-id; see docs/deploy.md")
    store = node.get("store") or config.get("store")
    if not store:
        raise FedOrthoError("no store is named; give the node store=DIRECTORY, see docs/deploy.md")
    return ClientState(
        int(node["partition-id"]), federate_settings(config), Path(str(store)), str(node.get("data", ""))
    )


def federate_settings(config: Config) -> FederateSettings:
    """The settings among the keys of a run's configuration; other keys belong to the server's job."""
    known = field_types(FederateSettings)
    return make_settings(FederateSettings, {k: v for k, v in config.items() if k.replace("-", "_") in known})
