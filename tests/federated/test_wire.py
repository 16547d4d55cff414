from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from flwr.app import Array, ArrayRecord, RecordDict
from hypothesis import given
from hypothesis import strategies as st
from small import TinyNet

from fedortho.data.images import made_images
from fedortho.data.request import ForgetRequest
from fedortho.engines.engine import PlanPart, TrainingPlan
from fedortho.engines.query import Query, Selection, Statistic
from fedortho.errors import FedOrthoError
from fedortho.federated.messages import ModelReply, Observe, TaskInfo, TrainLocal
from fedortho.federated.wire import (
    HEADER,
    LARGEST,
    BadReply,
    count_bytes,
    from_wire,
    pack,
    pack_integers,
    pack_json,
    pack_masks,
    pack_observations,
    pack_queries,
    pack_training_plan,
    to_wire,
    unpack,
    unpack_integers,
    unpack_json,
    unpack_masks,
    unpack_observations,
    unpack_queries,
    unpack_training_plan,
)
from fedortho.models.patch import Patch
from fedortho.statistics.observe import Observation
from fedortho.training.adapters import Adapters
from fedortho.training.objectives import FitOptions, Target
from fedortho.training.recipe import Recipe

TASK = TaskInfo(("a", "b"), (1, 8, 8), (0.5,), (0.25,))
WORDS = st.lists(st.sampled_from(["cat", "3", "Ärger", "a b"]), unique=True).map(tuple)
REQUESTS = st.none() | st.builds(ForgetRequest, WORDS, st.lists(st.integers(0, 9)).map(tuple), st.just(("1/2", "7")))
SELECTIONS = st.builds(
    Selection, st.sampled_from(["train", "valid"]), REQUESTS, REQUESTS, st.integers(0, 99), st.integers(0, 9)
)


@given(SELECTIONS)
def test_a_selection_survives_the_wire(selection: Selection) -> None:
    _, *described = pack_queries([Query((selection,), Statistic("right"))])
    _, order = unpack(pack({}, Observe(TASK, "", *described, 1, 1)), Observe, "a message")
    assert order.queries[0].selections == (selection,)


def test_tensors_survive_bit_for_bit_whatever_their_type() -> None:
    tensors = {
        "f": torch.tensor([float("inf"), -0.0, 1e-45]),
        "d": torch.rand(2, 3, dtype=torch.float64),
        "i": torch.tensor(7),
        "b": torch.tensor([True, False]),
        "empty": torch.zeros(0, 4),
    }
    received, value = unpack_json(pack_json(tensors, {"text": "ä", "list": [1, None]}))
    assert value == {"text": "ä", "list": [1, None]}
    for name, tensor in tensors.items():
        assert received[name].dtype == tensor.dtype
        assert received[name].shape == tensor.shape
        assert received[name].numpy().tobytes() == tensor.numpy().tobytes()


def test_queries_and_their_candidates_survive_and_kernel_lists_stay_here() -> None:
    patch = Patch(
        "a", "b", {"w": (torch.tensor([1, 2]), torch.tensor([0.0, 0.5]))}, {}, {"v": torch.ones(3)}, {"sites": {"x": 1}}
    )
    queries = [
        Query((Selection(), Selection("valid")), Statistic("peaks", "all", "conv", "bn")),
        Query((Selection(),), Statistic("moments", patches=(patch, Patch("", "")), norms=("n", "m"))),
    ]
    tensors, *described = pack_queries(queries)
    received, order = unpack(pack(tensors, Observe(TASK, "d", *described, 3, 5)), Observe, "a message")
    found = unpack_queries(received, order.queries, order.candidates)
    assert found[0] == queries[0]
    candidate = found[1].statistic.patches[0]
    assert torch.equal(candidate.scaled["w"][1], patch.scaled["w"][1])
    assert torch.equal(candidate.replaced["v"], patch.replaced["v"])
    assert found[1].statistic.norms == ("n", "m")
    assert not candidate.note


def test_observations_survive_and_missing_or_broken_ones_are_refused() -> None:
    queries = [Query((Selection(),), Statistic("right"))]
    seen = Observation({"right": torch.tensor([[3.0]], dtype=torch.float64)}, torch.tensor([5]))
    tensors, empty = pack_observations([[seen]], queries)
    assert not empty
    ((found,),) = unpack_observations(unpack_json(pack_json(tensors, {}))[0], queries)
    assert float(found.mean("right")) == 0.6
    for bad in (
        {},
        tensors | {"0.0.sums.0": torch.tensor([[float("nan")]])},
        tensors | {"0.0.counts": torch.tensor([-1])},
    ):
        with pytest.raises(BadReply):
            unpack_observations(bad, queries)


