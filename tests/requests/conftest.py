"""Requests are judged often here; what the audit of deployed copies finds is tested in `tests/audits`."""

import pytest

from fedortho.audits import copies


@pytest.fixture(autouse=True)
def without_export(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies that are rounded and folded only: `torch.export` takes seconds of every verdict."""
    monkeypatch.setattr(
        copies, "COPIES", {name: copied for name, copied in copies.COPIES.items() if name != "exported"}
    )
