"""What a node gives away, by its own decision: its smallest group, the queries it answers, and how often.

A node remembers the groups of images that it has sent sums of. It sends none about a group that differs from one of
them by fewer images than its minimum: the difference of the two sums would be a sum over those few.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from fedortho.data.images import Images
from fedortho.engines.query import STATISTICS, Query, Statistic
from fedortho.errors import FedOrthoError, unknown
from fedortho.statistics.observe import steady_order
from fedortho.storage.records import read_record, write_record

LEAST_GROUP, QUERY_BUDGET = 5, 1000  # of a real node that says nothing else
TRAIN = "train"  # beside the statistics: a round of training


@dataclass(frozen=True)
class NodePolicy:
    """The settings of a node; of clients that are simulated here, none: their images are the server's."""

    least_group: int = 1  # images of a sum or of a training; the larger one of this and the server's holds
    queries: tuple[str, ...] = (*STATISTICS, TRAIN)
    query_budget: int = 0  # selections answered for one model; 0: any number
    remembers: bool = False  # whether groups are compared with those that were answered before

    def check(self, word: str) -> None:
        """Refuse a statistic, or training, that the node does not allow."""
        if word not in self.queries:
            raise FedOrthoError(f"this node's settings allow {', '.join(self.queries)}; the server asked for {word}")


def read_policy(node: Mapping[str, Any], *, is_simulated: bool) -> NodePolicy:
    """The policy in a node's configuration: least-group, queries (a list with commas) and query-budget."""
    words = tuple(str(node.get("queries") or "").replace(",", " ").split()) or NodePolicy.queries
    for word in words:
        if word not in NodePolicy.queries:
            raise unknown("query in the node's configuration", word, NodePolicy.queries)
    least, budget = (1, 0) if is_simulated else (LEAST_GROUP, QUERY_BUDGET)
    least, budget = int(node.get("least-group", least)), int(node.get("query-budget", budget))
    if least < 1 or budget < 0:
        raise FedOrthoError(f"least-group is {least}, query-budget {budget}; expected at least 1 and at least 0")
    return NodePolicy(least, words, budget, remembers=not is_simulated or "least-group" in node)


@dataclass(frozen=True)
class AnsweredRecord:
    """answered.json of a client: groups that it has sent sums of, and how many for each model."""

    schema: ClassVar[int] = 1

    groups: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # statistic → bits of its rows, hexadecimal
    spent: Mapping[str, int] = field(default_factory=dict)  # digest of a model → selections


class QueryGuard:
    """Decides, group by group, what a client answers to one message; `save` before the answer leaves."""

    def __init__(self, policy: NodePolicy, path: Path, rows: torch.Tensor, least_group: int) -> None:
        self.policy, self._path, self._rows = policy, path, rows
        self.least = max(policy.least_group, least_group)
        self._record = read_record(AnsweredRecord, path) if path.exists() else AnsweredRecord()

    def spend(self, model: str, queries: "list[Query]") -> None:
        """Count the selections of a message; refused if a statistic is not allowed, or if they are too many."""
        for query in queries:
            self.policy.check(query.statistic.kind)
        budget, spent = self.policy.query_budget, self._record.spent.get(model, 0)
        spent += sum(len(query.selections) for query in queries)
        if budget and spent > budget:
            raise FedOrthoError(f"this node's settings allow {budget} selections for a model; these would be {spent}")
        if budget:
            self._record = replace(self._record, spent={**self._record.spent, model: spent})

    def admits(self, group: Images, statistic: Statistic) -> bool:
        """Whether sums over a group may be sent; if so, the group is remembered."""
        groups = [group]
        if statistic.sample and statistic.sample < len(group):  # where no ledger has its sums, only so many are read
            groups.append(group.subset(steady_order(group.rows, 0)[: statistic.sample]))
        return all(len(each) >= self.least for each in groups) and self._remember(
            groups, STATISTICS[statistic.kind].family or statistic.kind
        )

    def admitted_labels(self, group: Images) -> list[int]:
        """The labels of which counts over a group may be sent, each being a group of its own."""
        labels = torch.bincount(group.labels).ge(self.least).nonzero().flatten().tolist()
        return [label for label in labels if self._remember([group.subset(group.labels == label)], f"label {label}")]

    def _remember(self, groups: "list[Images]", family: str) -> bool:
        if not self.policy.remembers:
            return True
        known = [int(text, 16) for text in self._record.groups.get(family, ())]
        new = [self._bits(group) for group in groups]
        if any(0 < (bits ^ other).bit_count() < self.least for bits in new for other in known):
            return False
        added = tuple(f"{bits:x}" for bits in dict.fromkeys(new) if bits not in known)
        told = {**self._record.groups, family: (*self._record.groups.get(family, ()), *added)}
        self._record = replace(self._record, groups=told)
        return True

    def _bits(self, group: Images) -> int:
        return int.from_bytes(np.packbits(torch.isin(self._rows, group.rows).numpy()).tobytes(), "big")

    def save(self) -> None:
        """Write what was answered, if this node keeps it."""
        if self._record != AnsweredRecord():
            write_record(self._path, self._record)
