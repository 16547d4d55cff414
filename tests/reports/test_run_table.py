import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from commands import told
from verdicts import RECORD

from fedortho.audits.result import AuditResult
from fedortho.audits.verdict import write_verdict
from fedortho.errors import BadCheckpoint, BadData, UnknownName
from fedortho.reports.run_table import list_runs
from fedortho.runs.settings import TrainSettings
from fedortho.runs.training import train_run
from fedortho.storage.files import read_json, write_json

SETTINGS = TrainSettings(data="digits", model="small:TinyNet", epochs=1, batch_size=64, threads=1, crop=0, flip=0.0)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("runs")
    train_run(place / "first", SETTINGS)
    words = ("--method", "paper", "--audit", "none", "--out", place / "second")
    told("forget", place / "first", "class:3", *words)
    (place / "no-run").mkdir()
    return place


def test_every_run_has_a_line_with_what_it_left(place: Path) -> None:
    first, second = list_runs(place)
    assert (first.run, first.request, first.forget, first.audits) == ("first", "", None, "")
    record = json.loads((place / "second" / "run.json").read_text())["requests"][0]
    assert (second.forget, second.retain) == (record["after"]["forget"], record["after"]["retain"])
    verdict = replace(RECORD, audits=(AuditResult("FAIL", "", unlearned=0.5, name="C1"),))
    write_verdict(place / "second", verdict)
    second = list_runs(place)[1]
    assert (second.audits, second.probe, second.failed) == ("FAILED C1; passed 0 of 1", 0.5, "C1")
    write_verdict(place / "second", replace(verdict, retention=AuditResult("FAIL", "", name="retention")))
    assert list_runs(place)[1].failed == "C1 retention"
    write_verdict(place / "second", replace(verdict, audits=(AuditResult("NOT RUN", "", name="C1"),)))
    assert list_runs(place)[1].failed is None, "where nothing was tested, nothing failing says nothing"
    write_verdict(place / "second", replace(verdict, request="class:4"))
    assert list_runs(place)[1].audits == "", "a verdict on another request is none on this one"
    (place / "second" / "verdict.json").unlink()


def test_runs_are_filtered_and_shown_for_people_and_machines(place: Path) -> None:
    assert "class:3" in told("results", place)
    only = json.loads(told("results", place, "--request", "class:3", "--json"))
    assert [line["run"] for line in only] == ["second"]
    with pytest.raises(BadData, match=r"no run in .* fits model resnet; leave a filter out"):
        told("results", place, "--model", "resnet")


def test_runs_of_directories_below_are_listed_under_their_directory(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "first", tmp_path / "first")
    shutil.copytree(place / "second", tmp_path / "comparisons" / "a-very-long-name-of-a-comparison" / "second")
    lines = list_runs(tmp_path)
    assert [line.run for line in lines] == ["first", "comparisons/a-very-long-name-of-a-comparison/second"]
    text = told("results", tmp_path).splitlines()
    heading = text.index("comparisons/a-very-long-name-of-a-comparison:")
    assert any(line.split()[:3] == ["second", "paper", "class:3"] for line in text[heading:])
    assert not (tmp_path / "first" / "clients").exists()
    with pytest.raises(BadData, match="is a run; give the directory that holds it"):
        list_runs(tmp_path / "first")


def test_runs_are_sorted_and_rows_without_a_value_come_last(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "first", tmp_path / "a")
    for name, forget in (("b", 0.5), ("c", 0.25)):
        shutil.copytree(place / "second", tmp_path / name)
        record = read_json(tmp_path / name / "run.json")
        record["requests"][0]["after"]["forget"] = forget
        write_json(tmp_path / name / "run.json", record)
    assert [row.run for row in list_runs(tmp_path, sort="forget")] == ["c", "b", "a"]
    assert [row.run for row in list_runs(tmp_path, sort="run")] == ["a", "b", "c"]
    with pytest.raises(UnknownName, match="no column 'size'; choose from forget"):
        told("results", place, "--sort", "size")


def test_a_file_gets_every_name_and_number_whole(place: Path, tmp_path: Path) -> None:
    name = "a-name-" + "that-goes-on-" * 12
    shutil.copytree(place / "second", tmp_path / name)
    (line,) = [line for line in told("results", tmp_path).splitlines() if name in line]
    assert "class:3" in line
    assert line.count("%") == 3


def test_what_holds_no_runs_or_damaged_ones_is_refused(place: Path, tmp_path: Path) -> None:
    with pytest.raises(BadData, match="holds no finished run"):
        list_runs(tmp_path)
    with pytest.raises(BadData, match="is no directory"):
        list_runs(tmp_path / "nowhere")
    write_json(place / "second" / "verdict.json", [])
    with pytest.raises(BadCheckpoint, match="judge again"):
        list_runs(place)
    (place / "second" / "verdict.json").unlink()
    (place / "broken").mkdir()
    write_json(place / "broken" / "run.json", [])
    with pytest.raises(BadCheckpoint, match="TrainingRecord"):
        list_runs(place)
    (place / "broken" / "run.json").unlink()
