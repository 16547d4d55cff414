"""Masked sums: the server sees each client's integers only with masks that cancel in the total.

For one exchange every client draws an X25519 key. Two clients derive the same stream of integers from their shared
secret (HKDF, ChaCha20); one adds it, the other subtracts it, modulo 2⁶⁴. Each message alone is uniformly distributed;
the total is that of the open sums, bit for bit. If a client drops out, masks are left over, and the exchange is
repeated without it, with new keys. A server that calls itself several clients is not kept out: a client cannot tell
whose keys it gets.
"""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from fedortho.engines.query import STATISTICS, Query
from fedortho.errors import FedOrthoError
from fedortho.federated.messages import NO_SUMS, KeyReply, Observe, ObserveReply, ShareKey
from fedortho.federated.transport import Transport
from fedortho.federated.wire import Observations, Tensors, from_integers, pack, to_integers
from fedortho.statistics.observe import Observation

LEAST_CLIENTS = 3  # of two, each knows the other's sums from the total
COSTS = ("withheld", "images_read", "images_trained", "flops", "kept_flops")  # they travel masked, too
MASKED = "masked"


def draw_key() -> tuple[str, str]:
    """A new private key and its public key, hexadecimal."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    key = X25519PrivateKey.generate()
    return key.private_bytes_raw().hex(), key.public_key().public_bytes_raw().hex()


def mask(values: Tensor, client: int, private: str, keys: Mapping[int, str], exchange: str) -> Tensor:
    """The integers with the masks that this client shares with every other one in `keys`."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    own = X25519PrivateKey.from_private_bytes(bytes.fromhex(private))
    if len(keys) < LEAST_CLIENTS or keys.get(client) != own.public_key().public_bytes_raw().hex():
        raise FedOrthoError(
            f"masked sums of {len(keys)} clients are refused; expected {LEAST_CLIENTS}, this one among them"
        )
    masked = values.clone()
    for other, public in keys.items():
        if other == client:
            continue
        shared = own.exchange(X25519PublicKey.from_public_bytes(bytes.fromhex(public)))
        about = f"fedortho {exchange} {min(client, other)} {max(client, other)}".encode()
        key = HKDF(SHA256(), 32, salt=None, info=about).derive(shared)
        stream = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor().update(bytes(8 * len(values)))
        shift = torch.from_numpy(np.frombuffer(stream, dtype="<i8").copy())
        masked += shift if client < other else -shift  # integers of 64 bits wrap around
    return masked


def flatten(observed: Observations, queries: Sequence[Query], cost: ObserveReply) -> Tensor:
    """All sums, counts and costs of a client as one row of integers; those of empty groups are 0."""
    parts = []
    for row, query in zip(observed, queries, strict=True):
        if STATISTICS[query.statistic.kind].bits is None:
            raise FedOrthoError(f"sums of {query.statistic.kind} are float32 and cannot be masked; give --sums open")
        for each in row:
            parts += [to_integers(each.sums[key], query.statistic.kind).flatten() for key in sorted(each.sums)]
            parts.append(each.counts.flatten())
    return torch.cat([*parts, torch.tensor([round(getattr(cost, name)) for name in COSTS])])


def unflatten(
    total: Tensor, blank: Observations, queries: Sequence[Query]
) -> tuple[list[list[Observation]], ObserveReply]:
    """The observations and the costs of all clients together."""
    found: list[list[Observation]] = []
    at = 0

    def take(like: Tensor) -> Tensor:
        nonlocal at
        at += like.numel()
        return total[at - like.numel() : at].reshape(like.shape)

    for row, query in zip(blank, queries, strict=True):
        found.append([])
        for each in row:
            sums = {key: from_integers(take(each.sums[key]), query.statistic.kind) for key in sorted(each.sums)}
            found[-1].append(Observation({key: sums[key] for key in each.sums}, take(each.counts)))
    withheld, read, trained, flops, kept = total[at:].tolist()
    if min(withheld, read, trained, flops, kept, *(int(each.counts.min()) for row in found for each in row)) < 0:
        raise FedOrthoError("the masked sums have a negative count: masks or sums of a client are false")
    return found, ObserveReply(0, "done", (), withheld, read, trained, float(flops), float(kept))


def masked_observations(
    transport: Transport, clients: Sequence[int], order: Observe, tensors: Tensors, blank: Observations
) -> tuple[list[list[Observation]], ObserveReply]:
    """The observations of all clients together and what they cost, from masked sums; `blank` are those of nobody.

    The exchange is repeated without clients that drop out after they have sent a key.
    """
    size = len(flatten(blank, order.queries, NO_SUMS))
    while True:
        exchange = secrets.token_hex(16)
        asked = dict.fromkeys(clients, pack({}, ShareKey(exchange)))
        keys = {reply.client: reply.message.key for reply in transport.ask(ShareKey, KeyReply, asked)}
        if len(keys) < LEAST_CLIENTS:
            raise FedOrthoError(f"{len(keys)} clients take part; masked sums need {LEAST_CLIENTS}: give --sums open")
        content = pack(tensors, replace(order, exchange=exchange, keys=keys))
        total, done = torch.zeros(size, dtype=torch.int64), []
        for reply in transport.ask(Observe, ObserveReply, dict.fromkeys(keys, content)):
            found = reply.tensors.get(MASKED)
            if reply.message.status != "done":
                transport.log[-1].reject(reply.client, f"takes no part: {reply.message.status}")
            elif len(reply.tensors) != 1 or found is None or found.dtype != torch.int64 or found.shape != (size,):
                transport.log[-1].reject(reply.client, f"its masked sums are not {size} integers")
            else:
                total += found
                done.append(reply.client)
        if len(done) == len(keys):
            return unflatten(total, blank, order.queries)
        clients = done
