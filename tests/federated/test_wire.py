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
    pack_asks,
    pack_course,
    pack_group,
    pack_observations,
    unpack,
    unpack_asks,
    unpack_course,
    unpack_group,
    unpack_observations,
)
from fedortho.models.patch import Patch
from fedortho.statistics.observe import Observation
from fedortho.statistics.query import Ask, Group, Probe
from fedortho.statistics.training_plan import Course, Part
from fedortho.storage.files import tensors_digest
from fedortho.training.adapters import Adapters
from fedortho.training.objectives import Aim, Manner

WORDS = st.lists(st.sampled_from(["cat", "3", "Ärger", "a b"]), unique=True).map(tuple)
REQUESTS = st.none() | st.builds(ForgetRequest, WORDS, st.lists(st.integers(0, 9)).map(tuple), st.just(("1/2", "7")))
GROUPS = st.builds(
    Group, st.sampled_from(["train", "valid"]), REQUESTS, REQUESTS, st.integers(0, 99), st.integers(0, 9)
)


@given(GROUPS)
def test_a_group_survives_the_way(group: Group) -> None:
    _, note = unpack(pack({}, pack_group(group)))
    assert unpack_group(note) == group


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
    asks = [
        Ask((Group(), Group("valid")), Probe("peaks", "all", "conv", "bn")),
        Ask((Group(),), Probe("moments", patches=(patch, Patch("", "")), norms=("n", "m"))),
    ]
    tensors, notes = pack_asks(asks)
    found = unpack_asks(*unpack(pack(tensors, {"asks": notes}))[:1], unpack(pack({}, {"asks": notes}))[1]["asks"])
    assert found[0] == asks[0]
    again = found[1].probe.patches[0]
    assert torch.equal(again.scaled["w"][1], patch.scaled["w"][1])
    assert torch.equal(again.replaced["v"], patch.replaced["v"])
    assert found[1].probe.norms == ("n", "m")
    assert not again.note


def test_observations_survive_and_missing_or_broken_ones_are_refused() -> None:
    asks = [Ask((Group(),), Probe("right"))]
    seen = Observation({"0": torch.tensor([[3.0]], dtype=torch.float64)}, torch.tensor([5]))
    tensors = pack_observations([[seen]], asks)
    ((found,),) = unpack_observations(unpack(pack(tensors, {}))[0], asks)
    assert float(found.mean("0")) == 0.6
    for bad in (
        {},
        tensors | {"0.0.sums.0": torch.tensor([[float("nan")]])},
        tensors | {"0.0.counts": torch.tensor([-1])},
    ):
        with pytest.raises(BadReply):
            unpack_observations(bad, asks)


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
    forget = Group("train", ForgetRequest.parse("class:3"), seed=4)
    parts = (Part(forget, Aim("other", -0.5, "wise", once=True, seed=9), 0.3), Part(given=noise))
    course = Course(parts, Manner("paired", "frozen", "adam", "imitate", 2.0, 3), {"wise": teacher}, Adapters(("fc",)))

    def build(state: Mapping[str, torch.Tensor]) -> TinyNet:
        model = TinyNet()
        model.load_state_dict(state)
        return model

    tensors, note = unpack(pack(*pack_course(course)))
    found = unpack_course(tensors, note, noise.names, build)
    assert (found.manner, found.adapters, found.parts[0]) == (course.manner, course.adapters, course.parts[0])
    assert tensors_digest(found.teachers["wise"].state_dict()) == tensors_digest(teacher.state_dict())
    made = found.parts[1].given
    assert made is not None
    assert torch.equal(made.pixels[made.rows], noise.pixels[noise.rows])
    assert torch.equal(made.labels, noise.labels)
    assert made.labels.tolist() == [0, 1, 2] * 20
    assert len(made.pixels) == 3, "an image that is shown twenty times travels once, an unused one never"
