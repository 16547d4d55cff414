"""Run records: schema 2 is written, schema 1 is migrated, anything else is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from fedortho.engines.cost import Cost
from fedortho.errors import BadRecord
from fedortho.methods import make_method
from fedortho.runs.record import (
    Accuracies,
    ModelRecord,
    ResultRecord,
    RunRecord,
    TrainingRecord,
    TrialRecord,
    read_run_record,
)
from fedortho.runs.run import open_run
from fedortho.storage.records import from_json, to_json, write_record

OLD = Path(__file__).parent / "schema1"  # a run.json of fedortho 0.1.0, to which requests of every kind were added


@pytest.fixture
def old() -> RunRecord:
    record = read_run_record(OLD)
    assert isinstance(record, RunRecord)
    return record


def written(tmp_path: Path, **changes: Any) -> Path:
    """A run directory with the old record, changed."""
    value = json.loads((OLD / "run.json").read_text()) | changes
    (tmp_path / "run.json").write_text(json.dumps({key: each for key, each in value.items() if each is not ...}))
    return tmp_path


def test_a_record_of_schema_1_has_its_settings_under_their_new_names(old: RunRecord) -> None:
    settings = open_run(OLD).settings
    assert (settings.lr, settings.weight_decay, settings.batch_size) == (0.05, 0.0005, 64)
    assert not {"rate", "decay", "batch"} & old.settings.keys()
    assert old.model == ModelRecord(old.model.digest, 10, 3, 581866)
    assert old.data.class_names[:2] == ("airplane", "automobile")
    assert old.environment.versions["torch-pruning"] == "1.6.1"
    assert (old.parent, old.undone, old.result) == ("1" * 64, ("class:6",), ResultRecord(0.75))
    assert old.is_edited


def test_a_request_of_schema_1_has_its_method_trials_and_digests(old: RunRecord) -> None:
    assert [served.method for served in old.requests] == ["hide", "paper", "directions", "directions", "unsir"]
    first, second = old.requests[:2]
    assert first.before == Accuracies(0.9, 0.8, 0.75)
    assert first.chosen == TrialRecord(0.1, 0.0, 0.0, 0.79)
    assert first.trials == (first.chosen,)
    assert (first.model_before, first.model_after, first.ledger) == ("1" * 64, "2" * 64, "c" * 64)
    assert first.cost is None, "schema 1 did not record the FLOPs of the model"
    assert second.chosen is None
    assert old.requests[2].directions == {"features.24": 3}


def test_a_comparison_of_schema_1_has_its_cost_and_settings_that_its_method_takes(old: RunRecord) -> None:
    served = old.requests[-1]
    assert served.cost == Cost(1.5, 10, 20, 2.0, 0, 0, 0)
    assert served.model_before is None
    make_method(served.method, served.settings)


def test_a_migrated_record_is_written_as_schema_2_and_read_back(old: RunRecord, tmp_path: Path) -> None:
    write_record(tmp_path / "run.json", old)
    assert json.loads((tmp_path / "run.json").read_text())["schema"] == 2
    assert read_run_record(tmp_path) == old


def test_an_unfinished_run_has_no_model_yet(tmp_path: Path) -> None:
    record = read_run_record(written(tmp_path, status="training", model=..., result=..., parent=..., undone=...))
    assert isinstance(record, TrainingRecord)
    assert not isinstance(record, RunRecord)
    assert read_run_record(tmp_path / "nowhere") is None


@pytest.mark.parametrize(
    ("changes", "telling"),
    [
        ({"schema": 3}, "schema 3"),
        ({"schema": True}, "schema True"),
        ({"schema": ...}, "schema None"),
        ({"status": "lost"}, "status"),
        ({"settings": ...}, "settings"),
        ({"settings": {"rate": "fast"}}, "lr"),
        ({"settings": {"rat": 0.1}}, "rat"),
        ({"data": {"name": "cifar10"}}, "classes|class-names"),
        ({"requests": [{"request": "class:3"}]}, "settings"),
        ({"requests": {"request": "class:3"}}, "RunRecord"),
        ({"colour": "blue"}, "colour"),
    ],
)
def test_any_other_record_is_refused_by_file_and_key(tmp_path: Path, changes: dict[str, Any], telling: str) -> None:
    with pytest.raises(BadRecord, match=telling) as error:
        open_run(written(tmp_path, **changes))
    assert str(error.value).startswith(str(tmp_path / "run.json"))


def test_a_request_without_a_cost_or_with_another_type_is_told_apart(old: RunRecord) -> None:
    value = to_json(old)
    value["requests"][0]["after"]["forget"] = "0.0"
    with pytest.raises(BadRecord, match=r"requests\[0\].after.forget"):
        from_json(RunRecord, value, "run.json")
