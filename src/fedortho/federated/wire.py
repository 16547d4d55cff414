"""Values ↔ Flower records: tensors as NumPy arrays, the message as one line of JSON."""

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from fedortho.data.images import made_images
from fedortho.engines.engine import TrainingPlan
from fedortho.engines.query import STATISTICS, Query, Selection
from fedortho.errors import FedOrthoError
from fedortho.federated.messages import PatchInfo, WireMessage
from fedortho.models.patch import Patch, unpack_patch
from fedortho.statistics.observe import Observation
from fedortho.storage.files import below, parse_json, prefixed
from fedortho.storage.records import from_json, to_json
from fedortho.training.loop import Mask

if TYPE_CHECKING:
    from flwr.app import Array, RecordDict

M = TypeVar("M", bound=WireMessage)
Json = Mapping[str, Any]
Tensors = Mapping[str, Tensor]
Observations = Sequence[Sequence[Observation]]  # by query and selection
Places = Sequence[tuple[int, int]]  # query and selection
LARGEST = 2**53  # integers below it are exact as float64
HEADER = struct.Struct("<qIB")  # of packed integers: the lowest, how many in a row, bits of each
LEAST_BITS, MOST_BITS = 8, 54  # at least a byte, so that a message unpacks to a few times its size
NO_DIGESTS = PatchInfo("", "")  # of candidates


class BadReply(FedOrthoError):
    """A client's reply that does not match the server's message."""


def pack(tensors: Tensors, message: WireMessage) -> "RecordDict":
    """A Flower record of tensors and a message."""
    return pack_json(tensors, to_json(message))


def unpack(content: "RecordDict", kind: type[M], source: str) -> tuple[dict[str, Tensor], M]:
    """The tensors and the message of this kind in a Flower record; `source` names the record in errors."""
    tensors, value = unpack_json(content)
    return tensors, from_json(kind, value, source)


def arrays_of(tensors: Tensors) -> "dict[str, Array]":
    """Tensors as Flower arrays, which several records can share."""
    from flwr.app import Array

    return {name: Array(tensor.detach().cpu().contiguous().numpy()) for name, tensor in tensors.items()}


def pack_json(tensors: Tensors, value: Json) -> "RecordDict":
    return record_of(arrays_of(tensors), value)


def record_of(arrays: "Mapping[str, Array]", value: Json) -> "RecordDict":
    """A Flower record of arrays and a message as JSON."""
    from flwr.app import ArrayRecord, ConfigRecord, RecordDict

    text = json.dumps(value, separators=(",", ":"))
    return RecordDict({"tensors": ArrayRecord(dict(arrays)), "message": ConfigRecord({"json": text})})


