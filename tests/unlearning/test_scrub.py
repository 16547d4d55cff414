import pytest
import torch
from torch import nn

from fedortho.models.split import find_classifier
from fedortho.statistics.observe import Observation
from fedortho.unlearning.scrub import scrub, scrubbed


@pytest.mark.parametrize("strength", [0.25, 1.0])
def test_the_absorbed_scrub_equals_taking_the_direction_out_of_each_input(strength: float) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(4, 6, generator=generator).double(), torch.randn(4, generator=generator).double()
    gone, kept = torch.randn(50, 6, generator=generator).double() + 1, torch.randn(80, 6, generator=generator).double()
    new_weight, new_bias = scrub(weight, bias, gone.mean(0), kept.mean(0), kept.var(0), strength=strength)
    delta = gone.mean(0) - kept.mean(0)
    direction = delta / kept.var(0)
    for x in [*gone[:5], *kept[:5]]:
        moved = x - strength * delta * float(direction @ (x - kept.mean(0))) / float(direction @ delta)
        assert torch.allclose(new_weight @ x + new_bias, weight @ moved + bias)


def test_a_full_scrub_moves_the_class_mean_onto_the_retain_mean() -> None:
    weight, bias = torch.randn(3, 5).double(), torch.randn(3).double()
    gone, kept, variance = torch.randn(5).double(), torch.randn(5).double(), torch.rand(5).double() + 0.1
    new_weight, new_bias = scrub(weight, bias, gone, kept, variance, strength=1.0)
    assert torch.allclose(new_weight @ gone + new_bias, weight @ kept + bias)
    assert torch.allclose(new_weight @ kept + new_bias, weight @ kept + bias)


def test_a_scrub_of_a_class_own_row_leaves_the_answers_among_other_classes() -> None:
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(4, 6, generator=generator), torch.randn(4, generator=generator)
    gone, kept = torch.randn(50, 6, generator=generator).double() + 1, torch.randn(80, 6, generator=generator).double()
    sums = [
        Observation({"0:sum": part.sum(0, keepdim=True), "0:square": part.square().sum(0, keepdim=True)}, number)
        for part, number in ((gone, torch.tensor([50])), (kept, torch.tensor([80])))
    ]
    whole, own = (scrubbed(weight, bias, sums[:1], sums[1], 0, 1.0, rows) for rows in (None, [(2,)]))
    for name, before in (("weight", weight), ("bias", bias)):
        assert torch.equal(own[name][[0, 1, 3]], before[[0, 1, 3]])
        assert torch.equal(own[name][2], whole[name][2])
        assert not torch.equal(whole[name][0], before[0])


def test_a_class_that_is_no_different_is_left_alone() -> None:
    weight, bias, mean = torch.randn(3, 5), torch.randn(3), torch.randn(5)
    assert scrub(weight, bias, mean, mean, torch.ones(5), strength=1.0)[0] is weight


def test_the_classifier_is_the_layer_that_gives_the_answer() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 4), nn.ReLU(), nn.Linear(4, 4))
    assert find_classifier(model, 4, torch.rand(2, 1, 4, 4)) == "3"
    assert find_classifier(nn.Sequential(model, nn.Softmax(1)), 4, torch.rand(2, 1, 4, 4)) is None
