"""Finding a method by name, and running one: what comes back, and what is left out."""

from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import nn

import fedortho.methods
from fedortho.data.images import Dataset
from fedortho.data.request import ForgetRequest
from fedortho.engines.central import CentralEngine
from fedortho.errors import FedOrthoError, UnknownName
from fedortho.methods import METHODS, find_method, forget, known_methods, make_method, plan, unlearn
from fedortho.methods.finetune import FineTune
from fedortho.methods.hide import Hide
from fedortho.methods.hyperparameters import read_settings
from fedortho.methods.logit_mask import LogitMask
from fedortho.methods.method import CannotServe
from fedortho.methods.ssd import SSD
from fedortho.models.patch import undo_patch, write_undo
from fedortho.storage.files import tensors_digest, write_json

PLAIN = {"crop": 0, "flip": 0.0, "epochs": 1, "batch_size": 32}


@dataclass(frozen=True)
class Louder(SSD):
    """A method of somebody else's."""

    name: ClassVar[str] = "louder"


def installed(monkeypatch: pytest.MonkeyPatch, *points: tuple[str, str]) -> None:
    """As if packages had been installed that name these methods."""
    found = [EntryPoint(name, value, fedortho.methods.ENTRY_POINTS) for name, value in points]
    monkeypatch.setattr(fedortho.methods, "entry_points", lambda group: found)


def test_a_method_of_an_installed_package_is_found_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    installed(monkeypatch, ("louder", f"{__name__}:Louder"))
    monkeypatch.setitem(__import__("sys").modules, __name__, __import__("types").SimpleNamespace(Louder=Louder))
    assert known_methods() == (*METHODS, "louder")
    assert find_method("louder") is Louder
    made = make_method("louder", {"alpha": 3.0})
    assert isinstance(made, Louder)
    assert made.alpha == 3.0
    tuned = {"louder": {"alpha": 3.0}}  # as fedortho tune writes it
    write_json(tmp_path / "tuned.json", tuned)
    assert read_settings("digits", "vgg-mini", str(tmp_path / "tuned.json")) == tuned


@pytest.mark.parametrize(
    ("points", "token"),
    [
        ((("ssd", "somewhere:SSD"),), "taken"),
        ((("mine", "a:Mine"), ("mine", "b:Mine")), "taken"),
        ((("mine", "no_such_package:Mine"),), "cannot be imported"),
        ((("mine", "fedortho.methods.ssd:SSD"),), "must say so"),
    ],
)
def test_a_method_that_clashes_or_is_not_there_is_refused(
    monkeypatch: pytest.MonkeyPatch, points: tuple[tuple[str, str], ...], token: str
) -> None:
    installed(monkeypatch, *points)
    with pytest.raises(FedOrthoError, match=token):
        find_method("mine")


def test_an_unknown_method_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(UnknownName, match="did you mean 'hide'"):
        find_method("hides")


@pytest.mark.parametrize("name", ["hide", "ssd", "finetune", "logit-mask"])
def test_the_patch_of_any_method_makes_its_model_and_can_be_undone(
    digits: Dataset, digit_nets: dict[str, nn.Module], name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    model = digit_nets["vgg-mini"]
    settings = {"hide": {"ratio": 0.1}, "finetune": PLAIN}.get(name, {})
    result = unlearn(model, CentralEngine(digits), "class:3", make_method(name, settings))
    digest = tensors_digest(result.model.state_dict())
    assert result.method == name
    assert result.request == ForgetRequest.parse("class:3")
    assert digest == result.patch.after != result.patch.before == tensors_digest(model.state_dict())
    assert tensors_digest(result.patch.apply(model).state_dict()) == digest
    assert result.cost.seconds > 0
    assert (result.plan is None) == (name != "hide")
    undo = tmp_path_factory.mktemp("undo") / "undo.safetensors"
    write_undo(undo, result.patch, model)
    assert tensors_digest(undo_patch(undo, result.model).state_dict()) == result.patch.before


def test_the_patch_of_another_method_names_only_what_differs(digits: Dataset, digit_nets: dict[str, nn.Module]) -> None:
    result = unlearn(digit_nets["vgg-mini"], CentralEngine(digits), "class:3", LogitMask())
    assert {name.rpartition(".")[2] for name in result.patch.replaced} <= {"weight", "bias"}
    assert 1 <= len(result.patch.replaced) <= 2


def test_what_was_forgotten_before_is_not_trained_on(digits: Dataset, digit_nets: dict[str, nn.Module]) -> None:
    model, done = digit_nets["vgg-mini"], ForgetRequest.parse("class:7")
    method = make_method("finetune", PLAIN)
    told = unlearn(model, CentralEngine(digits), "class:3", method, forgotten=done)
    small = digits.train.subset(~done.mask(digits.train))
    without = Dataset(digits.name, small, digits.valid, digits.test, digits.digest)
    known = unlearn(model, CentralEngine(without), "class:3", method)
    assert tensors_digest(told.model.state_dict()) == tensors_digest(known.model.state_dict())
    assert told.cost.images_trained == known.cost.images_trained
    with pytest.raises(FedOrthoError):
        unlearn(model, CentralEngine(digits), "class:7", method, forgotten=done)


def test_forget_takes_names_and_methods_and_retrains_a_network_of_ones_own(
    digits: Dataset, digit_nets: dict[str, nn.Module]
) -> None:
    model = digit_nets["vgg-mini"]
    by_name = forget(model, digits, "class:3", "logit-mask")
    by_value = forget(model, digits, ForgetRequest.parse("class:3"), LogitMask())
    assert tensors_digest(by_name.model.state_dict()) == tensors_digest(by_value.model.state_dict())
    retrained = forget(model, digits, "class:3", make_method("retrain", PLAIN))
    assert not torch.equal(next(retrained.model.parameters()), next(model.parameters()))


def test_a_plan_changes_nothing_and_is_what_forget_applies(digits: Dataset, digit_nets: dict[str, nn.Module]) -> None:
    model = digit_nets["vgg-mini"]
    before = tensors_digest(model.state_dict())
    planned = plan(model, digits, "class:3", Hide(ratio=0.1))
    assert tensors_digest(model.state_dict()) == before
    assert planned.patch.after == forget(model, digits, "class:3", Hide(ratio=0.1)).patch.after
    with pytest.raises(CannotServe, match="hide, directions, paper"):
        plan(model, digits, "class:3", FineTune())
