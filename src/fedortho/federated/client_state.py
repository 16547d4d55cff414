"""What a client does with its images when the server asks; plain values in and out, nothing of Flower.

A client keeps under its store: models/DIGEST.safetensors (clients of a simulation share them), and for itself
client-N/state.json (its model, what it has forgotten) and client-N/ledger.safetensors.
"""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedortho.data.images import Dataset, Images
from fedortho.data.request import ForgetRequest
from fedortho.devices import choose_device, using_threads
from fedortho.engines.answer import AnswerCache, answer
from fedortho.errors import BadCheckpoint, BadData, FedOrthoError
from fedortho.federated.wire import (
    Note,
    Tensors,
    below,
    pack_observations,
    prefixed,
    unpack_queries,
    unpack_request,
    unpack_training_plan,
)
from fedortho.models.patch import unpack_patch
from fedortho.models.zoo import build_model
from fedortho.runs.federation import held_rows
from fedortho.runs.run import load_run_data
from fedortho.runs.settings import FederateSettings
from fedortho.statistics.ledger import forget_lines, load_ledger, rebind_ledger, write_ledger
from fedortho.statistics.observe import Observation
from fedortho.statistics.query import Selection
from fedortho.statistics.training_plan import TrainingPlan
from fedortho.storage.checkpoints import load_weights
from fedortho.storage.files import read_json, read_tensors, tensors_digest, write_json, write_tensors
from fedortho.storage.settings import make_settings
from fedortho.training.adapters import attach, base_tensors
from fedortho.training.batches import count_images
from fedortho.training.loop import Mask, Progress, fit
from fedortho.training.recipe import Recipe

Reply = tuple[Tensors, Note]
NEW: Note = {"model": "", "gone": [], "left": False, "past": []}  # the state of a client that has met nobody


@lru_cache(maxsize=2)
def _shares(settings: FederateSettings) -> tuple[Dataset, dict[int, Tensor]]:
    """The common dataset and who holds what of it; clients of a simulation read it once."""
    data = load_run_data(settings)
    return data, held_rows(data, settings, settings.partition_seed)


@lru_cache(maxsize=1)
def _own(settings: FederateSettings) -> Dataset:
    return load_run_data(settings)


