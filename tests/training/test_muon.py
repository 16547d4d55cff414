"""Muon: what a step does to kernels, and that everything else is SGD."""

import copy

import pytest
import torch
from torch import Tensor, nn

from fedortho.data.images import Images
from fedortho.models.predictions import accuracy
from fedortho.training.loop import fit
from fedortho.training.muon import Muon, orthogonal
from fedortho.training.objectives import FitOptions
from fedortho.training.recipe import Recipe
from fedortho.training.sgd import SGD

LR = 0.1


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("shape", [(6, 5, 3, 3), (40, 2, 3, 3), (8, 3, 1, 1)])
def test_all_singular_values_become_alike_and_their_directions_stay(shape: tuple[int, ...]) -> None:
    kernels = drawn(*shape)
    left, _, right = torch.linalg.svd(kernels.flatten(1), full_matrices=False)
    found = left.T @ orthogonal(kernels).flatten(1) @ right.T
    assert torch.allclose(found, torch.diag(found.diagonal()), atol=1e-4)
    assert found.diagonal().min() > 0.5
    assert found.diagonal().max() < 1.3


def stepped(model: nn.Module, optimiser: type[SGD] | type[torch.optim.SGD], number: int) -> nn.Module:
    """The model after some steps down the same loss."""
    moved = copy.deepcopy(model)
    weights = [weight for weight in moved.parameters() if weight.requires_grad]
    steps = optimiser(weights, lr=LR, momentum=0.8, nesterov=True, weight_decay=0.01)
    for _ in range(number):
        steps.zero_grad()
        moved(drawn(4, 3, 8, 8)).square().sum().backward()
        steps.step()
    return moved


def test_kernels_move_by_a_share_of_their_norm_and_all_else_as_by_sgd() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3, groups=4), nn.Flatten(), nn.Linear(64, 2))
    net[0].weight.requires_grad_(False)  # fixed: everything behind it has the gradients that SGD sees
    muon, sgd = stepped(net, Muon, 2), stepped(net, torch.optim.SGD, 2)
    for (name, one), other in zip(muon.named_parameters(), sgd.parameters(), strict=True):
        assert torch.equal(one, other), name
    net[0].weight.requires_grad_(True)
    before, after = (next(iter(model.parameters())).detach() for model in (net, stepped(net, Muon, 1)))
    assert float((after - before).norm() / before.norm()) == pytest.approx(LR, rel=1e-4)


def test_kernels_that_are_zero_begin_to_move_and_those_without_a_gradient_stay() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False))
    nn.init.zeros_(net[0].weight)
    weight = net[0].weight
    optimiser = Muon([weight], lr=LR, momentum=0.8, nesterov=True)
    optimiser.step()
    assert not weight.any()
    weight.grad = drawn(*weight.shape)
    optimiser.step()
    assert weight.any()
    assert weight.isfinite().all()


def test_a_network_learns_by_muon_to_the_same_bytes_each_time(toy: Images, tiny: nn.Module) -> None:
    recipe = Recipe(epochs=3, batch_size=16, lr=0.05, crop=0, flip=0.0, ortho=0.0)
    first, second = (fit(tiny, toy, recipe, options=FitOptions(optimiser="muon")) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first.parameters(), second.parameters(), strict=True))
    assert accuracy(first, toy) > max(0.6, accuracy(tiny, toy) + 0.2)
