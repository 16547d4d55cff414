from dataclasses import replace
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner
from verdicts import AUDITS, RECORD

from fedortho.audits.result import AuditResult
from fedortho.audits.verdict import Verdict
from fedortho.cli import verdict as module
from fedortho.cli.app import app

PASSED = replace(RECORD, audits=(AUDITS[1],), retention=AuditResult("PASS", "kept", 0.0, 0.02, name="retention"))


@pytest.mark.parametrize(("verdict", "code"), [(PASSED, 0), (RECORD, 1), (replace(PASSED, retention=None), 1)])
@pytest.mark.parametrize("form", ["--json", "--strict"])
def test_a_strict_judgement_fails_unless_every_audit_ran_and_passed(
    monkeypatch: pytest.MonkeyPatch, verdict: Verdict, code: int, form: str
) -> None:
    monkeypatch.setattr(module, "open_run", lambda path: SimpleNamespace(path=path))
    monkeypatch.setattr(module, "judge_run", lambda *_, **__: verdict)
    assert CliRunner().invoke(app, ["judge", "run", "--strict", form]).exit_code == code
    assert CliRunner().invoke(app, ["judge", "run", "--json"]).exit_code == 0
