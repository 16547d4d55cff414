import errno
import os
import shutil
from pathlib import Path

import pytest

from fedortho.errors import FedOrthoError
from fedortho.runs.derived import _place_file


@pytest.mark.parametrize("has_links", [True, False])
def test_an_undo_file_that_appears_meanwhile_on_another_file_system_is_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_links: bool
) -> None:
    (tmp_path / "building").mkdir()
    (tmp_path / "there").mkdir()
    source, undo = tmp_path / "building" / "undo", tmp_path / "there" / "undo"
    source.write_text("mine")
    link, copy = os.link, shutil.copyfile

    def other_system(old: Path, new: Path) -> None:
        if Path(old).parent != Path(new).parent or not has_links:
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        link(old, new)

    def meanwhile(old: Path, new: Path) -> None:
        undo.write_text("of another process")
        copy(old, new)

    monkeypatch.setattr(os, "link", other_system)
    _place_file(source, undo)
    assert undo.read_text() == "mine"
    undo.unlink()
    monkeypatch.setattr(shutil, "copyfile", meanwhile)
    with pytest.raises(FedOrthoError, match="an undo file is never overwritten"):
        _place_file(source, undo)
    assert undo.read_text() == "of another process"
    assert os.listdir(undo.parent) == ["undo"], "no copy is left"
