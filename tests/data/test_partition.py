"""Every scheme deals every image once, keeps the minimum, and repeats itself for a seed."""

import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedortho.data.partition import EXAMPLES, SCHEMES, partition
from fedortho.errors import BadSetting, UnknownName


def labels_of(number: int, classes: int = 10) -> Tensor:
    return torch.arange(number) % classes


def classes_held(labels: Tensor, parts: list[Tensor]) -> list[int]:
    return [len(labels[part].unique()) for part in parts]


@settings(deadline=None, max_examples=80)
@given(
    labels=st.lists(st.integers(0, 6), min_size=1, max_size=120),
    clients=st.integers(1, 20),
    minimum=st.integers(0, 8),
    scheme=st.sampled_from(["iid", "dirichlet:0.01", "dirichlet:0.5", "dirichlet:100", "shards:1", "shards:3"]),
    seed=st.integers(0, 1000),
)
def test_each_position_is_dealt_once_and_minimum_is_kept_or_refused(
    labels: list[int], clients: int, minimum: int, scheme: str, seed: int
) -> None:
    shards = int(scheme[-1]) if scheme.startswith("shards") else 0
    if clients * max(minimum, shards) > len(labels):
        with pytest.raises(BadSetting, match="images cannot"):
            partition(torch.tensor(labels), clients, scheme, seed=seed, minimum=minimum)
        return
    parts = partition(torch.tensor(labels), clients, scheme, seed=seed, minimum=minimum)
    assert len(parts) == clients
    assert sorted(torch.cat(parts).tolist()) == list(range(len(labels)))
    for part in parts:
        assert part.dtype == torch.int64
        assert part.tolist() == sorted(part.tolist())
        assert len(part) >= minimum


@pytest.mark.parametrize("scheme", EXAMPLES)
def test_a_seed_decides_everything(scheme: str) -> None:
    labels = labels_of(500)
    first, again = (partition(labels, 7, scheme, seed=3) for _ in range(2))
    other = partition(labels, 7, scheme, seed=4)
    assert all(torch.equal(one, two) for one, two in zip(first, again, strict=True))
    assert any(not torch.equal(one, two) for one, two in zip(first, other, strict=True))


@pytest.mark.parametrize("minimum", [1, 50])
@pytest.mark.parametrize("scheme", [*EXAMPLES, "dirichlet:0.001"])
def test_a_thousand_clients_take_under_two_seconds(scheme: str, minimum: int) -> None:
    start = time.perf_counter()
    parts = partition(labels_of(50_000), 1000, scheme, seed=0, minimum=minimum)
    assert time.perf_counter() - start < 2
    assert min(map(len, parts)) >= minimum


def test_iid_sizes_differ_by_at_most_one_and_mix_the_classes() -> None:
    labels = labels_of(1003)
    parts = partition(labels, 10, "iid", seed=0)
    assert {len(part) for part in parts} == {100, 101}
    assert min(classes_held(labels, parts)) >= 8


def test_a_smaller_beta_gives_clients_fewer_classes() -> None:
    labels = labels_of(2000)
    shares = []
    for beta in ("0.05", "0.5", "1000"):
        parts = partition(labels, 10, f"dirichlet:{beta}", seed=0)
        shares.append(sum(float(labels[part].bincount().max()) / len(part) for part in parts) / len(parts))
    assert shares[0] > 0.5 > shares[1] > shares[2]
    assert shares[2] == pytest.approx(0.1, abs=0.02)


def test_dirichlet_proportions_average_to_equal_shares() -> None:
    labels = torch.zeros(30, dtype=torch.int64)
    sizes = torch.tensor(
        [[len(part) for part in partition(labels, 3, "dirichlet:1", seed=s, minimum=0)] for s in range(400)]
    )
    assert sizes.float().mean(0).tolist() == pytest.approx([10, 10, 10], abs=1.2)


def test_shards_give_each_client_few_labels_and_equal_sizes() -> None:
    labels = labels_of(1000)
    parts = partition(labels, 10, "shards:2", seed=0)
    assert {len(part) for part in parts} == {100}
    assert max(classes_held(labels, parts)) == 2
    assert sum(classes_held(labels, partition(labels, 10, "shards:1", seed=0))) == 10


def test_images_move_to_poor_clients_only_as_far_as_needed() -> None:
    labels = torch.zeros(100, dtype=torch.int64)
    parts = partition(labels, 5, "dirichlet:1e-9", seed=0, minimum=4)  # one client draws everything
    assert sorted(map(len, parts)) == [4, 4, 4, 4, 84]


@pytest.mark.parametrize(
    ("scheme", "message"),
    [
        ("dirichlet:0", "beta must be above 0"),
        ("dirichlet:-1", "beta must be above 0"),
        ("dirichlet:nan", "beta must be above 0"),
        ("dirichlet:inf", "beta must be above 0"),
        ("dirichlet", "could not convert"),
        ("dirichlet:much", "could not convert"),
        ("shards:0", "at least 1 shard"),
        ("shards:1.5", "invalid literal"),
        ("iid:3", "takes no number"),
    ],
)
def test_a_bad_number_is_refused_with_examples(scheme: str, message: str) -> None:
    with pytest.raises(BadSetting, match=rf"no partition '{scheme}': .*{message}.*write it like iid, dirichlet:0.3"):
        partition(labels_of(50), 2, scheme, seed=0)


def test_an_unknown_scheme_is_met_with_the_choices() -> None:
    with pytest.raises(UnknownName, match=r"no partition 'dirichelet:0\.3'; did you mean 'dirichlet:0\.3'"):
        partition(labels_of(50), 2, "dirichelet:0.3", seed=0)
    assert {example.split(":")[0] for example in EXAMPLES} == set(SCHEMES)


@pytest.mark.parametrize(
    ("clients", "minimum", "scheme", "message"),
    [
        (0, 1, "iid", "at least 1 client, not 0"),
        (51, 1, "iid", "50 images cannot give each of 51 clients at least 1; ask for at most 50 clients"),
        (10, 6, "dirichlet:0.3", "each of 10 clients at least 6; ask for at most 8 clients"),
        (2, -1, "iid", "must be 0 or more, not -1"),
        (20, 1, "shards:3", "50 images cannot be cut into 20 x 3 shards"),
    ],
)
def test_impossible_numbers_are_refused(clients: int, minimum: int, scheme: str, message: str) -> None:
    with pytest.raises(BadSetting, match=message):
        partition(labels_of(50), clients, scheme, seed=0, minimum=minimum)
