import itertools
import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fedortho.audits import AUDITS
from fedortho.audits.membership import MEMBERSHIP
from fedortho.audits.result import AuditResult
from fedortho.data.images import Dataset, images_from_tensors, make_dataset
from fedortho.data.request import ForgetRequest
from fedortho.evaluation.case import Case
from fedortho.evaluation.shadows import ShadowPlan, ShadowSettings
from fedortho.training.loop import fit
from fedortho.training.recipe import Recipe

RECIPE = Recipe(epochs=25, batch_size=20, lr=0.05, ortho=0.0, crop=0, flip=0.0, weight_decay=0.0)
SETTINGS = ShadowSettings(models=8, images=120, targets=60, recipe=RECIPE)
SEEDS = itertools.count(500)


class OneKernel(nn.Module):
    """A convolution as large as the image: learns noise by heart."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 48, 8)
        self.fc = nn.Linear(48, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.conv(x).flatten(1).relu())


def build(seed: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return OneKernel()


def nothing(model: nn.Module, data: Dataset, request: ForgetRequest, epochs: Path | None) -> nn.Module:
    return model


def retrain(model: nn.Module, data: Dataset, request: ForgetRequest, epochs: Path | None) -> nn.Module:
    seed = next(SEEDS)
    return fit(build(seed), request.split(data.train)[1], replace(RECIPE, seed=seed))


@pytest.fixture(scope="module")
def noise() -> Dataset:
    """Images whose labels can only be learnt by heart."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (200, 1, 8, 8), dtype=torch.uint8, generator=generator)
    labels = torch.arange(200) % 4
    images = images_from_tensors(pixels, labels)
    return make_dataset(images.subset(range(140)), images.subset(range(140, 200)), valid=0.1)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shadows")


def audited(case: Case, plan: ShadowPlan) -> AuditResult:
    return MEMBERSHIP(replace(case, shadows=plan), budget="full")


@cache
def trained(data: Dataset) -> nn.Module:
    return fit(build(1), data.train, RECIPE)


def case_of(data: Dataset, request: str) -> Case:
    original = trained(data)
    return Case(original, original, (), data, ForgetRequest.parse(request))


def samples(data: Dataset) -> str:
    return "samples:" + ",".join(map(str, data.train.rows[:60].tolist()))


@pytest.fixture(scope="module")
def idle(noise: Dataset, place: Path) -> AuditResult:
    """Nothing was unlearned."""
    return audited(case_of(noise, samples(noise)), ShadowPlan(nothing, place, SETTINGS))


def test_unlearning_that_does_nothing_is_detected(idle: AuditResult) -> None:
    assert idle.outcome == "FAIL"
    assert idle.name in AUDITS, "or a verdict could not be written with it"
    assert idle.unlearned == idle.original == idle.details["AUC"] > 0.8
    low, high = idle.details["AUC, 95 %"]
    assert 0.6 < low <= idle.details["AUC"] <= high
    assert 0 < idle.details["true positives at 1 % false"] <= 1
    assert idle.details["offline LiRA: AUC"]["unlearned"] > 0.8
    assert "ideal 0.5" in idle.finding
    json.dumps(idle.details)


@pytest.mark.slow
def test_retraining_passes_with_the_shadows_that_are_there(idle: AuditResult, noise: Dataset, place: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in place.rglob("*.safetensors")}
    assert len(before) == 14, "eight as trained, and six of them retrained for the self-test"
    audit = audited(case_of(noise, samples(noise)), ShadowPlan(retrain, place, SETTINGS))
    assert {path: path.stat().st_mtime_ns for path in place.rglob("*.safetensors")} == before
    assert audit.details["AUC"] == pytest.approx(0.5, abs=0.1)
    assert audit.outcome == "PASS"
    assert audit.original == idle.original
    assert audit.value == pytest.approx(abs(audit.details["AUC"] - 0.5))
    low, high = audit.details["AUC, 95 %"]
    assert low <= audit.details["AUC"] <= high


@pytest.mark.slow
def test_a_class_that_is_pushed_too_far_fails_too(noise: Dataset, place: Path) -> None:
    def too_far(model: nn.Module, data: Dataset, request: ForgetRequest, epochs: Path | None) -> nn.Module:
        assert request == ForgetRequest.parse("class:1")
        state = {name: value.clone() for name, value in model.state_dict().items()}
        state["fc.bias"][1] -= 100
        pushed = build(0)
        pushed.load_state_dict(state)
        return pushed

    audit = audited(case_of(noise, "class:1"), ShadowPlan(too_far, place, SETTINGS))
    assert audit.outcome == "FAIL"
    assert set(audit.details["AUC by each"]) == {"the image's own label", "the closest retained class"}
    assert audit.details["by the margin of"] == "the image's own label", "it was pushed, the other one was not"