def unpack_json(content: "RecordDict") -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the message as JSON, not yet validated."""
    try:
        value = parse_json(str(content["message"]["json"]))
        tensors = {name: torch.from_numpy(array.numpy()) for name, array in content["tensors"].items()}  # type: ignore[union-attr]  # an ArrayRecord, or it fails here
        if any(tensor.is_complex() for tensor in tensors.values()):  # safetensors holds no others of NumPy's
            raise TypeError("complex numbers are in no message")
    except Exception as error:  # whatever a stranger's bytes make the readers of JSON and of arrays raise
        raise BadReply(f"the record is not a fedortho message ({type(error).__name__})") from error
    return tensors, value


def count_bytes(content: "RecordDict") -> int:
    """Bytes of all arrays, names and values in a record, as Flower counts them."""
    try:
        return sum(record.count_bytes() for record in content.values())
    except ValueError as error:  # Flower cannot count an empty text
        raise BadReply("the record has an empty value") from error


def patch_from_wire(tensors: Tensors, info: PatchInfo) -> Patch:
    """A patch of tensors and digests, without its list of kernels."""
    return unpack_patch(tensors, to_json(info), "the server's patch")


def pack_queries(queries: Sequence[Query]) -> tuple[dict[str, Tensor], tuple[Query, ...], tuple[int, ...]]:
    """Candidate patches as tensors, the queries without them, and the number of candidates of each query."""
    tensors: dict[str, Tensor] = {}
    for number, query in enumerate(queries):
        for place, patch in enumerate(query.statistic.patches):
            tensors |= prefixed(f"{number}.{place}.", patch.packed()[0])
    stripped = tuple(replace(query, statistic=replace(query.statistic, patches=())) for query in queries)
    return tensors, stripped, tuple(len(query.statistic.patches) for query in queries)


def unpack_queries(tensors: Tensors, queries: Sequence[Query], candidates: Sequence[int]) -> list[Query]:
    """The queries with so many candidate patches each."""
    found = []
    for number, (query, many) in enumerate(zip(queries, candidates, strict=True)):
        patches = tuple(patch_from_wire(below(f"{number}.{i}.", tensors), NO_DIGESTS) for i in range(many))
        found.append(replace(query, statistic=replace(query.statistic, patches=patches)))
    return found


def pack_masks(masks: Mask) -> dict[str, Tensor]:
    """Masks as bits, eight to a byte.

    >>> pack_masks({"weight": torch.tensor([[True, False], [True, True]])})["weight"].tolist()  # 10110000
    [176]
    """
    return {name: torch.from_numpy(np.packbits(mask.cpu().numpy())) for name, mask in masks.items()}


def unpack_masks(packed: Tensors, model: nn.Module) -> dict[str, Tensor]:
    """The masks that `pack_masks` has packed, of parameters of the model; others are refused by name."""
    masks, parameters = {}, dict(model.named_parameters())
    for name, bits in packed.items():
        if name not in parameters:
            raise FedOrthoError(f"a mask is of {name!r}, which is no parameter of the model")
        shape = parameters[name].shape
        size = -(-shape.numel() // 8)
        if bits.dtype != torch.uint8 or bits.shape != (size,):
            given = f"{str(bits.dtype)[6:]} {list(bits.shape)}"
            raise FedOrthoError(f"the mask of {name} is {given}; expected {size} bytes, a bit for each weight")
        whole = torch.from_numpy(np.unpackbits(bits.numpy(), count=shape.numel()))
        masks[name] = whole.reshape(shape).bool()
    return masks


def pack_training_plan(plan: TrainingPlan) -> tuple[dict[str, Tensor], TrainingPlan]:
    """A training plan as tensors (generated images) and the plan without them and without its models."""
    tensors: dict[str, Tensor] = {}
    for number, part in enumerate(plan.parts):
        if part.given is not None:
            used, rows = part.given.rows.unique(return_inverse=True)  # a repeated image travels once
            made = {"pixels": part.given.pixels[used], "labels": part.given.store_labels[used], "rows": rows}
            tensors |= prefixed(f"given.{number}.", made)
    stripped = tuple(replace(part, given=None) for part in plan.parts)
    return tensors, replace(plan, parts=stripped, teachers={}, original=None)


def unpack_training_plan(
    tensors: Tensors, plan: TrainingPlan, names: Sequence[str], teachers: Mapping[str, nn.Module]
) -> TrainingPlan:
    """The training plan that was packed, with these teachers."""
    parts = []
    for number, part in enumerate(plan.parts):
        made = below(f"given.{number}.", tensors)
        given = replace(made_images(made["pixels"], made["labels"], names), rows=made["rows"]) if made else None
        parts.append(replace(part, given=given))
    return replace(plan, parts=tuple(parts), teachers=teachers)


def to_integers(sums: Tensor, kind: str) -> Tensor:
    """Sums of a statistic as whole multiples of 2^-bits, int64; see BITS.

    >>> to_integers(torch.tensor([0.5, -2.0]), "peaks")
    tensor([  32768, -131072])
    """
    whole = (sums.double() * _scale(kind)).round()
    if not bool((whole.abs() < LARGEST).all()):
        raise FedOrthoError(f"a sum of {kind} is not finite or beyond the range of the wire")
    return whole.long()


def from_integers(whole: Tensor, kind: str) -> Tensor:
    """The sums that `to_integers` has made integers of, float64."""
    return whole.double() / _scale(kind)


def _scale(kind: str) -> float:
    """Sums are whole multiples of its inverse, so that their total does not depend on the order of clients."""
    bits = STATISTICS[kind].bits
    assert bits is not None, f"{kind} travels as float32"
    return 2.0**bits


def pack_integers(whole: Tensor) -> Tensor:
    """A matrix of integers as bytes: what each exceeds the lowest by, in as many bits as the largest needs.

    >>> pack_integers(torch.tensor([[-7, 255]])).tolist()[HEADER.size :]  # 0 and 262, nine bits each
    [0, 65, 128]
    """
    low = int(whole.min()) if whole.numel() else 0
    above = (whole.flatten() - low).numpy().astype(">u8")
    bits = max(int(above.max(initial=0)).bit_length(), LEAST_BITS)
    parts = [HEADER.pack(low, whole.shape[1], bits)]
    for start in range(0, len(above), 4096):  # whole bytes, and never all bits as numbers at once
        digits = np.unpackbits(above[start : start + 4096, None].view(np.uint8), axis=1)
        parts.append(np.packbits(digits[:, 64 - bits :]).tobytes())
    return torch.from_numpy(np.frombuffer(b"".join(parts), np.uint8).copy())


def unpack_integers(packed: Tensor, rows: int) -> Tensor:
    """The matrix of so many rows that `pack_integers` has packed, int64; other bytes are refused."""
    data = packed.numpy().tobytes()
    if packed.dtype != torch.uint8 or len(data) < HEADER.size:
        raise BadReply(f"{str(packed.dtype)[6:]}, {len(data)} bytes; expected packed integers")
    low, columns, bits = HEADER.unpack_from(data)
    size = -(-rows * columns * bits // 8)
    if not LEAST_BITS <= bits <= MOST_BITS or abs(low) >= LARGEST or len(data) != HEADER.size + size:
        raise BadReply(f"{len(data)} bytes; {rows} x {columns} integers of {bits} bits from {low} are others")
    at = np.arange(rows * columns) * bits  # where each begins; eight bytes from there hold it
    window = np.lib.stride_tricks.sliding_window_view(np.frombuffer(data + bytes(8), np.uint8)[HEADER.size :], 8)
    above = window[at // 8].view(">u8").ravel() << (at % 8).astype(np.uint64) >> np.uint64(64 - bits)
    whole: Tensor = torch.from_numpy(above.astype(np.int64)).reshape(rows, columns) + low
    if not bool((whole.abs() < LARGEST).all()):
        raise BadReply("an integer is beyond the range of the wire")
    return whole


def to_wire(sums: Tensor, kind: str) -> Tensor:
    """Sums of a statistic, (labels, values), as they travel."""
    return sums.float() if STATISTICS[kind].bits is None else pack_integers(to_integers(sums, kind))


def from_wire(sent: Tensor, kind: str, rows: int) -> Tensor:
    """The sums that `to_wire` was given, (rows, values), float64."""
    if STATISTICS[kind].bits is not None:
        return from_integers(unpack_integers(sent, rows), kind)
    if sent.dtype != torch.float32:
        raise BadReply(f"{str(sent.dtype)[6:]}; expected float32")
    return sent.double()


def pack_observations(
    observed: Observations, queries: Sequence[Query]
) -> tuple[dict[str, Tensor], tuple[tuple[int, int], ...]]:
    """Sums and counts by layer, and the query and place of each observation of no images, which has no tensors."""
    tensors: dict[str, Tensor] = {}
    empty = []
    for number, (observations, query) in enumerate(zip(observed, queries, strict=True)):
        for place, observation in enumerate(observations):
            if not observation.images:
                empty.append((number, place))
                continue
            sums = {f"sums.{key}": to_wire(value, query.statistic.kind) for key, value in observation.sums.items()}
            tensors |= prefixed(f"{number}.{place}.", {**sums, "counts": observation.counts})
    return tensors, tuple(empty)


def unpack_observations(
    tensors: Tensors, queries: Sequence[Query], empty: Places = (), holds: Mapping[str, int] | None = None
) -> list[list[Observation | None]]:
    """The observations of one client, None for empty ones; what it cannot have sent is refused by field.

    `holds` are the images of each split that the client said it has; counts beyond them are refused.
    """
    found: list[list[Observation | None]] = [[] for _ in queries]
    strange, unknown = set(tensors), set(empty)
    for number, query in enumerate(queries):
        kind = query.statistic.kind
        for place, selections in enumerate(places_of(query)):
            if (number, place) in empty:
                found[number].append(None)
                unknown.discard((number, place))
                continue
            part = below(start := f"{number}.{place}.", tensors)
            strange -= {f"{start}{name}" for name in part}
            values = holds["values"] if holds and kind == "layer" else 1  # a layer counts values
            most = None if holds is None else values * sum(holds[each.split] for each in selections)
            found[number].append(_unpacked(part, kind, start[:-1], most))
    if strange:
        raise BadReply(f"it has a tensor {min(strange)[:60]!r} that nobody asked for")
    if unknown:
        raise BadReply("empty names query {}, selection {}, which nobody asked for".format(*min(unknown)))
    return found


def places_of(query: Query) -> list[tuple[Selection, ...]]:
    """The selections of each observation that answers a query."""
    return [query.selections] if query.statistic.kind == "difference" else [(each,) for each in query.selections]


def _unpacked(part: Tensors, kind: str, at: str, most: int | None) -> Observation:
    """One observation from its tensors."""
    if "counts" not in part:
        raise BadReply(f"{at}.counts is missing")
    counts = part["counts"]
    if counts.dtype != torch.int64 or counts.dim() != 1 or bool((counts < 0).any()):
        raise BadReply(f"{at}.counts is {str(counts.dtype)[6:]}, or negative; expected int64 from 0")
    if not int(counts.sum()):  # bounds are on means, and such sums have none
        raise BadReply(f"{at}.counts is 0; expected images, or no sums and its place in empty")
    if most is not None and (bool((counts > most).any()) or int(counts.sum()) > most):
        raise BadReply(f"{at}.counts is {int(counts.max())}; expected at most {most}, which it said it holds")
    sums = {}
    for key, value in below("sums.", part).items():
        try:
            found = sums[key] = from_wire(value, kind, len(counts))
        except BadReply as error:
            raise BadReply(f"{at}.sums.{key} is {error}") from error
        if not bool(torch.isfinite(found).all()):
            raise BadReply(f"{at}.sums.{key} is not finite")
        if kind == "right" and not bool(((found >= 0) & (found <= counts.unsqueeze(1))).all()):
            raise BadReply(f"{at}.sums.{key} is below 0 or above its count")
    return Observation(sums, counts)
