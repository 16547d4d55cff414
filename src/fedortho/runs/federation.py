"""Settings of a federation: clients, rounds, partition of the images; who trains in a round, which rounds are kept."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from torch import Tensor

from fedortho.data.images import Dataset
from fedortho.data.partition import partition
from fedortho.errors import BadSetting, FedOrthoError, unknown
from fedortho.storage.settings import kebab

LEAST = {"clients": 1, "rounds": 0, "least_images": 1, "evaluate_every": 0, "least_group": 1, "warmup_contacts": 0}
SUMS = ("open", "masked")
POOLINGS = ("bounded", "trimmed", "sum")
NORMS = ("fedavg", "local", "recalibrate")


@dataclass(frozen=True)
class Federation:
    """Federated averaging: every field is a number or a word."""

    clients: Annotated[int, "number of clients"] = 100
    rounds: Annotated[int, "rounds of federated averaging"] = 100
    fraction: Annotated[float, "share of the clients that train in a round, at least one client"] = 0.1
    draw: Annotated[
        int, "clients of a round: 2: the first present of a permutation of all; 1: a draw among those present"
    ] = 2
    split: Annotated[str, "partition of the images: iid, dirichlet:BETA or shards:NUMBER"] = "iid"
    least_images: Annotated[int, "minimum number of images per client"] = 10
    norms: Annotated[
        str,
        "batch-norm statistics: fedavg, local (never sent, pooled at the end), recalibrate (fedavg, pooled at the end)",
    ] = "fedavg"
    warmup_contacts: Annotated[int, "rounds of a client before alignment begins"] = 1
    evaluate_every: Annotated[int, "rounds between two evaluations; 0: only at the end"] = 5
    timeout: Annotated[float, "seconds to wait for clients in one exchange"] = 600.0
    quorum: Annotated[float, "share of the contacted clients that must answer"] = 0.5
    least_group: Annotated[int, "minimum images of a sum that a client sends; 1: it sends all sums"] = 5
    sums: Annotated[str, "sums that clients send: open, or masked, of which the server sees only the total"] = "open"
    pooling: Annotated[
        str, "sums of clients: bounded (by the model and the median client), trimmed (without extremes), or sum"
    ] = "bounded"

    def __post_init__(self) -> None:
        for name, least in LEAST.items():
            if getattr(self, name) < least:
                raise BadSetting(f"{kebab(name)} must be at least {least}, not {getattr(self, name)}")
        if not 0 < self.fraction <= 1:
            raise BadSetting(f"fraction must be above 0 and at most 1, not {self.fraction}")
        if not 0 <= self.quorum <= 1:
            raise BadSetting(f"quorum must be between 0 and 1, not {self.quorum}")
        if self.norms not in NORMS:
            raise unknown("norms", self.norms, NORMS)
        if self.sums not in SUMS:
            raise unknown("sums", self.sums, SUMS)
        if self.pooling not in POOLINGS:
            raise unknown("pooling", self.pooling, POOLINGS)
        if self.draw not in (1, 2):
            raise BadSetting(f"draw must be 1 or 2, not {self.draw}")
        if not 0 < self.timeout < float("inf"):
            raise BadSetting(f"timeout must be a number of seconds above 0, not {self.timeout}")


def held_rows(data: Dataset, federation: Federation, seed: int) -> dict[int, Tensor]:
    """The rows of the training and validation images that each client holds or held."""
    return partitioned(data.known_rows, data.train.store_labels, federation, seed)


def partitioned(rows: Tensor, store_labels: Tensor, federation: Federation, seed: int) -> dict[int, Tensor]:
    """Each client's part of these rows of a store."""
    how = (federation.clients, federation.split)
    parts = partition(store_labels[rows], *how, seed=seed, minimum=federation.least_images)
    return {client: rows[positions] for client, positions in enumerate(parts)}


def sample_clients(
    present: Sequence[int], federation: Federation, seed: int, turn: int, always: Collection[int] = ()
) -> list[int]:
    """The clients that train in a round, in ascending order: those of `always`, and others drawn by seed and round.

    Together they are the federation's share of its clients; at least one of the others is drawn. Seed and round give a
    permutation of all clients, of which the first that are present train: the absence of a client that would not be
    drawn changes nothing. The draw 1, of runs before there were two, is among those present and has no such property.

    >>> sample_clients(range(10), Federation(clients=10, fraction=0.3), seed=0, turn=0)
    [2, 8, 9]
    >>> sample_clients([0, 2, 3, 8, 9], Federation(clients=10, fraction=0.3), seed=0, turn=0)  # half of them are absent
    [2, 8, 9]
    >>> sample_clients(range(10), Federation(clients=10, fraction=0.3, draw=1), seed=0, turn=0, always=[8])
    [0, 3, 8]
    """
    if not present:
        raise FedOrthoError("no client is connected; start the nodes and try again")
    named, others = (sorted(c for c in present if (c in always) is wanted) for wanted in (True, False))
    number = min(max(round(federation.fraction * federation.clients) - len(named), 1), len(others))
    if federation.draw == 1:
        drawn = np.random.default_rng([seed, turn, 77]).choice(np.asarray(others, dtype=int), number, replace=False)
    else:
        order = np.random.default_rng([seed, turn, 78]).permutation(federation.clients)
        drawn = order[np.isin(order, others)][:number]
    return sorted([*named, *drawn.tolist()])


def check_policy(policy: str) -> None:
    """Refuse what says nothing about the rounds to keep."""
    if policy not in ("", "all", "powers") and not (policy.isdecimal() and int(policy)):
        raise BadSetting(f"keep-rounds is {policy!r}; expected all, powers or a number N to keep every N-th")


def is_kept(policy: str, number: int) -> bool:
    """Whether the model after `number` rounds is kept; before the first round it follows from the seed.

    >>> [number for number in range(20) if is_kept("powers", number)], [n for n in range(20) if is_kept("6", n)]
    ([1, 2, 4, 8, 16], [6, 12, 18])
    """
    if policy == "powers":
        return number.bit_count() == 1
    return bool(policy and number) and (policy == "all" or number % int(policy) == 0)
