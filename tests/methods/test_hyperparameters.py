"""Settings of all methods together."""

from pathlib import Path

import pytest

from fedortho.errors import FedOrthoError, UnknownName
from fedortho.methods import METHODS
from fedortho.methods.hyperparameters import TUNED, read_settings
from fedortho.methods.method import Schedule
from fedortho.models.zoo import MODELS
from fedortho.requests.run_context import method_for_run
from fedortho.runs.run import Run
from fedortho.runs.settings import TrainSettings
from fedortho.storage.files import write_json


def test_settings_come_from_a_word_or_from_a_file(tmp_path: Path) -> None:
    settings, file = TrainSettings(), tmp_path / "tuned.json"
    write_json(file, {"salun": {"lr": 0.5}})
    assert read_settings(settings.data, settings.model, "short")["salun"] == {"epochs": 2, "batch_size": 64}
    assert read_settings(settings.data, settings.model, "published") == {}
    assert read_settings(settings.data, settings.model, str(file)) == {"salun": {"lr": 0.5}}


@pytest.mark.parametrize("file", sorted(TUNED.glob("*.json")))
def test_tuned_settings_are_found_by_data_and_model_and_every_method_takes_them(file: Path, tmp_path: Path) -> None:
    data, model = next((d, m) for d in ("cifar10", "fashion-mini") for m in MODELS if file.stem == f"{d}-{m}")
    run = Run(tmp_path, TrainSettings(data=data, model=model), {})
    found = read_settings(run.settings.data, run.settings.model, "tuned")
    assert set(found) >= {"ssd", "salun", "finetune", "unsir", "bad-teacher", "fused", "not", "neggrad"}
    for name, settings in found.items():
        assert method_for_run(run, name, settings).name == METHODS[name].name


def test_methods_train_in_the_precision_of_the_run_unless_told_otherwise(tmp_path: Path) -> None:
    run = Run(tmp_path, TrainSettings(precision="bfloat16"), {})
    trained = {name: method for name in METHODS if isinstance(method := method_for_run(run, name), Schedule)}
    assert set(trained) > {"finetune", "salun", "regrow", "unsir"}
    assert {method.recipe.precision for method in trained.values()} == {"bfloat16"}
    told = method_for_run(run, "finetune", {"precision": "float32"})
    assert isinstance(told, Schedule)
    assert told.recipe.precision == "float32"
    with pytest.raises(FedOrthoError, match="choose from bfloat16, float32"):
        method_for_run(run, "finetune", {"precision": "float8"})


def test_what_cannot_be_read_is_refused_with_the_reason(tmp_path: Path) -> None:
    settings = TrainSettings(data="digits")
    with pytest.raises(FedOrthoError, match=r"digits-vgg-mini.*cifar10-vgg-mini"):
        read_settings(settings.data, settings.model, "tuned")
    with pytest.raises(UnknownName, match=r"'fast'.*published, short, tuned"):
        read_settings(settings.data, settings.model, "fast")
    for wrong, why in (
        ([], "holds no settings by method"),
        ({"salun": 3}, "salun must have a mapping"),
        ({"salum": {}}, "no method 'salum'; did you mean 'salun'"),
        ({"salun": {"rates": 0.5}}, "no setting 'rates'"),
    ):
        write_json(tmp_path / "wrong.json", wrong)
        with pytest.raises(FedOrthoError, match=why):
            read_settings(settings.data, settings.model, str(tmp_path / "wrong.json"))
