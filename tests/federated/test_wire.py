from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from flwr.app import Array, ArrayRecord, RecordDict
from hypothesis import given
from hypothesis import strategies as st
from small import TinyNet

from fedortho.data.images import made_images
from fedortho.data.request import ForgetRequest
from fedortho.federated.wire import (
    BadReply,
    count_bytes,
    pack,
    pack_observations,
    pack_queries,
    pack_selection,
    pack_training_plan,
    unpack,
    unpack_observations,
    unpack_queries,
    unpack_selection,
    unpack_training_plan,
)
from fedortho.models.patch import Patch
from fedortho.statistics.observe import Observation
from fedortho.statistics.query import Query, Selection, Statistic
from fedortho.statistics.training_plan import PlanPart, TrainingPlan
from fedortho.storage.files import tensors_digest
from fedortho.training.adapters import Adapters
from fedortho.training.objectives import FitOptions, Target

WORDS = st.lists(st.sampled_from(["cat", "3", "Ärger", "a b"]), unique=True).map(tuple)
REQUESTS = st.none() | st.builds(ForgetRequest, WORDS, st.lists(st.integers(0, 9)).map(tuple), st.just(("1/2", "7")))
GROUPS = st.builds(
    Selection, st.sampled_from(["train", "valid"]), REQUESTS, REQUESTS, st.integers(0, 99), st.integers(0, 9)
)


@given(GROUPS)
def test_a_group_survives_the_way(group: Selection) -> None:
    _, note = unpack(pack({}, pack_selection(group)))
    assert unpack_selection(note) == group


def test_tensors_survive_bit_for_bit_whatever_their_type() -> None:
    tensors = {
        "f": torch.tensor([float("inf"), -0.0, 1e-45]),
        "d": torch.rand(2, 3, dtype=torch.float64),
        "i": torch.tensor(7),
        "b": torch.tensor([True, False]),
        "empty": torch.zeros(0, 4),
    }
    found, note = unpack(pack(tensors, {"text": "ä", "list": [1, None]}))
    assert note == {"text": "ä", "list": [1, None]}
    for name, value in tensors.items():
        assert found[name].dtype == value.dtype
        assert found[name].shape == value.shape
        assert found[name].numpy().tobytes() == value.numpy().tobytes()


def test_asks_and_their_candidates_survive_and_kernel_lists_stay_here() -> None:
    patch = Patch(
        "a", "b", {"w": (torch.tensor([1, 2]), torch.tensor([0.0, 0.5]))}, {}, {"v": torch.ones(3)}, {"sites": {"x": 1}}
    )
    queries = [
        Query((Selection(), Selection("valid")), Statistic("peaks", "all", "conv", "bn")),
        Query((Selection(),), Statistic("moments", patches=(patch, Patch("", "")), norms=("n", "m"))),
    ]
    tensors, notes = pack_queries(queries)
    found = unpack_queries(*unpack(pack(tensors, {"asks": notes}))[:1], unpack(pack({}, {"asks": notes}))[1]["asks"])
    assert found[0] == queries[0]
    again = found[1].statistic.patches[0]
    assert torch.equal(again.scaled["w"][1], patch.scaled["w"][1])
    assert torch.equal(again.replaced["v"], patch.replaced["v"])
    assert found[1].statistic.norms == ("n", "m")
    assert not again.note


def test_observations_survive_and_missing_or_broken_ones_are_refused() -> None:
    queries = [Query((Selection(),), Statistic("right"))]
    seen = Observation({"0": torch.tensor([[3.0]], dtype=torch.float64)}, torch.tensor([5]))
    tensors = pack_observations([[seen]], queries)
    ((found,),) = unpack_observations(unpack(pack(tensors, {}))[0], queries)
    assert float(found.mean("0")) == 0.6
    for bad in (
        {},
        tensors | {"0.0.sums.0": torch.tensor([[float("nan")]])},
        tensors | {"0.0.counts": torch.tensor([-1])},
    ):
        with pytest.raises(BadReply):
            unpack_observations(bad, queries)


def test_bytes_are_those_of_the_arrays_and_a_little_more() -> None:
    record = pack({"weights": torch.zeros(1000)}, {"round": 1})
    assert 4000 < count_bytes(record) < 4000 + 300


def test_a_foreign_record_is_refused() -> None:
    with pytest.raises(BadReply, match="not one of ours"):
        unpack(RecordDict({"tensors": ArrayRecord({"a": Array(torch.zeros(1).numpy())})}))


def test_a_course_survives_the_way_with_its_teachers_and_made_images() -> None:
    teacher = TinyNet()
    noise = made_images(torch.randn(6, 1, 8, 8), torch.tensor([0, 1, 2, 3, 0, 1]), ("a", "b", "c", "d"))
    noise = replace(noise, rows=torch.tensor([4, 1, 2] * 20))
    forget = Selection("train", ForgetRequest.parse("class:3"), seed=4)
    parts = (PlanPart(forget, Target("other", -0.5, "wise", once=True, seed=9), 0.3), PlanPart(given=noise))
    plan = TrainingPlan(
        parts, FitOptions("paired", "frozen", "adam", "imitate", 2.0, 3), {"wise": teacher}, Adapters(("fc",))
    )

    def build(state: Mapping[str, torch.Tensor]) -> TinyNet:
        model = TinyNet()
        model.load_state_dict(state)
        return model

    tensors, note = unpack(pack(*pack_training_plan(plan)))
    found = unpack_training_plan(tensors, note, noise.names, build)
    assert (found.options, found.adapters, found.parts[0]) == (plan.options, plan.adapters, plan.parts[0])
    assert tensors_digest(found.teachers["wise"].state_dict()) == tensors_digest(teacher.state_dict())
    made = found.parts[1].given
    assert made is not None
    assert torch.equal(made.pixels[made.rows], noise.pixels[noise.rows])
    assert torch.equal(made.labels, noise.labels)
    assert made.labels.tolist() == [0, 1, 2] * 20
    assert len(made.pixels) == 3, "an image that is shown twenty times travels once, an unused one never"
