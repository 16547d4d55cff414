"""Values ↔ Flower records: tensors as NumPy arrays, the message as one line of JSON."""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from fedortho.data.images import made_images
from fedortho.engines.query import Query
from fedortho.engines.training_plan import PlanPart, TrainingPlan
from fedortho.errors import FedOrthoError
from fedortho.federated.messages import Order, PartInfo, PatchInfo, PlanInfo, QueryInfo, Reply
from fedortho.models.patch import Patch, unpack_patch
from fedortho.statistics.observe import Observation
from fedortho.storage.files import tensors_digest
from fedortho.storage.records import from_json, to_json

if TYPE_CHECKING:
    from flwr.app import Array, RecordDict


M = TypeVar("M", bound=Order | Reply)
Json = Mapping[str, Any]
Tensors = Mapping[str, Tensor]
# float32 suffices for these sums; moments are subtracted from one another and need float64
FLOAT32 = ("peaks", "difference", "averages", "gram", "fisher", "fisher-abs", "gradient")


class BadReply(FedOrthoError):
    """A client's reply that does not match the server's message."""


def pack(tensors: Tensors, message: Order | Reply) -> "RecordDict":
    """A Flower record of tensors and a message."""
    return pack_json(tensors, to_json(message))


def unpack(content: "RecordDict", kind: type[M], source: str) -> tuple[dict[str, Tensor], M]:
    """The tensors and the message of this kind in a Flower record; `source` names the record in errors."""
    tensors, value = unpack_json(content)
    return tensors, from_json(kind, value, source)


def pack_json(tensors: Tensors, value: Json) -> "RecordDict":
    return record_of(arrays_of(tensors), value)


def arrays_of(tensors: Tensors) -> "dict[str, Array]":
    """Tensors as Flower arrays, which several records can share."""
    from flwr.app import Array

    return {name: Array(tensor.detach().cpu().contiguous().numpy()) for name, tensor in tensors.items()}


def record_of(arrays: "Mapping[str, Array]", value: Json) -> "RecordDict":
    """A Flower record of arrays and a message as JSON."""
    from flwr.app import ArrayRecord, ConfigRecord, RecordDict

    text = json.dumps(value, separators=(",", ":"))
    return RecordDict({"tensors": ArrayRecord(dict(arrays)), "message": ConfigRecord({"json": text})})


def unpack_json(content: "RecordDict") -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the message as JSON, not yet validated."""
    try:
        value = json.loads(str(content["message"]["json"]))
        tensors = {name: torch.from_numpy(array.numpy()) for name, array in content["tensors"].items()}  # type: ignore[union-attr]  # an ArrayRecord, or it fails here
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadReply(f"the record is not a fedortho message ({type(error).__name__})") from error
    return tensors, value


def count_bytes(content: "RecordDict") -> int:
    """Bytes of all arrays, names and values in a record, as Flower counts them."""
    return sum(record.count_bytes() for record in content.values())


def prefixed(prefix: str, tensors: Tensors) -> dict[str, Tensor]:
    return {f"{prefix}{name}": tensor for name, tensor in tensors.items()}


def below(prefix: str, tensors: Tensors) -> dict[str, Tensor]:
    """The tensors whose names start with `prefix`, without the prefix."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def pack_patch(patch: Patch) -> tuple[dict[str, Tensor], PatchInfo]:
    """A patch as tensors and its digests, without its list of kernels."""
    return patch.packed()[0], PatchInfo(patch.before, patch.after)


def patch_from_wire(tensors: Tensors, info: PatchInfo) -> Patch:
    return unpack_patch(tensors, to_json(info), "the server's patch")


def pack_queries(queries: Sequence[Query]) -> tuple[dict[str, Tensor], tuple[QueryInfo, ...]]:
    """Queries as tensors (their candidate patches) and descriptions."""
    tensors: dict[str, Tensor] = {}
    described = []
    for number, query in enumerate(queries):
        patches = []
        for place, patch in enumerate(query.statistic.patches):
            edits, info = pack_patch(patch)
            tensors |= prefixed(f"{number}.{place}.", edits)
            patches.append(info)
        described.append(QueryInfo(query.selections, replace(query.statistic, patches=()), tuple(patches)))
    return tensors, tuple(described)


