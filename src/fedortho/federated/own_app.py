"""Forgetting in a Flower app of your own: with its model, its loader and its strategy, on any grid."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.utils.data import Subset

from fedortho.data.images import Dataset, collect_images
from fedortho.data.loaders import Rows
from fedortho.data.request import ForgetRequest, union_of
from fedortho.errors import BadData, BadSetting, FedOrthoError
from fedortho.federated import switch_off
from fedortho.federated.client import HANDLERS, flower_app, partition_id
from fedortho.federated.client_state import ClientState, open_client, relabelled
from fedortho.federated.engine import FederatedEngine
from fedortho.federated.messages import Hello, HelloReply, TaskInfo
from fedortho.federated.node_policy import read_policy
from fedortho.federated.transport import Exchange, Transport
from fedortho.methods import as_dataset, level_of, method_of_level, unlearn
from fedortho.methods.method import ForgetResult, Method
from fedortho.models.patch import Patch
from fedortho.models.prepare import prepare_model, released
from fedortho.models.zoo import check_output, count_answers, reinitialised
from fedortho.runs.settings import FederateSettings, Federation
from fedortho.storage.files import state_directory, tensors_digest
from fedortho.storage.settings import kebab

if TYPE_CHECKING:
    from flwr.app import Context, Message, MetricRecord
    from flwr.clientapp import ClientApp
    from flwr.clientapp.typing import Mod
    from flwr.serverapp import Grid


def unlearning_app(
    app: "ClientApp",
    *,
    images: Any,
    model: Callable[[], nn.Module],
    mods: "Sequence[Mod]" = (),
    device: str = "auto",
    threads: int = 0,
) -> "ClientApp":
    """A client app that answers as the given one does, and also forgets when an `Unlearner` asks.

    `images` is a function from the context to the images of this node, as the model reads them: what `forget` takes, or
    a pair of the training and the validation set; or a partitioner of flwr-datasets, whose part `partition-id` is used.
    `model` makes the network, with any weights. `mods` surround the messages of forgetting; those of the given app
    stay its own. A node keeps its model and what it has forgotten in the directory `store` of its configuration;
    without one, in a directory of the user (`FEDORTHO_STATE`) that only this run uses.
    """
    from flwr.clientapp import ClientApp

    settings = FederateSettings(device=device, threads=threads)

    def load(context: "Context") -> Dataset:
        if hasattr(images, "load_partition"):
            return as_dataset(images.load_partition(partition_id(context.node_config)))
        given = images(context)
        is_pair = isinstance(given, tuple) and len(given) == 2
        return as_dataset({"train": given[0], "valid": given[1]} if is_pair else given)

    def find(context: "Context") -> ClientState:
        state = open_client(partition_id(context.node_config), settings, store_of(context))
        policy = read_policy(context.node_config, is_simulated="least-group" not in context.node_config)
        return replace(state, load=partial(load, context), network=model, policy=policy)

    forgetting = flower_app(find, mods)

    class Unlearning(ClientApp):
        """The given app, and beside it the one that forgets; neither is changed."""

        def __call__(self, message: "Message", context: "Context") -> "Message":
            chosen = forgetting if message.metadata.message_type in HANDLERS else app
            return chosen(message, context)

    return Unlearning()


def store_of(context: "Context") -> Path:
    """The directory in which the node of this context keeps its files."""
    if store := context.node_config.get("store"):
        return Path(str(store))
    return state_directory() / "flower" / f"run-{context.run_id}"


def retained(dataset: Rows, context: "Context") -> Rows:
    """The samples of a node's dataset that it was not asked to forget: what a client app goes on training with."""
    client = partition_id(context.node_config)
    record = open_client(client, FederateSettings(), store_of(context)).record
    if not record.forgotten:
        return dataset
    images = relabelled(collect_images(dataset), record.task)
    for request in record.forgotten:
        images = images.subset(~request.mask(images, {client: images.rows}))
    return Subset(dataset, images.rows.tolist())  # type: ignore[arg-type]  # what is read by position


