"""What TensorBoard is given, read back from its files as TensorBoard does."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small import SETTINGS
from typer.testing import CliRunner

from fedortho.cli.app import app
from fedortho.cli.tensorboard import tensorboard_watch
from fedortho.errors import FedOrthoError
from fedortho.federated.server import train_federation
from fedortho.runs.run import Run, open_run
from fedortho.runs.settings import TrainSettings
from fedortho.runs.training import train_run
from fedortho.training.recipe import learning_rate

reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator", reason="no tensorboard")
TRAINED = TrainSettings(
    data="digits", model="small:TinyNet", epochs=4, batch_size=64, threads=1, crop=0, flip=0.0, device="cpu"
)


class Killed(Exception):
    """Stands for a signal."""


def shown(place: Path) -> dict[str, list[tuple[int, float]]]:
    """Every curve as TensorBoard would draw it: steps and values."""
    found = reading.EventAccumulator(str(place), size_guidance={"scalars": 0})
    found.Reload()
    return {name: [(e.step, e.value) for e in found.Scalars(name)] for name in found.Tags()["scalars"]}


def expected(run: Run, epochs: int) -> dict[str, dict[int, float]]:
    recipe, history = replace(run.settings.recipe, epochs=epochs), run.history()
    curves: dict[str, list[Any]] = {
        "loss": [entry.loss for entry in history],
        "accuracy/training": [entry.accuracy for entry in history],
        "accuracy/validation": [entry.valid for entry in history],
        "lr": [learning_rate(recipe, number) for number in range(len(history))],
        "seconds": [entry.seconds for entry in history],
        "clients": [entry.clients for entry in history],
        "drift": [entry.drift for entry in history],
    }
    known = {name: {at: v for at, v in enumerate(values, 1) if v is not None} for name, values in curves.items()}
    return {name: values for name, values in known.items() if values}


def check(run: Run, place: Path, epochs: int) -> None:
    found = shown(place)
    wanted = expected(run, epochs)
    assert len(run.history()) == epochs
    assert set(found) - {"images per second", "orthogonality penalty"} == set(wanted)
    for name, values in wanted.items():
        assert [step for step, _ in found[name]] == list(values), "each step once, in order"
        assert dict(found[name]) == pytest.approx(values, rel=1e-6)


def test_every_epoch_is_written_once(tmp_path: Path) -> None:
    words = ("train", "--out", tmp_path / "runs" / "first", "--tensorboard", tmp_path / "boards", "--data", "digits")
    more = ("--model", "small:TinyNet", "--epochs", "2", "--crop", "0", "--threads", "1", "--device", "cpu")
    for _ in range(2):  # the second time it is finished already
        assert CliRunner().invoke(app, list(map(str, (*words, *more))), catch_exceptions=False).exit_code == 0
    check(open_run(tmp_path / "runs" / "first"), tmp_path / "boards" / "first", 2)


def test_a_killed_run_goes_on_at_the_right_step_and_no_step_is_shown_twice(tmp_path: Path) -> None:
    def dying(now: Any) -> None:
        if len(now.history) == 3:
            raise Killed  # after its checkpoint, before anything of this epoch is written

    run, boards = tmp_path / "run", tmp_path / "boards"
    with pytest.raises(Killed), tensorboard_watch(boards, run, TRAINED, dying) as watch:
        train_run(run, TRAINED, watch=watch)
    assert [step for step, _ in shown(boards / "run")["loss"]] == [1, 2]
    with tensorboard_watch(boards, run, TRAINED, lambda now: None) as watch:
        finished = train_run(run, TRAINED, watch=watch)
    check(finished, boards / "run", 4)


def test_rounds_of_a_federation_are_written(tmp_path: Path) -> None:
    def dying(now: Any) -> None:
        if len(now.history) == 2:
            raise Killed

    settings, run, boards = replace(SETTINGS, rounds=3), tmp_path / "run", tmp_path / "boards"
    with pytest.raises(Killed), tensorboard_watch(boards, run, settings, dying) as watch:
        train_federation(run, settings, watch=watch)
    with tensorboard_watch(boards, run, settings, lambda now: None) as watch:
        finished = train_federation(run, settings, watch=watch)
    check(finished, boards / "run", 3)
    assert [value for _, value in shown(boards / "run")["clients"]] == [4, 4, 4]


def test_without_the_package_or_a_place_it_is_refused_before_anything_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def watch(now: Any) -> None: ...

    (tmp_path / "file").write_text("")
    with (
        pytest.raises(FedOrthoError, match="--tensorboard"),
        tensorboard_watch(tmp_path / "file", tmp_path / "run", TRAINED, watch),
    ):
        raise AssertionError("not reached")
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with (
        pytest.raises(FedOrthoError, match=r"fedortho\[tensorboard\]"),
        tensorboard_watch(tmp_path / "boards", tmp_path / "run", TRAINED, watch),
    ):
        raise AssertionError("not reached")
    assert not (tmp_path / "boards").exists()
    with tensorboard_watch(None, tmp_path / "run", TRAINED, watch) as same:
        assert same is watch, "without --tensorboard nothing is needed"
    with pytest.raises(FedOrthoError, match="inprocess"):
        CliRunner().invoke(
            app,
            ["federate", "--out", str(tmp_path / "x"), "--backend", "ray", "--tensorboard", str(tmp_path / "boards")],
            catch_exceptions=False,
        )
