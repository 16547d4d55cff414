"""A tail that is reset shows what the layers before it know."""

import copy

import pytest
import torch
from torch import nn
from worlds import World

from fedortho.audits import reset_tail, result
from fedortho.audits.reset_tail import MeasurementCache, balanced_rows, recall_at_false_alarms
from fedortho.audits.result import Attack, Limit
from fedortho.evaluation.case import Case
from fedortho.models.graph import stage_entries
from fedortho.models.split import Split, Tail, entry_inputs, split_before
from fedortho.models.zoo import build_model

ENTRY = "features.11"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """One entry, number of images and tail, as in test_audits.py: the attack is shown, not its precision."""
    monkeypatch.setattr(reset_tail, "TAILS", 1)
    monkeypatch.setattr(reset_tail, "SAMPLES", (50,))
    monkeypatch.setattr(reset_tail, "stage_entries", lambda *_: [ENTRY])
    for name in ("LIMIT", "LAST_LIMIT"):
        monkeypatch.setattr(reset_tail, name, Limit("reset tail", 0.06))  # small networks know less of a coat
    monkeypatch.setattr(result, "ONE_REFERENCE", 0.0)


def attack(world: World, unlearned: nn.Module) -> Attack:
    return reset_tail.reset_tail(world.case(unlearned), world.cache)


def test_the_original_fails_and_a_retrained_network_passes(world: World) -> None:
    knows, never = attack(world, world.original), attack(world, world.references[2])
    assert knows.fails
    assert knows.details["erased_behind"] == ENTRY
    assert f"a new tail behind {ENTRY}, trained on 50 forgotten images, recalls" in knows.finding
    assert never.has_power
    assert not never.fails, never.finding


def test_a_retrained_tail_does_not_hide_what_the_layers_before_it_know(world: World) -> None:
    mixed = copy.deepcopy(world.references[2])
    for mine, theirs in zip(mixed.features[:11], world.original.features[:11], strict=True):
        mine.load_state_dict(theirs.state_dict())
    found = attack(world, mixed)
    assert found.fails
    assert found.measured["unlearned"] == found.measured["original"], "all that is left of the model is the prefix"


def test_a_reference_that_does_not_arrive_leaves_it_undecided(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reset_tail, "STEPS", 1)
    monkeypatch.setattr(reset_tail, "MOST_STEPS", 2)
    monkeypatch.setattr(reset_tail, "ARRIVED", 1.01)
    found = attack(world, world.original)
    assert found.is_undecided
    assert not found.fails
    assert f"behind {ENTRY} no reset tail decides: the reference model does not learn" in found.finding


def test_the_gap_furthest_beyond_the_limit_of_its_entry_decides(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reset_tail, "stage_entries", lambda *_: ["features.4", ENTRY])
    monkeypatch.setattr(reset_tail, "LAST_LIMIT", Limit("last reset tail", 0.11))
    gaps = {"features.4": 0.08, ENTRY: 0.1}

    def trials(case: Case, cache: MeasurementCache, role: str, split: Split, steps: int) -> dict[int, object]:
        above = {"unlearned": gaps[str(split.entry)], "original": 0.4, "reference": 0.0}[role]
        return {50: reset_tail.TailTrial(0.5 + above, 1.0)}

    monkeypatch.setattr(reset_tail, "trials_of", trials)
    found = attack(world, world.references[2])
    assert found.fails
    assert (found.details["entry"], found.details["erased_behind"]) == ("features.4", "features.4")
    assert (found.limit.name, found.value) == ("reset tail", pytest.approx(0.08))
    gaps["features.4"] = 0.05
    assert not attack(world, world.references[2]).fails, "10 points, where retrained networks differ by 11"


def test_steps_are_doubled_until_the_reference_arrives(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def trials(case: Case, cache: MeasurementCache, role: str, split: Split, steps: int) -> dict[int, object]:
        tried.append(steps)
        return {50: reset_tail.TailTrial(0.5, 0.9 if steps >= 100 else 0.4)}

    monkeypatch.setattr(reset_tail, "trials_of", trials)
    found = attack(world, world.references[2])
    assert tried[:2] == [50, 100]
    assert set(tried[2:]) == {100}, "all models get the steps of the reference"
    assert found.details["steps"] == {ENTRY: 100}


@pytest.mark.parametrize("name", ["vgg-mini", "resnet-mini"])
def test_a_tail_answers_as_the_network_does_at_every_entry(name: str) -> None:
    model, images = build_model(name, num_classes=10, channels=1).eval(), torch.rand(3, 1, 16, 16)
    for entry in stage_entries(model, (1, 16, 16)):
        split = split_before(model, entry, images)
        assert split.entry is not None
        with torch.no_grad():
            tail = Tail(model, split)(entry_inputs(model, split, images))
            assert torch.allclose(tail, model(images), atol=1e-5)


def test_a_bias_of_the_tail_changes_no_recall(world: World) -> None:
    case = world.case(world.original)
    generator = torch.Generator().manual_seed(0)
    forget, retain = torch.randn(200, 10, generator=generator), torch.randn(400, 10, generator=generator)
    labels = torch.full((200,), case.data.train.names.index("Coat"))
    forget[:, labels[0]] += 2
    found = recall_at_false_alarms(case, forget, retain, labels)
    assert 0.05 < found < 0.95
    shift = 7.0 * (torch.arange(10) == labels[0])
    assert recall_at_false_alarms(case, forget + shift, retain + shift, labels) == found


def test_every_label_is_drawn_equally_often() -> None:
    labels = torch.tensor([0] * 50 + [1] * 5 + [2] * 20)
    rows = balanced_rows(labels, torch.arange(60), 30)
    assert torch.bincount(labels[rows]).tolist() == [10, 10, 10]
    assert set(rows[labels[rows] == 2].tolist()) == set(range(55, 60)), "only what is known"


def test_a_network_that_cannot_be_split_there_is_undecided(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reset_tail, "split_before", lambda *_: Split(None))
    found = attack(world, world.original)
    assert found.is_undecided
    assert not found.fails
    assert "cannot be split there" in found.finding
    monkeypatch.setattr(reset_tail, "stage_entries", lambda *_: [])
    single = attack(world, world.original)
    assert not single.is_undecided
    assert not single.has_power, "a network of one stage has nothing to reset, and that shows nothing"


def test_near_the_limit_one_reference_is_too_few(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(result, "ONE_REFERENCE", 0.03)
    shares = {"unlearned": 0.58, "original": 0.9, "reference": 0.5}
    trials = {role: {50: reset_tail.TailTrial(share, 1.0)} for role, share in shares.items()}
    monkeypatch.setattr(reset_tail, "trials_of", lambda case, cache, role, *_: trials[role])
    found = reset_tail.reset_tail(world.case(world.original), world.cache)
    assert found.is_undecided
    assert not found.fails, "8 points, where the limit is 6"
    assert "one reference model is too few to decide: give three" in found.finding
    trials["unlearned"] = {50: reset_tail.TailTrial(0.7, 1.0)}
    assert reset_tail.reset_tail(world.case(world.original), world.cache).fails
