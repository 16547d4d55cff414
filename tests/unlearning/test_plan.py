"""The whole way from a trained network and a request to a forgetting one, on real digits."""

import logging
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fedortho.data.images import Dataset
from fedortho.data.request import ForgetRequest
from fedortho.engines.central import CentralEngine, central_engine
from fedortho.errors import BadData, BadSetting, UnknownName
from fedortho.methods import forget, make_method
from fedortho.methods.hide import Hide
from fedortho.methods.paper import Paper
from fedortho.models.predictions import evaluate
from fedortho.models.sites import find_sites
from fedortho.statistics.observe import Observation, observe
from fedortho.storage.files import tensors_digest
from fedortho.unlearning.calibrate import Refused, Unmeasured

MODELS = ("vgg-mini", "resnet-mini")
PAPER = Hide(
    edit="conv", tap="conv", spread="equal", ratio=0.01, alpha=0.5, weighting="paper", repair=False, scrub=False
)


def accuracies(model: nn.Module, digits: Dataset, label: int) -> tuple[float, float]:
    table = torch.tensor(evaluate(model, digits.test).confusion)
    kept = [row for row in range(10) if row != label]
    return float(table[label, label] / table[label].sum()), float(table[kept][:, kept].trace() / table[kept].sum())


def ledger_of(model: nn.Module, digits: Dataset, tap: str, layers: str = "deep") -> Observation:
    taps = [(site, tap) for site in find_sites(model, (1, 8, 8), layers, "channel", tap)]
    return observe(model, digits.train, taps, classes=10)


@pytest.mark.parametrize("name", MODELS)
def test_hide_forgets_a_class_keeps_the_rest_and_leaves_its_input(
    digits: Dataset, digit_nets: dict[str, nn.Module], name: str
) -> None:
    model = digit_nets[name]
    before = tensors_digest(model.state_dict())
    original = accuracies(model, digits, 3)
    forgot = forget(model, digits, "class:3", Hide(max_retain_drop=0.02)).model
    gone, kept = accuracies(forgot, digits, 3)
    assert tensors_digest(model.state_dict()) == before
    assert original[0] > 0.8
    assert gone <= 0.06, "at most 2 of 37 images"
    assert original[1] - 0.06 < kept <= 1.0


def test_the_same_request_gives_the_same_patch(digits: Dataset, digit_nets: dict[str, nn.Module]) -> None:
    request, settings = ForgetRequest.parse("class:7"), Hide(max_retain_drop=0.03)
    first, again = (settings.plan(digit_nets["vgg-mini"], CentralEngine(digits), request) for _ in range(2))
    assert first.patch.after == again.patch.after
    assert first.chosen is not None
    assert first.chosen.reaches


@pytest.mark.parametrize("name", MODELS)
def test_a_ledger_serves_a_class_without_reading_an_image_and_gives_the_same_patch(
    digits: Dataset, digit_nets: dict[str, nn.Module], name: str
) -> None:
    model, request = digit_nets[name], ForgetRequest.parse("class:5")
    settings = Hide(ratio=0.2, repair=False)
    with_it = settings.plan(model, central_engine(model, digits, ledger_of(model, digits, "stream")), request)
    without = settings.plan(model, CentralEngine(digits), request)
    assert with_it.images_read["statistics"] == 0
    assert without.images_read["statistics"] == len(digits.train)
    assert with_it.patch.after == without.patch.after


def test_a_ledger_makes_a_sample_request_read_the_named_samples_only(
    digits: Dataset, digit_nets: dict[str, nn.Module]
) -> None:
    model = digit_nets["vgg-mini"]
    rows = digits.train.rows[:40].tolist()
    request = ForgetRequest(samples=tuple(map(str, rows)))
    settings = Hide(ratio=0.05, repair=False)
    for contrast in ("retain", "same-class"):
        chosen = replace(settings, contrast=contrast)
        with_it = chosen.plan(model, central_engine(model, digits, ledger_of(model, digits, "stream")), request)
        without = chosen.plan(model, CentralEngine(digits), request)
        assert with_it.images_read["statistics"] == 40
        assert with_it.patch.after == without.patch.after


def test_a_sample_request_aims_at_held_out_accuracy_and_not_at_nothing(
    digits: Dataset, digit_nets: dict[str, nn.Module]
) -> None:
    rows = digits.train.rows[:30].tolist()
    request = ForgetRequest(samples=tuple(map(str, rows)))
    outcome = Hide(max_retain_drop=0.3, anyway=True).plan(digit_nets["vgg-mini"], CentralEngine(digits), request)
    assert outcome.chosen is not None
    assert outcome.chosen.limit > 0.7
    assert outcome.chosen.reaches
    assert outcome.patch.names(), "something was edited"


