"""The tables of README and docs, from result files that can be checked by hand."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import comparison_tables
import decision_table
import erasing_tables
import pytest
import result_text

from fedortho.reports.figures.style import caption_of

ORIGIN = {
    "command": "python x.py",
    "environment": {"processor": "none", "cores": 1, "versions": {"torch": "2", "fedortho": "0"}},
}


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """scripts/comparison_tables.py with result files and figures of its own."""
    monkeypatch.setattr(comparison_tables, "RESULTS", tmp_path)
    monkeypatch.setattr(erasing_tables, "RESULTS", tmp_path)
    monkeypatch.setattr(decision_table, "RESULTS", tmp_path)
    for name in ("ROOT", "RESULTS", "FIGURES"):
        monkeypatch.setattr(result_text, name, tmp_path)
    return comparison_tables


def row(method: str, forget: float, retain: float, flops: float, **more: Any) -> dict[str, Any]:
    cost = {"seconds": 1.0, "images-read": 0, "images-trained": 0, "flops": flops, "exchanges": 0}
    cost |= {"bytes-up": 0, "bytes-down": 0, "kept-flops": more.pop("kept", 0.0)}
    about = {"run": "one", "engine": "central", "model": "vgg-mini", "seed": 0, "request": "class:0"}
    told = {"method": method, "accuracies": {"forget": forget, "retain": retain}, "cost": cost, "refused": ""}
    return about | told | {"label": method, "tuned-on": "class:6", "original": "before", "weights": method} | more


ROWS = [
    row("retrain", 0.0, 0.8, 9e12),
    row("hide", 0.02, 0.8, 2e12, kept=1.5e12),
    row("ssd", 0.0, 0.81, 3e12, kept=2.9e12),
    row("logit-mask", 0.0, 0.8, 0.0),
    row("salun", 0.5, 0.8, 4e12, request="class:1"),
    row("salun", 0.0, 0.8, 40e12, label="salun ×10", request="class:1"),
    row("retrain", 0.1, 0.8, 9e12, request="class:1"),
]


def write(place: Path, name: str, rows: list[dict[str, Any]]) -> None:
    (place / f"{name}.json").write_text(json.dumps(ORIGIN | {"rows": rows}))


def cells(text: str) -> dict[str, list[str]]:
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    return {line[1]: line[2:] for line in lines[2:]}


def test_the_best_is_the_nearest_to_retraining_whoever_made_it_and_both_costs_are_told(
    tables: ModuleType, tmp_path: Path
) -> None:
    write(tmp_path, "comparison", ROWS)
    found = cells(tables.comparison())
    assert found["ssd"] == ["1", "0.0", "81.0", "**0.5**", "–", "3.00", "0.10"]
    assert found["hide"] == ["1", "2.0", "80.0", "1.0", "–", "2.00", "0.50"]
    assert found["logit-mask"][3] == "0.0", "a control is never the best"
    assert found["salun"][:1] + found["salun"][4:5] == ["–", "20.0"], "automobile stands in a column of its own"
    assert found["salun ×10"][4] == "**5.0**"


def test_a_model_that_a_method_left_as_it_was_is_told_and_never_the_best(tables: ModuleType, tmp_path: Path) -> None:
    about: dict[str, Any] = {"engine": "federation", "request": "client:3"}
    goal = row("retrain", 0.7, 0.8, 9e12, before={"forget": 0.9, "retain": 0.81}, **about)
    kept, changed = row("ssd", 0.7, 0.8, 3e12, weights="before", **about), row("salun", 0.6, 0.8, 3e12, **about)
    changed["cost"]["bytes-up"] = changed["cost"]["bytes-down"] = 2_000_000
    write(tmp_path, "comparison", [goal, kept, changed])
    found = cells(tables.comparison_others())
    assert found["original"][1:3] == ["90.0", "81.0"], "the model that all start from"
    assert found["ssd (model unchanged)"][3] == "0.0"
    assert found["salun"][3:] == ["**5.0**", "3.00", "3.00", "4.0"]


def test_a_row_without_kept_statistics_has_a_dash_and_not_a_number(tables: ModuleType, tmp_path: Path) -> None:
    old = [json.loads(json.dumps(one)) for one in ROWS]
    del old[1]["cost"]["kept-flops"]
    write(tmp_path, "comparison", old)
    assert cells(tables.comparison())["hide"][-2:] == ["2.00", "–"]


def test_a_value_at_the_edge_of_its_grid_is_told(tables: ModuleType, tmp_path: Path) -> None:
    assert tables.searches() == "No search has ended."
    about = {"file": "f", "tuned-on": "class:6", "method": "ssd", "attempts": 7, "settled": True, "score": 0.01}
    chosen = {"setting": "alpha", "value": 30.0, "lowest": 1.0, "highest": 30.0, "inside": False}
    inner = about | chosen | {"setting": "lr", "value": 3.0, "inside": True}
    write(tmp_path, "searches", [about | chosen, inner, about | chosen | {"score": 0.0}])
    first, second, third = (line for line in tables.searches().splitlines() if "class:6" in line)
    assert "| 30 | 1 to 30 | **no** | 7 | yes |" in first
    assert "| 3 | 1 to 30 | yes |" in second
    assert "| 30 | 1 to 30 | no, score 0 |" in third


def test_what_is_cheaper_than_ours_is_said_and_figures_name_the_numbers_that_they_show(
    tables: ModuleType, tmp_path: Path
) -> None:
    write(tmp_path, "comparison", ROWS)
    sent = {"retrain": 374e6, "hide": 7e6, "paper": 37e3}
    rows = [row(name, 0.0, 0.8, 1e12) for name in sent]
    for one, number in zip(rows, sent.values(), strict=True):
        one["cost"]["bytes-up"] = int(number)
    write(tmp_path, "costs", rows)
    large = [{"kind": "class", "method": name, "bytes_up": 1e9, "bytes_down": 1e6} for name in ("paper", "retrain")]
    write(tmp_path, "federation-cifar10", large)
    text = tables.cheaper_sentences()
    counted, kept, *_ = text.splitlines()
    assert counted.startswith(
        "- vgg-mini, central, FLOPs, everything counted: `hide` 2 T (2 / 80), `retrain` 9 T (5 / 80)"
    )
    assert counted.endswith("within one point: `logit-mask` 0 (0 / 80); cheaper and worse: none.")
    assert kept.endswith("within one point: `logit-mask` 0 (0 / 80), `ssd` 100 G (0 / 81); cheaper and worse: none.")
    write(tmp_path, "comparison", [*ROWS, row("hide", 0.02, 0.8, 1e11, label="hide, nothing kept")])
    counted, kept, *_ = tables.cheaper_sentences().splitlines()
    assert "`hide, nothing kept` 100 G (2 / 80), `retrain` 9 T" in counted, "whichever way to run ours needs least"
    assert "cheaper than `hide, nothing kept` and as accurate within one point: `logit-mask` 0" in counted
    assert "`hide, nothing kept` 100 G" in kept
    write(tmp_path, "comparison", ROWS)
    assert tables.is_level((3.0, 79.0), (2.0, 80.0))
    assert not tables.is_level((3.1, 80.0), (2.0, 80.0))
    assert not tables.is_level((0.0, 78.9), (2.0, 80.0))
    assert "The paper's own edit of a class sends 37 kB where retraining sends 374 MB (ten clients" in text
    assert result_text.stale_figures(tables.cost_figures(), write=True) == ["cost.png", "cost-central.png"]
    assert result_text.stale_figures(tables.cost_figures(), write=False) == []
    rows[1]["cost"]["bytes-up"] = 8_000_000
    write(tmp_path, "costs", rows)
    assert result_text.stale_figures(tables.cost_figures(), write=False) == ["cost.png"]
    told = [caption_of(draw()) for _, draw in tables.cost_figures().values()]
    assert told[0].startswith("vgg-mini on fashion-mini, ten clients, Dirichlet 0.3, seed 0; forgotten: class 0")
    assert told[1].startswith("vgg-mini on cifar10, one machine, seed 0; forgotten: class 0 (airplane), class 1 (auto")


def test_the_frontier_of_erasing_is_read_against_the_retrained_model_of_the_same_cell(
    tables: ModuleType, tmp_path: Path
) -> None:
    assert erasing_tables.erasing() == "The protocol has not been run."
    assert erasing_tables.erasing_figures() == {}
    about = {"data": "cifar10", "model": "vgg-mini", "seed": 0, "request": "class:0"}
    retrained = about | {"method": "retrain", "accuracies": {"forget": 0.0, "retain": 0.8}, "share": 1.0}
    probe = {"C1": {"unlearned": 0.55, "reference": 0.5, "original": 0.9}}
    ends = {"accuracies": {"forget": 0.0, "retain": 0.79}, "share": 0.33, "audits": probe, "label": "failed"}
    ends["alike"] = {"audits": {"C1": probe["C1"] | {"reference": 0.54}}, "label": "passed"}
    rows = [retrained, about | {"method": "regrow"} | ends, about | {"method": "regrow", "seed": 1} | ends]
    write(tmp_path, "erasing", rows)
    assert (
        "| cifar10 | vgg-mini | 0 | class:0 | retrain | 0.0 | 80.0 | 100.0% | – | – | – | – |"
        in erasing_tables.erasing()
    )
    assert "| 33.0% | 55.0 / 50.0 / 90.0 | failed | 55.0 / 54.0 / 90.0 | passed |" in erasing_tables.erasing()
    ((gap, lost, share),) = erasing_tables.frontier(rows)["regrow"]  # that of seed 1 has no retrained model yet
    assert (round(gap, 6), round(lost, 6), share) == (5.0, -1.0, 0.33)
    figures = erasing_tables.erasing_figures()
    told = caption_of(figures["erasing"][1]())
    assert told.startswith("vgg-mini on cifar10, seeds 0, 1; forgotten: class 0 (airplane); test images")
    assert result_text.stale_figures(figures, write=True) == ["erasing.png"]
    assert result_text.stale_figures(figures, write=False) == []


def test_the_table_that_decides_has_the_means_of_the_final_protocol(tables: ModuleType, tmp_path: Path) -> None:
    final = [
        {"data": "cifar10", "model": "vgg-mini", "seed": 1, "request": "class:0", "method": method}
        | {"share": share, "audits": audits, "accuracies": {"forget": 0.0, "retain": 0.7}}
        for method, share, audits in (
            ("retrain", 1.0, None),
            ("regrow", 0.5, {"C1": {"unlearned": 0.62, "reference": 0.6, "outcome": "PASS"}}),
            (
                "eu-k",
                0.2,
                {"C1": {"unlearned": 0.7, "reference": 0.6, "outcome": "FAIL"}, "C3": {"outcome": "INCONCLUSIVE"}},
            ),
        )
    ]
    write(tmp_path, "erasing", final)
    told = decision_table.decision()
    assert "| **erase** | 0.0 | 70.0 (70.0) | +2.0 | 50 | none, 1/1 |" in told
    assert "| EU-k of 6 layers | 0.0 | 70.0 (70.0) | +10.0 | 20 | C1 1/1; undecided C3 1/1 |" in told
    assert "vgg-mini on CIFAR-10, airplane; 1 network; test images." in " ".join(told.split())
    assert "applied to the retrained models" not in " ".join(told.split())
    final[1]["alike"] = {"audits": {"C1": {"unlearned": 0.62, "reference": 0.625, "outcome": "INCONCLUSIVE"}}}
    write(tmp_path, "erasing", final)
    told = decision_table.decision()
    assert "| **erase** | 0.0 | 70.0 (70.0) | +2.0 (−0.5) | 50 | none, 1/1; undecided C1 1/1 |" in told
    assert "applied to the retrained models" in " ".join(told.split())
    hidden = {"data": "cifar10", "model": "vgg-mini", "seed": 1, "request": "class:9", "method": "hide"}
    write(tmp_path, "erasing", [*final, hidden | {"share": 0.01, "accuracies": {"forget": 0.02, "retain": 0.7}}])
    told = decision_table.decision()
    assert "**hide**" not in told, "its class has no retrained model yet"
    assert "SSD" not in told, "what was not measured has no line"


def test_false_alarms_are_counted_over_processors_and_failures_by_class(tables: ModuleType, tmp_path: Path) -> None:
    passed = {name: {"outcome": "PASS"} for name in erasing_tables.QUICK}
    failed = passed | {"C3": {"outcome": "FAIL"}, "C1": {"outcome": "INCONCLUSIVE"}}
    rows = [
        {"processor": processor, "name": "Coat", "kind": kind, "number": 0, "audits": audits}
        for processor, kind, audits in (
            ("one", "retrained", passed),
            ("other", "retrained", failed),
            ("one", "erased of 2 stages", failed),
            ("other", "erased of 2 stages", passed),
        )
    ]
    write(tmp_path, "false-alarms", rows)
    told = erasing_tables.false_alarms()
    assert "| retrained | no | 1 | 2 | 1 of 2 | 0, 1 open | 0, 0 open | 1, 0 open |" in told
    assert "False alarms: 1 of 2 verdicts. Erased of 2 stages fail on: Coat by C3 1/2." in told


def test_the_frontier_shows_every_method_and_no_two_alike() -> None:
    points = {f"method {number}": [(float(number), 0.0, 0.1)] for number in range(12)}
    (ax,) = erasing_tables.frontier_drawn(points, "about").axes
    shown = [text.get_text().partition(":")[0] for text in ax.get_legend().get_texts()]
    assert shown == list(points), "seven, one for each colour, until 2026-11-19"
    looks = {(str(each.get_facecolor()), str(each.get_paths()[0].vertices)) for each in ax.collections}
    assert len(looks) == len(points)
