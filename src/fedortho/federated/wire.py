"""Our values ↔ Flower records: tensors as NumPy arrays, everything else as one line of JSON; bytes are counted."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fedortho.data.images import Images, made_images
from fedortho.data.request import ForgetRequest
from fedortho.engines.answer import AnswerCache, answer
from fedortho.errors import FedOrthoError
from fedortho.models.patch import unpack_patch
from fedortho.statistics.observe import Observation
from fedortho.statistics.query import Query, Selection, Statistic
from fedortho.statistics.training_plan import PlanPart, TrainingPlan
from fedortho.training.adapters import Adapters
from fedortho.training.objectives import FitOptions, Target

if TYPE_CHECKING:
    from flwr.app import RecordDict


Note = dict[str, Any]
Tensors = Mapping[str, Tensor]
# sums that need no more; moments are subtracted from one another and do
FLOAT32 = ("peaks", "difference", "averages", "fisher", "fisher-abs", "gradient")


class BadReply(FedOrthoError):
    """What a client sent is not what was asked for."""


def pack(tensors: Tensors, note: Mapping[str, Any]) -> "RecordDict":
    """A record of tensors and a note of plain values."""
    from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

    arrays = {name: Array(tensor.detach().cpu().contiguous().numpy()) for name, tensor in tensors.items()}
    return RecordDict({"tensors": ArrayRecord(arrays), "note": ConfigRecord({"json": json.dumps(note)})})


def unpack(content: "RecordDict") -> tuple[dict[str, Tensor], Note]:
    """What was packed; anything else is refused."""
    try:
        note = json.loads(str(content["note"]["json"]))
        tensors = {name: torch.from_numpy(array.numpy()) for name, array in content["tensors"].items()}  # type: ignore[union-attr]  # an ArrayRecord, or it fails here
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadReply(f"the record is not one of ours ({type(error).__name__})") from error
    if not isinstance(note, dict):
        raise BadReply("the record's note is not a mapping")
    return tensors, note


def count_bytes(content: "RecordDict") -> int:
    """Bytes of all arrays, names and values in a record, as Flower counts them."""
    return sum(record.count_bytes() for record in content.values())


def prefixed(prefix: str, tensors: Tensors) -> dict[str, Tensor]:
    return {f"{prefix}{name}": tensor for name, tensor in tensors.items()}


def below(prefix: str, tensors: Tensors) -> dict[str, Tensor]:
    """The tensors whose names begin so, without that beginning."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def pack_queries(queries: Sequence[Query]) -> tuple[dict[str, Tensor], list[Note]]:
    """Asks as tensors (the candidates) and notes; a candidate's kernel list stays here, its effect travels."""
    tensors: dict[str, Tensor] = {}
    notes: list[Note] = []
    for number, query in enumerate(queries):
        patches = []
        for place, patch in enumerate(query.statistic.patches):
            held, note = replace(patch, note={}).packed()
            tensors |= prefixed(f"{number}.{place}.", held)
            patches.append(note)
        statistic = {name: value for name, value in vars(query.statistic).items() if name != "patches"}
        selections = [pack_selection(group) for group in query.selections]
        notes.append({"probe": statistic, "patches": patches, "groups": selections})
    return tensors, notes


def unpack_queries(tensors: Tensors, notes: Sequence[Note]) -> list[Query]:
    queries = []
    for number, note in enumerate(notes):
        patches = tuple(
            unpack_patch(below(f"{number}.{i}.", tensors), about) for i, about in enumerate(note["patches"])
        )
        statistic = Statistic(**note["probe"] | {"norms": tuple(note["probe"]["norms"]), "patches": patches})
        queries.append(Query(tuple(map(unpack_selection, note["groups"])), statistic))
    return queries


def pack_selection(group: Selection) -> Note:
    words = {side: None if (r := getattr(group, side)) is None else asdict(r) for side in ("include", "exclude")}
    return {"split": group.split, "limit": group.limit, "seed": group.seed} | words


def unpack_selection(note: Note) -> Selection:
    sides = {side: unpack_request(note[side]) for side in ("include", "exclude")}
    return Selection(note["split"], sides["include"], sides["exclude"], note["limit"], note["seed"])