@dataclass
class ClientState:
    """One client: its number, the run's settings, where it keeps things and, if it has images of its own, where."""

    client: int
    settings: FederateSettings
    store: Path
    own: str = ""

    def __post_init__(self) -> None:
        self.place = self.store / f"client-{self.client}"
        path = self.place / "state.json"
        self.state: Note = _read_state(path) if path.exists() else dict(NEW)

    def images(self, about: Note | None = None) -> tuple[Images, Images, dict[int, Tensor]]:
        """Its training and validation images without what it has forgotten, and the rows it was dealt."""
        if self.own:
            about = about or self.state.get("about")  # as it was when the model came
            data = _own(replace(self.settings, data=self.own, data_dir=""))
            train, valid = (_renamed(part, about) for part in (data.train, data.valid))
            rows = torch.cat([train.rows, valid.rows]).sort().values
        else:
            data, shares = _shares(self.settings)
            if self.client not in shares:
                raise FedOrthoError(f"no client {self.client}; clients run 0 to {len(shares) - 1}")
            rows = shares[self.client]
            train, valid = (part.subset(torch.isin(part.rows, rows)) for part in (data.train, data.valid))
        mine = {self.client: rows}
        for entry in self.state["gone"]:
            gone = unpack_request(entry)
            assert gone is not None
            train, valid = (part.subset(~gone.mask(part, mine)) for part in (train, valid))
        return train, valid, mine

    def _select(
        self, group: Selection, held: tuple[Images, Images, dict[int, Tensor]], share: int = 1, least: int = 1
    ) -> Images:
        train, valid, rows = held
        local = group.on_client(self.client, share, least)
        return local.select(valid if group.split == "valid" else train, rows)

    def _model(self, digest: str) -> nn.Module:
        train, _, _ = self.images()
        model = build_model(self.settings.model, num_classes=train.classes, channels=train.shape[0])
        path = self._model_path(digest)
        load_weights(model, read_tensors(path)[0], path)
        if tensors_digest(model.state_dict()) != digest:
            raise BadCheckpoint(f"{path} is not the model that its name says; remove it, and it is sent again")
        return model.eval()

    def _model_path(self, digest: str) -> Path:
        return self.store / "models" / f"{digest}.safetensors"

    def _keep(self, model: nn.Module, **changes: Any) -> None:
        """Make a model the client's own; one that no client here has any more is removed from the disk."""
        state = model.state_dict()
        digest, old = tensors_digest(state), self.state["model"]
        if not self._model_path(digest).exists():
            write_tensors(self._model_path(digest), state)
        self._write(model=digest, **changes)
        self._forget_model(old)

    def _forget_model(self, digest: str) -> None:
        users = []
        for path in self.store.glob("client-*/state.json"):
            with suppress(BadCheckpoint):  # another's damage is not this client's
                users.append(_read_state(path)["model"])
        if digest and digest not in users:
            self._model_path(digest).unlink(missing_ok=True)

    def _write(self, **changes: Any) -> None:
        self.state = {**self.state, **changes}
        write_json(self.place / "state.json", self.state)

    def hello(self, tensors: Tensors, note: Note) -> Reply:
        """Who it is, how many images it trains on, and which model it has; it ends what a crash interrupted."""
        if self.state["left"]:
            self._leave()
        for digest in filter(lambda past: self._model_path(past).exists(), self.state["past"]):
            self._forget_model(digest)
        images = 0 if self.state["left"] else len(self.images(note.get("about"))[0])
        model = self.state["model"] if self._model_path(self.state["model"]).exists() else ""
        told = {"client": self.client, "images": images, "own": bool(self.own)}
        return {}, told | {"model": model, "left": self.state["left"]}

    def local(self, tensors: Tensors, note: Note) -> Reply:
        """Train the model that was sent on one's own images, and send it back."""
        held = self.images(note.get("about"))
        plan = unpack_training_plan(tensors, note["course"], held[0].names, partial(self._network, note))
        training_sets = [part.training_set(self._select(part.group, held, note["share"])) for part in plan.parts]
        own = sum(len(training_set.images) for training_set in training_sets if not training_set.given)
        if own < 2:
            return {}, {"client": self.client, "images": 0}
        recipe = make_settings(Recipe, note["recipe"])
        model = self._received(below("model.", tensors), plan, note)
        last: list[Progress] = []
        trained = fit(
            model,
            training_sets,
            recipe,
            reference=model if note["align"] else None,
            device=choose_device(self.settings.device),
            trainable=_mask(model, below("mask.", tensors), note["still"]),
            watch=last.append,
            options=plan.options,
            teachers=plan.teachers,
        )
        state = trained.state_dict()
        entry = last[-1].history[-1]
        told: Note = {"client": self.client, "images": own, "loss": entry.loss, "accuracy": entry.accuracy}
        told |= {"ortho": entry.ortho, "drift": _drift(model, trained)}
        seen, taught = count_images(training_sets, recipe.batch_size, recipe.epochs, plan.options)
        told |= {"trained": seen, "read": taught}
        return prefixed("model.", {k: v for k, v in state.items() if k not in note["still"]}), told

    def _network(self, note: Note, state: Tensors) -> nn.Module:
        """The federation's network with weights that were sent."""
        model = build_model(self.settings.model, num_classes=note["classes"], channels=note["channels"])
        load_weights(model, dict(state), Path("the server's model"))
        return model

    def _received(self, sent: Tensors, plan: TrainingPlan, note: Note) -> nn.Module:
        """The model that was sent; what stays as it is may be missing there, where this client has it."""
        base = read_tensors(self._model_path(note["base"]))[0] if note["base"] else base_tensors(sent)
        model = self._network(note, base)
        if plan.adapters is not None:
            model = attach(model, plan.adapters)
        load_weights(model, {**model.state_dict(), **sent}, Path("the server's model"))
        return model

    def keep(self, tensors: Tensors, note: Note) -> Reply:
        """Take the model that requests will be about; write its ledger, which never leaves this disk."""
        if self.state["left"]:
            return {}, {"client": self.client, "status": "left"}
        train, _, _ = self.images(note.get("about"))
        model = build_model(self.settings.model, num_classes=train.classes, channels=train.shape[0])
        load_weights(model, below("model.", tensors), Path("the server's model"))
        if tensors_digest(model.state_dict()) in self.state["past"]:
            return {}, {"client": self.client, "status": "past"}  # it was patched away: it must not come back
        (self.place / "ledger.safetensors").unlink(missing_ok=True)  # before the state, as in a patch
        self._keep(model.eval(), about=note.get("about"), gone=self._gone(unpack_request(note.get("gone"))))
        train, _, _ = self.images()
        if len(train) and note["ledger"]:
            device = choose_device(self.settings.device)
            write_ledger(self.place / "ledger.safetensors", model.to(device), train, device=device)
        return {}, {"client": self.client, "model": self.state["model"]}

    def observe(self, tensors: Tensors, note: Note) -> Reply:
        """Sums over groups of one's images, by one's own model or one that was sent; of too few images none."""
        sent = below("model.", tensors)
        if self.state["left"] or (not sent and self.state["model"] != note["model"]):
            return {}, {"client": self.client, "status": "left" if self.state["left"] else "other-model"}
        queries = unpack_queries(tensors, note["asks"])
        held = self.images(note.get("about"))
        device = choose_device(self.settings.device)
        model = (self._network(note, sent).eval() if sent else self._model(note["model"])).to(device)
        memory = AnswerCache(None if sent else load_ledger(self.place / "ledger.safetensors", model), {}, {})
        found, withheld = [], 0
        least = note["least-group"]
        for query in queries:
            if query.statistic.by_label and query.statistic.kind != "right":
                raise FedOrthoError(
                    f"{query.statistic.kind} by label is refused; a client gives only counts of right answers by label"
                )
            groups = [self._select(group, held, note["share"], least) for group in query.selections]
            small = [0 < len(group) < least for group in groups]
            withheld += sum(small)
            groups = [g.subset([]) if few else g for g, few in zip(groups, small, strict=True)]
            answers = answer(model, held[0], groups, query.statistic, cache=memory, device=device)
            found.append([_told(seen, least) for seen in answers] if query.statistic.by_label else answers)
        told: Note = {"client": self.client, "withheld": withheld}
        told |= {"read": memory.images_read, "trained": memory.images_trained, "tail-flops": memory.tail_flops}
        return pack_observations(found, queries), told

    def patch(self, tensors: Tensors, note: Note) -> Reply:
        """Apply a patch once, drop what it is about, and leave if that is oneself."""
        patch = unpack_patch(tensors, note["patch"])
        mine = self.state["model"]
        if mine not in (patch.before, patch.after) or self.state["left"]:
            return {}, {"client": self.client, "status": "left" if self.state["left"] else "other-model", "model": mine}
        if mine == patch.before:
            self._apply(patch, unpack_request(note["request"]))
        if self.state["left"]:
            self._leave()
        return {}, {"client": self.client, "model": patch.after}

    def _apply(self, patch: Any, request: ForgetRequest | None) -> None:
        model = self._model(patch.before)
        edited = patch.apply(model)
        path = self.place / "ledger.safetensors"
        train, _, rows = self.images()
        ledger = load_ledger(path, model)
        bound = None if ledger is None or not len(train) else rebind_ledger(ledger, model, edited, train)
        if bound is not None and request is not None:
            bound = forget_lines(bound, train.subset(~request.on_client(self.client).mask(train, rows)))
        left = request is not None and self.client in request.clients
        path.unlink(missing_ok=True)  # before the state: a ledger of another model would be refused
        past = [*self.state["past"], patch.before] if request is not None else self.state["past"]
        self._keep(edited, gone=self._gone(request), left=left, past=past)
        if bound is not None and not left:
            bound.save(path)

    def _gone(self, request: ForgetRequest | None) -> list[Note]:
        """What it has forgotten, and what of a request concerns it besides."""
        gone: list[Note] = self.state["gone"]
        concerns = ForgetRequest() if request is None else request.on_client(self.client)
        entry: Note = json.loads(json.dumps(asdict(concerns)))  # as it is read back: lists
        return gone if concerns == ForgetRequest() or entry in gone else [*gone, entry]

    def _leave(self) -> None:
        """Nothing of the federation stays with a client that is gone; may be done again."""
        (self.place / "ledger.safetensors").unlink(missing_ok=True)
        if old := self.state["model"]:
            self._write(model="", past=[*self.state["past"], old])
            self._forget_model(old)


