"""Runs that forgot, and bundles of them."""

import json
from pathlib import Path

import pytest
from bundles import HOW, REQUEST, Runs

from fedortho.cli.report import report_command
from fedortho.data.request import ForgetRequest
from fedortho.evidence.bundle import make_bundle
from fedortho.evidence.signature import make_key
from fedortho.requests.forgetting import forget_run
from fedortho.runs.settings import TrainSettings
from fedortho.runs.training import train_run

TRAINED = TrainSettings(data="digits", model="vgg-mini", epochs=2, batch_size=64, lr=0.05, threads=1, crop=0, flip=0.0)


@pytest.fixture(scope="package")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """A model, the same without class 3, and without class 5 as well."""
    place = tmp_path_factory.mktemp("runs")
    first = train_run(place / "first", TRAINED)
    data, found = first.load_data(), {"first": first}
    for name, parent, words in (("second", "first", "class:3"), ("third", "second", "class:5")):
        request = ForgetRequest.parse(words)
        undo = place / f"{name}.undo"
        run = forget_run(found[parent], data, request, HOW, out=place / name, undo=undo).run
        assert run is not None
        found[name] = run
    about = {"schema": 1, "request": "class:3", "sentence": '3 is "gone".', "label": "none run"}
    about["digests"] = {"after": found["second"].record["model"]["digest"]}
    (place / "second" / "verdict.json").write_text(json.dumps(about))
    report_command(place / "second", device="cpu")
    return found


@pytest.fixture(scope="package")
def made(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("made") / "evidence.zip"
    make_bundle(runs["second"], REQUEST, out)
    return out


@pytest.fixture(scope="package")
def signed(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("signed")
    make_key(place / "me.pem")
    make_bundle(runs["second"], REQUEST, place / "evidence.zip", sign=place / "me.pem")
    return place / "evidence.zip"
