"""Code that a file names runs only if the user typed that name or trusts it; another file is asked about again."""

import sys
from pathlib import Path

import pytest

from fedortho.errors import FedOrthoError
from fedortho.storage.trusted_code import check_trusted, load_function, remember_code


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("FEDORTHO_TRUST_CODE")
    monkeypatch.setenv("FEDORTHO_STATE", str(tmp_path / "state"))
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path / "state"


@pytest.mark.parametrize(
    ("text", "told"),
    [("def f(:", "SyntaxError"), ("1 / 0", "ZeroDivisionError"), ("raise SystemExit(3)", "SystemExit")],
)
def test_a_module_that_fails_or_exits_when_it_is_imported_is_refused(
    state: Path, tmp_path: Path, text: str, told: str
) -> None:
    (tmp_path / f"fails_by_{told}.py").write_text(text)
    with pytest.raises(FedOrthoError, match=f"cannot import 'fails_by_{told}' for the model '.*': {told}: "):
        load_function(f"fails_by_{told}:f", "model")


def package(place: Path, name: str = "strange") -> Path:
    """A package whose code leaves a trace when it runs."""
    file = place / name / "nets.py"
    file.parent.mkdir(parents=True)
    for each in (file, file.with_name("__init__.py")):
        each.write_text(
            f"from pathlib import Path\nPath({str(place / 'harm')!r}).touch()\ndef build(num_classes): ...\n"
        )
    return file


def test_a_name_is_refused_until_it_is_trusted_and_nothing_runs_meanwhile(state: Path, tmp_path: Path) -> None:
    file = package(tmp_path)
    with pytest.raises(FedOrthoError, match=rf"a run names strange.nets:build, .* code of {file}.*--trust-code"):
        check_trusted("a run", "vgg-mini", "strange.nets:build")
    remember_code("strange.nets:build", "vgg-mini", "")
    check_trusted("a run", "strange.nets:build")
    assert not (tmp_path / "harm").exists()
    assert "strange" not in sys.modules
    assert (state / "trusted-code.json").stat().st_mode & 0o777 == 0o600
    with pytest.raises(FedOrthoError, match="other, which would run"):
        check_trusted("a run", "strange.nets:other")


def test_the_same_name_in_another_file_is_asked_about_again(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package(tmp_path)
    remember_code("strange.nets:build")
    other = package(tmp_path / "elsewhere")
    monkeypatch.syspath_prepend(tmp_path / "elsewhere")
    with pytest.raises(FedOrthoError, match=str(other)):
        check_trusted("a run", "strange.nets:build")


@pytest.mark.parametrize("name", ["vgg-mini", "timm:resnet18", "no.such.module:build", ""])
def test_names_that_run_no_code_of_others_need_no_trust(state: Path, name: str) -> None:
    check_trusted("a run", name)
    remember_code(name)
    assert not state.exists()


@pytest.mark.parametrize("name", ["os:abort", "sys:exit", "__main__:main", "subprocess:run"])
def test_the_standard_library_is_code_of_others_too(state: Path, name: str) -> None:
    with pytest.raises(FedOrthoError, match=name):
        check_trusted("a run", name)


def test_the_environment_may_name_what_is_trusted_or_all(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package(tmp_path)
    monkeypatch.setenv("FEDORTHO_TRUST_CODE", "other:name,strange.nets:build")
    check_trusted("a run", "strange.nets:build")
    with pytest.raises(FedOrthoError, match="os:abort"):
        check_trusted("a run", "os:abort")
    monkeypatch.setenv("FEDORTHO_TRUST_CODE", "all")
    check_trusted("a run", "strange.nets:build")
    monkeypatch.delenv("FEDORTHO_TRUST_CODE")
    check_trusted("a run", "strange.nets:build")


def test_without_a_place_for_the_list_the_process_remembers(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    package(tmp_path)
    state.write_text("a file, no directory")
    monkeypatch.setenv("FEDORTHO_TRUST_CODE", "")
    remember_code("strange.nets:build")
    assert "trusted only by this process" in caplog.text
    check_trusted("a run", "strange.nets:build")


@pytest.mark.parametrize("name", ["strange.nets", "strange.nets:", ":build"])
def test_a_name_without_a_function_runs_nothing(state: Path, tmp_path: Path, name: str) -> None:
    package(tmp_path)
    with pytest.raises(FedOrthoError, match=r"package\.module:function"):
        load_function(name, "transform")
    assert "strange" not in sys.modules
