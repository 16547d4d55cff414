"""The audits are audited: what only hides must fail, what never knew must pass, what breaks must show."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from worlds import World

from fedortho.audits import AUDITS, distance, probe, relearn, reset_tail, result, run_audits
from fedortho.audits.result import AuditResult, Limit, label
from fedortho.audits.retention import RETENTION
from fedortho.data.request import ForgetRequest
from fedortho.engines.central import CentralEngine
from fedortho.errors import BadData, UnknownName
from fedortho.evaluation.case import Case
from fedortho.methods import unlearn
from fedortho.methods.paper import Paper


def by_name(audits: list[AuditResult]) -> dict[str, AuditResult]:
    assert [audit.name for audit in audits] == list(AUDITS)
    return {audit.name: audit for audit in audits}


def without_row(world: World) -> nn.Module:
    def erase(model: nn.Module) -> None:
        model.fc.weight[4], model.fc.bias[4] = 0.0, -1e4

    return world.changed(erase)


@pytest.fixture(autouse=True)
def proposed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits as proposed: the retrained networks of this world agree within them, those of CIFAR-10 need more."""
    monkeypatch.setattr(probe, "LIMIT", replace(probe.LIMIT, calibrated=None))
    monkeypatch.setattr(probe, "ENTRY_LIMIT", replace(probe.ENTRY_LIMIT, calibrated=None))
    monkeypatch.setattr(reset_tail, "TAILS", 1)
    monkeypatch.setattr(reset_tail, "SAMPLES", (50,))
    monkeypatch.setattr(relearn, "PROTOTYPE_LIMIT", replace(relearn.PROTOTYPE_LIMIT, calibrated=None))


def test_a_retrained_network_leaves_room_for_the_probe_to_tell(world: World) -> None:
    probed = by_name(run_audits(world.case(world.references[2]), only=("C1",), cache=world.cache))["C1"]
    assert probed.reference is not None
    assert probed.reference < 0.8


def test_editing_only_the_classifier_row_fails_probe_and_prototype(world: World) -> None:
    audits = run_audits(world.case(without_row(world)), cache=world.cache)
    found = by_name(audits)
    assert (found["C1"].outcome, found["C3"].outcome) == ("FAIL", "FAIL")
    assert found["C1"].unlearned == found["C1"].original
    assert label(audits) == "FAILED C1, C3; passed 2 of 6, 2 not run"


def test_what_is_erased_in_the_last_stage_only_is_called_that_and_does_not_pass(
    world: World,
) -> None:
    def silence(model: nn.Module) -> None:
        model.features[11].weight.zero_()  # nothing passes, and all is still there at its entry

    probed = by_name(run_audits(world.case(world.changed(silence)), only=("C1",), cache=world.cache))["C1"]
    assert probed.outcome == "FAIL"
    assert probed.unlearned == probed.original
    assert probed.details["depth"] == probed.details["erased_behind"] == "features.11"
    assert "erased behind features.11 only" in probed.finding


def test_one_reference_is_too_few_near_the_limit(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "original_exceeds", lambda *_: True)
    monkeypatch.setattr(result, "original_exceeds", lambda *_: True)

    def probed(limit: float, *, second: bool = False) -> AuditResult:
        for name in ("LIMIT", "ENTRY_LIMIT", "LAST_ENTRY_LIMIT"):
            monkeypatch.setattr(probe, name, Limit(name, limit))
        return AUDITS["C1"](world.case(world.references[2], second=second), world.cache)

    gap = probed(0.0).value
    assert gap is not None
    found = [probed(gap + shift) for shift in (-0.04, -0.02, 0.02, 0.04)]
    assert [audit.outcome for audit in found] == ["FAIL", "INCONCLUSIVE", "INCONCLUSIVE", "PASS"]
    assert "one reference model is too few to decide: give three" in found[1].finding
    mean_gap = probed(0.0, second=True).value
    assert mean_gap is not None
    assert probed(mean_gap + 0.02, second=True).outcome == "PASS"


