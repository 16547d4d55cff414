"""Settings of a federation: clients, rounds, partition of the images; which clients train in a round."""

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
NORMS = ("fedavg", "local", "recalibrate")


@dataclass(frozen=True)
class Federation:
    """Federated averaging: every field is a number or a word."""

    clients: Annotated[int, "number of clients"] = 100
    rounds: Annotated[int, "rounds of federated averaging"] = 100
    fraction: Annotated[float, "share of the clients that train in a round, at least one client"] = 0.1
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

    Together they are the federation's share of its clients; at least one of the others is drawn.

    >>> sample_clients(range(10), Federation(clients=10, fraction=0.3), seed=0, turn=0)
    [0, 3, 7]
    >>> sample_clients(range(10), Federation(clients=10, fraction=0.3), seed=0, turn=0, always=[8])
    [0, 3, 8]
    """
    if not present:
        raise FedOrthoError("no client is connected; start the nodes and try again")
    named, others = (sorted(c for c in present if (c in always) is wanted) for wanted in (True, False))
    number = min(max(round(federation.fraction * federation.clients) - len(named), 1), len(others))
    random = np.random.default_rng([seed, turn, 77])
    return sorted([*named, *random.choice(np.asarray(others, dtype=int), number, replace=False).tolist()])