def test_samples_within_their_limit_before_any_edit_are_not_edited_unless_asked(
    digits: Dataset, digit_nets: dict[str, nn.Module]
) -> None:
    model, rows = digit_nets["vgg-mini"], digits.train.rows[:30]
    request, engine = ForgetRequest(samples=tuple(map(str, rows.tolist()))), CentralEngine(digits)
    before = evaluate(model, digits.train.subset(range(30))).accuracy
    with pytest.raises(Unmeasured, match=rf"forget accuracy is {before:.1%} .*\(unseen images .* a lenient estimate\)"):
        Hide().plan(model, engine, request)
    with pytest.raises(
        Unmeasured, match=rf"within the limit of {before:.1%} \(models without it\); nothing was changed"
    ):
        Hide(limit=before).plan(model, engine, request)
    chosen = Hide(limit=before - 0.02, max_retain_drop=0.3).plan(model, engine, request).chosen
    assert chosen is not None, "above the limit there is something to forget"
    assert chosen.forget <= chosen.limit == before - 0.02


def test_a_limit_is_not_for_classes(digits: Dataset, digit_nets: dict[str, nn.Module]) -> None:
    chosen = (
        Hide(limit=0.9, max_retain_drop=0.3)
        .plan(digit_nets["vgg-mini"], CentralEngine(digits), ForgetRequest.parse("class:3"))
        .chosen
    )
    assert chosen is not None
    assert chosen.limit == 0.01


def test_several_classes_at_once_are_all_forgotten(digits: Dataset, digit_nets: dict[str, nn.Module]) -> None:
    forgot = forget(digit_nets["vgg-mini"], digits, "class:1,8", Hide(max_retain_drop=0.1)).model
    assert max(accuracies(forgot, digits, label)[0] for label in (1, 8)) <= 0.06


def test_a_sequence_of_requests_forgets_all_of_them(digits: Dataset, digit_nets: dict[str, nn.Module]) -> None:
    model, done = digit_nets["vgg-mini"], None
    for text in ("class:2", "class:6"):
        request = ForgetRequest.parse(text)
        outcome = Hide(max_retain_drop=0.1).plan(model, CentralEngine(digits), request, done)
        model = outcome.patch.apply(model)
        done = request if done is None else done + request
    assert max(accuracies(model, digits, label)[0] for label in (2, 6)) <= 0.08
    with pytest.raises(Exception, match="selects none"):
        Hide().plan(model, CentralEngine(digits), ForgetRequest.parse("class:2"), done)


