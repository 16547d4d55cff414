"""SGD: the bytes of torch.optim.SGD; that nothing of torch's compiler is imported is in cli/test_app.py."""

import copy

import pytest
import torch
from torch import nn

from fedortho.training.sgd import SGD

SETTINGS: list[dict[str, float | bool]] = [
    {"momentum": 0.9, "weight_decay": 5e-4, "fused": True},
    {"momentum": 0.9, "weight_decay": 5e-4, "fused": False},
    {"momentum": 0.8, "nesterov": True, "fused": True},
    {"momentum": 0.0, "fused": True},
    {"momentum": 0.0, "weight_decay": 0.1, "fused": False},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_the_weights_are_those_of_torch(settings: dict[str, float | bool]) -> None:
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(27, 4))
    theirs = copy.deepcopy(ours)
    for model in (ours, theirs):
        model[0].weight.requires_grad_(False)  # one weight without a gradient
    mine, torchs = SGD(ours.parameters(), 0.1, **settings), torch.optim.SGD(theirs.parameters(), 0.1, **settings)
    for step in range(4):
        inputs = torch.randn(6, 2, 5, 5, generator=torch.Generator().manual_seed(step))
        for model, optimiser in ((ours, mine), (theirs, torchs)):
            optimiser.param_groups[0]["lr"] = 0.1 / (step + 1)
            optimiser.zero_grad()
            model(inputs).square().sum().backward()
            optimiser.step()
    for (name, one), other in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
        assert torch.equal(one, other), name
    kept = [list(state) for state in mine.state.values() if state]
    assert kept == ([["momentum_buffer"]] * 5 if settings["momentum"] else [])
