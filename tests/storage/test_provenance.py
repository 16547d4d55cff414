"""The environment that is recorded with every run."""

from dataclasses import replace

import pytest
import torch

from fedortho.storage.provenance import Environment, environment
from fedortho.storage.records import from_json, to_json


def test_vector_instructions_and_their_limit_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    used = torch.backends.cpu.get_cpu_capability()
    assert environment().instructions == used
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert environment().instructions == f"{used}, oneDNN at most AVX2"


def test_bytes_may_differ_where_versions_processor_or_known_instructions_do() -> None:
    here = environment()
    assert not here.may_differ_from(here)
    for change in ({"processor": "abacus"}, {"instructions": "beads"}, {"versions": {"torch": "1.0"}}):
        assert here.may_differ_from(replace(here, **change))  # type: ignore[arg-type]  # one field each
    old = to_json(here)
    del old["instructions"]
    assert not here.may_differ_from(from_json(Environment, old, "run.json")), "an old record does not tell"