def test_paper_edits_conv_weights_only_and_warns(
    digits: Dataset, digit_nets: dict[str, nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    model = digit_nets["vgg-mini"]
    with caplog.at_level(logging.WARNING):
        outcome = Paper().plan(model, CentralEngine(digits), ForgetRequest.parse("class:0"))
    assert outcome.patch.names() == sorted(f"features.{n}.weight" for n in (15, 18, 21, 24))
    assert all(len(found["kernels"]) == 2 for found in outcome.patch.note["sites"].values())
    assert [f for found in outcome.patch.note["sites"].values() for f in found["factors"]] == [0.5] * 8
    assert "undoes a conv edit" in caplog.text


def test_repairing_a_conv_edit_is_refused_and_silencing_is_not(
    digits: Dataset, digit_nets: dict[str, nn.Module]
) -> None:
    model, request = digit_nets["vgg-mini"], ForgetRequest.parse("class:0")
    with pytest.raises(BadSetting, match=r"repair undoes a conv edit before batch norm .*--no-repair or --alpha 1"):
        replace(PAPER, repair=True).plan(model, CentralEngine(digits), request)
    replace(PAPER, repair=True, alpha=1.0).plan(model, CentralEngine(digits), request)


def test_kernels_that_respond_more_to_what_stays_are_counted_told_and_can_be_spared(
    digits: Dataset, digit_nets: dict[str, nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    model, request = digit_nets["vgg-mini"], ForgetRequest.parse("class:0")
    with caplog.at_level(logging.WARNING):
        all_of_them = Paper(ratio=1.0).plan(model, CentralEngine(digits), request)
        spared = Paper(ratio=1.0, min_difference=1e-9).plan(model, CentralEngine(digits), request)
    numbers = [sum(len(found["kernels"]) for found in o.patch.note["sites"].values()) for o in (all_of_them, spared)]
    assert all_of_them.opposed == numbers[0] - numbers[1] > 0
    assert spared.opposed == 0
    assert caplog.text.count("at least as strongly to the retain set") == 1


def test_a_target_for_samples_is_refused(digits: Dataset, digit_nets: dict[str, nn.Module]) -> None:
    request = ForgetRequest(samples=tuple(map(str, digits.train.rows[:2].tolist())))
    with pytest.raises(BadSetting, match=r"target 0.5 is for classes; samples requests aim at what unseen images"):
        Hide(target=0.5).plan(digit_nets["vgg-mini"], CentralEngine(digits), request)


def test_the_ledger_of_another_model_is_refused(digits: Dataset, digit_nets: dict[str, nn.Module]) -> None:
    foreign = ledger_of(digit_nets["resnet-mini"], digits, "stream")
    with pytest.raises(BadData, match="ledger is that of another model"):
        Hide().plan(
            digit_nets["vgg-mini"],
            central_engine(digit_nets["vgg-mini"], digits, foreign),
            ForgetRequest.parse("class:0"),
        )


def test_a_subsample_is_seeded_and_its_agreement_with_the_ledger_is_told(
    digits: Dataset, digit_nets: dict[str, nn.Module]
) -> None:
    model, request = digit_nets["vgg-mini"], ForgetRequest.parse("class:4")
    settings = Hide(ratio=0.1, repair=False, statistics_images=60)
    outcomes = [
        settings.plan(model, central_engine(model, digits, ledger_of(model, digits, "stream")), request)
        for _ in range(2)
    ]
    assert outcomes[0].patch.after == outcomes[1].patch.after
    assert 100 < outcomes[0].images_read["statistics"] <= 120
    assert outcomes[0].sample_correlation is not None
    assert 0.5 < outcomes[0].sample_correlation < 1


def test_what_cannot_be_had_is_refused_and_shows_its_frontier(
    digits: Dataset, digit_nets: dict[str, nn.Module]
) -> None:
    with pytest.raises(Refused, match="cannot both be had") as refusal:
        Hide(target=0.0, max_retain_drop=0.0, scrub=False, layers="features.0").plan(  # all classes need these kernels
            digit_nets["vgg-mini"], CentralEngine(digits), ForgetRequest.parse("class:3")
        )
    assert refusal.value.frontier


@pytest.mark.parametrize("name", MODELS)
def test_paper_is_the_edit_of_hide_with_everything_added_since_switched_off(
    digits: Dataset, digit_nets: dict[str, nn.Module], name: str
) -> None:
    model, request = digit_nets[name], ForgetRequest.parse("class:0")
    printed, hidden = (
        method.plan(model, CentralEngine(digits), request).patch
        for method in (Paper(ratio=0.2), replace(PAPER, ratio=0.2))
    )
    assert printed.after == hidden.after != printed.before
    with pytest.raises(BadSetting, match="ratio"):
        Paper(ratio=0.0)


def test_settings_out_of_range_are_refused() -> None:
    with pytest.raises(UnknownName, match="did you mean 'hide'"):
        make_method("hides")
    with pytest.raises(BadSetting, match="target must be at least 0 and at most 1"):
        Hide(target=2)
    with pytest.raises(BadSetting, match="rank-base must be at least 0 and at most 1"):
        Hide(rank_base=2)


def test_a_loader_of_ones_own_serves_a_class_request(digits: Dataset, digit_nets: dict[str, nn.Module]) -> None:
    train = digits.train
    pairs = TensorDataset(train.normalise(train.pixels[train.rows]), train.labels)
    forgot = forget(
        digit_nets["vgg-mini"], DataLoader(pairs, batch_size=100), "class:3", Hide(max_retain_drop=0.05)
    ).model
    gone, kept = accuracies(forgot, digits, 3)
    assert gone <= 0.05
    assert kept > 0.8
    with pytest.raises(BadData, match="can be read only once"):
        forget(digit_nets["vgg-mini"], iter([(torch.zeros(1, 1, 8, 8), torch.zeros(1))]), "class:3")
    with pytest.raises(BadData, match="must give batches"):
        forget(digit_nets["vgg-mini"], [torch.zeros(1, 1, 8, 8)], "class:3")  # type: ignore[list-item]