def test_an_observation_of_no_images_has_no_tensors_and_is_told_from_a_missing_one() -> None:
    queries = [Query((Selection(), Selection()), Statistic("right"))]
    seen = Observation({"right": torch.tensor([[3.0]], dtype=torch.float64)}, torch.tensor([5]))
    tensors, empty = pack_observations([[seen - seen, seen]], queries)
    assert empty == ((0, 0),)
    assert tensors.keys() == {"0.1.sums.right", "0.1.counts"}
    ((nothing, found),) = unpack_observations(tensors, queries, empty)
    assert nothing is None
    assert found.images == 5
    with pytest.raises(BadReply, match="counts is missing"):
        unpack_observations(tensors, queries)


def test_sums_over_no_images_are_refused_since_no_bound_on_means_would_hold_them() -> None:
    queries = [Query((Selection(),), Statistic("peaks"))]
    seen = Observation({"bn:c": torch.tensor([[1e9]], dtype=torch.float64)}, torch.tensor([5]))
    tensors, _ = pack_observations([[seen]], queries)
    with pytest.raises(BadReply, match=r"0\.0\.counts is 0"):
        unpack_observations(tensors | {"0.0.counts": torch.tensor([0])}, queries)


@pytest.mark.parametrize(("kind", "bits"), [("peaks", 16), ("moments", 18), ("right", 0)])
def test_sums_of_clients_add_up_to_the_stated_precision_in_any_order(kind: str, bits: int) -> None:
    generator = torch.Generator().manual_seed(0)
    clients = [torch.randn(1, 500, dtype=torch.float64, generator=generator) * 300 for _ in range(7)]
    clients = [each.round().abs() for each in clients] if kind == "right" else clients
    queries = [Query((Selection(),), Statistic(kind))]

    def total(order: Sequence[int]) -> torch.Tensor:
        added = torch.zeros(1, 500, dtype=torch.float64)
        for client in order:
            seen = Observation({"0": clients[client]}, torch.tensor([5000]))
            sent, _ = pack_observations([[seen]], queries)
            assert sent["0.0.sums.0"].dtype == torch.uint8
            ((found,),) = unpack_observations(sent, queries)
            assert found is not None
            added += found.sums["0"]
        return added

    assert torch.equal(total(range(7)), total([4, 2, 6, 0, 5, 1, 3])), "bit for bit"
    error = (total(range(7)) - torch.stack(clients).sum(0)).abs().max()
    assert float(error) <= 7 * 2.0 ** -(bits + 1)


INTEGERS = st.integers(1 - LARGEST, LARGEST - 1) | st.integers(-300, 300)
SHAPES = st.tuples(st.integers(1, 4), st.integers(0, 70))


@given(
    SHAPES.flatmap(
        lambda shape: st.lists(INTEGERS, min_size=shape[0] * shape[1], max_size=shape[0] * shape[1]).map(
            lambda values: torch.tensor(values, dtype=torch.int64).reshape(shape)
        )
    )
)
def test_packed_integers_come_back_and_take_the_bits_of_their_range(whole: torch.Tensor) -> None:
    packed = pack_integers(whole)
    assert torch.equal(unpack_integers(packed, len(whole)), whole)
    bits = max(int(whole.max() - whole.min()).bit_length(), 8) if whole.numel() else 8
    assert len(packed) == HEADER.size + (whole.numel() * bits + 7) // 8


def test_many_packed_integers_come_back() -> None:
    """More than are packed at a time, of odd widths."""
    for bits in (9, 27, 31, 54):
        whole = torch.randint(
            -(2 ** (bits - 1)), 2 ** (bits - 1) - 1, (2, 5000), generator=torch.Generator().manual_seed(bits)
        )
        assert torch.equal(unpack_integers(pack_integers(whole), 2), whole)


@given(st.binary(max_size=40), st.integers(0, 3))
def test_bytes_of_a_stranger_are_refused_or_a_matrix_within_range(data: bytes, rows: int) -> None:
    try:
        whole = unpack_integers(torch.frombuffer(bytearray(data) or bytearray(1), dtype=torch.uint8), rows)
    except BadReply:
        return
    assert len(whole) == rows
    assert bool((whole.abs() < LARGEST).all())
    assert whole.numel() <= 8 * len(data), "no more integers than eight times the bytes that were sent"


@pytest.mark.parametrize(
    ("low", "columns", "bits"),
    [
        (0, 3, 7),
        (0, 3, 55),
        (0, 4, 8),
        (0, 2, 8),
        (LARGEST, 3, 8),
        (-LARGEST, 3, 8),
        (LARGEST - 1, 3, 8),
        (0, 2**32 - 1, 8),
    ],
)
def test_headers_that_lie_are_refused(low: int, columns: int, bits: int) -> None:
    honest = bytes(pack_integers(torch.tensor([[0, 9, 200]])).tolist())
    unpack_integers(torch.frombuffer(bytearray(honest), dtype=torch.uint8), 1)
    forged = bytearray(HEADER.pack(low, columns, bits) + honest[HEADER.size :])
    with pytest.raises(BadReply):
        unpack_integers(torch.frombuffer(forged, dtype=torch.uint8), 1)


