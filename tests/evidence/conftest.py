"""Runs that forgot, and bundles of them."""

import shutil
from functools import partial
from pathlib import Path

import pytest
from bundles import HOW, REQUEST, Runs, no_audits
from once import made_once, run_once

from fedortho.audits.verdict import write_verdict
from fedortho.cli.show import report_command
from fedortho.data.request import ForgetRequest
from fedortho.evidence.bundle import make_bundle
from fedortho.evidence.signature import make_key
from fedortho.requests.forgetting import serve_request
from fedortho.requests.judging import JudgeOptions, judge_run
from fedortho.runs.run import open_run
from fedortho.runs.settings import TrainSettings
from fedortho.storage.journal import append_entry

TRAINED = TrainSettings(data="digits", model="vgg-mini", epochs=2, batch_size=64, lr=0.05, threads=1, crop=0, flip=0.0)


@pytest.fixture(scope="package")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """A model, the same after forgetting class 3, and after forgetting class 5 as well; a copy for each process."""
    place = tmp_path_factory.mktemp("runs")
    made = made_once(tmp_path_factory, "evidence", partial(_write_runs, tmp_path_factory))
    shutil.copytree(made, place, dirs_exist_ok=True)
    return {name: open_run(place / name) for name in ("first", "second", "third")}


def _write_runs(factory: pytest.TempPathFactory, place: Path) -> None:
    run = run_once(factory, place / "first", TRAINED)
    data = run.load_data()
    for name, words in (("second", "class:3"), ("third", "class:5")):
        forgot = serve_request(
            run, data, ForgetRequest.parse(words), HOW, out=place / name, undo=place / f"{name}.undo"
        )
        assert forgot.run is not None
        run = forgot.run
    after = open_run(place / "second").record.model.digest
    write_verdict(place / "second", no_audits("class:3", after))
    report_command(place / "second", device="cpu")


@pytest.fixture(scope="package")
def made(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("made") / "evidence.zip"
    make_bundle(runs["second"], REQUEST, out)
    return out


@pytest.fixture(scope="package")
def judged(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a model, the same after forgetting class 3, its verdict, report, journal and evidence.zip."""

    def judge(place: Path) -> None:
        run = open_run(shutil.copytree(runs["first"].path, place / "first"))
        done = serve_request(run, run.load_data(), REQUEST, HOW, out=place / "second").run
        assert done is not None
        append_entry(place, "received", "other", "class:7", details={"secret": "of somebody else"})
        judge_run(done, options=JudgeOptions(retrain=True, device="cpu"))
        report_command(done.path, images=False, device="cpu")
        make_bundle(done, REQUEST, place / "evidence.zip")

    return made_once(tmp_path_factory, "judged", judge)


@pytest.fixture(scope="package")
def signed(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("signed")
    make_key(place / "me.pem")
    make_bundle(runs["second"], REQUEST, place / "evidence.zip", sign=place / "me.pem")
    return place / "evidence.zip"
