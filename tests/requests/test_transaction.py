"""A kill at any file operation, a full disk or a second process leaves the old state or the new one, and the same call
completes it."""

import errno
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from small import SETTINGS as FEDERATION
from stopping import Killed, counted, full_at, killed_at, operations
from torch import nn

from fedortho.data.images import Dataset
from fedortho.data.request import ForgetRequest
from fedortho.errors import Busy, FedOrthoError
from fedortho.federated.server import sync, train_federation
from fedortho.models.patch import load_patch
from fedortho.requests import forgetting
from fedortho.requests.forgetting import ServedRequest, forget_run
from fedortho.requests.undoing import undo_run
from fedortho.runs.derived import building
from fedortho.runs.run import Run, open_run
from fedortho.runs.settings import TrainSettings
from fedortho.runs.training import train_run
from fedortho.storage.files import locked, read_tensors, tensors_digest
from fedortho.storage.journal import check_journal, read_journal

SETTINGS = TrainSettings(data="digits", model="small:TinyNet", epochs=1, threads=1, crop=0, flip=0.0, device="cpu")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train_run(tmp_path_factory.mktemp("trained") / "run", SETTINGS)


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train_federation(tmp_path_factory.mktemp("federation") / "run", replace(FEDERATION, rounds=1, clients=2))


@pytest.fixture(autouse=True, scope="module")
def known_results() -> Iterator[None]:
    """The same result every time, computed once: what is tested is how it is written."""
    with pytest.MonkeyPatch.context() as patched:
        for name in ("unlearn", "measured_record"):
            patched.setattr(forgetting, name, remembered(getattr(forgetting, name)))
        yield


def remembered(work: Callable[..., Any]) -> Callable[..., Any]:
    results: dict[str, Any] = {}

    def call(*words: Any, **more: Any) -> Any:
        key = next(tensors_digest(word.state_dict()) for word in words if isinstance(word, nn.Module))
        key += str([word for word in words if isinstance(word, ForgetRequest)])
        if key not in results:
            results[key] = work(*words, **more)
        return results[key]

    return call


@cache
def data_of(path: Path) -> Dataset:
    return open_run(path).load_data()


class World:
    """A directory of runs in which one request is served."""

    def __init__(self, original: Run, place: Path) -> None:
        self.run = open_run(shutil.copytree(original.path, place / "runs" / "run"))
        self.data, self.directory = data_of(original.path), place / "runs"
        self.out, self.undo = self.directory / "new", self.directory / "undo.safetensors"

    def forget(self) -> ServedRequest:
        return forget_run(self.run, "class:3", "logit-mask", out=self.out, undo=self.undo, data=self.data, device="cpu")

    def check_between(self) -> None:
        """What is there is the old state or the new one; an undo file alone is removed by the next call."""
        open_run(self.run.path).load_model()
        if self.out.exists():
            self.check_new()

    def check_new(self) -> None:
        new = open_run(self.out)
        assert new.load_model() is not None
        assert load_patch(self.out / "patches" / "0000.safetensors").after == new.record.model.digest
        assert (new.path / "clients").exists() == (self.run.path / "clients").exists()
        assert self.undo.exists()

    def check_done(self) -> None:
        self.check_new()
        entries = check_journal(self.directory).entries
        (executed,) = (entry for entry in entries if entry.event == "executed")
        assert executed.after == open_run(self.out).record.model.digest
        assert executed.details["out"] == entries[0].details["out"] == "new"
        names = {path.name for path in self.directory.iterdir() if "journal." not in path.name}
        assert names == {"run", "new", "undo.safetensors"}, "nothing is left over"
        tensors, note = read_tensors(self.undo)
        assert note == {"before": self.run.record.model.digest, "after": executed.after}
        assert tensors


def check_every_place(
    original: Run, tmp_path: Path, stop: Callable[[int], Callable[[int, str], None]], every: int = 1
) -> int:
    """Stop a request at every one of its file operations, or some, then repeat it; how many there are."""
    number = operations(World(original, tmp_path / "all").forget)
    for place in range(1, number + 1, every):
        world = World(original, tmp_path / str(place))
        with counted(stop(place)), suppress(Killed, FedOrthoError):
            world.forget()
        world.check_between()
        world.forget()
        world.check_done()
        shutil.rmtree(tmp_path / str(place))
    return number


@pytest.mark.parametrize("every", [11, pytest.param(1, marks=pytest.mark.slow)])
def test_a_request_that_is_killed_at_any_file_operation_is_repeated(trained: Run, tmp_path: Path, every: int) -> None:
    assert check_every_place(trained, tmp_path, killed_at, every) > 60


