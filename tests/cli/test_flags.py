"""Flags that are made from dataclasses, and hyper-parameters that are given by name."""

import pytest
from commands import told

from fedortho.cli.flags import method_changes, parse_assignments
from fedortho.errors import BadSetting, UnknownName
from fedortho.methods.hide import Hide
from fedortho.methods.ssd import SSD


def test_assignments_have_the_types_of_the_fields() -> None:
    found = parse_assignments(Hide, ["ratio=1", "repair=false", "layers=mid,deep", "max-retain-drop = 0.02"])
    assert found == {"ratio": 1.0, "repair": False, "layers": "mid,deep", "max_retain_drop": 0.02}
    assert type(found["ratio"]) is float


@pytest.mark.parametrize(("word", "token"), [("ratio", "NAME=VALUE"), ("ratio=big", "'big'"), ("repair=0", "true")])
def test_an_assignment_that_is_none_is_refused(word: str, token: str) -> None:
    with pytest.raises(BadSetting, match=token):
        parse_assignments(Hide, [word])


def test_a_flag_that_the_method_does_not_have_is_refused_by_name() -> None:
    assert method_changes(SSD, {"alpha": 3.0}, ["batch-size=8"]) == {"alpha": 3.0, "batch_size": 8}
    with pytest.raises(BadSetting, match="ssd has no setting --target"):
        method_changes(SSD, {"alpha": 3.0, "target": 0.1}, [])
    with pytest.raises(UnknownName, match="'target'"):
        method_changes(SSD, {}, ["target=0.1"])


COMPUTING = (
    *("train", "import", "evaluate", "federate", "sync", "deploy", "forget"),
    *("judge", "audit", "qualify", "compare", "tune", "reproduce", "theory", "report"),
)


@pytest.mark.parametrize("name", COMPUTING)
def test_every_command_that_computes_takes_a_device(name: str) -> None:
    assert "--device" in told(name, "--help")
