"""The Flower client app, and what a client does for each message; the text of errors stays on this machine."""

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fedortho.data.images import Images
from fedortho.devices import FlopCounter, choose_device, using_threads
from fedortho.engines.answer import AnswerCache, answer
from fedortho.engines.engine import Tally, TrainingPlan
from fedortho.engines.query import Query
from fedortho.errors import FedOrthoError
from fedortho.federated import messages, wire
from fedortho.federated.client_state import ClientImages, ClientState, open_client
from fedortho.federated.masking import MASKED, draw_key, flatten, mask
from fedortho.federated.node_policy import TRAIN, QueryGuard, read_policy
from fedortho.federated.wire import Json, Tensors, pack, unpack_json
from fedortho.runs.settings import FederateSettings
from fedortho.statistics.ledger import load_ledger, write_ledger
from fedortho.storage.checkpoints import load_weights
from fedortho.storage.files import below, prefixed, read_tensors, tensors_digest
from fedortho.storage.records import from_json
from fedortho.storage.settings import field_types, make_settings
from fedortho.storage.trusted_code import check_trusted
from fedortho.training.adapters import attach, base_tensors
from fedortho.training.batches import count_images
from fedortho.training.loop import Progress, fit

if TYPE_CHECKING:
    from flwr.app import Context, Message
    from flwr.clientapp import ClientApp
    from flwr.clientapp.typing import Mod

logger = logging.getLogger(__name__)
Config = Mapping[str, Any]
SERVER = Path("the server's model")  # named in errors about weights that were sent


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
        register(name)(partial(_answer_message, action, find))
    return app


def _answer_message(
    action: str, find: "Callable[[Context], ClientState]", message: "Message", context: "Context"
) -> "Message":
    from flwr.app import Message

    client, received = context.node_config.get("partition-id"), unpack_json(message.content)
    return Message(pack(*client_reply(action, partial(find, context), client, *received)), reply_to=message)


def client_reply(
    action: str, find: Callable[[], ClientState], client: object, tensors: Tensors, value: Json
) -> tuple[Tensors, messages.Reply]:
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
    if not (store := node.get("store") or config.get("store")):
        raise FedOrthoError("the node's configuration has no store; give the node store=DIRECTORY, see docs/deploy.md")
    run = node.get("run") or (config.get("run") if config.get("store") else "")  # only of clients simulated here
    policy = read_policy(node, is_simulated=bool(config.get("store")) or "run" in node)
    settings = federate_settings({**config, "strategy": ""})  # which is the server's
    state = open_client(client, settings, Path(str(store)), str(node.get("data", "")))
    return replace(state, run=str(run or ""), policy=policy)


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


def hello(state: ClientState, tensors: Tensors, order: messages.Hello) -> tuple[Tensors, messages.HelloReply]:
    """Tell who the client is and which model it has, after finishing what a crash interrupted."""
    state.clean_up()
    record = state.record
    model = record.model if state.model_path(record.model).exists() else ""
    reply = messages.HelloReply(state.client, 0, state.has_own_images, model, record.has_left, record.forgotten)
    reply = replace(reply, identity=state.identify(), version=version("fedortho"))
    if not record.has_left:
        images = state.images(order.task)
        train = images.train
        task = messages.TaskInfo(train.names, train.shape, train.mean, train.std) if order.task is None else None
        data = f"{reply.identity}{images.digest}".encode() + images.rows[state.client].numpy().tobytes()
        digest = hashlib.sha256(data).hexdigest()
        reply = replace(reply, images=len(train), valid=len(images.valid), data=digest, task=task)
    return {}, reply


