"""Strategies of Flower in place of the weighted mean: they choose among a round's clients and combine their models."""

import ast
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fedortho.errors import BadSetting, FedOrthoError
from fedortho.federated.aggregation import check_state
from fedortho.federated.wire import BadReply, arrays_of
from fedortho.storage.trusted_code import code_of_others, load_function

if TYPE_CHECKING:
    from flwr.app import Message
    from flwr.serverapp.strategy import Strategy

MOST_LOOKS = 5  # times that a strategy may ask who is there before it waits for clients that will not come
KNOWN = ("server-round",)  # what a strategy may tell clients: ours know nothing else
FLOWER = "flwr.serverapp.strategy"
# those of Flower that keep nothing from round to round: what they make follows from the seed and the replies
REPEATABLE = ("FedAvg", "FedMedian", "FedTrimmedAvg", "Krum", "MultiKrum", "Bulyan")


def is_repeatable(text: str) -> bool:
    """Whether a training by this strategy can go on after any of its rounds to the same bytes."""
    return not text or text.partition("(")[0] in [f"{FLOWER}:{name}" for name in REPEATABLE]


def load_strategy(text: str) -> "Strategy":
    """The strategy that `package.module:Class` or `package.module:Class(name=value, …)` names, with plain values."""
    name, arguments = text, {}
    if "(" in text:
        name = text.partition("(")[0]
        try:
            call = ast.parse(text[len(name.rpartition(":")[0]) + 1 :], mode="eval").body
            if not isinstance(call, ast.Call) or call.args or any(word.arg is None for word in call.keywords):
                raise ValueError("only name=value")
            arguments = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
        except (SyntaxError, ValueError) as error:
            raise BadSetting(f"--strategy is {text!r}; write package.module:Class(name=value, …)") from error
    function = load_function(name, "strategy")
    with code_of_others(f"--strategy {text} cannot be made", BadSetting):
        made = function(**arguments)
    if missing := [each for each in ("configure_train", "aggregate_train") if not hasattr(made, each)]:
        raise BadSetting(f"--strategy {text} has no {missing[0]}; it must be a Strategy of flwr.serverapp.strategy")
    return made  # type: ignore[no-any-return]  # code of others


@dataclass
class StrategyRound:
    """One round of a strategy: whom it asks, and the models that it combines.

    Its draws come from Python's and NumPy's global generators, which are seeded for it and put back. Integer tensors
    (batch-norm counters) are not shown to it: they take the largest, as in the weighted mean.
    """

    strategy: "Strategy"
    number: int  # from 0
    seed: int
    replies: "list[Message]" = field(default_factory=list)
    counters: dict[str, Tensor] = field(default_factory=dict)
    orders: "dict[int, Message]" = field(default_factory=dict)  # by node

    def sampled(self, state: Mapping[str, Tensor], nodes: Mapping[int, int]) -> list[int]:
        """Those of these clients, each with its node, that the strategy asks."""
        from flwr.app import ArrayRecord, ConfigRecord

        arrays = ArrayRecord(arrays_of({name: each for name, each in state.items() if each.is_floating_point()}))
        with self._working():
            asked = list(self.strategy.configure_train(self.number + 1, arrays, ConfigRecord(), _Nodes(nodes)))  # type: ignore[arg-type]  # all that a strategy needs of a grid
            self.orders = {message.metadata.dst_node_id: message for message in asked}
        for message in asked:
            if any(record is not arrays for record in message.content.array_records.values()):
                raise FedOrthoError(f"{self._name} sends clients another model than the current one; no client of ours")
            told = [key for record in message.content.config_records.values() for key in record if key not in KNOWN]
            if told:
                raise FedOrthoError(f"{self._name} tells clients {told[0]!r}, which they do not know; use another one")
        return sorted(client for client, node in nodes.items() if node in self.orders)

    def add(self, node: int, state: Mapping[str, Tensor], images: int) -> None:
        """A client's model, checked before, and the number of its images."""
        from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict

        floats = {name: value for name, value in state.items() if value.is_floating_point()}
        for name in state.keys() - floats.keys():
            self.counters[name] = torch.maximum(self.counters.get(name, state[name]), state[name])
        weight = MetricRecord({str(getattr(self.strategy, "weighted_by_key", "num-examples")): images})
        content = RecordDict({"arrays": ArrayRecord(arrays_of(floats)), "metrics": weight})
        self.replies.append(Message(content, reply_to=self.orders[node]))

    def combine(self, into: Mapping[str, Tensor]) -> None:
        """Write the model that the strategy makes of the replies into these tensors."""
        with self._working():
            arrays, _ = self.strategy.aggregate_train(self.number + 1, self.replies)
        if arrays is None:
            raise FedOrthoError(f"{self._name} made no model of {len(self.replies)} replies in round {self.number + 1}")
        made = {name: torch.from_numpy(np.array(array.numpy())) for name, array in arrays.items()}
        made = {name: value.to(into[name].dtype) if name in into else value for name, value in made.items()}
        try:
            check_state(made | self.counters, into)
        except BadReply as error:
            raise FedOrthoError(f"{self._name} made no model of this network: {error}") from error
        for name, value in (made | self.counters).items():
            into[name].copy_(value)

    @property
    def _name(self) -> str:
        return type(self.strategy).__name__

    @contextmanager
    def _working(self) -> Iterator[None]:
        """Seeds the global generators for the strategy; whatever it raises is named."""
        before, arrays = random.getstate(), np.random.get_state()
        random.seed(self.seed)
        np.random.seed(self.seed % 2**32)
        try:
            with code_of_others(f"{self._name} failed in round {self.number + 1}", FedOrthoError):
                yield
        finally:
            random.setstate(before)
            np.random.set_state(arrays)


@dataclass
class _Nodes:
    """What a strategy sees of the grid: the nodes of a round's clients."""

    nodes: Mapping[int, int]
    looks: int = 0

    def get_node_ids(self) -> list[int]:
        self.looks += 1
        if self.looks > MOST_LOOKS:
            raise FedOrthoError(
                f"the strategy waits for more than the {len(self.nodes)} clients of this round; raise --fraction, "
                "or give it min_available_nodes=1, min_train_nodes=1"
            )
        return list(self.nodes.values())