@pytest.mark.parametrize("every", [19, pytest.param(1, marks=pytest.mark.slow)])
def test_a_full_disk_leaves_nothing_behind_and_the_request_is_repeated(
    trained: Run, tmp_path: Path, every: int
) -> None:
    assert check_every_place(trained, tmp_path, full_at, every) > 60


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 19])
def test_a_federation_that_is_killed_at_a_file_operation_is_repeated(
    federation: Run, tmp_path: Path, every: int
) -> None:
    assert check_every_place(federation, tmp_path, killed_at, every) > 100


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a process that can be killed is forked")
@pytest.mark.parametrize("name", ["save_file", "link", "rename"])
def test_a_process_that_is_killed_leaves_the_old_state(trained: Run, tmp_path: Path, name: str) -> None:
    world = World(trained, tmp_path)

    def stop(_: int, operation: str) -> None:
        if operation == name:
            os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if not child:
        with counted(stop):
            world.forget()
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert list(world.directory.glob(".new.building-*"))
    assert world.undo.exists() == (name == "rename"), "the undo file comes first, the run last"
    assert not world.out.exists()
    world.forget()
    world.check_done()
    assert undo_run(world.out, world.undo, tmp_path / "restored").record.model == world.run.record.model


def test_a_second_process_with_the_same_out_is_refused_and_an_empty_directory_is_not_replaced(
    trained: Run, tmp_path: Path
) -> None:
    world = World(trained, tmp_path)
    with locked(world.out), pytest.raises(Busy, match="another process is working on"):
        world.forget()
    with building(world.out, world.undo) as place:
        place.run.mkdir()
        place.undo_file.write_text("what was removed")
        world.out.mkdir()  # by somebody who does not ask
        with pytest.raises(FedOrthoError, match="new exists already"):
            place.place()
    assert not world.undo.exists(), "its run did not follow"
    world.out.rmdir()
    world.forget()
    world.check_done()


def test_an_undo_file_is_never_overwritten_nor_removed(trained: Run, tmp_path: Path) -> None:
    world = World(trained, tmp_path)
    world.undo.write_text("of another request")
    with pytest.raises(FedOrthoError, match="an undo file is never overwritten"):
        world.forget()
    with building(world.out) as place:
        place.run.mkdir()
        place.undo_file.write_text("what was removed")
        with pytest.raises(FedOrthoError, match="an undo file is never overwritten"):
            replace(place, undo=world.undo).place()
    assert world.undo.read_text() == "of another request"
    assert not world.out.exists()


def test_an_undo_file_goes_to_another_file_system(
    trained: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_link(*_: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    world = World(trained, tmp_path)
    monkeypatch.setattr(os, "link", no_link)
    world.forget()
    world.check_done()


def test_the_same_request_again_changes_nothing_and_another_one_is_refused(trained: Run, tmp_path: Path) -> None:
    world = World(trained, tmp_path)
    first = world.forget()
    before = {path: path.stat().st_mtime_ns for path in world.directory.rglob("*") if path.is_file()}
    again = world.forget()
    assert (again.was_finished, again.record) == (True, first.record)
    assert {path: path.stat().st_mtime_ns for path in world.directory.rglob("*") if path.is_file()} == before
    for request, method, undo in (("class:5", "logit-mask", world.undo), ("class:3", "paper", None)):
        with pytest.raises(FedOrthoError, match="new exists already"):
            forget_run(world.run, request, method, out=world.out, undo=undo, data=world.data, device="cpu")
    with pytest.raises(FedOrthoError, match="new exists already"):
        forget_run(world.run, "class:3", "logit-mask", out=world.out, undo=tmp_path / "none", data=world.data)


def test_a_federation_that_forgot_has_its_clients(federation: Run, tmp_path: Path) -> None:
    world = World(federation, tmp_path)
    world.forget()
    world.check_done()
    assert sync(open_run(world.out)) == [0, 1]


@pytest.mark.parametrize("error", [RuntimeError("a defect\nof two lines"), KeyboardInterrupt(), OSError(28, "full")])
def test_every_error_ends_a_request_in_the_journal_with_its_reason(
    error: BaseException, trained: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(forgetting, "unlearn", fail)
    run = open_run(shutil.copytree(trained.path, tmp_path / "run"))
    with pytest.raises((type(error), FedOrthoError)):  # what the disk refuses becomes one of ours, outside
        forget_run(run, "class:3", "logit-mask", out=tmp_path / "out")
    received, ended = read_journal(tmp_path).entries
    end = "interrupted" if isinstance(error, KeyboardInterrupt) else "refused"
    assert (received.event, ended.event) == ("received", end)
    assert str(ended.details["reason"]).startswith(type(error).__name__)
    assert "\n" not in str(ended.details["reason"])
