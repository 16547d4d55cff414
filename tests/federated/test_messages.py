"""Every message survives JSON; one with a missing, unknown or wrongly typed field is refused by name."""

import json
from dataclasses import fields
from typing import Any

import pytest

from fedortho.data.request import ForgetRequest
from fedortho.engines.engine import PlanPart, TrainingPlan
from fedortho.engines.query import Query, Selection, Statistic
from fedortho.errors import BadRecord
from fedortho.federated.messages import (
    ORDERS,
    ApplyPatch,
    Hello,
    HelloReply,
    KeepModel,
    LocalResult,
    ModelReply,
    Observe,
    ObserveReply,
    PatchInfo,
    TaskInfo,
    TrainLocal,
    TrainReply,
)
from fedortho.storage.records import from_json, to_json
from fedortho.training.adapters import Adapters
from fedortho.training.objectives import FitOptions, Target
from fedortho.training.recipe import Recipe

TASK = TaskInfo(("ant", "bee"), (1, 8, 8), (0.5,), (0.25,))
REQUEST = ForgetRequest(("3",), (2,), ("1/4",))
PART = PlanPart(Selection("train", REQUEST, None, 7, 1), Target("other", -1.0), 0.5)
PLAN = TrainingPlan((PART,), FitOptions("turns"), adapters=Adapters(("fc",)))
PATCH = PatchInfo("a" * 64, "b" * 64)
QUERY = Query((Selection(),), Statistic("moments", norms=("n",), patches=()))
MESSAGES: list[Any] = [
    Hello(TASK),
    HelloReply(3, 100, False, "c" * 64, True),
    TrainLocal(TASK, Recipe(lr=0.125), PLAN, {"wise": "d" * 64}, True, ("fc.weight",), "d" * 64, 4),
    TrainReply(3, LocalResult(90, 0.5, 0.75, None, 1.5, 0, 90, 4.5)),
    TrainReply(3, None),
    KeepModel(TASK, True, REQUEST),
    KeepModel(TASK, False, None),
    ModelReply(3, "e" * 64),
    Observe(TASK, "f" * 64, (QUERY,), (3,), 4, 5),
    ObserveReply(3, "done", ((0, 1),), 1, 2, 3, 4.0, 1.0),
    ApplyPatch(PATCH, REQUEST),
]


def through_json(message: Any) -> Any:
    return json.loads(json.dumps(to_json(message)))


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_survives_json_and_names_what_it_lacks(message: Any) -> None:
    value = through_json(message)
    assert from_json(type(message), value, "a message") == message
    first = fields(message)[0].name
    with pytest.raises(BadRecord, match=f"^its reply.* {first}"):
        from_json(type(message), {key: each for key, each in value.items() if key != first}, "its reply")
    with pytest.raises(BadRecord, match="secret"):
        from_json(type(message), value | {"secret": 1}, "its reply")
    with pytest.raises(BadRecord, match="schema 99"):
        from_json(type(message), value | {"schema": 99}, "its reply")


@pytest.mark.parametrize(
    ("message", "change", "telling"),
    [
        (TrainReply(3, None), {"client": "3"}, "client"),
        (TrainReply(3, None), {"result": {"images": 3}}, "loss"),
        (ModelReply(3, ""), {"status": "asleep"}, "status"),
        (ObserveReply(3, "done", ((0, 1),), 1, 2, 3, 4.0, 1.0), {"withheld": 1.5}, "withheld"),
        (HelloReply(3, 1, False, "", False), {"has-left": 0}, "has-left"),
        (TrainReply(3, None), {"client": -1}, "client is -1"),
        (TrainReply(3, LocalResult(90, 0.5, 0.75, None, 1.5, 0, 90, 4.5)), {"client": float("nan")}, "client"),
        (ObserveReply(3, "done", (), 1, 2, 3, 4.0, 1.0), {"flops": float("inf")}, "flops is inf"),
        (Hello(TASK), {"task": to_json(TASK) | {"shape": [1, 8]}}, "task.shape"),
        (KeepModel(TASK, True, None), {"forgotten": {"classes": [3]}}, "forgotten.classes"),
    ],
)
def test_a_wrong_type_is_refused_with_its_field(message: Any, change: dict[str, Any], telling: str) -> None:
    with pytest.raises(BadRecord, match=telling):
        from_json(type(message), through_json(message) | change, "its reply")


def test_actions_are_those_that_flower_accepts() -> None:
    """Flower takes train, evaluate and query, each with one Python identifier."""
    for action, order in ORDERS.items():
        kind, _, name = action.partition(".")
        assert kind in ("train", "query")
        assert name.isidentifier()
        assert order.action == action


def test_a_reply_without_tensors_is_small() -> None:
    assert len(json.dumps(through_json(ModelReply(3, "f" * 64)), separators=(",", ":"))) < 128