def train_local(
    state: ClientState, tensors: Tensors, order: messages.TrainLocal
) -> tuple[Tensors, messages.TrainReply]:
    """Train the model that was sent on the client's images, and send the trained tensors back."""
    state.policy.check(TRAIN)
    images = state.images(order.task)
    state.forget_teachers(keep=order.teachers.values())
    teachers = {}
    for name, digest in order.teachers.items():
        weights = state.teacher_weights(digest, below(f"teacher.{digest}.", tensors))
        teachers[name] = _build(state, order.task, weights)
    plan = wire.unpack_training_plan(tensors, order.plan, images.train.names, teachers)
    training_sets = [part.training_set(images.select(part.group, order.num_clients)) for part in plan.parts]
    own_images = sum(len(training_set.images) for training_set in training_sets if not training_set.given)
    if own_images < max(2, state.policy.least_group):
        return {}, messages.TrainReply(state.client, None)
    model = _received_model(state, below("model.", tensors), plan, order)
    progress: list[Progress] = []
    with FlopCounter(apart=True) as counter:
        trained = fit(
            model,
            training_sets,
            order.recipe,
            reference=model if order.align else None,
            device=choose_device(state.settings.device),
            trainable=wire.unpack_masks(below("mask.", tensors), model),
            watch=progress.append,
            options=plan.options,
            teachers=plan.teachers,
        )
    epoch = progress[-1].history[-1]
    trained_on, read = count_images(training_sets, order.recipe.batch_size, order.recipe.epochs, plan.options)
    scores = (epoch.loss, epoch.accuracy, epoch.ortho, _drift(model, trained))
    result = messages.LocalResult(own_images, *scores, read, trained_on, counter.flops)
    sent = {name: value for name, value in trained.state_dict().items() if name not in order.frozen}
    return prefixed("model.", sent), messages.TrainReply(state.client, result)


def keep_model(state: ClientState, tensors: Tensors, order: messages.KeepModel) -> tuple[Tensors, messages.ModelReply]:
    """Keep the model that later requests are about, and write its ledger, which never leaves this disk."""
    if state.record.has_left:
        return {}, messages.ModelReply(state.client, "", "left")
    model = _build(state, order.task, below("model.", tensors)).eval()
    if tensors_digest(model.state_dict()) in state.record.patched_away:
        return {}, messages.ModelReply(state.client, state.record.model, "patched-away")
    images = state.images(order.task)  # refused before anything changes: images that do not fit the task
    if not state.is_covered_by(order.forgotten, images):
        return {}, messages.ModelReply(state.client, state.record.model, "uncovered")
    state.keep_model(model, task=order.task, forgotten=state.forgotten_with(order.forgotten))
    train = state.images().train
    if len(train) and order.write_ledger:
        device = choose_device(state.settings.device)
        write_ledger(state.ledger_path, model.to(device), train, valid=state.images().valid, device=device)
    return {}, messages.ModelReply(state.client, state.record.model)


def observe_images(
    state: ClientState, tensors: Tensors, order: messages.Observe
) -> tuple[Tensors, messages.ObserveReply]:
    """Sums over selections of the client's images, by its own model or one that was sent."""
    sent, nothing = below("model.", tensors), replace(messages.NO_SUMS, client=state.client)
    if state.record.has_left:
        return {}, replace(nothing, status="left")
    if not sent and state.record.model != order.model:
        return {}, replace(nothing, status="other-model")
    if sent and tensors_digest(sent) != order.model:  # its budget is counted by this digest
        raise FedOrthoError(f"the server sent another model than {order.model[:12]!r}, as it calls it")
    queries, images = wire.unpack_queries(tensors, order.queries, order.candidates), state.images(order.task)
    guard = QueryGuard(state.policy, state.folder / "answered.json", images.rows[state.client], order.least_group)
    try:
        guard.spend(order.model, queries)
    except FedOrthoError as error:
        logger.error("client %d: %s", state.client, error)
        return {}, replace(nothing, status="refused")
    device = choose_device(state.settings.device)
    model = (_build(state, order.task, sent).eval() if sent else state.load_model(order.model)).to(device)
    tally = Tally()
    cache = AnswerCache(None if sent else load_ledger(state.ledger_path, model), {}, {}, tally)
    observed, withheld = [], 0
    for query in queries:
        selected, small = _select_groups(query, images, order, guard)
        withheld += small
        with FlopCounter(apart=True) as counter:
            answers = answer(model, images.train, selected, query.statistic, cache=cache, device=device)
        tally.flops += counter.flops
        if query.statistic.by_label:
            labels = [guard.admitted_labels(group) for group in selected]
            answers = [each.only(admitted) for each, admitted in zip(answers, labels, strict=True)]
        observed.append(answers)
    guard.save()
    read, trained = tally.images_read, tally.images_trained
    reply = messages.ObserveReply(state.client, "done", (), withheld, read, trained, tally.flops, tally.kept_flops)
    if order.exchange:
        values = flatten(observed, queries, reply)
        masked = mask(values, state.client, state.take_key(order.exchange), order.keys, order.exchange)
        return {MASKED: masked}, nothing
    sums, empty = wire.pack_observations(observed, queries)
    return sums, replace(reply, empty=empty)