class Unlearner:
    """Makes a model and the clients that trained it forget, over any Flower grid.

    The clients run an app of `unlearning_app`. Class names and image shape are agreed in the greeting; `names` are
    those of the model's outputs if the clients cannot know them. `forgotten` are requests that the model has served.
    It waits up to `timeout` seconds for `clients` nodes (0: those that are connected) and for the replies of each
    exchange, of which the share `quorum` must come. Clients withhold sums over fewer than `least_group` images.
    With a `ledger` they keep sums over their images on their own disk, which make later requests cheaper. Where a
    method trains, the share `fraction` of the clients trains in a round.
    """

    def __init__(
        self,
        grid: "Grid",
        model: nn.Module,
        *,
        names: Sequence[str] = (),
        forgotten: Sequence[ForgetRequest | str] = (),
        clients: int = 0,
        timeout: float = 600.0,
        quorum: float = 0.5,
        least_group: int = 5,
        ledger: bool = True,
        fraction: float = 1.0,
    ) -> None:
        switch_off(os.environ)
        self.model = model
        self.confirmed: tuple[int, ...] = ()  # clients that have the model
        self.exchanges: list[Exchange] = []  # of the last request: bytes by client, and who failed why
        self.metrics: MetricRecord | None = None  # of the last request: its cost, its trial and who confirmed
        self._grid, self._names, self._clients, self._ledger = grid, tuple(names), clients, ledger
        self._federation = Federation(timeout=timeout, quorum=quorum, least_group=least_group, fraction=fraction)
        requests = [ForgetRequest.parse(each) if isinstance(each, str) else each for each in forgotten]
        self._served: list[tuple[Patch | None, ForgetRequest]] = [(None, request) for request in requests]

    @property
    def forgotten(self) -> ForgetRequest | None:
        """All that the model has forgotten; None: nothing."""
        return union_of([request for _, request in self._served])

    def forget(
        self,
        request: ForgetRequest | str,
        method: Method | str = "",
        *,
        level: str = "",
        trained_rounds: int = 0,
        accept: Callable[[ForgetResult], None] | None = None,
    ) -> ForgetResult:
        """Have the clients measure what the request names, edit the model, and send them the patch.

        `request`, `method` and `level` are as in `forget`; samples are named as client/row. `erase` takes 5 % of
        `trained_rounds`, those of the training, and at least four; ten if they are not known. `accept` receives the
        result before any client changes: save it there, or raise an error to refuse it. Afterwards `model` is the
        edited one and `confirmed` are the clients that have it; the others get it with the next request.
        """
        from flwr.app import MetricRecord

        request = ForgetRequest.parse(request) if isinstance(request, str) else request
        level = level_of(request, level, method)
        if level == "exact" and not method:
            raise BadSetting("how your strategy trains is not known here; train again without the images, or erase")
        engine, known = self._engine()
        engine.check_quorum()
        engine.check(request, self.forgotten)
        chosen = method or method_of_level(level, trained_rounds, "rounds")
        result = unlearn(known, engine, request, chosen, forgotten=self.forgotten)
        if accept is not None:
            accept(result)
        self._served.append((result.patch, request))
        self.model = released(result.model)  # before any client changes: too few replies to the patch are an error
        self.confirmed = tuple(engine.send_patch(result.patch, request))
        tried = {} if result.chosen is None else {"forget": result.chosen.forget, "retain": result.chosen.retain}
        told = {kebab(name): value for name, value in {**asdict(result.cost), **tried}.items()}
        self.metrics = MetricRecord({**told, "clients-confirmed": len(self.confirmed)})
        return result

    def sync(self) -> tuple[int, ...]:
        """Send clients the patches that they missed, and the model to those without; returns those that have it."""
        self._engine()
        return self.confirmed

    def _engine(self) -> tuple[FederatedEngine, nn.Module]:
        """The engine over the clients that are connected, each with the model; and the model as it works on it."""
        transport = Transport(self._grid, self._federation.timeout, self._federation.quorum)
        clients = transport.greet(Hello(None), max(self._clients, 1))
        task = agreed_task(clients, self.model, self._names)
        known = prepare_model(self.model, len(task.names)).eval()
        check_output(known, task.shape, len(task.names))
        federation = replace(self._federation, clients=max(self._clients, max(clients) + 1))
        left = [client for _, request in self._served for client in request.clients]
        engine = FederatedEngine(self._grid, federation, task, left=left, build=lambda s: reinitialised(known, s))
        engine.transport, engine.clients = transport, clients
        self.exchanges = transport.log
        patches = [(patch, request) for patch, request in self._served if patch is not None]
        engine.bring_up_to_date(known, patches, self.forgotten, ledger=self._ledger)
        digest = tensors_digest(known.state_dict())
        self.confirmed = tuple(client for client in engine.present() if engine.clients[client].model == digest)
        return engine, known


def agreed_task(clients: Mapping[int, HelloReply], model: nn.Module, names: Sequence[str] = ()) -> TaskInfo:
    """The task that all clients have: one shape and normalisation, and names for every output of the model.

    Without `names` they are the longest list that a client has; a client that lacks some classes has fewer.
    """
    tasks = {client: reply.task for client, reply in clients.items() if reply.task is not None}
    if not tasks:
        raise FedOrthoError("no client tells its images; wrap the client app: unlearning_app(app, images=…, model=…)")
    first, task = max(tasks.items(), key=lambda found: len(found[1].names))
    for client, other in tasks.items():
        for what in ("shape", "mean", "std"):
            if (found := getattr(other, what)) != (wanted := getattr(task, what)):
                raise BadData(
                    f"client {client} has images of {what} {found}, client {first} of {wanted}; "
                    "give all nodes images of one size, as floats that the model reads"
                )
    outputs = count_answers(prepare_model(model, len(task.names)), task.shape)
    known = tuple(names) or task.names
    if known == tuple(map(str, range(len(known)))):  # numbers: classes of which no client has images
        known = tuple(map(str, range(max(outputs, len(known)))))
    for client, other in tasks.items():
        if strange := [name for name in other.names if name not in known]:
            raise BadData(f"client {client} has a class {strange[0]!r}; known are {', '.join(known)}: give names=")
    if len(known) != outputs:
        raise BadSetting(f"the model has {outputs} outputs and the clients {len(known)} classes; give names=")
    return replace(task, names=known)
