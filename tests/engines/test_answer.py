"""How a holder of images answers queries: what it computes once."""

import pytest
import torch
from small import TinyNet
from torch import nn

import fedortho.methods
import fedortho.models.sites
from fedortho.data.images import Dataset
from fedortho.engines.central import CentralEngine
from fedortho.engines.query import Query, Selection, Statistic
from fedortho.methods.hide import Hide


def test_a_class_request_traces_the_network_at_most_once(
    digits: Dataset, digit_nets: dict[str, nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    trace = fedortho.models.sites.trace_layers
    monkeypatch.setattr(fedortho.models.sites, "trace_layers", lambda *given: calls.append(given) or trace(*given))
    result = fedortho.methods.unlearn(
        digit_nets["resnet-mini"], CentralEngine(digits), "class:3", Hide(max_retain_drop=0.3)
    )
    assert len(result.trials) > 1
    assert len(calls) <= 1


@pytest.mark.parametrize("kind", ["fisher", "gradient"])
def test_gradients_come_to_the_cpu_once_and_not_at_every_batch(
    digits: Dataset, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    copies, to_cpu = [0], torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: (copies.append(1), to_cpu(tensor))[1])
    model, numbers = TinyNet(classes=10), []
    for batch_size in (16, 64):
        engine = CentralEngine(digits)
        engine.measure(model, [])  # its copy of the model
        before = len(copies)
        engine.measure(model, [Query((Selection("valid"),), Statistic(kind, batch_size=batch_size))])
        numbers.append(len(copies) - before)
    assert numbers[0] == numbers[1]
