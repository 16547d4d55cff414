"""The federated engine: averaged rounds, summed statistics and patches over any Flower grid."""

import copy
import hashlib
import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from operator import add
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from torch import nn

from fedortho.engines.engine import EngineInfo, Tally, TrainingPlan, as_training_plan
from fedortho.engines.query import Query, Selection, Statistic
from fedortho.errors import BadCheckpoint, FedOrthoError, first_line
from fedortho.federated import wire
from fedortho.federated.aggregation import RunningMean, TrainingJob, check_state, round_history
from fedortho.federated.masking import masked_observations
from fedortho.federated.messages import LocalResult, Observe, ObserveReply, TrainLocal, TrainReply
from fedortho.federated.pooling import Pool, blank_observations
from fedortho.federated.roster import Roster, ranges
from fedortho.federated.strategies import StrategyRound, is_repeatable, load_strategy
from fedortho.federated.transport import ClientReply, Exchange, Progress
from fedortho.federated.wire import BadReply, Tensors
from fedortho.models.norms import batch_norms, frozen_norms
from fedortho.runs.rounds import RoundRecord, StartRound
from fedortho.runs.settings import Federation, sample_clients
from fedortho.statistics.observe import Observation
from fedortho.storage.files import below, damage_named, prefixed, read_tensors, tensors_digest, write_tensors
from fedortho.storage.records import from_json, to_json
from fedortho.training.adapters import base_tensors
from fedortho.training.batches import step_seed
from fedortho.training.loop import Epoch, Mask, check_mask
from fedortho.training.recipe import Recipe, learning_rate
from fedortho.unlearning.repair import norm_buffers

if TYPE_CHECKING:
    from flwr.app import RecordDict

logger = logging.getLogger(__name__)
PARALLEL_TRIALS = 12  # candidates in one exchange
NO_MODEL: Tensors = {}


@dataclass(frozen=True)
class RoundProgress:
    """What `watch` receives after each reply and at the end of each round."""

    round: int
    rounds: int
    answered: int
    asked: int
    bytes_up: int
    bytes_down: int
    history: tuple[Epoch, ...]


@dataclass(frozen=True)
class TrainingCheckpoint:
    """The record beside the weights in a checkpoint: how far a training is."""

    schema: ClassVar[int] = 2

    belongs_to: str  # identity of model, plan, recipe and federation
    history: tuple[Epoch, ...]  # of the finished rounds
    log: tuple[RoundRecord, ...]
    exchanges: tuple[Exchange, ...]


Watch = Callable[[RoundProgress], None]
Keep = Callable[[int, Tensors], None]  # receives how many rounds have ended, and the model