def unpack_queries(tensors: Tensors, described: Sequence[QueryInfo]) -> list[Query]:
    queries = []
    for number, info in enumerate(described):
        patches = tuple(patch_from_wire(below(f"{number}.{i}.", tensors), p) for i, p in enumerate(info.patches))
        queries.append(Query(info.selections, replace(info.statistic, patches=patches)))
    return queries


def pack_training_plan(plan: TrainingPlan) -> tuple[dict[str, Tensor], PlanInfo]:
    """A training plan as tensors (generated images) and a description; teachers are packed by `pack_teachers`."""
    tensors: dict[str, Tensor] = {}
    for number, part in enumerate(plan.parts):
        if part.given is not None:
            used, rows = part.given.rows.unique(return_inverse=True)  # a repeated image travels once
            made = {"pixels": part.given.pixels[used], "labels": part.given.store_labels[used], "rows": rows}
            tensors |= prefixed(f"given.{number}.", made)
    parts = tuple(PartInfo(part.group, part.target, part.fraction) for part in plan.parts)
    teachers = {name: tensors_digest(teacher.state_dict()) for name, teacher in plan.teachers.items()}
    return tensors, PlanInfo(parts, plan.options, plan.adapters, teachers)


def pack_teachers(plan: TrainingPlan, digests: Collection[str]) -> dict[str, Tensor]:
    """The weights of the plan's teachers that have these digests."""
    tensors: dict[str, Tensor] = {}
    for teacher in plan.teachers.values():
        digest = tensors_digest(teacher.state_dict())
        if digest in digests:
            tensors |= prefixed(f"teacher.{digest}.", teacher.state_dict())
    return tensors


def unpack_training_plan(
    tensors: Tensors, info: PlanInfo, names: Sequence[str], teacher: Callable[[str, Tensors], nn.Module]
) -> TrainingPlan:
    """The training plan that was packed; `teacher` makes a teacher from its digest and the weights that were sent."""
    parts = []
    for number, part in enumerate(info.parts):
        made = below(f"given.{number}.", tensors)
        given = replace(made_images(made["pixels"], made["labels"], names), rows=made["rows"]) if made else None
        parts.append(PlanPart(part.selection, part.target, part.fraction, given))
    teachers = {name: teacher(digest, below(f"teacher.{digest}.", tensors)) for name, digest in info.teachers.items()}
    return TrainingPlan(tuple(parts), info.options, teachers, info.adapters)


def pack_observations(
    observed: Sequence[Sequence[Observation]], queries: Sequence[Query]
) -> tuple[dict[str, Tensor], tuple[tuple[int, int], ...]]:
    """Sums and counts by layer, and the query and place of each observation of no images, which has no tensors."""
    tensors: dict[str, Tensor] = {}
    empty = []
    for number, (observations, query) in enumerate(zip(observed, queries, strict=True)):
        dtype = torch.float32 if query.statistic.kind in FLOAT32 else torch.float64
        for place, observation in enumerate(observations):
            if not observation.images:
                empty.append((number, place))
                continue
            start = f"{number}.{place}."
            tensors |= prefixed(f"{start}sums.", {key: value.to(dtype) for key, value in observation.sums.items()})
            tensors[f"{start}counts"] = observation.counts
    return tensors, tuple(empty)


def unpack_observations(
    tensors: Tensors, queries: Sequence[Query], empty: Sequence[tuple[int, int]] = ()
) -> list[list[Observation | None]]:
    """The observations of one client, None for empty ones.

    Missing observations, sums that are not finite and negative counts are refused.
    """
    observed = []
    for number, query in enumerate(queries):
        places = 1 if query.statistic.kind == "difference" else len(query.selections)
        row: list[Observation | None] = []
        for place in range(places):
            if (number, place) in empty:
                row.append(None)
                continue
            part = below(f"{number}.{place}.", tensors)
            if "counts" not in part:
                raise BadReply(f"query {number}, selection {place} has no counts")
            sums = {key: value.double() for key, value in below("sums.", part).items()}
            is_finite = all(bool(torch.isfinite(value).all()) for value in sums.values())
            if not is_finite or bool((part["counts"] < 0).any()):
                raise BadReply(f"query {number}, selection {place} has a sum that is not finite or a negative count")
            row.append(Observation(sums, part["counts"].long()))
        observed.append(row)
    return observed