def pack_training_plan(plan: TrainingPlan) -> tuple[dict[str, Tensor], Note]:
    """A course as tensors (teachers, images that were made) and a note."""
    tensors: dict[str, Tensor] = {}
    parts: list[Note] = []
    for number, part in enumerate(plan.parts):
        note: Note = {"group": pack_selection(part.group), "aim": asdict(part.target), "fraction": part.fraction}
        if part.given is not None:
            used, rows = part.given.rows.unique(return_inverse=True)  # an image that is shown often travels once
            made = {"pixels": part.given.pixels[used], "labels": part.given.store_labels[used], "rows": rows}
            tensors |= prefixed(f"given.{number}.", made)
        parts.append(note)
    for name, teacher in plan.teachers.items():
        tensors |= prefixed(f"teacher.{name}.", teacher.state_dict())
    adapters = None if plan.adapters is None else asdict(plan.adapters)
    told = {"parts": parts, "manner": asdict(plan.options), "adapters": adapters}
    return tensors, told | {"teachers": list(plan.teachers)}


def unpack_training_plan(
    tensors: Tensors, note: Note, names: Sequence[str], build: Callable[[Tensors], nn.Module]
) -> TrainingPlan:
    """The course that was packed; `build` makes a teacher of its weights."""
    parts = []
    for number, about in enumerate(note["parts"]):
        made = below(f"given.{number}.", tensors)
        given = replace(made_images(made["pixels"], made["labels"], names), rows=made["rows"]) if made else None
        parts.append(PlanPart(unpack_selection(about["group"]), Target(**about["aim"]), about["fraction"], given))
    teachers = {name: build(below(f"teacher.{name}.", tensors)) for name in note["teachers"]}
    about = note["adapters"]
    adapters = None if about is None else Adapters(**about | {"layers": tuple(about["layers"])})
    return TrainingPlan(tuple(parts), FitOptions(**note["manner"]), teachers, adapters)


def unpack_request(note: Note | None) -> ForgetRequest | None:
    return None if note is None else ForgetRequest(*(tuple(note[name]) for name in ("classes", "clients", "samples")))


def pack_observations(found: Sequence[Sequence[Observation]], queries: Sequence[Query]) -> dict[str, Tensor]:
    """Sums and counts; the names of layers travel, nothing of an image does."""
    tensors: dict[str, Tensor] = {}
    for number, (observations, query) in enumerate(zip(found, queries, strict=True)):
        kind = torch.float32 if query.statistic.kind in FLOAT32 else torch.float64
        for place, observation in enumerate(observations):
            start = f"{number}.{place}."
            tensors |= prefixed(f"{start}sums.", {key: value.to(kind) for key, value in observation.sums.items()})
            tensors[f"{start}counts"] = observation.counts
    return tensors


def unpack_observations(tensors: Tensors, queries: Sequence[Query]) -> list[list[Observation]]:
    """The observations of one client; missing ones, or numbers that are none, are refused."""
    found = []
    for number, query in enumerate(queries):
        places = 1 if query.statistic.kind == "difference" else len(query.selections)
        row = []
        for place in range(places):
            part = below(f"{number}.{place}.", tensors)
            if "counts" not in part:
                raise BadReply(f"the answer to ask {number}, group {place} is missing")
            sums = {key: value.double() for key, value in below("sums.", part).items()}
            whole = all(bool(torch.isfinite(value).all()) for value in sums.values())
            if not whole or bool((part["counts"] < 0).any()):
                raise BadReply("some sums are not finite, or a count is negative")
            row.append(Observation(sums, part["counts"].long()))
        found.append(row)
    return found


def blank_observations(
    model: nn.Module, shape: tuple[int, int, int], names: tuple[str, ...], queries: Sequence[Query]
) -> list[list[Observation]]:
    """What a client without images answers: the layers, labels and shapes that every answer must have."""
    none, flat = torch.zeros(0, dtype=torch.int64), (0.0,) * shape[0]
    nothing = Images(torch.zeros(0, *shape, dtype=torch.uint8), none, none, names, flat, flat)
    cache = AnswerCache()  # traces the network once
    return [answer(model, nothing, [nothing] * len(q.selections), q.statistic, cache=cache) for q in queries]


def add_observations(
    total: Sequence[Sequence[Observation]], mine: Sequence[Sequence[Observation]]
) -> list[list[Observation]]:
    """The sums with those of one more client, which are refused unless they fit."""
    for ours, theirs in zip(total, mine, strict=True):
        for first, second in zip(ours, theirs, strict=True):
            if first.sums.keys() != second.sums.keys() or first.counts.shape != second.counts.shape:
                raise BadReply("its sums are of other layers or labels")
            if any(second.sums[key].shape != value.shape for key, value in first.sums.items()):
                raise BadReply("its sums have other shapes")
    return [[a + b for a, b in zip(ours, theirs, strict=True)] for ours, theirs in zip(total, mine, strict=True)]