def test_a_class_that_only_its_own_row_hides_is_found_by_the_nearest_class_that_stays(
    noise: Dataset, place: Path
) -> None:
    """The own margin is made that of a network which never met the class; the others are answered far too surely."""

    class Retrained(nn.Module):
        def __init__(self, old: nn.Module, other: nn.Module) -> None:
            super().__init__()
            self.old, self.other = old, other

        def forward(self, x: Tensor) -> Tensor:
            rest, wanted = 5 * self.old(x), self.other(x)
            keep = [0, 2, 3]
            margin = wanted[:, 1] - wanted[:, keep].logsumexp(1)
            rest[:, 1] = rest[:, keep].logsumexp(1) + margin
            return rest

    def disguised(model: nn.Module, data: Dataset, request: ForgetRequest, epochs: Path | None) -> nn.Module:
        kept = data.train.subset(~request.mask(data.train))
        return Retrained(model, fit(build(next(SEEDS)), kept, replace(RECIPE, seed=next(SEEDS)))).eval()

    audit = audited(case_of(noise, "class:1"), ShadowPlan(disguised, place, SETTINGS))
    found = audit.details["AUC by each"]
    assert abs(found["the image's own label"] - 0.5) < 0.1, "by this margin alone it would have passed"
    assert audit.outcome == "FAIL"
    assert audit.details["by the margin of"] == "the closest retained class"


def test_an_attack_without_power_is_no_pass(noise: Dataset, tmp_path: Path) -> None:
    lazy = replace(SETTINGS, recipe=replace(RECIPE, epochs=0))
    audit = audited(case_of(noise, samples(noise)), ShadowPlan(nothing, tmp_path, lazy))
    assert audit.outcome == "INCONCLUSIVE"
    assert not audit.details["self-test"]["holds"]
    assert "it does not hold, so nothing is shown" in audit.finding


def test_the_self_test_finds_untouched_models_and_not_retrained_ones(idle: AuditResult) -> None:
    tested = idle.details["self-test"]
    assert tested["holds"]
    assert tested["untouched"]["AUC"] > 0.8
    assert tested["retrained"]["AUC"] == pytest.approx(0.5, abs=0.1)
    assert (tested["images"], tested["models"]) == (30, 6)
    assert "must fail" in idle.finding


@pytest.mark.parametrize(("untouched", "retrained"), [(0.55, 0.5), (0.9, 0.7), (0.9, 0.3)])
def test_an_attack_whose_self_test_does_not_hold_decides_nothing(
    untouched: float, retrained: float, noise: Dataset, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a failure nor a pass counts where memorised images are not found, or retrained models are."""
    found = {"holds": False, "images": 30, "untouched": {"AUC": untouched}, "retrained": {"AUC": retrained}}
    monkeypatch.setattr("fedortho.audits.membership.self_test", lambda *_: found)
    audit = audited(case_of(noise, samples(noise)), ShadowPlan(nothing, place, SETTINGS))
    assert audit.details["AUC"] > 0.8, "by itself it fails"
    assert audit.outcome == "INCONCLUSIVE"


def test_samples_that_were_not_memorised_are_no_pass(
    idle: AuditResult, noise: Dataset, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The self-test holds on other images; of these the attack finds nothing in the models as trained either."""
    monkeypatch.setattr("fedortho.audits.membership.self_test", lambda *_: idle.details["self-test"])
    lazy = replace(SETTINGS, recipe=replace(RECIPE, epochs=0))
    audit = audited(case_of(noise, samples(noise)), ShadowPlan(nothing, place, lazy))
    assert audit.outcome == "INCONCLUSIVE"
    assert "nothing that only the forget set taught can be measured" in audit.finding


@pytest.mark.slow
def test_what_a_named_method_left_is_measured_once(noise: Dataset, place: Path) -> None:
    calls = []

    def counted(model: nn.Module, data: Dataset, request: ForgetRequest, epochs: Path | None) -> nn.Module:
        calls.append(request)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return model

    plan = ShadowPlan(counted, place, SETTINGS, method="counted {}")
    with pytest.raises(KeyboardInterrupt):
        audited(case_of(noise, samples(noise)), plan)
    first = audited(case_of(noise, samples(noise)), plan)
    assert len(calls) == 6 + 3, "five were finished before it was stopped"
    assert audited(case_of(noise, samples(noise)), plan).details == first.details
    assert len(calls) == 9
    audited(case_of(noise, samples(noise)), replace(plan, method="counted {lr: 1}"))
    assert len(calls) == 17, "another setting is another method"
