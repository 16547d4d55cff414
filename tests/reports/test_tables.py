"""Tables as values: what a cell is sorted by, which columns hold numbers, numbers for people."""

from fedortho.engines.cost import Cost
from fedortho.evaluation.metrics import Metric
from fedortho.reports.tables import Cell, build_table, costs_table, metrics_table, number, settings_table


def test_a_number_is_sorted_by_its_value_and_an_unknown_one_by_nothing() -> None:
    assert Cell("10.0 %", 0.1, is_number=True).sort_key == "0.1"
    assert Cell("–", None, is_number=True).sort_key == "", "empty: the script puts it last"
    assert Cell("text").sort_key is None
    assert (Cell("1", 1.0, is_number=True).css, Cell("x" * 41).css, Cell("x").css) == ("number", "says", None)


def test_a_column_holds_numbers_if_all_its_cells_do() -> None:
    one, two = Cell("1", 1.0, is_number=True), Cell("–", is_number=True)
    assert build_table("t", ["a", "b", "c"], [["x", one, one], ["y", two, "text"]]).number_columns == {1}
    assert build_table("t", ["a"], []).number_columns == set()


def test_a_metric_that_failed_shows_its_error() -> None:
    ((title, value, *_),) = metrics_table([Metric("forget-accuracy", None, error="too few images")]).rows
    assert (title.text, value.text, value.badge) == ("forget accuracy: too few images", "! ERROR", "ERROR")


def test_every_part_of_a_cost_has_a_row_and_no_cost_has_none() -> None:
    rows = costs_table(Cost(2.0, 1, 3, 1e9, 4, 7, 5, kept_flops=4e8)).rows
    assert [row[1].value for row in rows] == [2.0, 1.0, 3.0, 1e9, 6e8, 4.0, 7.0, 5.0]
    assert (rows[3][0].text, rows[3][1].text) == ("computation, everything counted", "1.00 GFLOPs")
    assert costs_table(None).rows == ()


def test_settings_without_a_value_are_a_dash() -> None:
    rows = settings_table("s", {"a": {"b": None}, "c": 0, "d": -1e30}).rows
    assert [[cell.text for cell in row] for row in rows] == [["a.b", "–"], ["c", "0"], ["d", "–"]]


def test_numbers_are_written_for_people() -> None:
    assert number(float("nan")) == "–"
    assert number(-0.02, -1.0, 1.0) == "-2.0 %"
    assert number(0.5, 0.0, 2.0) == "0.5"