def _told(seen: Observation, least: int) -> Observation:
    """Counts by label without those of too few images: with one image they would tell its label."""
    return seen.only((seen.counts >= least).nonzero().flatten().tolist())


def _read_state(path: Path) -> Note:
    state = read_json(path)
    if not isinstance(state, dict) or NEW.keys() - state.keys():
        raise BadCheckpoint(f"{path} is damaged; remove it, and the model and what it forgot are sent again")
    return state


def _mask(model: nn.Module, some: Tensors, still: Sequence[str]) -> Mask | None:
    """Which coordinates may move: of the tensors that stay still none, of some a part, of the others all."""
    none = {name: torch.zeros_like(p, dtype=torch.bool) for name, p in model.named_parameters() if name in still}
    return none | {name: mask.bool() for name, mask in some.items()} or None


def _drift(received: nn.Module, trained: nn.Module) -> float:
    """Distance of all trained weights from those received, ‖W_k − W_global‖."""
    theirs = dict(received.named_parameters())
    squares = [(p.detach() - theirs[name].detach()).double().square().sum() for name, p in trained.named_parameters()]
    return float(torch.stack(squares).sum().sqrt())


def _renamed(images: Images, about: Note | None) -> Images:
    """Own images with the federation's labels and normalisation; classes are matched by name."""
    if about is None:
        return images
    names: Sequence[str] = about["names"]
    if other := [name for name in images.names if name not in names]:
        raise BadData(f"class {other[0]!r} is unknown to the federation")
    table = torch.tensor([list(names).index(name) for name in images.names])
    labels = table[images.store_labels]
    return replace(images, store_labels=labels, names=tuple(names), mean=tuple(about["mean"]), std=tuple(about["std"]))


ACTIONS = {
    "query.hello": ClientState.hello,
    "train.local": ClientState.local,
    "train.keep": ClientState.keep,
    "query.observe": ClientState.observe,
    "train.patch": ClientState.patch,
}


def act(holder: ClientState, action: str, tensors: Tensors, note: Note) -> Reply:
    """One action, with the run's number of threads."""
    with using_threads(holder.settings.threads):
        return ACTIONS[action](holder, tensors, note)
