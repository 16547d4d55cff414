import copy

import pytest
import torch
from torch import nn

from fedortho.data.images import Dataset
from fedortho.data.request import ForgetRequest
from fedortho.engines.central import CentralEngine
from fedortho.methods.method import Method
from fedortho.methods.salun import SalUn
from fedortho.methods.ssd import SSD

REQUEST = ForgetRequest.parse("class:3")


@pytest.mark.parametrize("method", [SSD(), SalUn(epochs=1, crop=0, flip=0.0)])
def test_weights_whose_channels_come_last_in_memory_are_changed_as_others_are(
    small_net: nn.Module, digits: Dataset, method: Method
) -> None:
    last = copy.deepcopy(small_net)
    for weight in last.parameters():
        if weight.dim() == 4:
            weight.data = weight.data.contiguous(memory_format=torch.channels_last)
    assert not last.get_parameter("features.3.weight").is_contiguous()
    plain, other = (method(model, CentralEngine(digits), REQUEST).state_dict() for model in (small_net, last))
    for name in ("features.0.weight", "features.3.weight", "features.6.weight"):
        assert not plain[name].equal(small_net.state_dict()[name]), "it was changed at all"
        assert torch.allclose(plain[name], other[name], atol=1e-5)