def test_sums_beyond_the_wire_are_refused_and_other_types_by_name() -> None:
    with pytest.raises(FedOrthoError, match="beyond the range"):
        to_wire(torch.tensor([[float("inf")]]), "peaks")
    with pytest.raises(BadReply, match="float32, 4 bytes; expected packed integers"):
        from_wire(torch.tensor([[1.0]]), "peaks", 1)
    with pytest.raises(BadReply, match="float64; expected float32"):
        from_wire(torch.tensor([[1.0]], dtype=torch.float64), "fisher", 1)
    queries = [Query((Selection(),), Statistic("peaks"))]
    with pytest.raises(BadReply, match=r"0\.0\.sums\.x is int64"):
        unpack_observations({"0.0.sums.x": torch.tensor([[1]]), "0.0.counts": torch.tensor([1])}, queries)


def test_bytes_are_those_of_the_arrays_and_a_little_more() -> None:
    record = pack({"weights": torch.zeros(1000)}, ModelReply(3, "f" * 64))
    assert 4000 < count_bytes(record) < 4000 + 300


def test_a_foreign_record_is_refused() -> None:
    with pytest.raises(BadReply, match="not a fedortho message"):
        unpack_json(RecordDict({"tensors": ArrayRecord({"a": Array(torch.zeros(1).numpy())})}))


def test_a_training_plan_survives_with_its_teachers_and_generated_images() -> None:
    teacher = TinyNet()
    noise = made_images(torch.randn(6, 1, 8, 8), torch.tensor([0, 1, 2, 3, 0, 1]), ("a", "b", "c", "d"))
    noise = replace(noise, rows=torch.tensor([4, 1, 2] * 20))
    forget = Selection("train", ForgetRequest.parse("class:3"), seed=4)
    parts = (PlanPart(forget, Target("other", -0.5, "wise", once=True, seed=9), 0.3), PlanPart(given=noise))
    plan = TrainingPlan(
        parts, FitOptions("paired", "frozen", "adam", "imitate", 2.0, 3), {"wise": teacher}, Adapters(("fc",))
    )

    tensors, info = pack_training_plan(plan)
    assert not any(name.startswith("teacher") for name in tensors)
    order = TrainLocal(TASK, Recipe(), info, {}, align=True, frozen=("fc.bias",), base="", num_clients=2)
    tensors, order = unpack(pack(tensors, order), TrainLocal, "a message")
    found = unpack_training_plan(tensors, order.plan, noise.names, plan.teachers)
    assert (found.options, found.adapters, found.parts[0]) == (plan.options, plan.adapters, plan.parts[0])
    assert found.teachers["wise"] is teacher
    made = found.parts[1].given
    assert made is not None
    assert torch.equal(made.pixels[made.rows], noise.pixels[noise.rows])
    assert torch.equal(made.labels, noise.labels)
    assert made.labels.tolist() == [0, 1, 2] * 20
    assert len(made.pixels) == 3, "an image that is shown twenty times travels once, an unused one never"


@given(st.integers(1, 5), st.integers(1, 7), st.integers(0, 99))
def test_masks_travel_as_bits(rows: int, columns: int, seed: int) -> None:
    model = torch.nn.Linear(columns, rows)
    generator = torch.Generator().manual_seed(seed)
    masks = {name: torch.rand(p.shape, generator=generator) < 0.5 for name, p in model.named_parameters()}
    packed = pack_masks(masks)
    assert packed["weight"].numel() == -(-rows * columns // 8)
    received = unpack_masks(packed, model)
    assert all(torch.equal(received[name], mask) for name, mask in masks.items())


@pytest.mark.parametrize(
    ("name", "bits", "message"),
    [
        (
            "weight",
            torch.zeros(2, dtype=torch.uint8),
            "the mask of weight is uint8 \\[2\\]; expected 1 bytes, a bit for",
        ),
        ("weight", torch.zeros(1), "the mask of weight is float32"),
        ("other", torch.zeros(1, dtype=torch.uint8), "a mask is of 'other', which is no parameter of the model"),
    ],
)
def test_a_mask_that_is_not_of_the_model_is_refused(name: str, bits: torch.Tensor, message: str) -> None:
    with pytest.raises(FedOrthoError, match=message):
        unpack_masks({name: bits}, torch.nn.Linear(2, 3))
