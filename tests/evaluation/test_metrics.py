import json
import math

import pytest

from fedortho.errors import UnknownName
from fedortho.evaluation.metrics import METRICS, Measurement, Metric, measure_metric


@pytest.mark.parametrize("name", METRICS)
def test_every_metric_is_described_completely(name: str) -> None:
    known = METRICS[name]
    assert known.title
    assert known.source
    assert known.low < known.high
    assert (known.ideal is None) == (known.direction == "as retrain")
    assert known.ideal is None or known.low <= known.ideal <= known.high
    assert len({description.title for description in METRICS.values()}) == len(METRICS)


@pytest.mark.parametrize("name", METRICS)
@pytest.mark.parametrize("reference", [None, 0.25])
def test_no_number_is_shown_without_its_description(name: str, reference: float | None) -> None:
    known, metric = METRICS[name], Metric(name, 0.125, reference, images=77)
    for shown in (str(metric), f"{metric}", repr(metric)):
        assert "0.1250" in shown
        told = ["77 images", known.title, known.source, known.range_text(), f"ideal {known.ideal_text()}"]
        told.append("no reference" if reference is None else "Retrain 0.2500")
        told.append("best as Retrain" if known.direction == "as retrain" else f"better {known.direction}")
        assert all(word in shown for word in told), shown
    mapping = json.loads(json.dumps(metric.to_json(), allow_nan=False))
    assert mapping["value"] == 0.125
    assert mapping["reference"] == reference
    assert mapping.keys() >= {"title", "source", "low", "high", "direction", "ideal", "images", "error", "details"}


def test_an_unknown_metric_is_refused_with_the_choices() -> None:
    with pytest.raises(UnknownName, match="did you mean 'forget-accuracy'"):
        Metric("forget-acuracy", 0.5)
    with pytest.raises(UnknownName):
        measure_metric("speed", lambda: Measurement(1.0, 1))


def test_whatever_raises_is_an_error_that_stays_in_sight() -> None:
    class Odd(Exception):
        pass

    def fails() -> Measurement:
        raise Odd("no such luck\nsecond line")

    for metric in (measure_metric("zrf", fails), measure_metric("zrf", lambda: Measurement(0.5, 3), fails)):
        assert metric.value is None
        assert metric.error == "Odd: no such luck"
        assert "ERROR, Odd: no such luck" in str(metric)
        assert METRICS["zrf"].range_text() in str(metric)
        assert metric.to_json()["error"] == metric.error


@pytest.mark.parametrize("value", [math.nan, math.inf, -0.1, 1.1])
def test_a_number_outside_its_range_is_an_error(value: float) -> None:
    metric = measure_metric("tug-of-war", lambda: Measurement(value, 3))
    assert metric.value is None
    assert "outside 0 to 1" in (metric.error or "")
    assert measure_metric("tug-of-war", lambda: Measurement(1 + 1e-12, 3)).value == pytest.approx(1)
    with pytest.raises(ValueError, match="both"):
        Metric("tug-of-war", 0.5, error="no")


def test_a_gap_without_a_reference_model_is_shown_as_not_measured() -> None:
    assert "not measured (no reference" in str(Metric("average-gap", None))
