"""What a ledger keeps beside sums, and what becomes of it when the model is edited."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from fedortho.data.images import Dataset
from fedortho.data.request import ForgetRequest
from fedortho.engines.central import CentralEngine, central_engine
from fedortho.methods.hide import Hide
from fedortho.models.patch import Patch, edit_model
from fedortho.models.predictions import evaluate
from fedortho.statistics.ledger import forget_lines, ledger_taps, load_ledger, rebind_ledger, write_ledger
from fedortho.statistics.observe import Observation, key_of, observe
from fedortho.unlearning.rank import rank_correlation, rank_kernels

MODELS = ("vgg-mini", "resnet-mini")
SHAPE = (1, 8, 8)


@pytest.fixture(scope="module")
def ledgers(
    digits: Dataset, digit_nets: dict[str, nn.Module], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Observation]:
    found = {}
    for name in MODELS:
        path: Path = tmp_path_factory.mktemp("ledgers") / f"{name}.safetensors"
        assert write_ledger(path, digit_nets[name], digits.train, valid=digits.valid)
        ledger = load_ledger(path, digit_nets[name])
        assert ledger is not None
        found[name] = ledger
    return found


@pytest.mark.parametrize("name", MODELS)
def test_a_given_ratio_is_repaired_on_kept_activations_without_an_image(
    digits: Dataset, digit_nets: dict[str, nn.Module], ledgers: dict[str, Observation], name: str
) -> None:
    model, request, settings = digit_nets[name], ForgetRequest.parse("class:5"), Hide(ratio=0.1)
    kept = settings.plan(model, central_engine(model, digits, ledgers[name]), request)
    read = settings.plan(model, CentralEngine(digits), request)
    assert sum(kept.images_read.values()) == 0 < sum(read.images_read.values())
    assert kept.patch.note["sites"] == read.patch.note["sites"]
    for tensor in kept.patch.replaced:
        assert torch.allclose(kept.patch.replaced[tensor], read.patch.replaced[tensor], rtol=0.02, atol=0.02)


def test_trials_with_kept_activations_read_images_of_the_class_alone(
    digits: Dataset, digit_nets: dict[str, nn.Module], ledgers: dict[str, Observation]
) -> None:
    model, request = digit_nets["vgg-mini"], ForgetRequest.parse("class:5")
    found = Hide(max_retain_drop=0.05).plan(model, central_engine(model, digits, ledgers["vgg-mini"]), request)
    assert len(found.trials) > 0
    assert sum(found.images_read.values()) <= int((digits.train.labels == 5).sum())


@pytest.mark.parametrize("name", MODELS)
def test_the_ledger_of_an_edited_model_ranks_as_observing_it_anew(
    digits: Dataset, digit_nets: dict[str, nn.Module], ledgers: dict[str, Observation], name: str
) -> None:
    model, request = digit_nets[name], ForgetRequest.parse("class:5")
    edited = edit_model(model, Hide(ratio=0.1).plan(model, CentralEngine(digits), request).patch)
    stays = request.split(digits.train)[1]
    moved = forget_lines(rebind_ledger(ledgers[name], model, edited, digits.train), stays)
    anew = observe(edited, stays, ledger_taps(model, SHAPE), classes=10)
    assert not moved.stale
    sites = {site.name: key_of(site, "stream") for site, tap in ledger_taps(model, SHAPE) if tap in ("relu", "stream")}

    def ranking(ledger: Observation, old: bool = False) -> object:
        others = [label for label in range(10) if label not in (3, 5)]
        return rank_kernels(ledger.only([3]), ledger.only(others), sites)

    agreement = rank_correlation(ranking(moved), ranking(anew))
    before = rank_correlation(ranking(ledgers[name]), ranking(anew))
    assert agreement > max(before, 0.97)
    assert moved.kept is not None
    assert not bool((moved.kept.labels == 5).any()), "neither training nor validation images of the class"
    valid = moved.kept.where(~moved.kept.training)
    whole = digits.valid.subset(torch.isin(digits.valid.rows, valid.rows))
    assert abs(float(valid.right.float().mean()) - evaluate(edited, whole).accuracy) < 0.02


@pytest.mark.parametrize("name", MODELS)
def test_the_ledger_of_an_edited_model_says_nothing_of_silenced_kernels_that_no_image_gives(
    digits: Dataset, digit_nets: dict[str, nn.Module], ledgers: dict[str, Observation], name: str
) -> None:
    model = digit_nets[name]
    edited = edit_model(model, Hide(ratio=0.1).plan(model, CentralEngine(digits), ForgetRequest.parse("class:5")).patch)
    moved = rebind_ledger(ledgers[name], model, edited, digits.train)
    anew = observe(edited, digits.train, ledger_taps(model, SHAPE), classes=10)
    silent = {key: (sums == 0).all(0) for key, sums in anew.sums.items() if key.startswith(("relu:", "stream:"))}
    assert sum(int(each.sum()) for each in silent.values()) > 0
    for key, is_silent in silent.items():
        assert not moved.sums[key][:, is_silent].any()
        assert bool((moved.sums[key] >= 0).all()), "a rectifier gives nothing below 0"


def test_an_edit_before_the_split_drops_the_activations(
    digits: Dataset, digit_nets: dict[str, nn.Module], ledgers: dict[str, Observation]
) -> None:
    model = digit_nets["vgg-mini"]
    first = next(name for name, _ in model.named_parameters())
    edited = edit_model(model, Patch("", "", replaced={first: 2 * model.get_parameter(first).detach()}))
    moved = rebind_ledger(ledgers["vgg-mini"], model, edited, digits.train)
    assert moved.stale
    assert moved.kept is not None
    assert not len(moved.kept.rows)


def test_samples_that_are_forgotten_are_dropped(digits: Dataset, ledgers: dict[str, Observation]) -> None:
    kept = ledgers["vgg-mini"].kept
    assert kept is not None
    gone = kept.rows[kept.training][:7]
    left = forget_lines(ledgers["vgg-mini"], digits.train.subset(~torch.isin(digits.train.rows, gone))).kept
    assert left is not None
    assert len(left.rows) == len(kept.rows) - 7
    assert not bool(torch.isin(gone, left.rows).any())


def test_classes_that_earlier_requests_removed_are_held_down(digits: Dataset, digit_nets: dict[str, nn.Module]) -> None:
    model, first = digit_nets["vgg-mini"], ForgetRequest.parse("class:2")
    patch = (
        Hide(ratio=0.01, repair=False).plan(model, CentralEngine(digits), ForgetRequest.parse("class:6"), first).patch
    )
    table = torch.tensor(evaluate(edit_model(model, patch), digits.test).confusion)
    assert int(table[:, 2].sum()) == 0, "class 2 is never the answer, though nothing else was edited for it"
    assert int(torch.tensor(evaluate(model, digits.test).confusion)[:, 2].sum()) > 0
    again = (
        replace(Hide(ratio=0.01, repair=False)).plan(model, CentralEngine(digits), ForgetRequest.parse("class:6")).patch
    )
    assert not again.replaced, "without earlier requests the classifier stays"
