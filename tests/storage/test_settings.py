from pathlib import Path

import pytest

from fedortho.errors import BadSetting, UnknownName
from fedortho.methods import make_method
from fedortho.runs.settings import TrainSettings
from fedortho.storage.settings import as_mapping, field_help, make_settings, read_toml
from fedortho.training.recipe import Recipe


def test_later_sources_win_and_both_spellings_are_read() -> None:
    made = make_settings(Recipe, {"epochs": 3, "ortho-every": 2}, {"ortho_every": 5})
    assert (made.epochs, made.ortho_every) == (3, 5)


def test_a_mapping_round_trips() -> None:
    settings = TrainSettings(epochs=3, data="digits", ortho=0.0)
    assert make_settings(TrainSettings, as_mapping(settings)) == settings


def test_an_unknown_key_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(UnknownName, match="no setting 'ortho-evry'; did you mean 'ortho-every'"):
        make_settings(Recipe, {"ortho-evry": 1})


@pytest.mark.parametrize("value", ["3", 3.5, True, None])
def test_a_value_of_another_type_is_refused(value: object) -> None:
    with pytest.raises(BadSetting, match="expected int"):
        make_settings(Recipe, {"epochs": value})


def test_whole_numbers_pass_for_fractions() -> None:
    lr = make_settings(Recipe, {"lr": 1}).lr
    assert lr == 1.0
    assert isinstance(lr, float)


def test_every_setting_says_what_it_means() -> None:
    assert all(field_help(TrainSettings).values())


def test_bad_toml_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text("epochs = ")
    with pytest.raises(BadSetting, match="is not TOML"):
        read_toml(tmp_path / "x.toml")
    with pytest.raises(BadSetting, match="does not exist"):
        read_toml(tmp_path / "none.toml")
    with pytest.raises(BadSetting, match="cannot be read: Is a directory"):
        read_toml(tmp_path)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_hyper_parameter_that_is_not_finite_is_refused_for_every_method(value: float) -> None:
    """NaN compares false with every bound, so a method would run and change nothing."""
    for name, key in (("ssd", "alpha"), ("hide", "min-difference"), ("salun", "ratio")):
        with pytest.raises(BadSetting, match=f"{key} must be a finite number"):
            make_method(name, {key: value})