@dataclass(eq=False)
class FederatedEngine(Roster):
    """An engine whose images lie with clients."""

    build: Callable[[int], nn.Module] | None = None
    local_epochs: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        self._spent = Tally()
        self.history: list[Epoch] = []  # of the last training
        self.log: list[RoundRecord] = []
        self.apart: dict[int, float] = {}  # client → how far its statistics stood apart, at most so far
        self._taught: set[int] = set()  # clients that have the teachers of this training

    @property
    def info(self) -> EngineInfo:
        """Which images there are, only the clients know: the digest is over how many each of them has."""
        images = {client: self.clients[client].images for client in self.present()}
        known = json.dumps([to_json(Selection()), to_json(self.task), images])
        task = (self.task.names, self.task.shape, hashlib.sha256(known.encode()).hexdigest())
        return EngineInfo(*task, is_federated=True, parallel_trials=PARALLEL_TRIALS, build=self.build)

    @property
    def tally(self) -> Tally:
        self._spent.exchanges = len(self.transport.log)
        self._spent.bytes_up, self._spent.bytes_down = self.transport.bytes_up, self.transport.bytes_down
        return self._spent

    def fit(
        self,
        model: nn.Module,
        what: Selection | TrainingPlan,
        recipe: Recipe,
        *,
        trainable: Mask | None = None,
        checkpoint: Path | None = None,
        score: Callable[[nn.Module], float] | None = None,
        watch: Watch | None = None,
        updates: Path | None = None,
        keep: Keep | None = None,
        begin: StartRound | None = None,
        after: int = 0,
    ) -> nn.Module:
        """A copy of the model after `recipe.epochs` rounds of federated averaging.

        The learning rate follows the schedule by rounds; a client's first rounds have no alignment. With a checkpoint a
        killed training goes on after its last finished round, to the same bytes. `updates` is a directory that keeps
        every client's model of every round. `keep` receives the model after each round. `begin` is the state
        to start from, a kept round of the same training. `after` rounds of the recipe are over.
        """
        current, plan = copy.deepcopy(model).cpu().eval(), as_training_plan(what)
        check_mask(current, trainable or {})  # the bits of a mask do not tell clients its shape
        local_epochs = plan.options.local_epochs or self.local_epochs
        base = tensors_digest(base_tensors(model.state_dict()))
        job = TrainingJob(plan, recipe, trainable, local_epochs, base, updates, self.federation.norms)
        if plan.original is not None and job.freezes(current, plan.original):
            job = replace(job, base=tensors_digest(plan.original.state_dict()))
        identity = _identity(model, job, self.federation)
        self._taught.clear()
        self._strategy = load_strategy(self.federation.strategy) if self.federation.strategy else None
        if not is_repeatable(self.federation.strategy):
            checkpoint = None  # it may keep state that no checkpoint has: a killed training begins anew
        self._resume(checkpoint, identity, current, begin)
        clients, every = [each for each in self.present() if job.may_train(each)], self.federation.evaluate_every
        for number in range(after + len(self.history), recipe.epochs):
            if returned := self.welcome():
                clients = sorted({*clients, *(client for client in returned if job.may_train(client))})
            entry = self._round(current, job, number, clients, watch)
            is_due = number + 1 == recipe.epochs or (every and (number + 1) % every == 0)
            if score is not None and is_due and self.federation.norms != "local":  # wrong until they are pooled
                entry = replace(entry, valid=score(current))
            self.history.append(entry)
            if keep is not None:
                keep(number + 1, current.state_dict())
            if checkpoint is not None:
                exchanges = tuple(each for each in self.transport.log if each.kind == TrainLocal.action)
                note = TrainingCheckpoint(identity, tuple(self.history), tuple(self.log), exchanges)
                write_tensors(checkpoint, current.state_dict(), to_json(note))
            self._report(watch, number + 1, recipe.epochs)
        if self.federation.norms != "fedavg" and plan.options.norms != "frozen":
            self._pool_norms(current, job, clients)
        return current

    def _report(self, watch: Watch | None, number: int, rounds: int, answered: int = 0, asked: int = 0) -> None:
        if watch is not None:
            sent = (self.transport.bytes_up, self.transport.bytes_down)
            watch(RoundProgress(number, rounds, answered, asked, *sent, tuple(self.history)))

    def _round(
        self, current: nn.Module, job: TrainingJob, number: int, clients: Sequence[int], watch: Watch | None
    ) -> Epoch:
        """One round, in place; if no sampled client has images for it, others are sampled."""
        started, remaining = time.monotonic(), list(clients)
        results: dict[int, LocalResult | None] = {}
        progress = partial(self._report, watch, number, job.recipe.epochs)
        while remaining:
            sampled = sample_clients(remaining, self.federation, job.recipe.seed, number, self._named(job.plan))
            chosen = None
            if self._strategy is not None:
                seed = step_seed(job.recipe.seed, number, self.federation.clients + 1)  # of no client's training
                chosen = StrategyRound(self._strategy, number, seed)
                frozen = job.frozen_tensors(current)
                state = {name: value for name, value in current.state_dict().items() if name not in frozen}
                sampled = chosen.sampled(state, {client: self.transport.nodes[client] for client in sampled})
            results |= self._average(current, job, number, sampled, progress, chosen)
            asked = set(sampled)
            remaining = [client for client in remaining if client not in asked]
            if trained := {client: result for client, result in results.items() if result is not None}:
                drawn, digest = sorted(set(clients) - set(remaining)), tensors_digest(current.state_dict())
                self.log.append(RoundRecord(tuple(drawn), tuple(results), tuple(trained), digest))
                return round_history(number, list(trained.values()), time.monotonic() - started)
        raise FedOrthoError(f"round {number + 1}: none of the clients {ranges(clients, 5)} has images to train on")

    def _named(self, plan: TrainingPlan) -> set[int]:
        """Clients whose images a part of the plan names, such as the one that leaves: they train in every round."""
        requests = [part.group.include for part in plan.parts if part.given is None and part.group.include is not None]
        shares = None if self.common is None else self.common[1]
        return {client for request in requests for client in request.named_clients(shares)}

    def _average(
        self,
        current: nn.Module,
        job: TrainingJob,
        number: int,
        sampled: Sequence[int],
        progress: Progress,
        strategy: StrategyRound | None,
    ) -> dict[int, LocalResult | None]:
        """Send the model, have clients train it, average what they send; the results of those that answer.

        The result is None for a client without images, and for one whose answer does not count. Models are added in the
        order of client numbers, into the tensors of the current model: beside it there is only its message. A strategy
        has them all at once.
        """
        state = current.state_dict()
        job.save(number, "global", state)
        contents = self._train_contents(current, job, number, sampled)
        frozen = job.frozen_tensors(current)
        trained = {name: value for name, value in state.items() if name not in frozen}
        mean, results = RunningMean(trained), dict[int, LocalResult | None]()
        self._taught -= set(sampled)  # a client that fails is sent the teachers again
        for reply in self.transport.ask(TrainLocal, TrainReply, contents, progress=progress):
            results[reply.client] = None
            self._taught.add(reply.client)
            result, sent = reply.message.result, below("model.", reply.tensors)
            if result is None:
                continue
            own = self.clients[reply.client]
            most = sum(part.given is None for part in job.plan.parts) * (own.images + own.valid)
            try:
                check_state(sent, trained)
                if not 1 <= result.images <= most:  # its weight in the average
                    raise BadReply(f"result.images is {result.images}; expected 1 to {most}, by what it said it holds")
            except BadReply as error:
                self.transport.log[-1].reject(reply.client, f"its reply does not match ({error})")
                continue
            if strategy is None:
                mean.add(sent, result.images)
            else:
                strategy.add(self.transport.nodes[reply.client], sent, result.images)
            job.save(number, f"client-{reply.client}", sent, result.images)
            self._spend(result)
            results[reply.client] = result
        if strategy is not None and strategy.replies:
            strategy.combine(trained)
        return results

    def _train_contents(
        self, current: nn.Module, job: TrainingJob, number: int, sampled: Sequence[int]
    ) -> "dict[int, RecordDict]":
        """The record for each client, without frozen tensors and teachers that the client has."""
        frozen = job.frozen_tensors(current)
        masks = {name: mask for name, mask in (job.trainable or {}).items() if name not in frozen}
        shared = wire.arrays_of(prefixed("model.", current.state_dict()) | prefixed("mask.", wire.pack_masks(masks)))
        states = {job.teacher_digests[name]: teacher.state_dict() for name, teacher in job.plan.teachers.items()}
        teachers = {digest: wire.arrays_of(prefixed(f"teacher.{digest}.", state)) for digest, state in states.items()}
        lr, given_shares = learning_rate(job.recipe, number), self._given_shares(job.plan, sampled)
        recipe = replace(job.recipe, epochs=job.local_epochs, lr=lr, schedule="constant", warmup=0.0)
        given_seed = step_seed(job.recipe.seed, number, self.federation.clients)  # of no client's training
        contents, contacts = {}, Counter(client for each in self.log for client in each.answered)
        for client in sampled:
            own_model = self.clients[client].model
            has_base = bool(frozen) and own_model == job.base
            parts = tuple(part.given_share(*given_shares[client], given_seed) for part in job.plan.parts)
            given, plan = wire.pack_training_plan(replace(job.plan, parts=parts))
            order = TrainLocal(
                self.task,
                replace(recipe, seed=step_seed(recipe.seed, number, client)),
                plan,
                job.teacher_digests,
                align=contacts[client] >= self.federation.warmup_contacts,
                frozen=frozen,
                base=job.base if has_base else "",
                num_clients=self._sharing(sampled),
            )
            left_out = {f"model.{name}" for name in frozen} if has_base else set()
            arrays = {name: array for name, array in shared.items() if name not in left_out} | wire.arrays_of(given)
            for digest, weights in teachers.items():
                if client not in self._taught and digest != own_model:
                    arrays |= weights
            contents[client] = wire.record_of(arrays, to_json(order))
        return contents

    def _given_shares(self, plan: TrainingPlan, sampled: Sequence[int]) -> dict[int, tuple[float, float]]:
        """Each client's share of generated images, from and to: as large as its share of the other images.

        The other images are those that the plan would use in one place. So the ratio of generated to real images is
        that of central training, whatever the number of clients. Only numbers of images are known here, not labels.
        """
        limits = [part.group.limit for part in plan.parts if part.given is None]
        whole = sum(self.clients[client].images for client in self.present())
        in_one_place = sum(min(limit or whole, whole) for limit in limits)
        shares, end = {}, 0.0
        for client in sampled:
            own, start = self.clients[client].images, end
            local = [min(-(-limit // self._sharing(sampled)) if limit else own, own) for limit in limits]
            end = min(start + sum(local) / max(in_one_place, 1), 1.0)
            shares[client] = (start, end)
        return shares

    def _sharing(self, clients: Sequence[int]) -> int:
        """How many of these clients share the limits of selections: those that hold images."""
        return max(sum(self.clients[each].images + self.clients[each].valid > 0 for each in clients), 1)

    def _resume(self, path: Path | None, identity: str, current: nn.Module, begin: StartRound | None) -> None:
        """Load a checkpoint, or where training is to begin, into the current model, with the rounds before it."""
        self.history, self.log = [], []
        if path is not None and path.exists():
            weights, note = read_tensors(path)
            saved = from_json(TrainingCheckpoint, note, path)
            if saved.belongs_to != identity:
                raise BadCheckpoint(f"{path} belongs to other settings, clients or weights; remove it to start anew")
            self.transport.resume(saved.exchanges)
            begin = StartRound(path, weights, saved.history, saved.log)
        if begin is not None:
            with damage_named(begin.run):
                current.load_state_dict({name: value.clone() for name, value in begin.weights.items()})
            self.history, self.log = list(begin.history), list(begin.log)

    def _pool_norms(self, current: nn.Module, job: TrainingJob, clients: Sequence[int]) -> None:
        """Replace, in place, the batch-norm statistics by those over all training images; one exchange."""
        frozen = frozen_norms(current, job.plan.options.norms)
        norms = tuple(name for name in batch_norms(current) if name not in frozen)
        if not norms:
            return
        selections = tuple(part.group for part in job.plan.parts if part.given is None)
        statistic = Statistic("moments", layers="all", edit="conv", tap="conv", norms=norms)
        sent = prefixed("model.", current.state_dict())
        (observed,) = self._observe(current, [Query(selections, statistic)], clients, sent)
        pooled = reduce(add, observed)
        if pooled.images:
            current.load_state_dict(norm_buffers(pooled, 0, norms), strict=False)
        else:
            logger.warning("no client has --least-group images: running statistics were not pooled")

    def measure(self, model: nn.Module, queries: Sequence[Query]) -> list[list[Observation]]:
        """Sums over all clients that are connected and have this model; one exchange."""
        return self._observe(model, queries, self.present())

    def _observe(
        self, model: nn.Module, queries: Sequence[Query], clients: Sequence[int], sent: Tensors = NO_MODEL
    ) -> list[list[Observation]]:
        """Sums over these clients, of the model that they have or of one that is sent along and not kept."""
        digest = tensors_digest(model.state_dict())
        tensors, stripped, candidates = wire.pack_queries(queries)
        order = Observe(self.task, digest, stripped, candidates, self._sharing(clients), self.federation.least_group)
        blank = blank_observations(model, self.task, queries)
        if self.federation.sums == "masked":
            found, cost = masked_observations(self.transport, clients, order, {**tensors, **sent}, blank)
            self._spend(cost)
            return found
        contents = dict.fromkeys(clients, wire.pack({**tensors, **sent}, order))
        pool = Pool(self.federation.pooling, blank, queries, model, self.task)
        for reply in self.transport.ask(Observe, ObserveReply, contents):
            self._add(pool, reply, queries)
        if not pool.clients:
            raise FedOrthoError(f"no client has the model {digest[:12]}; send it with fedortho federate")
        total = pool.total()
        self.apart = {c: max(pool.apart.get(c, 0.0), self.apart.get(c, 0.0)) for c in {*pool.apart, *self.apart}}
        return total

    def _add(self, pool: Pool, reply: ClientReply[ObserveReply], queries: Sequence[Query]) -> None:
        """Add the sums of one reply, unless it is rejected."""
        message, exchange = reply.message, self.transport.log[-1]
        info, (_, height, width) = self.clients[reply.client], self.task.shape
        holds = {"train": info.images, "valid": info.valid, "values": 4 * height * width}  # of an image in one channel
        if message.status != "done":
            reasons = {"left": "has left", "refused": "refuses: its node's settings do not allow it"}
            exchange.reject(reply.client, reasons.get(message.status, "has another model"))
            return
        try:
            pool.add(reply.client, wire.unpack_observations(reply.tensors, queries, message.empty, holds))
        except (FedOrthoError, KeyError, TypeError, ValueError, RuntimeError) as error:
            exchange.reject(reply.client, f"its sums do not match ({first_line(error)})")
            return
        self._spend(message)

    def _spend(self, cost: LocalResult | ObserveReply) -> None:
        for name in ("flops", "kept_flops", "images_read", "images_trained", "withheld"):
            setattr(self._spent, name, getattr(self._spent, name) + getattr(cost, name, 0))


def _identity(model: nn.Module, job: TrainingJob, federation: Federation) -> str:
    """What a checkpoint belongs to: model, plan, recipe and the lasting settings of the federation."""
    lasting = replace(federation, timeout=1.0, evaluate_every=0, quorum=0.0, pooling="bounded", sums="open")
    tensors, plan = wire.pack_training_plan(job.plan)
    values = (plan, job.teacher_digests, job.recipe, lasting, job.local_epochs)
    parts = [tensors_digest(model.state_dict()), *map(str, values)]
    return "|".join(parts + [tensors_digest(each) for each in (tensors, job.trainable) if each])