def test_the_original_is_held_against_models_that_were_not_treated_either(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the treatment itself takes from a reference model is no trace of the class in the original."""
    recalls = {"unlearned": 0.58, "original": 0.58}
    case = replace(world.case(world.original, second=True), counterfactuals=(world.references[2],) * 2)

    def measured(each: Case, cache: object, role: str) -> float:
        return recalls.get(role, 0.565 if each.counterfactuals else 0.445)

    monkeypatch.setattr(relearn, "prototype_recall", measured)
    monkeypatch.setattr(
        probe,
        "depth_recalls",
        lambda each, cache: {role: {"entry": 0.5, "fc": measured(each, cache, role)} for role in each.models},
    )
    for name in ("C1", "C3"):
        found = AUDITS[name](case, world.cache)
        assert found.outcome == "INCONCLUSIVE"
        assert "the original model passes too" in found.finding
    recalls["original"] = 0.7
    assert [AUDITS[name](case, world.cache).outcome for name in ("C1", "C3")] == ["FAIL", "FAIL"]


def test_one_reference_is_too_few_for_a_prototype_near_its_limit(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relearn, "original_exceeds", lambda *_: True)

    def recovered(limit: float, *, second: bool = False) -> AuditResult:
        monkeypatch.setattr(relearn, "PROTOTYPE_LIMIT", Limit("prototype", limit))
        return AUDITS["C3"](world.case(world.references[2], second=second), world.cache)

    gap = recovered(0.5).value
    assert gap is not None
    found = [recovered(gap + shift) for shift in (-0.04, -0.02, 0.02, 0.04)]
    assert [audit.outcome for audit in found] == ["FAIL", "INCONCLUSIVE", "INCONCLUSIVE", "PASS"]
    assert "one reference model is too few to decide: give three" in found[1].finding
    mean_gap = recovered(0.5, second=True).value
    assert mean_gap is not None
    assert recovered(mean_gap + 0.02, second=True).outcome == "PASS"


def test_the_papers_edit_before_batch_norm_fails_the_norm_attacks(world: World) -> None:
    edited = unlearn(world.original, CentralEngine(world.data), "class:Coat", Paper(ratio=0.3)).model
    audit = by_name(run_audits(world.case(edited), only=("C2",), cache=world.cache))["C2"]
    assert audit.outcome == "FAIL"
    for recovered in audit.details["attacks"].values():
        assert recovered["unlearned"] == pytest.approx(recovered["original"], abs=0.02)  # the edit is gone


@pytest.mark.slow
def test_another_retrained_network_passes_everything_that_is_run(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relearn, "STEPS", 10)  # with 30 no model relearns either
    case = world.case(world.references[2], second=True)
    audits = run_audits(case, "full", cache=world.cache)
    assert label(audits) == "passed 5 of 6, 1 not run", [audit.finding for audit in audits]
    assert "--shadows" in by_name(audits)["C4"].finding
    assert set(by_name(audits)["C1"].details["stages"]["unlearned"]) == {"features.7", "features.11", "fc"}
    assert by_name(audits)["C3"].details["relearning"]["0"] == {"unlearned": None, "reference": None}
    assert "more than 10 steps (one reference model more than 10; speed-up unknown)" in by_name(audits)["C3"].finding


def test_the_original_itself_fails_and_relearns_at_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relearn, "STEPS", 4)
    monkeypatch.setattr(relearn, "SAMPLES", (0,))
    audits = run_audits(world.case(world.original, second=True), "full", only=("C3", "C5"), cache=world.cache)
    found = by_name(audits)
    assert found["C3"].outcome == found["C5"].outcome == "FAIL"
    assert found["C3"].details["relearning"]["0"]["unlearned"] == 0
    assert found["C5"].value == pytest.approx(1.0)


def test_random_noise_on_the_weights_fails_retention_and_a_retrained_network_does_not(world: World) -> None:
    generator = torch.Generator().manual_seed(0)

    def disturb(model: nn.Module) -> None:
        for weight in model.parameters():
            weight.add_(0.5 * weight.std() * torch.randn(weight.shape, generator=generator))

    assert RETENTION(world.case(world.changed(disturb)), world.cache).outcome == "FAIL"
    assert RETENTION(world.case(world.references[2]), world.cache).outcome == "PASS"


def test_without_a_reference_nothing_reads_pass(world: World) -> None:
    case, names = world.case(world.references[2], reference=False), ("C1", "C2", "C5", "C6")
    audits = run_audits(case, "full", only=names, cache=world.cache)
    found = by_name(audits)
    for name in names:
        assert found[name].outcome == "NO REFERENCE"
        assert (found[name].value is not None) is (name in ("C2", "C6")), "only these have an absolute limit"
        assert found[name].unlearned is not None
    assert label(audits) == "no reference, 4 of 6 measured, 2 not run"


def test_what_needs_a_class_of_its_own_is_not_run_for_samples(world: World) -> None:
    rows = world.data.train.rows[:300].tolist()  # one image is less than the limit of a copy
    request = ForgetRequest(samples=tuple(map(str, rows)))
    case = replace(world.case(world.original), request=request, references=(world.original,))
    audits = run_audits(case)
    outcomes = [audit.outcome for audit in audits]
    assert outcomes == ["NOT RUN", "INCONCLUSIVE", "NOT RUN", "NOT RUN", "NOT RUN", "PASS"]
    assert "the original model passes too" in audits[1].finding, "where nothing can fail, passing means nothing"
    assert "class requests" in audits[0].finding
    assert "class requests" in audits[2].finding


def test_the_reference_is_trained_on_until_the_outcome_is_certain(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[tuple[str, int]] = []

    def steps(case: Case, twin: nn.Module, role: str, k: int, target: float, most: int) -> int | None:
        given.append((role, most))
        return 36 if role == "unlearned" else None

    monkeypatch.setattr(relearn, "steps_needed", steps)
    samples = ForgetRequest(samples=tuple(map(str, world.data.train.rows[:60].tolist())))
    audit = AUDITS["C3"](replace(world.case(world.references[2]), request=samples), None, "full")
    assert set(given) == {("unlearned", 60), ("reference", 120)}
    assert audit.outcome == "FAIL", "twice 36 steps do not suffice"
    assert "36 steps (one reference model more than 120; speed-up at least 3.4)" in audit.finding


def test_relearning_that_the_original_would_pass_too_cannot_tell(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relearn, "_relearning_steps", lambda *_: {"unlearned": 2, "reference": 2})
    samples = ForgetRequest(samples=tuple(map(str, world.data.train.rows[:60].tolist())))
    audit = AUDITS["C3"](replace(world.case(world.references[2]), request=samples), world.cache, "full")
    assert audit.outcome == "INCONCLUSIVE"
    assert "the original model passes too" in audit.finding


def test_a_distance_without_a_scale_ran_and_cannot_tell(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distance, "MIN_SPAN", 1.0)
    audit = AUDITS["C5"](world.case(world.references[2], second=True), world.cache, "full")
    assert audit.outcome == "INCONCLUSIVE"
    assert "no scale" in audit.finding


def test_a_finding_on_one_image_is_called_that(world: World) -> None:
    (row,) = world.data.train.rows[:1].tolist()
    case = replace(world.case(world.references[2]), request=ForgetRequest(samples=(str(row),)))
    found = {audit.name: audit for audit in run_audits(case, only=("C1", "C6"))}
    assert found["C6"].finding.endswith("; measured on one image")
    assert "one image" not in found["C1"].finding, "it was not run"


def test_answers_that_are_no_numbers_are_refused_by_name(world: World) -> None:
    def spoil(model: nn.Module) -> None:
        model.fc.bias[0] = float("nan")

    with pytest.raises(BadData, match=r"the unlearned model: 4.* answers are not finite"):
        run_audits(world.case(world.changed(spoil)))
    with pytest.raises(BadData, match="the reference model"):
        run_audits(replace(world.case(world.original), references=(world.changed(spoil),)))


def test_probabilities_of_exactly_0_and_1_are_answers_like_others(world: World) -> None:
    def harden(model: nn.Module) -> None:
        model.fc.weight *= 1e4

    case = world.case(world.changed(harden), second=True)
    audits = run_audits(case, "full", only=("C5", "C6"), cache=world.cache)
    assert {"PASS", "FAIL"} >= {audits[4].outcome, audits[5].outcome}
    assert all(0 <= share <= 1 for share in audits[4].details["total_variation"].values())


def test_an_audit_that_raises_is_an_error_and_stays_in_the_list(world: World) -> None:
    class Twisted(nn.Module):
        """No linear layer at its end, so it has no features."""

        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return 2 * self.inner(x)

    audits = run_audits(world.case(Twisted(world.references[2])), only=("C1", "C6"), cache=world.cache)
    assert audits[0].outcome == "ERROR"
    assert "linear layer" in audits[0].finding
    assert audits[5].outcome == "PASS"
    assert label(audits).startswith("ERROR in C1; passed 1 of 6")


def test_what_is_not_part_of_the_budget_says_so(world: World) -> None:
    told: list[str] = []
    audits = run_audits(world.case(world.original), "none", on_step=told.append)
    assert label(audits) == "none of 6 run"
    assert not told
    audits = run_audits(world.case(world.references[2]), only=("C6",), on_step=told.append, cache=world.cache)
    assert told == ["deployed copies"]
    assert audits[3].finding == "not requested, only C6"
    with pytest.raises(UnknownName, match="C7"):
        run_audits(world.case(world.original), only=("C7",))
    with pytest.raises(UnknownName, match="budget"):
        run_audits(world.case(world.original), "qick")


def test_no_model_of_a_case_is_changed(world: World) -> None:
    before = [weight.clone() for weight in world.original.state_dict().values()]
    run_audits(world.case(world.original), only=("C1", "C2", "C6"))
    after = world.original.state_dict().values()
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(before, after, strict=True))
    assert not world.original.training
