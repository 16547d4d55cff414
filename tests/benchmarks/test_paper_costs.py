"""Costs that are computed agree with those that were measured where both are known."""

import json
from pathlib import Path

import pytest
from costs import SETTINGS
from paper_costs import COMPUTED, computed_cost, of_paper

from fedortho.models.zoo import build_model

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


@pytest.mark.parametrize("method", COMPUTED)
def test_the_formulas_give_what_was_measured_in_a_small_federation(method: str) -> None:
    rows = json.loads((RESULTS / "costs.json").read_text())["rows"]
    measured = next(row["cost"] for row in rows if row["method"] == method)
    model = build_model("vgg-mini", num_classes=10, channels=1)
    found = computed_cost(method, model, (1, 28, 28), SETTINGS, images=5400, forgotten=540)
    assert found.flops == pytest.approx(measured["flops"], rel=0.05)
    assert found.kept_flops == pytest.approx(measured["kept-flops"], rel=0.05)
    for direction in ("up", "down"):
        sent = measured[f"bytes-{direction}"]
        assert getattr(found, f"bytes_{direction}") == pytest.approx(sent, rel=0.15 if method == "fused" else 0.05)


@pytest.mark.slow
def test_the_rows_of_the_paper_are_those_that_are_checked_in() -> None:
    assert json.loads((RESULTS / "paper-costs.json").read_text())["rows"] == of_paper()
