"""How a holder of images answers queries: what it computes once."""

import pytest
from torch import nn

import fedortho.methods
import fedortho.models.sites
from fedortho.data.images import Dataset
from fedortho.engines.central import CentralEngine
from fedortho.methods.hide import Hide


def test_a_class_request_traces_the_network_once_where_it_is_planned_and_once_where_the_images_are(
    digits: Dataset, digit_nets: dict[str, nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    trace = fedortho.models.sites.trace_layers
    monkeypatch.setattr(fedortho.models.sites, "trace_layers", lambda *given: calls.append(given) or trace(*given))
    result = fedortho.methods.unlearn(
        digit_nets["resnet-mini"], CentralEngine(digits), "class:3", Hide(max_retain_drop=0.3)
    )
    assert len(result.trials) > 1
    assert len(calls) == 2
