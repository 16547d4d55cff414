"""Partition images among clients: IID, Dirichlet over labels, or shards by label."""

import heapq
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedortho.errors import BadSetting, unknown

Ints = NDArray[np.int64]
Deal = Callable[[str, Ints, int, np.random.Generator], Ints]  # number, labels, clients -> the client of each position

REDRAWS = 20
EXAMPLES = ("iid", "dirichlet:0.3", "shards:2")


def partition(labels: Tensor, clients: int, scheme: str, *, seed: int, minimum: int = 1) -> list[Tensor]:
    """The positions of `labels` that each client holds, ascending; every position belongs to exactly one client.

    `scheme` is `iid`, `dirichlet:BETA` or `shards:NUMBER`.  A draw that leaves a client fewer than `minimum` images
    is repeated; after `REDRAWS` draws images move from the largest client to those below the minimum.

    >>> [len(part) for part in partition(torch.tensor([0, 0, 0, 1, 1, 1]), 3, "iid", seed=0)]
    [2, 2, 2]
    """
    if clients < 1:
        raise BadSetting(f"a federation needs at least 1 client, not {clients}")
    if minimum < 0 or seed < 0:
        raise BadSetting(f"minimum and seed must be 0 or more, not {minimum} and {seed}")
    if clients * minimum > len(labels):
        advice = f"ask for at most {len(labels) // minimum} clients, or for a smaller minimum"
        raise BadSetting(f"{len(labels)} images cannot give each of {clients} clients at least {minimum}; {advice}")
    name, _, number = scheme.partition(":")
    if name not in SCHEMES:
        raise unknown("partition", scheme, EXAMPLES)
    known, random = labels.cpu().numpy().astype(np.int64), np.random.default_rng(seed)
    for _ in range(REDRAWS):
        try:
            owners = SCHEMES[name](number, known, clients, random)
        except ValueError as error:
            raise BadSetting(f"no partition {scheme!r}: {error}; write it like {', '.join(EXAMPLES)}") from error
        if np.bincount(owners, minlength=clients).min() >= minimum:
            break
    else:
        owners = _mend(owners, clients, minimum, random)
    order = torch.from_numpy(np.argsort(owners, kind="stable"))
    return list(order.split(np.bincount(owners, minlength=clients).tolist()))


def _mend(owners: Ints, clients: int, minimum: int, random: np.random.Generator) -> Ints:
    """Move single random images from the largest client to those below the minimum."""
    owners = owners.copy()
    held: list[list[int]] = [[] for _ in range(clients)]
    for position in random.permutation(len(owners)).tolist():
        held[owners[position]].append(position)
    largest = [(-len(positions), client) for client, positions in enumerate(held)]
    heapq.heapify(largest)
    for client in range(clients):
        for _ in range(minimum - len(held[client])):
            size, donor = heapq.heappop(largest)
            owners[held[donor].pop()] = client
            heapq.heappush(largest, (size + 1, donor))
    return owners


def _iid(number: str, labels: Ints, clients: int, random: np.random.Generator) -> Ints:
    """A random partition of equal sizes, up to one image."""
    if number:
        raise ValueError("iid takes no number")
    return random.permutation(np.arange(len(labels)) % clients)


def _dirichlet(number: str, labels: Ints, clients: int, random: np.random.Generator) -> Ints:
    """Split each class in proportions drawn from a symmetric Dirichlet; a small beta gives clients few classes."""
    beta = float(number)
    if not 0 < beta <= 1e6:
        raise ValueError("beta must be above 0 and at most 1e6")
    owners = np.empty(len(labels), np.int64)
    for label in np.unique(labels):
        positions = random.permutation(np.flatnonzero(labels == label))
        ends = np.cumsum(random.dirichlet(np.full(clients, beta))) * len(positions)
        places = np.arange(len(positions)) + random.random()  # a random start, so rounding favours no client
        owners[positions] = np.searchsorted(ends[:-1], places)
    return owners


def _shards(number: str, labels: Ints, clients: int, random: np.random.Generator) -> Ints:
    """Sort by label, cut into equal shards, and give each client `number` of them at random."""
    each = int(number)
    if each < 1:
        raise ValueError("a client needs at least 1 shard")
    if clients * each > len(labels):
        raise BadSetting(f"{len(labels)} images cannot be cut into {clients} x {each} shards; ask for fewer")
    order = random.permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    shard = np.arange(len(labels)) * (clients * each) // len(labels)
    owners = np.empty(len(labels), np.int64)
    owners[order] = random.permutation(np.arange(clients * each) % clients)[shard]
    return owners


SCHEMES: dict[str, Deal] = {"iid": _iid, "dirichlet": _dirichlet, "shards": _shards}