def share_key(state: ClientState, tensors: Tensors, order: messages.ShareKey) -> tuple[Tensors, messages.KeyReply]:
    """Draw a key for one exchange of masked sums, and tell its public part."""
    private, public = draw_key()
    state.keep_key(order.exchange, private)
    return {}, messages.KeyReply(state.client, public)


def apply_patch(
    state: ClientState, tensors: Tensors, order: messages.ApplyPatch
) -> tuple[Tensors, messages.ModelReply]:
    """Apply a patch once, stop using the forgotten images, and leave if the request names this client."""
    patch, model = wire.patch_from_wire(tensors, order.patch), state.record.model
    if state.record.has_left:
        return {}, messages.ModelReply(state.client, model, "left")
    if model not in (patch.before, patch.after):
        return {}, messages.ModelReply(state.client, model, "other-model")
    if model == patch.before or state.forgotten_with(order.request) != state.record.forgotten:
        state.apply_patch(patch, order.request)
    if state.record.has_left:
        state.leave()
    return {}, messages.ModelReply(state.client, patch.after)


Handler = Callable[[ClientState, Tensors, Any], tuple[Tensors, messages.Reply]]
HANDLERS: Mapping[str, Handler] = {
    messages.Hello.action: hello,
    messages.TrainLocal.action: train_local,
    messages.KeepModel.action: keep_model,
    messages.ShareKey.action: share_key,
    messages.Observe.action: observe_images,
    messages.ApplyPatch.action: apply_patch,
}


def handle(state: ClientState, action: str, tensors: Tensors, value: Json) -> tuple[Tensors, messages.Reply]:
    """Validate a message and answer it, with the run's number of threads."""
    order = from_json(messages.ORDERS[action], value, f"the server's {action}")
    if not isinstance(order, messages.TrainLocal):
        state.forget_teachers()  # the training that they belong to is over
    with using_threads(state.settings.threads):
        return HANDLERS[action](state, tensors, order)


def _build(state: ClientState, task: messages.TaskInfo, tensors: Tensors) -> nn.Module:
    """The federation's network with weights that were sent."""
    model = state.new_model(len(task.names), task.shape[0])
    load_weights(model, dict(tensors), SERVER)
    return model


def _received_model(state: ClientState, sent: Tensors, plan: TrainingPlan, order: messages.TrainLocal) -> nn.Module:
    """The model that was sent; frozen tensors come from the client's own model if the server left them out."""
    if order.base not in ("", state.record.model):
        raise FedOrthoError(
            f"the server left out tensors of {order.base[:12]!r}, a model that this client does not have"
        )
    base = read_tensors(state.model_path(order.base))[0] if order.base else base_tensors(sent)
    model = _build(state, order.task, base)
    if plan.adapters is not None:
        model = attach(model, plan.adapters)
    load_weights(model, {**model.state_dict(), **sent}, SERVER)
    for name, weight in model.named_parameters():
        weight.requires_grad_(name not in order.frozen)
    return model


def _drift(received: nn.Module, trained: nn.Module) -> float:
    """Distance of all trained weights from those received, ‖W_k − W_global‖."""
    before = dict(received.named_parameters())
    squares = [(p.detach() - before[name].detach()).double().square().sum() for name, p in trained.named_parameters()]
    return float(torch.stack(squares).sum().sqrt())


def _select_groups(
    query: Query, images: ClientImages, order: messages.Observe, guard: QueryGuard
) -> tuple[list[Images], int]:
    """The images of each selection, and how many selections are withheld."""
    if query.statistic.by_label and query.statistic.kind != "right":
        raise FedOrthoError(
            f"{query.statistic.kind} by label is refused; a client gives only counts of right answers by label"
        )
    groups = [images.select(selection, order.num_clients, guard.least) for selection in query.selections]
    withheld = [len(group) > 0 and not guard.admits(group, query.statistic) for group in groups]
    kept = [group.subset([]) if held else group for group, held in zip(groups, withheld, strict=True)]
    return kept, sum(withheld)
